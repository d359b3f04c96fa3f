"""The harness for tests on several ranks: results, errors, deaths and hangs all come back, and nothing stays behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor as dcp_process
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.ranks import GRACE_SECS, STACKS_SECS, RankError, RankPool, RankPools, reserved_port, run_ranks

pytestmark = pytest.mark.long

REPORT_SECS = GRACE_SECS + STACKS_SECS + 5.0  # from a failure to its report, with room for a busy machine


def _sum_of_ranks(rank: int, factor: int) -> tuple[int, int]:
    total = torch.tensor(rank * factor)
    dist.all_reduce(total)
    return rank, int(total)


def _surroundings(rank: int) -> dict[str, object]:
    return {
        "rank": dist.get_rank(),
        "local rank": dist.get_node_local_rank(),
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
    }


def _process(rank: int) -> int:
    return os.getpid()


def _start_sleeper(rank: int) -> tuple[int, int]:
    return os.getpid(), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def _raise_on_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 found nothing to save")
    dist.barrier()


def _raise_no_exception(rank: int) -> None:
    raise CheckpointException("a BaseException", {})


def _hang_on_1(rank: int, pids: Path) -> None:
    Path(pids, str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        _wait_for_nothing(rank)


def _wait_for_nothing(rank: int) -> None:
    time.sleep(600)


def _hang_in_collective(rank: int) -> None:
    if rank == 0:
        dist.barrier()


def _die_on_1(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        return "the other rank is gone"
    return "the other rank is there"


def _exit_on_1(rank: int) -> None:
    if rank == 1:
        os._exit(3)


def _return_function(rank: int) -> Callable[[], None]:
    return lambda: None


def _gone(pid: int) -> bool:
    """Whether the process is gone, or soon is."""
    deadline = time.monotonic() + REPORT_SECS
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_results_come_in_order_of_ranks(rank_pool: RankPools) -> None:
    """The ranks form one group, and each result stands at its rank."""
    assert rank_pool(2).run(_sum_of_ranks, 10) == [(0, 10), (1, 10)]


def test_ranks_are_set_up_alike(rank_pool: RankPools) -> None:
    """Each rank knows its place, speaks gloo and computes on one thread."""
    ranks = rank_pool(2).run(_surroundings)
    assert ranks == [{"rank": n, "local rank": n, "backend": "gloo", "threads": 1} for n in range(2)]


def test_pool_keeps_its_processes(rank_pool: RankPools) -> None:
    """A pool runs one function after another in the same processes, and there is one pool for a world size."""
    first = rank_pool(2).run(_process)
    assert rank_pool(2).run(_process) == first
    assert len({os.getpid(), *first}) == 3


def test_error_of_a_rank_is_raised_with_all_that_happened() -> None:
    """One rank's traceback comes within the grace, with the stacks of the rank that waited for it."""
    with RankPool(2) as pool:
        start = time.monotonic()
        with pytest.raises(RankError, match="rank 1 found nothing to save") as caught:
            pool.run(_raise_on_1)
    assert time.monotonic() - start < REPORT_SECS
    assert "in _raise_on_1" in caught.value.reports[1]
    assert "hung" in caught.value.reports[0]
    assert "barrier" in caught.value.reports[0]


def test_errors_that_are_no_exception_are_raised() -> None:
    """DCP's CheckpointException is a BaseException; the harness reports it like any other."""
    with pytest.raises(RankError, match="CheckpointException"):
        run_ranks(1, _raise_no_exception)


def test_hang_is_reported_within_its_limit(tmp_path: Path) -> None:
    """A rank that hangs is killed at the limit, and the error shows where it hung."""
    with RankPool(2) as pool:
        start = time.monotonic()
        with pytest.raises(RankError, match=r"(?s)1 of 2 ranks failed.*rank 1 hung.*_wait_for_nothing") as caught:
            pool.run(_hang_on_1, tmp_path, timeout_secs=1.0)
    assert 1.0 <= time.monotonic() - start < 1.0 + REPORT_SECS
    assert list(caught.value.reports) == [1]
    assert all(_gone(int(path.read_text())) for path in tmp_path.iterdir())


def test_hang_in_a_collective_is_reported() -> None:
    """Stacks come from a rank that waits in C++ code, too."""
    with pytest.raises(RankError, match=r"(?s)rank 0 hung.*barrier.*_hang_in_collective"):
        run_ranks(2, _hang_in_collective, timeout_secs=1.0)


def test_expected_kill_leaves_the_others_their_results() -> None:
    """A rank that kills itself as expected has no result, and the others answer."""
    assert run_ranks(2, _die_on_1, expect_killed={1}) == ["the other rank is gone", None]


@pytest.mark.parametrize(
    ("fn", "expect_killed", "report"),
    [
        pytest.param(_die_on_1, {0, 1}, "rank 0 was expected to be killed, and returned", id="expected"),
        pytest.param(_die_on_1, set(), "rank 1 was killed by SIGKILL", id="unexpected"),
        pytest.param(_exit_on_1, {1}, "rank 1 exited with status 3", id="another death"),
    ],
)
def test_wrong_fate_is_an_error(fn: Callable[[int], object], expect_killed: set[int], report: str) -> None:
    """A rank that dies unasked, or otherwise than asked, or does not die, is an error."""
    with pytest.raises(RankError, match=report):
        run_ranks(2, fn, expect_killed=expect_killed)


def test_failed_pool_is_closed_and_replaced() -> None:
    """After an error a pool refuses to run, its processes are gone, and the next one asked for is another."""
    pools = RankPools()
    pool = pools(1)
    pids = pool.run(_process)
    with pytest.raises(RankError, match="a BaseException"):
        pool.run(_raise_no_exception)
    assert all(_gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(_process)
    assert pools(1).run(_process) != pids
    pools.close()


def test_result_that_cannot_be_pickled_is_an_error() -> None:
    """What cannot travel is reported by the rank, instead of being lost."""
    with pytest.raises(RankError, match="pickle"):
        run_ranks(1, _return_function)


def test_processes_of_a_rank_end_with_it() -> None:
    """What a rank started is gone when its pool is closed."""
    pids = run_ranks(2, _start_sleeper)
    assert all(_gone(pid) for both in pids for pid in both)


def test_ranks_end_when_their_parent_dies(tmp_path: Path) -> None:
    """Ranks, even hanging ones, do not outlive a test run that was killed."""
    program = (
        "from tests.repository import test_rank_harness\nfrom tests.support import ranks\n"
        "if __name__ == '__main__':\n"
        "    pool = ranks.RankPool(1)\n"
        "    print(pool.run(test_rank_harness._start_sleeper), flush=True)\n"
        "    pool.run(test_rank_harness._wait_for_nothing)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed parent does not remove its temporary folder
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().strip("[()]\n").split(",")]
        assert all(psutil.pid_exists(pid) for pid in pids)
        parent.kill()
    assert all(_gone(pid) for pid in pids)


def _port_of_dcp(rank: int) -> int:
    return dcp_process.get_free_port()


def test_the_port_of_dcps_process_is_taken_by_nobody_else(rank_pool: RankPools) -> None:
    """From when DCP chooses it until its process listens at it, though many others may ask for a port meanwhile."""
    for port in (reserved_port(), *rank_pool(1).run(_port_of_dcp)):
        for address in ("127.0.0.1", ""):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((address, port))
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert dist.TCPStore("127.0.0.1", port).get("key") == b"value"

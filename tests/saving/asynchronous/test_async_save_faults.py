"""Asynchronous saves that fail: whatever goes wrong, on whichever rank, nobody hangs, and the next has the rows."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.faults import InjectedError
from tests.support.jobs import SavingJob
from tests.support.killing import in_child
from tests.support.models import differing, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools

CELLS = [
    (phase, when, rank)
    for phase in (*faults.PHASES, "stage")
    for when in ("before", "after")
    for rank in ((0,) if phase in faults.COORDINATOR_PHASES else (0, 1))
]


def _failures(future: "Future[Any]") -> dict[int, BaseException]:
    return faults.failures_of(lambda: future.result(timeout=100))


def _fail_and_go_on(rank: int, root: str, cells: list[tuple[str, str, int]]) -> None:
    for number, (phase, when, failing_rank) in enumerate(cells):
        run = SavingJob(f"{root}/{number}", torchrec_job)
        run.async_save("0").result(timeout=60)
        train(run.job, 1)
        before = whole(state(run.job))
        with faults.failing(run.planner, run.writer, phase, when, failing_rank):
            causes = _failures(run.async_save("1"))
        assert list(causes) == [failing_rank], (phase, when, failing_rank)
        assert all(isinstance(cause, InjectedError) for cause in causes.values())
        newest = f"{run.root}/{int(faults.has_committed(phase, when))}"
        assert cnr.latest(run.root) == newest
        train(run.job, 2)
        after = whole(state(run.job))
        run.async_save("2").result(timeout=60)
        run.close()
        checkpoint = cnr.read_checkpoint(f"{run.root}/2")
        assert checkpoint.parent in (None, newest)
        assert differing(before, after)
        assert differing(models.load(torchrec_job(2), f"{run.root}/2"), after) == []
        if faults.has_committed(phase, when):
            assert differing(models.load(torchrec_job(2), newest), before) == []


@pytest.mark.parametrize("phase", [*faults.PHASES, "stage"])
def test_a_save_that_fails_gives_its_rows_back(tmp_path: Path, rank_pool: RankPools, phase: str) -> None:
    """An exception in any phase, before or after its work, on any rank: all ranks get it, and the next save goes on."""
    cells = [cell for cell in CELLS if cell[0] == phase]
    rank_pool(2).run(_fail_and_go_on, str(tmp_path), cells)


# Ranks that die or stop in the middle

WORLD_SIZE = 3
MANAGER_SECS = 4.0


def _live_until(rank: int, root: str, group: str, victim: int, how: str, phase: str) -> str:
    """Save once, then again while one rank is killed or stopped in a phase: what the others are told."""
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=WORLD_SIZE)
    job = torchrec_job(1)
    manager = cnr.CheckpointManager(root, cnr.RowTracker(job.model), timeout_secs=MANAGER_SECS)
    train(job, 1)
    manager.save(1, lambda: state(job))
    train(job, 2)
    if rank == victim:
        target = manager._planner if phase in faults.PLANNER_PHASES else manager._writer
        end = signal.SIGKILL if how == "killed" else signal.SIGSTOP
        faults.act_before(target, phase, lambda: os.kill(os.getpid(), end))
    manager.async_save(2, lambda: state(job))
    began = time.monotonic()
    try:
        manager.wait()
    except cnr.SaveError as error:
        assert time.monotonic() - began < 6 * MANAGER_SECS
        return str(error)
    return "nothing"


def _resume(rank: int, root: str, group: str) -> bool:
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=WORLD_SIZE)
    expected, job = torchrec_job(1), torchrec_job(2)
    train(expected, 1)
    manager = cnr.CheckpointManager(root, cnr.RowTracker(job.model))
    assert manager.restore(state(job)) == 1
    assert differing(whole(job.model.state_dict()), whole(expected.model.state_dict())) == []
    train(job, 2)
    manager.async_save(2, lambda: state(job))
    saved = manager.wait()
    assert saved is not None
    manager.close()
    return saved.kind == "delta"


def _deaths() -> Iterator[Any]:
    """Every phase on the coordinator and on another rank; one of them in every run."""
    for phase in (*faults.PHASES, "stage"):
        for victim in (0,) if phase in faults.COORDINATOR_PHASES else (0, 2):
            for how in ("killed", "stopped"):
                is_common = (victim, how, phase) == (2, "stopped", "write_data")
                yield pytest.param(
                    victim, how, phase, id=f"{victim}-{how}-{phase}", marks=[] if is_common else [pytest.mark.slow]
                )


@pytest.mark.long
@pytest.mark.parametrize(("victim", "how", "phase"), list(_deaths()))
def test_a_rank_that_is_missing_is_named(tmp_path: Path, victim: int, how: str, phase: str) -> None:
    """The others get an error within the timeout that says which rank it is; a job that starts again goes on."""
    root = str(tmp_path / "root")
    with ThreadPoolExecutor(WORLD_SIZE) as threads:
        lives = [
            threads.submit(in_child, _live_until, rank, root, str(tmp_path / "group"), victim, how, phase)
            for rank in range(WORLD_SIZE)
        ]
        told = [life.result(timeout=60) for rank, life in enumerate(lives) if rank != victim]
        assert all(f"rank {victim} does not answer" in str(message) for message in told), told
        _kill_stopped()
        assert how == "stopped" or lives[victim].result(timeout=60) == -signal.SIGKILL
        again = [threads.submit(in_child, _resume, rank, root, str(tmp_path / "again")) for rank in range(WORLD_SIZE)]
        assert [life.result(timeout=60) for life in again] == [True] * WORLD_SIZE


def _kill_stopped() -> None:
    """End children of children that were stopped."""
    for nursery in multiprocessing.active_children():
        children = Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children").read_text().split()
        for child in children:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                    os.kill(int(child), signal.SIGKILL)


# A full disk


def _fill_disk(root: str) -> None:
    """Files may not grow beyond a few bytes, as on a full disk, and then they may."""
    run = SavingJob(root)
    run.async_save("0").result(timeout=100)
    for number in range(1, 3):
        train(run.job, number)
        with faults.small_files(100):
            causes = _failures(run.async_save(f"full-{number}"))
        assert [type(cause) for cause in causes.values()] == [cnr.StoreError]
    assert cnr.latest(root) == f"{root}/0"
    train(run.job, 3)
    end = whole(state(run.job))
    run.async_save("1").result(timeout=100)
    assert cnr.read_checkpoint(f"{root}/1").kind == "delta"
    assert differing(models.load(plain_job(2, "adagrad"), f"{root}/1"), end) == []


@pytest.mark.long
def test_a_full_disk_costs_nothing_but_the_save(tmp_path: Path) -> None:
    """The save fails with the reason, and the rows are in the next one that has room."""
    assert in_child(_fill_disk, str(tmp_path / "root")) is None


# In another process


def _fail_in_process(rank: int, root: str) -> None:
    run, process = SavingJob(root, torchrec_job), AsyncCheckpointerType.PROCESS
    run.async_save("0", process).result(timeout=100)
    train(run.job, 1)
    causes = _failures(run.async_save("0", process))
    assert {type(cause) for cause in causes.values()} == {cnr.CheckpointExistsError}
    train(run.job, 2)
    if rank == 0:
        Path(root, "1").write_text("no directory")
    dist.barrier()
    causes = _failures(run.async_save("1", process))
    assert {type(cause) for cause in causes.values()} == {cnr.StoreError}
    train(run.job, 3)
    end = whole(state(run.job))
    run.async_save("2", process).result(timeout=100)
    assert cnr.read_checkpoint(f"{root}/2").parent in (None, f"{root}/0")
    assert differing(models.load(torchrec_job(2), f"{root}/2"), end) == []
    run.close()


def test_what_fails_in_another_process_is_told(tmp_path: Path, rank_pool: RankPools) -> None:
    """An id that is taken, and a place that cannot be written to: typed errors at the future, and nothing is lost."""
    rank_pool(2).run(_fail_in_process, str(tmp_path))


def _exceed_budget(rank: int, root: str) -> None:
    run = SavingJob(root, staging_bytes=100)
    (refused,) = _failures(run.async_save("0", AsyncCheckpointerType.PROCESS)).values()
    assert isinstance(refused, cnr.ConfigurationError)
    assert "'staging_bytes'" in str(refused)
    run.async_save("1").result(timeout=100)
    assert differing(models.load(plain_job(2, "adagrad"), f"{root}/1"), whole(state(run.job))) == []
    run.close()


def test_rows_that_cannot_be_staged_for_a_process_are_refused(tmp_path: Path, rank_pool: RankPools) -> None:
    """Another process cannot read live tables: the error says what to change, and the next save has the rows."""
    rank_pool(1).run(_exceed_budget, str(tmp_path))

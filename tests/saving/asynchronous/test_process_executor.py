"""Saves in DCP's own process: its group's timeout, its end, and what it keeps from save to save."""

import gc
import os
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.jobs import SavingJob
from tests.support.ranks import RankPools
from torchrec_cnr.format import manifest_json
from torchrec_cnr.saving import running_saves

PROCESS = AsyncCheckpointerType.PROCESS


def _dcp_process() -> Any:
    """The process that DCP has started."""
    return executor._CHECKPOINT_PROCESS._save_process  # type: ignore[union-attr]


def _save_after_its_end(rank: int, root: str) -> None:
    job = SavingJob(root)
    job.train()
    job.async_save("0", PROCESS).result(timeout=100)
    os.kill(_dcp_process().pid, signal.SIGKILL)
    _dcp_process().join()
    job.train()
    for name in ("1", "2"):
        with pytest.raises(cnr.SaveError, match="the process in which DCP saves has ended"):
            job.async_save(name, PROCESS).result(timeout=100)
    job.async_save("3").result(timeout=100)
    job.train()
    job.save("4")
    for name in ("0", "3", "4"):
        job.assert_loads(name)
    assert cnr.read_checkpoint(job.path("3")).parent in (None, job.path("0"))
    job.close()
    executor._CHECKPOINT_PROCESS = None  # other tests run in this process


def test_a_process_that_was_killed_is_named(tmp_path: Path, rank_pool: RankPools) -> None:
    """Later saves in it fail with what to do, and those in a thread hold all rows."""
    rank_pool(1).run(_save_after_its_end, str(tmp_path))


def _save_to_memory(rank: int, root: str) -> None:
    job = SavingJob("memory://of-one-process")
    job.train()
    failures = faults.failures_of(lambda: job.async_save("0", PROCESS).result(timeout=100))
    assert [type(failure) for failure in failures.values()] == [cnr.ConfigurationError]
    assert "has its own 'memory://'" in str(failures[0])
    job.async_save("1").result(timeout=100)
    job.assert_loads("1")
    job.close()


def test_a_process_does_not_save_to_its_own_memory(tmp_path: Path, rank_pool: RankPools) -> None:
    """The save fails, instead of reporting success with nothing to load."""
    rank_pool(1).run(_save_to_memory, str(tmp_path))


class _Timeout:
    """An object whose pickle tells the timeout of the process group where it is saved."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        options: Any = dist.group.WORLD._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
        Path(self.path).write_text(f"{os.getpid()} {options._timeout.total_seconds()}")
        return {"path": self.path}


def _tell_timeout(rank: int, root: str) -> tuple[int, float]:
    """In a group whose timeout is a minute: which process saved, and the timeout that it had."""
    told = Path(root, f"told-{rank}")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60))
    torch.serialization.add_safe_globals([_Timeout])
    future: Any = dcp.async_save(
        {"t": torch.ones(3), "timeout": _Timeout(str(told))},
        storage_writer=models.writer(f"{root}/0"),
        async_checkpointer_type=PROCESS,
    )
    with pytest.raises(CheckpointException):  # the other process refuses the type
        future.result(timeout=100)
    pid, secs = told.read_text().split()
    assert int(pid) == _dcp_process().pid
    return int(pid), float(secs)


def test_the_process_has_the_timeout_of_the_jobs_group(tmp_path: Path, rank_pool: RankPools) -> None:
    """DCP gives the group of its process half an hour: a rank that is missing is waited for as long as in the job."""
    found = rank_pool(1).run(_tell_timeout, str(tmp_path))
    assert [secs for _, secs in found] == [60.0]


class _Forget:
    """An object that drops the manifests that are remembered, where it is saved."""

    def __getstate__(self) -> dict[str, Any]:
        manifest_json.forget()
        gc.collect()
        return {}


def _forget_manifests(root: str) -> None:
    """Here and in DCP's process: they take memory up to a bound, which hides whether saves leave any."""
    future: Any = dcp.async_save(
        {"forget": _Forget()}, storage_writer=models.writer(f"{root}/forget"), async_checkpointer_type=PROCESS
    )
    with pytest.raises(CheckpointException):  # the other process refuses the type
        future.result(timeout=100)
    _Forget().__getstate__()


def _overlapping_requests(rank: int, root: str) -> int:
    """Save in two process groups by DCP's process, without waiting: how many of its threads ask the process at once."""
    asking: list[str] = []
    most = 0
    save = executor._AsyncCheckpointProcess.save

    def count_and_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        asking.append(kwargs["checkpoint_id"])
        most = max(most, len(asking))
        time.sleep(0.3)
        try:
            return save(self, *args, **kwargs)
        finally:
            asking.pop()

    with mock.patch.object(executor._AsyncCheckpointProcess, "save", count_and_save):
        futures = []
        for number in range(4):
            group = dist.new_group(backend="gloo")
            values, path = {"t": torch.full((3,), float(number))}, f"{root}/{number}"
            futures.append(
                models.save_behind(
                    values, path, models.writer(path), cnr.CNRSavePlanner(), group=group, executor=PROCESS
                )
            )
        for future in futures:
            future.result(timeout=100)
    return most


def test_saves_of_several_groups_ask_the_process_one_after_the_other(tmp_path: Path, rank_pool: RankPools) -> None:
    """It has one pipe: of two threads that wait for an answer, one would get that of the other."""
    assert rank_pool(2).run(_overlapping_requests, str(tmp_path)) == [1, 1]


class _NumRunning:
    """An object whose pickle tells how many saves run where it is saved."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        with Path(self.path).open("a") as file:
            file.write(f"{os.getpid()} {len(running_saves.running_saves.running())}\n")
        return {"path": self.path}


def _num_running(rank: int, root: str) -> list[int]:
    """How many saves run in DCP's process while it does the first, the second and so on, each of which fails."""
    told = Path(root, "told")
    for number in range(3):
        path = f"{root}/{number}"
        failing: Any = {"t": torch.ones(3), "told": _NumRunning(str(told))}
        with pytest.raises(CheckpointException):  # the writer refuses the type
            models.save_behind(failing, path, models.writer(path), cnr.CNRSavePlanner(), executor=PROCESS).result(
                timeout=100
            )
    told_of = [line.split() for line in told.read_text().splitlines()]
    return [int(number) for pid, number in told_of if int(pid) == _dcp_process().pid]


def test_the_process_keeps_no_save_that_has_ended(tmp_path: Path, rank_pool: RankPools) -> None:
    """Nor what a save that has failed was to write: only the one that it does is there."""
    (found,) = rank_pool(1).run(_num_running, str(tmp_path))
    assert found
    assert set(found) == {1}


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _memory_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def _save_many(
    rank: int, root: str, num_saves: int, num_descriptors: int | None
) -> tuple[list[int], list[float], list[int]]:
    """Descriptors and MiB of DCP's process and of this one, and objects here, after the tenth save and last."""
    if num_descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors, num_descriptors))
    job = SavingJob(root, policy=cnr.Full() if num_saves > 100 else None)
    counts: list[int] = []
    sizes: list[float] = []
    num_objects: list[int] = []
    for step in range(num_saves):
        job.train()
        job.async_save(step, PROCESS).result(timeout=100)
        if step in (9, num_saves - 1):
            _forget_manifests(root)
            counts += [_descriptors(_dcp_process().pid), _descriptors(os.getpid())]
            num_objects.append(len(gc.get_objects()))
            sizes += [_memory_mib(_dcp_process().pid), _memory_mib(os.getpid())]
        if num_saves > 100 and step > 3:
            job.saved.pop(str(step - 1), None)
    job.assert_loads(num_saves - 1)
    job.close()
    return counts, sizes, num_objects


def test_saves_in_a_process_keep_no_descriptors(tmp_path: Path, rank_pool: RankPools) -> None:
    """As many files are open after forty saves as after ten, on both sides."""
    ((counts, _, _),) = rank_pool(1).run(_save_many, str(tmp_path), 40, None, timeout_secs=110.0)
    assert counts[2:] == counts[:2]


@pytest.mark.slow
@pytest.mark.timeout(1_600)
def test_a_thousand_saves_with_few_descriptors(tmp_path: Path, rank_pool: RankPools) -> None:
    """With at most 256 open files, a thousand saves leave no more of them than ten, and about as much memory.

    Objects stay as many. What the allocators of threads that have ended keep differs from run to run.
    """
    ((counts, sizes, num_objects),) = rank_pool(1).run(_save_many, str(tmp_path), 1000, 256, timeout_secs=1_500.0)
    assert counts[2:] == counts[:2]
    assert all(after < 1.25 * before for before, after in zip(sizes[:2], sizes[2:], strict=True)), sizes
    assert num_objects[1] < num_objects[0] + 2_000, num_objects

"""Processes that die in a save: what was committed stays, and what comes next works."""

import itertools
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.jobs import adagrad_job, assert_loads, save, saver
from tests.support.killing import in_child
from tests.support.models import Job, Whole, differing, state, torchrec_job, train, whole
from tests.support.ranks import RankPools, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _assert_goes_on(build: Callable[[int], Job], root: str, expected: Whole) -> None:
    """The latest checkpoint is the expected one, and a job goes on from it: its next save works, and loads."""
    path = cnr.latest(root)
    assert path is not None
    job = build(98)
    tracker, planner = saver(job)
    assert differing(whole(state(job)), expected)
    assert differing(models.load(job, path, tracker), expected) == []
    train(job, 97)
    end = save(job, f"{root}/next", planner)
    tracker.close()
    assert cnr.latest(root) == f"{root}/next"
    assert cnr.read_checkpoint(f"{root}/next").parent == path
    assert_loads(f"{root}/next", end, build)


# Ranks that are killed.


def _kill_in_save(rank: int, root: str, phase: str, when: str, victims: Collection[int]) -> str:
    """Save three times, and kill ranks in the third; answer what a survivor was told."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    job = torchrec_job(1)
    _, planner = saver(job)
    for number in range(3):
        train(job, number)
        cut = whole(state(job))
        path = f"{root}/{number}"
        writer = models.writer(path)
        if rank == 0:
            torch.save(cut, f"{root}-expected-{number}")
        if number == 2 and rank == (0 if phase in faults.COORDINATOR_PHASES else 1):
            _kill_at(writer, phase, when, [pids[victim] for victim in victims])
        try:
            dcp.save(state(job), storage_writer=writer, planner=planner)
        except CheckpointException as error:
            return f"{number}: {type(error).__name__}"
        except RuntimeError as error:  # gloo's, of a connection that is gone
            return f"{number}: {type(error).__name__}"
    return "every save returned"


def _kill_at(writer: cnr.CNRStorageWriter, phase: str, when: str, pids: list[int]) -> None:
    original = getattr(writer, phase)

    def kill(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs) if when == "after" else None
        for pid in sorted(pids, key=lambda pid: pid == os.getpid()):  # itself last
            os.kill(pid, signal.SIGKILL)
        return result

    faults.replace_method(writer, phase, kill)


def _goes_on_after_kill(rank: int, root: str, number: int) -> None:
    assert cnr.latest(root) == f"{root}/{number}"
    _assert_goes_on(torchrec_job, root, torch.load(f"{root}-expected-{number}", weights_only=True))


_KILLS = [("write_data", "before"), ("write_data", "after"), ("finish", "before"), ("finish", "after")]
_DEFAULT_KILLS = {("write_data", "before", False), ("finish", "before", False), ("finish", "after", True)}


@pytest.mark.parametrize(
    ("phase", "when", "kills_all"),
    [
        pytest.param(
            phase, when, kills_all, marks=() if (phase, when, kills_all) in _DEFAULT_KILLS else pytest.mark.slow
        )
        for (phase, when), kills_all in itertools.product(_KILLS, (False, True))
    ],
)
def test_ranks_killed_in_mid_save_leave_the_last_committed_state(
    tmp_path: Path, rank_pool: RankPools, phase: str, when: str, kills_all: bool
) -> None:
    """New processes load what was committed last, bit for bit; the next save and load work."""
    root = str(tmp_path / "job")
    killer = 0 if phase in faults.COORDINATOR_PHASES else 1
    victims = [0, 1] if kills_all else [killer]
    told = run_ranks(2, _kill_in_save, root, phase, when, victims, timeout_secs=60.0, expect_killed=victims)
    if not kills_all:
        assert told[1 - killer] in ("2: CheckpointException", "2: RuntimeError", "2: DistBackendError")
    number = 2 if (phase, when) == ("finish", "after") else 1
    rank_pool(2).run(_goes_on_after_kill, root, number, timeout_secs=60.0)


# One process that dies at any of its file operations.


def _resume_and_save(root: str, act: Callable[[str], None] | None = None) -> Whole:
    """Load the latest checkpoint, train, and save ``root``/2; the same each time."""
    job = adagrad_job(5)
    tracker, planner = saver(job)
    path = cnr.latest(root)
    assert path is not None
    models.load(job, path, tracker)
    train(job, 3)
    if act is not None:
        act(root)
    return save(job, f"{root}/2", planner)


def _two_checkpoints(root: str) -> Whole:
    """A baseline and a delta; what the delta holds."""
    job = adagrad_job(1)
    tracker, planner = saver(job)
    train(job, 1)
    save(job, f"{root}/0", planner)
    train(job, 2)
    cut = save(job, f"{root}/1", planner)
    tracker.close()
    return cut


def _watch_writes(root: str, act: Callable[[int], None]) -> None:
    """Call ``act(number)`` before each file operation below ``root`` that writes."""
    numbers = itertools.count()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            writes = isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        else:
            writes = event in ("os.mkdir", "os.link", "os.rename", "os.remove", "os.symlink", "os.truncate")
        if writes and any(str(arg).startswith(root) for arg in args[:2]):
            act(next(numbers))

    sys.addaudithook(hook)


def _count_writes(root: str) -> int:
    seen: list[int] = []
    _resume_and_save(root, lambda root: _watch_writes(root, seen.append))
    return len(seen)


def _die_at_write(root: str, number: int) -> None:
    def die(current: int) -> None:
        if current == number:
            os.kill(os.getpid(), signal.SIGKILL)

    _resume_and_save(root, lambda root: _watch_writes(root, die))


def _die_at_size(root: str, num_bytes: int) -> None:
    """Die while a file is being written, at a byte: the kernel ends the process there."""

    def limit(root: str) -> None:
        with open(os.devnull, "wb") as nowhere:  # what the process says may go to a file too
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    _resume_and_save(root, limit)


@pytest.mark.long
def test_a_process_that_dies_at_any_file_operation_of_a_save(tmp_path: Path) -> None:
    """Whichever operation is the last, the latest checkpoint is whole: the one before, or the new one."""
    base = tmp_path / "base"
    before = _two_checkpoints(str(base))
    shutil.copytree(base, tmp_path / "counted")
    num_writes = in_child(_count_writes, str(tmp_path / "counted"))
    assert 4 <= num_writes <= 40, "at least: a directory, a pack, and a manifest that is linked"
    shutil.copytree(base, tmp_path / "done")
    after = _resume_and_save(str(tmp_path / "done"))
    assert differing(before, after)
    found = []
    for number in range(num_writes):
        root = str(tmp_path / f"died-{number}")
        shutil.copytree(base, root)
        assert in_child(_die_at_write, root, number) == -signal.SIGKILL
        found.append(cnr.latest(root) == f"{root}/2")
        _assert_goes_on(adagrad_job, root, after if found[-1] else before)
    assert found == sorted(found), "committed once and for all"
    assert not found[0]


@pytest.mark.long
@pytest.mark.parametrize("num_bytes", [1, 300, 1000, 1700])
def test_a_process_that_dies_while_it_writes_a_file(tmp_path: Path, num_bytes: int) -> None:
    """A file that was written in part is no checkpoint, and is in nobody's way."""
    root = str(tmp_path / "job")
    before = _two_checkpoints(root)
    assert in_child(_die_at_size, root, num_bytes) == -signal.SIGXFSZ
    assert cnr.latest(root) == f"{root}/1"
    partial = [path.stat().st_size for path in Path(root).rglob("*") if path.is_file()]
    assert num_bytes in partial
    _assert_goes_on(adagrad_job, root, before)

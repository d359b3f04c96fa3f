"""Processes die, phases raise, writers race and disks fill up: what was committed stays, and what comes next works.

Tests on ranks kill real processes of a gloo group. Those in one process run in a child, see ``tests.support.killing``,
so that a process may die at each of its file operations in turn.
"""

import contextlib
import errno
import itertools
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.faults import InjectedError, small_disk
from tests.support.jobs import adagrad_job, assert_loads, save, saver
from tests.support.killing import in_child
from tests.support.models import Job, Whole, differing, state, torchrec_job, train, whole
from tests.support.ranks import RankPools, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CHILD_SECS = 60.0

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["torch.distributed.checkpoint", "torchrec.distributed.model_parallel", "pytest"])


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


@pytest.mark.parametrize("num_bytes", [1, 300, 1000, 1700])
def test_a_process_that_dies_while_it_writes_a_file(tmp_path: Path, num_bytes: int) -> None:
    """A file that was written in part is no checkpoint, and is in nobody's way."""
    root = str(tmp_path / "job")
    before = _two_checkpoints(root)
    assert in_child(_die_at_size, root, num_bytes) == -signal.SIGXFSZ
    assert cnr.latest(root) == f"{root}/1"
    partial = [path.stat().st_size for path in Path(root, "2").iterdir()]
    assert num_bytes in partial
    _assert_goes_on(adagrad_job, root, before)


# A rank that raises.


def _fail_everywhere(rank: int, root: str, build: Callable[[int], Job]) -> None:
    job, target = build(1), build(2)
    tracker, planner = saver(job)
    save(job, f"{root}/0", planner)
    numbers = itertools.count(1)
    for phase, when, culprit in itertools.product(faults.PHASES, ("before", "after"), range(dist.get_world_size())):
        if phase in faults.COORDINATOR_PHASES and culprit != 0:
            continue
        train(job, next(numbers))
        path = f"{root}/{next(numbers)}"
        writer = models.writer(path)
        with faults.failing(planner, writer, phase, when, culprit), pytest.raises(CheckpointException) as raised:
            dcp.save(state(job), storage_writer=writer, planner=planner)
        causes = faults.causes(raised.value)
        assert set(causes) == {culprit}, (phase, when, culprit)
        assert isinstance(causes[culprit], InjectedError)
        assert str(causes[culprit]) == f"{phase} failed on rank {culprit}"
        is_committed = cnr.latest(root) == path
        assert is_committed == faults.has_committed(phase, when)
        train(job, next(numbers))
        path = f"{root}/{next(numbers)}"
        cut = save(job, path, planner)
        assert cnr.read_checkpoint(path).kind == "delta"
        assert differing(whole(state(target)), cut)
        assert differing(models.load(target, path), cut) == []
    tracker.close()


def test_every_rank_is_told_what_failed_in_which_phase(tmp_path: Path, rank_pool: RankPools) -> None:
    """Whatever phase raises on whatever rank, the cause reaches every rank, and the next save works."""
    rank_pool(2).run(_fail_everywhere, str(tmp_path), torchrec_job, timeout_secs=110.0)


def _raise_typed_errors(rank: int, root: str) -> None:
    job = torchrec_job(1)
    tracker, planner = saver(job)
    cut = save(job, f"{root}/0", planner)

    def causes_of(path: str, saved: dict[str, Any]) -> dict[int, BaseException]:
        with pytest.raises(CheckpointException) as raised:
            dcp.save(saved, storage_writer=models.writer(path), planner=planner)
        return faults.causes(raised.value)

    causes = causes_of(f"{root}/0", state(job))
    assert set(causes) == {0, 1}
    for cause in causes.values():
        assert isinstance(cause, cnr.CheckpointExistsError)
        assert f"{root}/0" in str(cause)

    without_tables = state(job)
    if rank == 1:
        del without_tables["model"]
    cause = causes_of(f"{root}/1", without_tables)[1]
    assert isinstance(cause, cnr.ConfigurationError)
    assert "not hold its memory" in str(cause) or "state dict" in str(cause)

    in_the_way = Path(root, "a file")
    if rank == 0:
        in_the_way.touch()
    dist.barrier()
    for cause in causes_of(f"{in_the_way}/2", state(job)).values():
        assert isinstance(cause, cnr.StoreError)
        assert "a file" in str(cause)

    assert cnr.latest(root) == f"{root}/0"
    assert_loads(f"{root}/0", cut, torchrec_job)
    train(job, 1)
    end = save(job, f"{root}/3", planner)
    tracker.close()
    assert_loads(f"{root}/3", end, torchrec_job)


def test_typed_errors_reach_every_rank(tmp_path: Path, rank_pool: RankPools) -> None:
    """An error of ours arrives on all ranks as what it was, with its message, and the next save works."""
    rank_pool(2).run(_raise_typed_errors, str(tmp_path), timeout_secs=60.0)


def _fail_to_load(rank: int, root: str) -> None:
    job = torchrec_job(1)
    tracker, planner = saver(job)
    cut = save(job, f"{root}/0", planner)
    train(job, 1)
    with pytest.raises(CheckpointException) as raised:
        models.load(torchrec_job(2), f"{root}/nothing here")
    assert [type(cause) for cause in faults.causes(raised.value).values()] == [cnr.CheckpointNotFoundError] * 2
    pack = next(Path(root, "0").glob("*-1-0.safetensors"))
    dist.barrier()
    if rank == 0:
        pack.rename(f"{root}/hidden")
    dist.barrier()
    with pytest.raises(CheckpointException) as raised:
        models.load(torchrec_job(2), f"{root}/0")
    causes = faults.causes(raised.value)
    assert all(isinstance(cause, cnr.DamagedError) for cause in causes.values())
    assert any(pack.name in str(cause) for cause in causes.values())
    dist.barrier()
    if rank == 0:
        Path(root, "hidden").rename(pack)
    dist.barrier()
    assert_loads(f"{root}/0", cut, torchrec_job)
    end = save(job, f"{root}/1", planner)
    assert cnr.read_checkpoint(f"{root}/1").kind == "delta"
    tracker.close()
    assert_loads(f"{root}/1", end, torchrec_job)


def test_a_load_that_fails_tells_every_rank(tmp_path: Path, rank_pool: RankPools) -> None:
    """Nothing to load, or a missing pack: typed errors on every rank; a load of another job disturbs nothing."""
    rank_pool(2).run(_fail_to_load, str(tmp_path), timeout_secs=60.0)


# Two writers and one checkpoint id.


def _race(root: str, seed: int, barrier: Any, sender: Connection) -> None:
    """Save several times, without a lineage, to ids that another process uses at the same time; send who was how."""
    torch.set_num_threads(1)
    outcomes: list[Any] = []
    job = adagrad_job(seed)
    for number in range(_NUM_RACES):
        train(job, number)
        path = f"{root}/{number}"
        writer = models.writer(path)
        finish = writer.finish

        def meet_then_finish(*args: Any, finish: Callable[..., None] = finish, **kwargs: Any) -> None:
            barrier.wait(CHILD_SECS)
            finish(*args, **kwargs)

        faults.replace_method(writer, "finish", meet_then_finish)
        cut = whole(state(job))
        try:
            dcp.save(state(job), storage_writer=writer)
            outcomes.append(cut)
        except CheckpointException as error:
            outcomes.append([f"{type(cause).__name__}: {cause}" for cause in faults.causes(error).values()])
        barrier.wait(CHILD_SECS)
    sender.send_bytes(pickle.dumps(outcomes))


_NUM_RACES = 10


def test_of_two_writers_of_one_id_exactly_one_commits(tmp_path: Path) -> None:
    """Of two processes that save under one id at a time, one commits; the other is told that the checkpoint exists."""
    barrier = _FORKED.Barrier(2)
    pipes = [_FORKED.Pipe(duplex=False) for _ in range(2)]
    racers = [
        _FORKED.Process(target=_race, args=(str(tmp_path), seed, barrier, sender), daemon=True)
        for seed, (_, sender) in enumerate(pipes)
    ]
    for racer, (_, sender) in zip(racers, pipes, strict=True):
        racer.start()
        sender.close()
    try:
        for receiver, _ in pipes:
            assert receiver.poll(CHILD_SECS), "a writer hangs"
        both = [pickle.loads(receiver.recv_bytes()) for receiver, _ in pipes]
    finally:
        for racer in racers:
            racer.kill()
            racer.join()
    for number, pair in enumerate(zip(*both, strict=True)):
        path = f"{tmp_path}/{number}"
        (winner,) = [outcome for outcome in pair if isinstance(outcome, dict)]
        (loser,) = [outcome for outcome in pair if isinstance(outcome, list)]
        assert len(loser) == 1
        assert loser[0].startswith("CheckpointExistsError")
        assert path in loser[0]
        assert_loads(path, winner, adagrad_job)


# Stores that refuse.


def _save_where_it_fails(job: Job, planner: cnr.CNRSavePlanner, path: str) -> cnr.StoreError:
    with pytest.raises(CheckpointException) as raised:
        dcp.save(state(job), storage_writer=models.writer(path), planner=planner)
    (cause,) = faults.causes(raised.value).values()
    assert isinstance(cause, cnr.StoreError)
    assert path in str(cause)
    return cause


def _save_elsewhere_after(root: str, fail: Callable[[Job, cnr.CNRSavePlanner], None]) -> None:
    """Fail, then save elsewhere: a delta that holds what was trained before the failure and after it."""
    job = adagrad_job(1)
    tracker, planner = saver(job)
    cut = save(job, f"{root}/0", planner)
    train(job, 1)
    fail(job, planner)
    assert cnr.latest(root) == f"{root}/0"
    assert_loads(f"{root}/0", cut, adagrad_job)
    train(job, 2)
    end = save(job, f"{root}/1", planner)
    tracker.close()
    assert cnr.read_checkpoint(f"{root}/1").kind == "delta"
    assert_loads(f"{root}/1", end, adagrad_job)


def _exceed_file_size(root: str) -> None:
    def fail(job: Job, planner: cnr.CNRSavePlanner) -> None:
        with faults.small_files(700):
            cause = _save_where_it_fails(job, planner, f"{root}/big")
        assert cause.errno == errno.EFBIG

    _save_elsewhere_after(root, fail)


def _fill_disk(root: str, at: str) -> str:
    def fail(job: Job, planner: cnr.CNRSavePlanner) -> None:
        with small_disk(f"{root}/disk", 64 << 10):
            writer = models.writer(f"{root}/disk/full")
            original = getattr(writer, at)

            def fill_then(*args: Any, **kwargs: Any) -> Any:
                with contextlib.suppress(OSError), open(f"{root}/disk/filler", "wb", buffering=0) as filler:
                    while True:
                        filler.write(bytes(4096))
                return original(*args, **kwargs)

            faults.replace_method(writer, at, fill_then)
            with pytest.raises(CheckpointException) as raised:
                dcp.save(state(job), storage_writer=writer, planner=planner)
            (cause,) = faults.causes(raised.value).values()
            assert isinstance(cause, cnr.StoreError)
            assert cause.errno == errno.ENOSPC
            assert f"{root}/disk/full" in str(cause)
            assert cnr.latest(f"{root}/disk") is None

    try:
        _save_elsewhere_after(root, fail)
    except PermissionError as error:
        return f"no disk to fill here: {error}"
    return "done"


@pytest.mark.parametrize("at", ["write_data", "finish"], ids=["packs", "manifest"])
def test_a_full_disk_is_a_store_error_and_a_save_elsewhere_works(tmp_path: Path, at: str) -> None:
    """No space for a pack, or for the manifest: nothing is committed, no row is lost, and another place will do."""
    outcome = in_child(_fill_disk, str(tmp_path), at)
    if outcome != "done":
        pytest.skip(str(outcome))


def test_a_file_that_may_not_grow_is_a_store_error(tmp_path: Path) -> None:
    """A limit on the size of files, which stands for every write that fails half way."""
    assert in_child(_exceed_file_size, str(tmp_path)) is None


@pytest.mark.parametrize("place", ["below a file", "proc"])
def test_a_place_that_cannot_be_written_is_a_store_error(tmp_path: Path, place: str) -> None:
    """A path that cannot be made: the error names it, and a save elsewhere works."""
    (tmp_path / "file").touch()
    path = {"below a file": str(tmp_path / "file" / "step"), "proc": "/proc/no-such-place/step"}[place]

    def fail(job: Job, planner: cnr.CNRSavePlanner) -> None:
        _save_where_it_fails(job, planner, path)

    _save_elsewhere_after(str(tmp_path), fail)

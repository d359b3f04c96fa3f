"""Saves that overlap: with one writer, one planner, one tracker, or several of each. Each that succeeds loads."""

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.faults import InjectedError
from tests.support.jobs import SavingJob
from tests.support.killing import in_child
from tests.support.models import plain_job, state, torchrec_job
from tests.support.ranks import RankPools
from torchrec_cnr.saving import running_saves
from torchrec_cnr.saving.cut import Cuts, PendingSave
from torchrec_cnr.saving.plug_in_messages import StagedSave
from torchrec_cnr.storage.leases import Lease
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
KINDS = ("sync", "thread", "process")
WRITES = ("put", "put_new", "remove")


def _loads(path: str, values: dict[str, torch.Tensor]) -> bool:
    found = {fqn: torch.zeros_like(value) for fqn, value in values.items()}
    assert not all(torch.equal(found[fqn], value) for fqn, value in values.items())
    dcp.load(found, storage_reader=cnr.CNRStorageReader(path), no_dist=True)
    return all(torch.equal(found[fqn], value) for fqn, value in values.items())


def _tables(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"embedding_bags.t{number}.weight": torch.randn(50, 4, generator=generator) for number in range(2)}


# Without a tracker


@faults.slowed(Store, *WRITES, secs=0.02)
def _overlap(rank: int, root: str, kinds: tuple[str, ...], is_one_writer: bool) -> None:
    """Begin saves, one behind the other, on a slow store, without waiting for any; each holds its own values."""
    group = dist.new_group(backend="gloo")
    writer = models.writer(f"{root}/unused")
    saved: dict[str, dict[str, torch.Tensor]] = {}
    futures: list[Any] = []
    for number, kind in enumerate(kinds):
        path, values = f"{root}/{number}", _tables(number)
        saved[path] = {fqn: value.clone() for fqn, value in values.items()}
        options: dict[str, Any] = {
            "checkpoint_id": path,
            "storage_writer": writer if is_one_writer else models.writer(path),
            "process_group": group,
        }
        if kind == "sync":
            dcp.save(values, **options)
        else:
            executor = AsyncCheckpointerType.THREAD if kind == "thread" else AsyncCheckpointerType.PROCESS
            futures.append(dcp.async_save(values, async_checkpointer_type=executor, **options))
        for value in values.values():
            value.add_(1)
    for future in futures:
        future.result(timeout=100)
    dist.barrier(group)
    for path, values in saved.items():
        assert _loads(path, values), path


@pytest.mark.parametrize("is_one_writer", [True, False], ids=["one-writer", "a-writer-each"])
def test_saves_that_overlap_hold_their_own_values(tmp_path: Path, rank_pool: RankPools, is_one_writer: bool) -> None:
    """Asynchronous and synchronous saves in any order, none waited for: each checkpoint is of its own moment."""
    kinds = ("thread", "sync", "thread", "thread", "sync", "process", "sync", "process", "thread", "sync")
    rank_pool(2).run(_overlap, str(tmp_path), kinds, is_one_writer, timeout_secs=100.0)


@faults.slowed(Store, *WRITES, secs=0.02)
def _save_two_models(rank: int, root: str) -> None:
    """Two models and their trackers, one writer; one model is not tracked at all."""
    group = dist.new_group(backend="gloo")
    jobs = [SavingJob(f"{root}/{number}", torchrec_job, seed=number, group=group) for number in range(2)]
    writer, futures = jobs[0].writer, []
    for step in range(4):
        for job in jobs:
            job.writer = writer
            job.train()
            futures.append(job.async_save(step))
        values = _tables(step)
        path = f"{root}/dense-{step}"
        futures.append(dcp.async_save(values, checkpoint_id=path, storage_writer=writer, process_group=group))
    for future in futures:
        future.result(timeout=100)
    for step in range(4):
        for job in jobs:
            job.assert_loads(step)
        assert _loads(f"{root}/dense-{step}", _tables(step))
    for job in jobs:
        assert cnr.read_checkpoint(job.path(3)).kind == "delta"
        job.tracker.close()


def test_two_models_and_one_writer(tmp_path: Path, rank_pool: RankPools) -> None:
    """Each model's saves are its own lineage."""
    rank_pool(2).run(_save_two_models, str(tmp_path), timeout_secs=100.0)


@faults.slowed(Store, *WRITES, secs=0.02)
def _save_by_two_writers(rank: int, root: str) -> None:
    job = SavingJob(root, torchrec_job, group=dist.new_group(backend="gloo"))
    writers = [models.writer(f"{root}/unused") for _ in range(2)]
    futures = []
    for step in range(6):
        job.writer = writers[step % 2]
        job.train()
        if step % 3 == 2:
            job.save(step)
        else:
            futures.append(job.async_save(step))
    for future in futures:
        future.result(timeout=100)
    for step in range(6):
        job.assert_loads(step)
        assert cnr.read_checkpoint(job.path(step)).kind == ("delta" if step else "baseline")
    job.close()


def test_two_writers_and_one_tracker(tmp_path: Path, rank_pool: RankPools) -> None:
    """Each save is a delta of the one before, whichever writer wrote that."""
    rank_pool(2).run(_save_by_two_writers, str(tmp_path), timeout_secs=100.0)


def test_saves_of_a_tracker_overlap_on_a_store_without_directories(rank_pool: RankPools) -> None:
    """Where no directory shows that a save has begun."""
    rank_pool(1).run(_save_by_two_writers, f"memory://overlap-{uuid.uuid4().hex}", timeout_secs=100.0)


def test_threads_without_a_group_save_beside_each_other(tmp_path: Path) -> None:
    """One writer in four threads: nobody waits, and each checkpoint holds its own values."""
    writer = models.writer(tmp_path / "unused")

    def save(number: int) -> None:
        values = _tables(number)
        for step in range(5):
            path = f"{tmp_path}/{number}-{step}"
            dcp.save(values, checkpoint_id=path, storage_writer=writer, no_dist=True)
            assert _loads(path, values)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(save, number) for number in range(4)]:
            done.result(timeout=100)


@pytest.mark.parametrize("is_async", [False, True])
def test_threads_save_one_tracker_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Without a group, threads begin at the same time; each save takes its own marks, on top of the one before."""
    checkpoint = PendingSave.checkpoint
    monkeypatch.setattr(PendingSave, "checkpoint", lambda last: (checkpoint(last), time.sleep(0.02))[0])
    job = SavingJob(tmp_path)
    names = [f"{step}-{thread}" for step in range(4) for thread in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for step in range(4):
            job.train()
            of_step = [name for name in names if name.startswith(f"{step}-")]
            done = list(pool.map(job.async_save if is_async else job.save, of_step))
            for future in done if is_async else ():
                future.result(timeout=100)
    for name in names:
        job.assert_loads(name)
    found = [cnr.read_checkpoint(job.path(name)) for name in names]
    assert len({checkpoint.parent for checkpoint in found}) == len(found), "a line, without branches"
    job.close()


def _save_in_threads(rank: int, root: str) -> None:
    """Three threads that save one after the other again and again, in one group."""
    writer = models.writer(f"{root}/unused", timeout_secs=20.0)

    def save(thread: int) -> None:
        for step in range(10):
            dcp.save({"t": torch.ones(3)}, checkpoint_id=f"{root}/{thread}-{step}", storage_writer=writer)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(save, thread) for thread in range(3)]:
            done.result(timeout=100)


def test_a_thread_that_saves_again_is_waited_for_no_longer(tmp_path: Path, rank_pool: RankPools) -> None:
    """Its next call of DCP's may have the frame of the call before, which has ended all the same."""
    rank_pool(1).run(_save_in_threads, str(tmp_path))


class _SavesItself:
    """A part of a state that saves something else when it is asked for its own state."""

    def __init__(self, save: Callable[[], object]) -> None:
        self.save = save

    def state_dict(self) -> dict[str, Any]:
        self.save()
        return {"own": torch.ones(2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


@pytest.mark.parametrize("inner_fails", [False, True])
def test_a_save_within_the_state_dict_of_a_save(tmp_path: Path, inner_fails: bool) -> None:
    """By one writer: each goes where it was told, also when the inner one fails and leaves its id free."""
    writer = models.writer(tmp_path / "unused")
    options: dict[str, Any] = {"storage_writer": writer, "no_dist": True}

    def save() -> None:
        values = {"inner": torch.ones(3)}
        if not inner_fails:
            dcp.save(values, checkpoint_id=tmp_path / "inner", **options)
            return
        faults.failure_of(lambda: dcp.save({**values, "f": _tables}, checkpoint_id=tmp_path / "inner", **options))

    metadata = dcp.save({"part": _SavesItself(save)}, checkpoint_id=tmp_path / "outer", **options)
    assert list(metadata.state_dict_metadata) == ["part.own"]
    assert _loads(str(tmp_path / "outer"), {"part.own": torch.ones(2)})
    assert (tmp_path / "inner" / "manifest.json").exists() != inner_fails


# Collectives of the save before


@faults.slowed(Lease, "release", secs=0.1)
def _save_back_to_back(rank: int, root: str, kind: str, num_saves: int) -> int:
    """Begin each save when the one before is committed, but not ended: leases take long to release."""
    job = SavingJob(root, torchrec_job, group=dist.new_group(backend="gloo"))
    for step in range(num_saves):
        job.train()
        if kind == "mixed" and step % 2:
            job.save(step)
        else:
            job.async_save(step)
    job.planner.resolve_last_save()
    for step in range(num_saves):
        job.assert_loads(step)
    job.close()
    return num_saves


@pytest.mark.parametrize("kind", ["async", "mixed"])
def test_a_save_begins_when_the_collectives_before_have_ended(tmp_path: Path, rank_pool: RankPools, kind: str) -> None:
    """Saves back to back on a store that releases leases slowly: no collective meets another."""
    assert rank_pool(3).run(_save_back_to_back, str(tmp_path), kind, 12, timeout_secs=110.0) == [12] * 3


@faults.slowed(Store, *WRITES, secs=0.1)
def _save_on_a_slow_store(rank: int, root: str, num_saves: int) -> int:
    return _save_back_to_back(rank, root, "async", num_saves)


@pytest.mark.slow
@pytest.mark.timeout(1_600)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_two_hundred_saves_back_to_back_on_a_slow_store(tmp_path: Path, rank_pool: RankPools, world_size: int) -> None:
    """Each operation takes a tenth of a second; all checkpoints are there, and no collective is broken."""
    found = rank_pool(world_size).run(_save_on_a_slow_store, str(tmp_path), 200, timeout_secs=1_500.0)
    assert found == [200] * world_size


# The end of a save


_LAST_SAVE_FAILS = """
import sys
import torch, torch.distributed.checkpoint as dcp
import torchrec_cnr as cnr

values = {"t": torch.ones(3), "sparse": torch.eye(3).to_sparse()}
dcp.async_save(values, storage_writer=cnr.CNRStorageWriter(sys.argv[1]), no_dist=True)
"""


def test_a_last_save_that_fails_is_logged(tmp_path: Path) -> None:
    """A script that ends without waiting for it has nothing else that tells of it."""
    command = [sys.executable, "-c", _LAST_SAVE_FAILS, str(tmp_path / "0")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "the last asynchronous save failed" in done.stderr
    assert "sparse" in done.stderr


_LAST_SAVE = """
import sys, time
import torch, torch.distributed.checkpoint as dcp
import torchrec_cnr as cnr
from torchrec_cnr.storage.store import Store

put = Store.put
Store.put = lambda *args, **kwargs: (time.sleep(0.3), put(*args, **kwargs))[1]
dcp.async_save({"t": torch.arange(1000.)}, storage_writer=cnr.CNRStorageWriter(sys.argv[1]), no_dist=True)
"""


def test_the_interpreter_ends_after_its_last_save(tmp_path: Path) -> None:
    """A script that ends without waiting for the future has saved all the same."""
    done = subprocess.run([sys.executable, "-c", _LAST_SAVE, str(tmp_path / "0")], check=True, timeout=120)
    assert done.returncode == 0
    found = {"t": torch.zeros(1000)}
    dcp.load(found, storage_reader=cnr.CNRStorageReader(tmp_path / "0"), no_dist=True)
    assert torch.equal(found["t"], torch.arange(1000.0))


def test_a_save_that_fails_before_it_begins_ends_while_other_threads_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were not copied are waited for as long as the save can write them, whatever other threads there are."""
    release = threading.Event()
    bystander = threading.Thread(target=release.wait, name="bystander")
    job = SavingJob(tmp_path, staging_bytes=10)
    job.train()
    monkeypatch.setattr(job.writer, "storage_meta", faults.raising("storage_meta"))
    original = job.writer.stage

    def stage(*args: Any, **kwargs: Any) -> Any:
        staged = original(*args, **kwargs)
        bystander.start()  # younger than what was staged
        return staged

    faults.replace_method(job.writer, "stage", stage)
    done = threading.Thread(target=lambda: job.async_save("0"), daemon=True)
    done.start()
    done.join(30)
    assert not done.is_alive(), "async_save hangs"
    release.set()
    bystander.join()
    monkeypatch.undo()
    job.writer = models.writer(job.path("unused"))
    job.save("1")
    job.assert_loads("1")
    job.close()


def test_a_save_that_does_not_end_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one of its queue fails at its 'timeout_secs', and works once the first has ended."""
    release = threading.Event()
    job = SavingJob(tmp_path, timeout_secs=0.3)
    write = job.writer.write_data

    def hold(*args: Any) -> Any:
        release.wait(60)
        return write(*args)

    faults.replace_method(job.writer, "write_data", hold)
    first = job.async_save("0")
    job.train()
    failure = job.failure("1")
    assert isinstance(failure, cnr.SaveError)
    assert "has not ended within 0.3 s" in str(failure)
    release.set()
    first.result(timeout=60)
    job.save("2")
    for name in ("0", "2"):
        job.assert_loads(name)
    job.close()


def _settle_in_a_fork(root: str) -> int:
    """Fork while another thread waits for a save, and settle it in the child: its exit status, 1 if it hangs."""
    job = SavingJob(root, plain_job)
    job.train_and_save("0")
    cuts = Cuts.of(job.tracker, cnr.Full(), job.planner)
    has_turn, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with cuts._alone(1.0):
            has_turn.set()
            may_end.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    has_turn.wait()
    pid = os.fork()
    if pid == 0:
        try:
            cuts.resolve_last_save(5.0)
        except BaseException:  # noqa: BLE001 - this process must not go on
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    may_end.set()
    holder.join()
    return status


def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have(tmp_path: Path) -> None:
    """What was locked in the parent is not in the child."""
    assert in_child(_settle_in_a_fork, str(tmp_path)) == 0


def test_a_save_staged_and_never_begun_is_given_up(tmp_path: Path) -> None:
    """What was staged by hand is not waited for, and is refused when it comes after another save."""
    job = SavingJob(tmp_path)
    staged = job.writer.stage(state(job.job))
    job.train()
    job.save("1")
    options: dict[str, Any] = {"storage_writer": job.writer, "planner": job.planner, "no_dist": True}
    failure = faults.failure_of(lambda: dcp.save(staged, checkpoint_id=job.path("0"), **options))
    assert isinstance(failure, cnr.SaveError)
    assert "another save began before" in str(failure)
    job.train_and_save("2")
    for name in ("1", "2"):
        job.assert_loads(name)
    job.close()


def test_a_save_that_begins_late_is_waited_for(tmp_path: Path) -> None:
    """As DCP's own process takes long to start: the save behind it neither overtakes it nor gives it up."""
    release = threading.Event()
    job = SavingJob(tmp_path, build=plain_job)
    job.train()
    storage_meta = job.writer.storage_meta
    number_of_calls = itertools.count()

    def hold() -> Any:
        if next(number_of_calls) == 0:
            release.wait(60)
        return storage_meta()

    faults.replace_method(job.writer, "storage_meta", hold)
    first = job.async_save("0")
    job.train()
    threading.Timer(0.5, release.set).start()
    second = job.async_save("1")
    assert release.is_set()
    for future in (first, second):
        future.result(timeout=60)
    for name in ("0", "1"):
        job.assert_loads(name)
    job.close()


def test_threads_of_others_do_not_hold_up_training(tmp_path: Path) -> None:
    """A pool that was started meanwhile is not taken for what will write the rows, when that has failed."""
    job = SavingJob(tmp_path, build=plain_job, staging_bytes=0)
    stage, ends = job.writer.stage, threading.Event()
    faults.replace_method(job.writer, "storage_meta", faults.raising("storage_meta"))
    with ThreadPoolExecutor(1) as pool:

        def stage_beside(*args: Any, **options: Any) -> Any:
            staged = stage(*args, **options)
            pool.submit(ends.wait, 30)
            return staged

        faults.replace_method(job.writer, "stage", stage_beside)
        began = time.monotonic()
        future = job.async_save("0")
        assert time.monotonic() < began + 20
        ends.set()
    assert "storage_meta failed" in str(faults.failure_of(lambda: future.result(timeout=60)))
    job.close()


def test_a_save_leaves_nothing_behind(tmp_path: Path) -> None:
    """No state of a save outlives it, but the outcome that the next one reads."""
    job = SavingJob(tmp_path)
    for step in range(3):
        job.train()
        job.save(2 * step)
        job.async_save(2 * step + 1).result(timeout=60)
    job.planner.resolve_last_save()
    running_saves.running_saves.clean_up()
    assert running_saves.running_saves.running() == []
    job.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_planner_does_not_keep_what_it_has_saved(tmp_path: Path, fails: bool) -> None:
    """Tensors of the state dict that only a save has held are freed when it has been written, or has failed."""
    job = SavingJob(tmp_path, build=plain_job)
    extra = torch.zeros(3)
    held = ref(extra)
    live = {**state(job.job), "extra": extra, "bad": torch.eye(3).to_sparse() if fails else torch.ones(1)}
    options: dict[str, Any] = {"storage_writer": job.writer, "planner": job.planner, "no_dist": True}
    with pytest.raises(CheckpointException) if fails else nullcontext():
        dcp.save(live, checkpoint_id=job.path(0), **options)
    del live, extra
    gc.collect()
    assert held() is None
    job.close()


def _staging_failed() -> Any:
    """What was raised of it, weakly."""
    staged = StagedSave(running_saves.running_saves.add(has_begun=False), failure=InjectedError("staging"))
    try:
        staged.__create_write_items__("staged", staged)
    except InjectedError as error:
        return ref(error)


def test_what_staging_failed_with_does_not_refer_to_itself() -> None:
    """Else what the frames of its traceback hold would be kept until the garbage collector runs."""
    gc.disable()
    try:
        assert _staging_failed()() is None
    finally:
        gc.enable()


def test_optimizer_state_that_is_made_after_the_baseline(tmp_path: Path) -> None:
    """Asynchronous one-shot deltas on a baseline that has no optimizer state: each holds all of it."""
    job = SavingJob(tmp_path, lambda seed: plain_job(seed, "adam"), policy=cnr.OneShot())
    job.async_save(0).result(timeout=60)
    for step in range(1, 5):
        job.train()
        job.async_save(step).result(timeout=60)
        assert cnr.read_checkpoint(job.path(step)).kind == "delta"
    for step in range(5):
        job.assert_loads(step)
    job.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_optimizer_state_that_is_replaced_after_the_baseline(tmp_path: Path, is_async: bool) -> None:
    """Each one-shot delta stores it whole, not only the first: the others are based on the baseline, too."""
    job = SavingJob(tmp_path, lambda seed: plain_job(seed, "adagrad"), policy=cnr.OneShot())
    job.train_and_save(0)
    states = [state for optimizer in job.job.optimizers.values() for state in optimizer.state.values()]
    for per_row in states:
        for name, value in per_row.items():
            if isinstance(value, torch.Tensor) and value.dim():
                per_row[name] = value + 1
    for step in range(1, 4):
        job.train()
        if is_async:
            job.async_save(step).result(timeout=60)
        else:
            job.save(step)
        job.assert_loads(step)
    job.close()

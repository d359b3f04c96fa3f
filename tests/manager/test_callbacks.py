"""Callbacks that raise end neither a save nor the thread that compacts and prunes; nor does any other foreign error."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _world

import torchrec_cnr as cnr
from tests.support.models import plain_job, state, torchrec_job, train
from tests.support.ranks import RankPools
from torchrec_cnr.errors import StoreError
from torchrec_cnr.maintenance.background_upkeep import Upkeep
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.pruning import execute

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _raise(*_: object) -> None:
    raise KeyError("boom")


def _saved_steps(manager: cnr.CheckpointManager, job: Any, num_steps: int) -> list[int]:
    found = []
    for step in range(1, num_steps + 1):
        train(job, step)
        saved = manager.save(step, state(job))
        found += [] if saved is None else [saved.step]
    return found


def test_callbacks_that_raise_end_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are logged once each, and counted; saves and retention go on."""
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    manager = cnr.CheckpointManager(
        tmp_path, tracker, policy=cnr.Full(), keep=cnr.Keep(last=1), on_saved=_raise, on_progress=_raise
    )
    assert _saved_steps(manager, job, 3) == [1, 2, 3]
    manager.close()
    assert list(read_catalog(tmp_path).checkpoints) == ["step-3"]
    assert manager.num_callback_errors > 3
    assert [record.message.split()[0] for record in caplog.records if record.name.endswith("callbacks")] == [
        "on_progress",
        "on_saved",
    ]


def test_an_evaluation_that_fails_in_a_callback_ends_nothing(tmp_path: Path) -> None:
    """What DCP raises is no Exception."""

    def fail(_: object) -> None:
        raise CheckpointException("no such checkpoint", {})

    job = plain_job(1)
    manager = cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model), on_saved=fail)
    assert _saved_steps(manager, job, 2) == [1, 2]
    assert manager.num_callback_errors == 2
    manager.close()


@pytest.mark.parametrize("error", [SystemExit("end"), KeyboardInterrupt()], ids=repr)
def test_no_error_ends_the_thread_of_upkeep(tmp_path: Path, error: BaseException) -> None:
    """A callback may raise anything in it; the next checkpoint is pruned for."""
    job, errors = plain_job(1), [error]

    def fail_once(what: str, *_: int) -> None:
        if what == "prune" and errors:
            raise errors.pop()

    manager = cnr.CheckpointManager(
        tmp_path, cnr.RowTracker(job.model), policy=cnr.Full(), keep=cnr.Keep(last=1), on_progress=fail_once
    )
    _saved_steps(manager, job, 2)
    assert manager._upkeep is not None
    while manager._upkeep.num_errors == 0:
        time.sleep(0.01)
    train(job, 3)
    manager.save(3, state(job))
    manager.close()
    assert list(read_catalog(tmp_path).checkpoints) == ["step-3"]


def test_a_foreign_error_does_not_end_upkeep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged with its traceback, and the work is done after the next checkpoint."""
    job, errors = plain_job(1), [RuntimeError("foreign"), None]
    run_for = Upkeep.run_for

    def failing_once(self: Upkeep, *args: Any) -> None:
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        run_for(self, *args)

    monkeypatch.setattr(Upkeep, "run_for", failing_once)
    upkeep = Upkeep(str(tmp_path), cnr.Keep(last=1), compacts=False)
    manager = cnr.CheckpointManager(
        tmp_path, cnr.RowTracker(job.model), policy=cnr.Full(), background=cnr.Background(compacts=False)
    )
    _saved_steps(manager, job, 2)
    manager.close()
    upkeep.after(str(tmp_path / "step-1"))
    while upkeep.num_errors == 0:
        time.sleep(0.01)
    upkeep.after(str(tmp_path / "step-2"))
    upkeep.close()
    assert upkeep.num_errors == 1
    assert "maintenance failed" in caplog.text
    assert "foreign" in caplog.text
    assert list(read_catalog(tmp_path).checkpoints) == ["step-2"]


@pytest.mark.parametrize("refused", [0, 1])  # calls before a save, and after it
def test_one_rank_alone_raises_nothing(tmp_path: Path, rank_pool: RankPools, refused: int) -> None:
    """All report the checkpoint, also where one cannot read the last one at a moment or its callback raises."""
    assert rank_pool(2).run(_save_with_trouble_on_one_rank, str(tmp_path), refused) == [[1, 2]] * 2


def _save_with_trouble_on_one_rank(rank: int, root: str, refused: int) -> list[int]:
    job = torchrec_job(1)
    tracker = cnr.RowTracker(job.model)
    manager = cnr.CheckpointManager(root, tracker, on_saved=_raise if rank else None)
    resolve, found = manager._planner.resolve_last_save, []
    for step in (1, 2):
        train(job, step)
        calls = [resolve] * 3  # before the save, after it, and at the end
        calls[refused] = _refuse
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr(manager._planner, "resolve_last_save", lambda calls=calls: calls.pop(0)())
            saved = manager.save(step, state(job))
        assert saved is not None
        found.append(saved.step)
    manager.close()
    tracker.close()
    dist.barrier()
    return found


def _refuse() -> None:
    raise StoreError("does not answer")


def test_groups_end_with_their_manager(tmp_path: Path, rank_pool: RankPools) -> None:
    """A process may make many managers."""
    assert rank_pool(2).run(_num_groups_left, str(tmp_path)) == [0] * 2


def _num_groups_left(rank: int, root: str) -> int:
    job = torchrec_job(1)
    num_groups = len(_world.pg_map)
    tracker = cnr.RowTracker(job.model)
    manager = cnr.CheckpointManager(root, tracker)
    manager.close()
    manager.close()
    tracker.close()
    dist.barrier()
    return len(_world.pg_map) - num_groups


@pytest.mark.parametrize("policy", [cnr.Full(), cnr.Compacted(max_deltas=3)], ids=repr)
def test_a_healthy_asynchronous_run_logs_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: cnr.Policy
) -> None:
    """Saves, loads and prunes at once leave work to each other, and say why in the log of what is no warning."""
    caplog.set_level(logging.INFO, "torchrec_cnr")
    job = plain_job(1)
    manager = cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model), policy=policy, keep=cnr.Keep(last=2))
    for step in range(1, 16):
        train(job, step)
        manager.async_save(step, state(job))
    manager.close()
    records = [record for record in caplog.records if record.name.startswith("torchrec_cnr")]
    assert [record.message for record in records if record.levelno >= logging.WARNING] == []
    told = [record.message for record in records if "not removed yet" in record.message]
    assert all(message.partition("not removed yet: ")[2] for message in told)
    assert cnr.latest(tmp_path) == str(tmp_path / "step-15")


def test_what_a_prune_leaves_for_somebody_at_work_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes with its reason; a store that refuses is a warning."""
    job = plain_job(1)
    manager = cnr.CheckpointManager(
        tmp_path, cnr.RowTracker(job.model), policy=cnr.Full(), background=cnr.Background(compacts=False)
    )
    _saved_steps(manager, job, 2)
    manager.close()
    upkeep = Upkeep(str(tmp_path), cnr.Keep(last=1), compacts=False)
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        patch.setattr(execute._Execution, "_why_leased", lambda *_: "leased (a load, until 14:03 UTC)")
        upkeep.prune()
    with monkeypatch.context() as patch:
        patch.setattr(execute.Store, "remove", lambda *_, **__: _refuse())
        upkeep.prune()
    told = [record for record in caplog.records if "step-1: not removed yet" in record.message]
    assert [record.levelno for record in told] == [logging.INFO, logging.WARNING]
    assert "leased (a load" in told[0].message


def test_upkeep_passes_over_what_its_own_prune_has_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A newer checkpoint may be committed while an older one waits to be compacted."""
    job = plain_job(1)
    manager = cnr.CheckpointManager(
        tmp_path, cnr.RowTracker(job.model), policy=cnr.Full(), background=cnr.Background(compacts=False)
    )
    _saved_steps(manager, job, 2)
    manager.close()
    older = cnr.read_checkpoint(tmp_path / "step-1")
    upkeep = Upkeep(str(tmp_path), cnr.Keep(last=1), compacts=True)
    upkeep.prune()
    assert list(read_catalog(tmp_path).checkpoints) == ["step-2"]
    upkeep.run_for(older)
    upkeep.after(older.store.url)
    upkeep.close()
    assert upkeep.num_errors == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_upkeep_rests_after_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine times as long as it has worked, so that frequent saves leave a core to training; but not at the end."""
    job = plain_job(1)
    manager = cnr.CheckpointManager(
        tmp_path, cnr.RowTracker(job.model), policy=cnr.Full(), background=cnr.Background(compacts=False)
    )
    _saved_steps(manager, job, 1)
    manager.close()
    spans: list[tuple[float, float]] = []

    def work(self: Upkeep, *args: Any) -> None:
        began = time.monotonic()
        time.sleep(0.1)
        spans.append((began, time.monotonic()))

    monkeypatch.setattr(Upkeep, "run_for", work)
    upkeep = Upkeep(str(tmp_path), cnr.Keep(last=1), compacts=False)
    for number in (1, 2, 3):
        upkeep.after(str(tmp_path / "step-1"))
        while number < 3 and len(spans) < number:
            time.sleep(0.01)
    upkeep.close()
    (_, first_end), (second_begin, second_end), (third_begin, _) = spans
    assert second_begin - first_end > 0.8
    assert third_begin - second_end < second_begin - first_end


def test_times_of_asynchronous_saves_are_those_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those until the next call asks for it; but a wait for the save before it is a stall of training."""
    job = plain_job(1)
    manager = cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model))
    began = time.monotonic()
    future = manager.async_save(1, state(job))
    assert future is not None
    future.result(timeout=100)
    took = time.monotonic() - began
    time.sleep(0.5)
    saved = manager.wait()
    assert saved is not None
    assert 0 < saved.secs < took + 0.3
    wait = manager._wait
    monkeypatch.setattr(manager, "_wait", lambda: (time.sleep(0.2), wait())[1])
    manager.async_save(2, state(job))
    saved = manager.wait()
    manager.close()
    assert saved is not None
    assert saved.stall_secs >= 0.2

"""A root depends on no other root, unless a user saves a delta across; then both roots show it and keep it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.state_dict_saver import save

import torchrec_cnr as cnr
from tests.support import models
from tests.support.command_line import cnr_json, cnr_text
from tests.support.models import Job, differing, plain_job, state, train, whole
from torchrec_cnr.errors import StoreError
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _save(job: Job, path: Path, planner: cnr.CNRSavePlanner) -> None:
    save(state(job), storage_writer=models.writer(path), planner=planner)


def _saved_across(root: Path) -> Job:
    """A run of three checkpoints, and a delta on the last of them under another root."""
    job = plain_job(1)
    planner = cnr.CNRSavePlanner(cnr.RowTracker(job.model), policy=cnr.Consecutive())
    for number in range(1, 4):
        train(job, number)
        _save(job, root / "run" / f"step-{number}", planner)
    train(job, 4)
    _save(job, root / "fork" / "step-4", planner)
    return job


def test_a_manager_begins_a_root_with_a_baseline(tmp_path: Path) -> None:
    """Whatever the job has saved or loaded elsewhere: its root can be copied, moved and pruned alone."""
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    train(job, 1)
    _save(job, tmp_path / "run" / "step-1", cnr.CNRSavePlanner(tracker))
    manager = cnr.CheckpointManager(tmp_path / "months", tracker, background=cnr.Background(compacts=False))
    kinds = []
    for number in (2, 3):
        train(job, number)
        saved = manager.save(number, state(job))
        assert saved is not None
        kinds.append(saved.kind)
    manager.close()
    assert kinds == ["baseline", "delta"]
    shutil.rmtree(tmp_path / "run")
    shutil.move(tmp_path / "months", tmp_path / "moved")
    assert not differing(models.load(plain_job(9), str(tmp_path / "moved" / "step-3")), whole(state(job)))


def test_an_asynchronous_first_save_is_a_baseline_too(tmp_path: Path) -> None:
    """All rows are staged for it."""
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    train(job, 1)
    _save(job, tmp_path / "run" / "step-1", cnr.CNRSavePlanner(tracker))
    manager = cnr.CheckpointManager(tmp_path / "months", tracker, background=cnr.Background(compacts=False))
    train(job, 2)
    manager.async_save(2, state(job))
    saved = manager.wait()
    manager.close()
    assert saved is not None
    assert saved.kind == "baseline"
    assert not differing(models.load(plain_job(9), saved.path), whole(state(job)))


def test_a_compaction_copies_the_rows_of_another_root(tmp_path: Path) -> None:
    """It takes over no file from there, however little of it is dead."""
    job = _saved_across(tmp_path)
    cnr.compact(tmp_path / "fork" / "step-4", max_ratio=1000.0)
    manifest = read_checkpoint(tmp_path / "fork" / "step-4").manifest
    assert manifest.parent is None
    assert {pack.directory for pack in manifest.packs} == {None}
    shutil.rmtree(tmp_path / "run")
    assert not differing(models.load(plain_job(9), str(tmp_path / "fork" / "step-4")), whole(state(job)))


def test_a_prune_keeps_what_a_compaction_across_roots_is_based_on(tmp_path: Path) -> None:
    """The compaction tags its new parent, when the old parent no longer needs that one."""
    job = _saved_across(tmp_path)
    cnr.compact(tmp_path / "fork" / "step-4", since=tmp_path / "run" / "step-1")
    cnr.compact(tmp_path / "run" / "step-3", self_contained=True)
    cnr.execute(cnr.plan_prune(tmp_path / "run", cnr.Keep(last=1)))
    assert not differing(models.load(plain_job(9), str(tmp_path / "fork" / "step-4")), whole(state(job)))


@pytest.mark.parametrize("tagged", [True, False])
def test_a_prune_keeps_what_another_root_depends_on(tmp_path: Path, tagged: bool) -> None:
    """The save across roots has told it, until the tag is taken away."""
    job = _saved_across(tmp_path)
    train(job, 5)
    _save(job, tmp_path / "run" / "step-5", cnr.CNRSavePlanner(cnr.RowTracker(job.model)))
    keep = cnr.Keep(last=1, tagged=tagged)
    plan = cnr.plan_prune(tmp_path / "run", keep)
    assert not plan.pruned
    assert any("another root needs it" in reason for reason in plan.stays["step-3"])
    (tag,) = (tmp_path / "run" / "step-3").glob("needed-by-fork-*.tag")
    cnr.untag(tmp_path / "run" / "step-3", tag.stem)
    assert len(cnr.plan_prune(tmp_path / "run", keep).pruned) == 3


def test_a_parent_that_cannot_be_tagged_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A root of somebody else's may be read-only; the save goes on."""
    put = Store.put

    def refusing(store: Store, name: str, *args: Any, **options: Any) -> None:
        if name.endswith(".tag"):
            raise StoreError(f"{name}: read-only")
        put(store, name, *args, **options)

    monkeypatch.setattr(Store, "put", refusing)
    job = _saved_across(tmp_path)
    assert "cannot tag it" in caplog.text
    assert not differing(models.load(plain_job(9), str(tmp_path / "fork" / "step-4")), whole(state(job)))


def test_dependencies_on_other_roots_are_shown(tmp_path: Path) -> None:
    """By the commands that list a root and describe a checkpoint."""
    _saved_across(tmp_path)
    fork = tmp_path / "fork"
    assert "needs ../run/step-3" in cnr_text("ls", fork)
    (entry,) = cnr_json("ls", fork)["checkpoints"]
    assert entry["needed_of_other_roots"] == ["../../run/step-3"]
    assert "../run/step-3, ../run/step-2, ../run/step-1 (baseline)" in cnr_text("inspect", fork)
    cnr.compact(fork / "step-4")
    assert "needs" not in cnr_text("ls", fork)

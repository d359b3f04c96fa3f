"""A manager goes back to an older checkpoint: what is newer is abandoned by the first save after it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.lineage.tensorless_roots import as_newer_version
from tests.support import faults, models
from tests.support.command_line import cnr_json, cnr_text
from tests.support.models import Job, differing, plain_job, state, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _manager(root: Path, **options: Any) -> tuple[Job, cnr.CheckpointManager]:
    job = plain_job(1)
    options = {"background": cnr.Background(compacts=False), "policy": cnr.Consecutive(), **options}
    return job, cnr.CheckpointManager(root, cnr.RowTracker(job.model), **options)


def _save(job: Job, manager: cnr.CheckpointManager, step: int) -> str:
    train(job, step)
    saved = manager.save(step, state(job))
    assert saved is not None
    return Path(saved.path).name


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five checkpoints, each on the one before."""
    job, manager = _manager(tmp_path)
    for step in range(1, 6):
        _save(job, manager, step)
    manager.close()
    return tmp_path


def _name(path: str | None) -> str:
    assert path is not None
    return Path(path).name


@pytest.mark.parametrize("by_path", [False, True])
def test_a_run_goes_on_from_an_older_checkpoint(run: Path, by_path: bool) -> None:
    """What was newer is passed over, also where all that is newer than the return is damaged."""
    job, manager = _manager(run)
    target = state(job)
    back = {"path": run / "step-2"} if by_path else {"step": 2}
    assert manager.restore(target, **back) == 2
    assert not differing(models.load(plain_job(9), str(run / "step-2")), whole(target))
    assert _name(cnr.latest(run)) == "step-5"  # nothing was saved yet
    assert [_save(job, manager, step) for step in (3, 4)] == ["step-3-2", "step-4-2"]
    manager.close()
    wanted = whole(state(job))
    assert _name(cnr.latest(run)) == "step-4-2"
    assert not differing(models.load(plain_job(9), str(run / "step-4-2")), wanted)
    for name in ("step-3-2", "step-4-2"):
        for pack in (run / name).glob("*.safetensors"):
            faults.flip_middle(pack)
    again, manager = _manager(run)
    assert manager.restore(state(again)) == 2
    manager.close()


def test_another_manager_goes_on_from_an_older_checkpoint(run: Path) -> None:
    """With the same tracker, in the same process, and without a restore of its own."""
    job, manager = _manager(run)
    assert manager.restore(state(job), step=2) == 2
    assert _save(job, manager, 3) == "step-3-2"
    manager.close()
    manager = cnr.CheckpointManager(run, manager._tracker)
    assert [_save(job, manager, step) for step in (4, 6)] == ["step-4-2", "step-6"]
    manager.close()


def _whole_run(root: Path) -> Path:
    """Three checkpoints, each of them a baseline, so that a prune may remove any."""
    job, manager = _manager(root, policy=cnr.Full())
    for step in range(1, 4):
        _save(job, manager, step)
    manager.close()
    return root


@pytest.mark.parametrize("is_async", [False, True])
def test_a_prune_keeps_what_the_next_save_is_a_delta_of(tmp_path: Path, is_async: bool) -> None:
    """Until it is committed; an asynchronous save has copied only the modified rows when it begins."""
    job, manager = _manager(_whole_run(tmp_path))
    manager.restore(state(job), step=2)
    assert cnr.execute(cnr.plan_prune(tmp_path, cnr.Keep(last=1))).removed == ("step-1",)
    train(job, 3)
    wanted = whole(state(job))
    saved = manager.async_save(3, state(job)) if is_async else manager.save(3, state(job))
    assert saved is not None
    manager.close()
    assert cnr.read_checkpoint(tmp_path / "step-3-2").kind == "delta"
    assert not differing(models.load(plain_job(9), str(tmp_path / "step-3-2")), wanted)
    assert not list(tmp_path.glob("*/*.lease"))


def test_no_delta_of_what_a_prune_may_still_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to remove a manifest seems to fail, and takes effect after the next save."""
    late = []

    def remove_later(store: Store, name: str, **options: Any) -> None:
        if name == MANIFEST_FILE:
            late.append(store.child(name))
            raise cnr.StoreError(f"{store.url}: no answer")
        remove(store, name, **options)

    _whole_run(tmp_path)
    with monkeypatch.context() as patched:
        remove = Store.remove
        patched.setattr(Store, "remove", remove_later)
        cnr.execute(cnr.plan_prune(tmp_path, cnr.Keep(last=1)))
    assert [Path(path).parent.name for path in late] == ["step-2", "step-1"]
    job, manager = _manager(tmp_path)
    assert manager.restore(state(job), step=2) == 2
    assert _save(job, manager, 3) == "step-3-2"
    manager.close()
    for path in late:
        Path(path).unlink()
    assert not differing(models.load(plain_job(9), str(tmp_path / "step-3-2")), whole(state(job)))


def test_no_delta_of_what_a_prune_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save, without a manager, begins and commits between the prune's look for leases and its removal."""

    def save_and_remove(store: Store, name: str, **options: Any) -> None:
        if name == MANIFEST_FILE and not (tmp_path / "step-4").exists():
            saved.append(store.url)
            train(job, 4)
            writer, planner = (
                cnr.CNRStorageWriter(tmp_path / "step-4"),
                cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive()),
            )
            dcp.save(state(job), storage_writer=writer, planner=planner)
        remove(store, name, **options)

    _whole_run(tmp_path)
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    reader = cnr.CNRStorageReader(tmp_path / "step-2")
    dcp.load(state(job), storage_reader=reader, planner=cnr.CNRLoadPlanner(tracker))
    saved: list[str] = []
    with monkeypatch.context() as patched:
        remove = Store.remove
        patched.setattr(Store, "remove", save_and_remove)
        result = cnr.execute(cnr.plan_prune(tmp_path, cnr.Keep(last=1)))
    assert saved
    assert result.removed == ("step-2", "step-1")
    assert not list(tmp_path.glob("*/*.lease"))
    assert cnr.read_checkpoint(tmp_path / "step-4").kind == "baseline"
    assert not differing(models.load(plain_job(9), str(tmp_path / "step-4")), whole(state(job)))


def test_what_was_abandoned_goes_by_a_rule_that_is_stated(run: Path) -> None:
    """It counts for nothing but its tag and its metric; what says so goes with it."""
    cnr.tag(run / "step-4", "looked-at")
    job, manager = _manager(run)
    manager.restore(state(job), step=2)
    _save(job, manager, 3)
    manager.close()
    listed = {entry["name"]: entry["is_abandoned"] for entry in cnr_json("ls", run)["checkpoints"]}
    assert [name for name, is_abandoned in listed.items() if is_abandoned] == ["step-3", "step-4", "step-5"]
    text = cnr_text("ls", run)
    assert {line.split()[0] for line in text.splitlines() if "abandoned" in line} == {"step-3", "step-4", "step-5"}
    assert "newest: step-3-2" in text
    plan = cnr.plan_prune(run, cnr.Keep(last=2))
    assert [pruned.name for pruned in plan.pruned] == ["step-5"]
    cnr.execute(plan)
    assert sorted(name.name.split(".")[0] for name in run.glob("*.abandoned")) == ["step-3", "step-4"]
    cnr.untag(run / "step-4", "looked-at")
    cnr.execute(cnr.plan_prune(run, cnr.Keep(last=2)))
    assert list(read_catalog(run).checkpoints) == ["step-1", "step-2", "step-3-2"]
    assert not list(run.glob("*.abandoned"))


def test_a_name_of_an_abandoned_checkpoint_may_be_used_again(run: Path) -> None:
    """Once it was pruned; what was said of the old one does not hold for the new one."""
    job, manager = _manager(run)
    manager.restore(state(job), step=2)
    _save(job, manager, 3)
    manager.close()
    marks = {mark: mark.read_bytes() for mark in run.glob("*.abandoned")}
    cnr.execute(cnr.plan_prune(run, cnr.Keep(last=2)))
    for mark, data in marks.items():
        mark.write_bytes(data)
    again, manager = _manager(run)
    assert manager.restore(state(again)) == 3
    assert _save(again, manager, 4) == "step-4"
    manager.close()
    assert _name(cnr.latest(run)) == "step-4"


def test_a_return_to_what_was_abandoned(run: Path) -> None:
    """It is not abandoned any more, nor is what it stands on."""
    for step in (2, 4):
        job, manager = _manager(run)
        assert manager.restore(state(job), step=step) == step
        last = _save(job, manager, step + 1)
        manager.close()
    assert last == "step-5-2"
    entries = read_catalog(run).entries
    assert {name for name, entry in entries.items() if entry.is_abandoned} == {"step-5", "step-3-2"}
    assert _name(cnr.latest(run)) == "step-5-2"


def test_a_return_to_another_root(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All of the own root is abandoned then."""
    other = tmp_path_factory.mktemp("other")
    job, manager = _manager(other)
    _save(job, manager, 1)
    manager.close()
    job, manager = _manager(other)
    assert manager.restore(state(job), path=run / "step-3") == 3
    assert _save(job, manager, 4) == "step-4"
    manager.close()
    entries = read_catalog(other).entries
    assert {name: entry.is_abandoned for name, entry in entries.items()} == {"step-1": True, "step-4": False}
    assert not differing(models.load(plain_job(9), str(other / "step-4")), whole(state(job)))


def test_what_cannot_be_gone_back_to(run: Path) -> None:
    """Is named, with what is there."""
    job, manager = _manager(run)
    with pytest.raises(cnr.CheckpointNotFoundError, match=r"no checkpoint of step 9 .* steps there: 1, 2, 3, 4, 5"):
        manager.restore(state(job), step=9)
    with pytest.raises(cnr.ConfigurationError, match="'step' and 'path'"):
        manager.restore(state(job), step=2, path=run / "step-2")
    for pack in (run / "step-2").glob("*.safetensors"):
        faults.flip_middle(pack)
    with pytest.raises(CheckpointException, match="step-2"):
        manager.restore(state(job), step=2)
    manager.close()


def test_all_ranks_go_back_alike(run: Path, rank_pool: RankPools) -> None:
    """The first rank looks, and records."""
    assert rank_pool(2).run(_go_back, str(run)) == ["step-3-2"] * 2


def _go_back(rank: int, root: str) -> str:
    job, manager = _manager(Path(root))
    assert manager.restore(state(job), step=2) == 2
    name = _save(job, manager, 3)
    manager.close()
    return name


def test_what_a_run_went_back_to_may_be_pruned_before_the_next_save(run: Path) -> None:
    """That save is a baseline, and what is newer is abandoned all the same."""
    job, manager = _manager(run)
    assert manager.restore(state(job), step=2) == 2
    shutil.rmtree(run / "step-2")
    assert _save(job, manager, 3) == "step-3-2"
    manager.close()
    assert _name(cnr.latest(run)) == "step-3-2"
    assert cnr.read_checkpoint(run / "step-3-2").kind == "baseline"


def test_a_run_goes_back_beside_a_checkpoint_of_a_newer_version(run: Path) -> None:
    """It is passed over, and keeps nobody from going back and saving."""
    manifest = run / "step-5" / "manifest.json"
    manifest.write_bytes(as_newer_version(manifest.read_bytes()))
    job, manager = _manager(run)
    assert manager.restore(state(job), step=2) == 2
    assert _save(job, manager, 3) == "step-3-2"
    manager.close()

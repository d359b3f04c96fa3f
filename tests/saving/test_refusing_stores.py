"""Disks that are full and places that cannot be written: a save elsewhere works."""

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.faults import small_disk
from tests.support.jobs import adagrad_job, assert_loads, save, saver
from tests.support.killing import in_child
from tests.support.models import Job, state, train
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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


@pytest.mark.long
@pytest.mark.parametrize("at", ["write_data", "finish"], ids=["packs", "manifest"])
def test_a_full_disk_is_a_store_error_and_a_save_elsewhere_works(tmp_path: Path, at: str) -> None:
    """No space for a pack, or for the manifest: nothing is committed, no row is lost, and another place will do."""
    outcome = in_child(_fill_disk, str(tmp_path), at)
    if outcome != "done":
        pytest.skip(str(outcome))


@pytest.mark.long
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


def test_a_timeout_that_no_lock_can_wait_for_is_refused(tmp_path: Path) -> None:
    """At once, instead of by an OverflowError of each save."""
    with pytest.raises(cnr.ConfigurationError, match="'timeout_secs' must be a number more than 0, and at most"):
        cnr.CNRStorageWriter(tmp_path, timeout_secs=1e10)


def test_a_checkpoint_in_dcp_format_is_not_written_over(tmp_path: Path) -> None:
    """A directory holds one checkpoint: otherwise it depends on the reader which one is loaded."""
    saved = {"a": torch.ones(2)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointException) as caught:
        dcp.save(saved, storage_writer=cnr.CNRStorageWriter(tmp_path), planner=cnr.CNRSavePlanner(), no_dist=True)
    (error,) = faults.causes(caught.value).values()
    assert isinstance(error, cnr.CheckpointExistsError)
    assert "in DCP's own format" in str(error)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_checkpoint_is_not_saved_where_it_would_hide_others(is_remote: bool, tmp_path: Path) -> None:
    """Into a root, such as by a checkpoint_id without the step; or into a checkpoint, where nobody looks for it."""
    root = f"memory://{tmp_path}/run" if is_remote else str(tmp_path / "run")
    state = {"x": torch.ones(3, 2)}
    dcp.save(state, storage_writer=models.writer(f"{root}/step-1"))
    for path, words in ((root, "is a root that contains checkpoints"), (f"{root}/step-1/x", "cannot contain another")):
        with pytest.raises(CheckpointException, match=words) as caught:
            dcp.save(state, storage_writer=models.writer(path))
        assert [type(error) for error in faults.causes(caught.value).values()] == [cnr.ConfigurationError]
    assert Store.open(root).names() == ["step-1"]
    assert Store.open(f"{root}/step-1").listing().directories == ()
    dcp.save(state, storage_writer=models.writer(f"{root}/step-2"))
    assert str(cnr.latest(root)).endswith("/run/step-2")


def test_a_foreign_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    """Other tools call their files so, too: beside the checkpoints, and in directories of the root."""
    (tmp_path / "run" / "assets").mkdir(parents=True)
    for folder in (tmp_path / "run", tmp_path / "run" / "assets"):
        (folder / "manifest.json").write_text("{}")
    dcp.save({"x": torch.ones(2)}, storage_writer=models.writer(tmp_path / "run" / "step-1"))
    assert cnr.read_checkpoint(tmp_path / "run" / "step-1").kind == "baseline"

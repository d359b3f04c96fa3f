"""Transforms and bases that a delta shares with older checkpoints, while those are compacted and pruned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.quantization.test_transform_coded import DIM, few_dimensions
from tests.quantization.test_transformed_checkpoints import (
    NUM_ROWS,
    RULE,
    Run,
    assert_near,
    basis_directory,
    running,
    scheme_of,
)
from tests.support import models
from tests.support.faults import act_before, causes
from torchrec_cnr.format.manifest import History
from torchrec_cnr.quantization import Transformed
from torchrec_cnr.saving.plug_in_messages import CommittedSize
from torchrec_cnr.storage.leases import Lease
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

SOME_ROWS = torch.arange(2_000)  # enough that a transform of their own is worth its bytes
COLUMNS = {"users": DIM, "films": DIM // 2}


def _directories(checkpoint: cnr.Checkpoint) -> set[str | None]:
    return {pack.directory for pack in checkpoint.manifest.packs}


def _merge_and_prune(root: Path, name: str) -> None:
    """Leave one checkpoint of a root, with no more files than it needs."""
    cnr.compact(root / name, self_contained=True)
    cnr.execute(cnr.plan_prune(root, cnr.Keep(last=1)))
    assert [path.parent.name for path in root.glob("*/manifest.json")] == [name]


def _two_saves(run: Run) -> None:
    """A baseline and a delta, whose transforms are in two directories."""
    run.save()
    run.change(SOME_ROWS, 1)
    assert None in _directories(run.save())


# Another root


def test_a_delta_in_another_root_stores_transforms_again(tmp_path: Path) -> None:
    """Once, so that compactions and prunes of the first root remove nothing that it needs but its tagged parent."""
    for root in (tmp_path / "a", tmp_path / "b"):
        root.mkdir()
    with running(tmp_path / "a") as run:
        _two_saves(run)
        run.root = tmp_path / "b"
        deltas = []
        for number in (2, 3):
            run.change(SOME_ROWS, number)
            deltas.append(run.save())
        assert [delta.kind for delta in deltas] == ["delta", "delta"]
        assert [_directories(delta) for delta in deltas] == [{None}, {None, "../2"}]
        _merge_and_prune(tmp_path / "a", "1")
        assert_near(tmp_path / "b" / "3", run.table)
        assert not cnr.verify(tmp_path / "b" / "3").problems


# Prunes during a save


def _act_at_lease(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> None:
    """Do something once, right before a save takes the lease on the checkpoint of this name."""
    take, waiting = Lease.take, [act]

    def act_and_take(store: Store, purpose: Any) -> Lease | None:
        if purpose == "save" and store.path.endswith(f"/{name}") and waiting:
            waiting.pop()()
        return take(store, purpose)

    monkeypatch.setattr(Lease, "take", act_and_take)


def test_a_parent_that_was_compacted_before_its_lease_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transforms are in other files then, and a prune may have removed those that were read first."""
    with running(tmp_path) as run:
        _two_saves(run)
        _act_at_lease(monkeypatch, "1", lambda: _merge_and_prune(tmp_path, "1"))
        run.change(SOME_ROWS, 2)
        delta = run.save()
        assert (delta.kind, _directories(delta)) == ("delta", {None, "../1"})
        assert_near(tmp_path / "2", run.table)


def test_an_ancestor_that_was_compacted_before_the_lease_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its transforms are not those of the parent, which has no rows here."""
    with running(tmp_path) as run:
        _two_saves(run)
        run.save()

        def act() -> None:
            cnr.compact(tmp_path / "1", self_contained=True)
            cnr.execute(cnr.plan_prune(tmp_path, cnr.Keep(last=1)))

        _act_at_lease(monkeypatch, "2", act)
        run.change(SOME_ROWS, 2)
        delta = run.save()
        assert not (tmp_path / "0").exists()
        assert (delta.kind, _directories(delta)) == ("delta", {None, "../1"})
        assert_near(tmp_path / "3", run.table)


def test_no_commit_names_a_file_that_was_removed(tmp_path: Path) -> None:
    """A delta without the transforms of its rows could not be loaded. After forget(), a save needs none."""
    with running(tmp_path) as run:
        _two_saves(run)
        basis = scheme_of(cnr.read_checkpoint(tmp_path / "1")).basis
        files = {file: file.read_bytes() for file in (tmp_path / "0").glob("*.safetensors")}

        def remove() -> None:
            for file in files:
                file.unlink(missing_ok=True)

        run.change(SOME_ROWS, 2)
        act_before(run.writer, "finish", remove)
        for _ in range(2):
            with pytest.raises(CheckpointException) as raised:
                run.save()
            error = causes(raised.value)[0]
            assert isinstance(error, cnr.SaveError)
            assert "it needs the transforms in" in str(error)
        assert cnr.latest(tmp_path) == str(tmp_path / "1")
        run.tracker.forget()
        baseline = run.save()
        assert (baseline.kind, _directories(baseline)) == ("baseline", {None})
        assert scheme_of(baseline).basis != basis
        assert_near(tmp_path / "4", run.table)


# Tables that some deltas do not contain


def test_a_table_that_changes_now_and_then_has_one_basis(tmp_path: Path) -> None:
    """Also if the parent has no rows of it; and after a compaction, where its basis is in another file."""
    with running(tmp_path) as run:
        saved = []
        for number in range(7):
            if number % 2 == 0:
                run.change(torch.arange(number, NUM_ROWS, 5), number)
            saved.append(run.save())
            if number == 4:
                cnr.compact(tmp_path / "4", self_contained=True)
        with_rows = [saved[number] for number in (2, 4, 6)]
        assert [basis_directory(delta) for delta in with_rows] == ["../0", "../0", "../4"]
        assert {scheme_of(delta).basis for delta in with_rows} == {scheme_of(saved[0]).basis}
        assert_near(tmp_path / "6", run.table)


# What counts as written


def test_shared_files_count_where_they_were_written(tmp_path: Path) -> None:
    """In the size of a save, and in the history from which policies decide, also after a compaction of an ancestor."""
    with running(tmp_path) as run:
        written = []
        for number in range(5):
            if number:
                run.change(SOME_ROWS, number)
            delta = run.save()
            size = CommittedSize.of(delta.committed, delta.manifest_bytes)
            assert size.num_bytes == sum(file.stat().st_size for file in (tmp_path / str(number)).iterdir())
            written.append(size.num_bytes - delta.manifest_bytes)
        assert delta.manifest.history == History(written[0], tuple(written[1:]))
        merged = cnr.compact(tmp_path / "2")
        run.change(SOME_ROWS, 5)
        delta = run.save()
        assert delta.manifest.history == History(merged.manifest.blob_bytes, (*written[3:], delta.manifest.pack_bytes))


# Tables that are divided otherwise


def test_a_transform_of_other_columns_is_not_used(tmp_path: Path) -> None:
    """As a writer has it whose job has divided a table by columns: a shard begins where another one began before."""
    model = nn.ModuleDict({name: nn.EmbeddingBag(2_000, dim, sparse=True) for name, dim in COLUMNS.items()})
    with torch.no_grad():
        for name, dim in COLUMNS.items():
            model.get_parameter(f"{name}.weight").copy_(few_dimensions(2_000)[:, :dim])
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    writer = models.writer(tmp_path / "0", quantization={"*": RULE})
    for number in range(2):
        dcp.save(
            {"model": model.state_dict()},
            checkpoint_id=tmp_path / str(number),
            storage_writer=writer,
            planner=planner,
            no_dist=True,
        )
        keys = {name: (f"model.{name}.weight", (0, 0)) for name in COLUMNS}
        transforms = writer._transforms
        transforms[keys["users"]], transforms[keys["films"]] = transforms[keys["films"]], transforms[keys["users"]]
        for name in COLUMNS:
            tracker.mark(name, torch.arange(0, 2_000, 3))
    tracker.close()
    delta = cnr.read_checkpoint(tmp_path / "1")
    assert delta.kind == "delta"
    assert all(isinstance(entry.shards[0].scheme, Transformed) for entry in delta.manifest.tensors.values())
    for name in COLUMNS:
        table = model.get_parameter(f"{name}.weight").detach()
        loaded = cnr.load_table(tmp_path / "1", f"model.{name}.weight")
        assert float((loaded - table).norm()) < 0.1 * float(table.norm())

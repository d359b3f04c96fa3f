"""2-D parallel models: one of the replicas saves what any of them modified."""

from pathlib import Path

import pytest
import torch
from torch import nn

import torchrec_cnr as cnr
from tests.support import zoo
from tests.support.models import Whole, differing
from tests.support.ranks import RankPools
from tests.support.zoo import Kind, ZooJob

SHARDINGS = ("table_wise", "row_wise", "column_wise")


def _kind(sharding: str) -> Kind:
    return Kind("EmbeddingBagCollection", sharding, "RowWiseAdagrad", num_replicas=2)


def _train(job: ZooJob, seed: int) -> None:
    zoo.train(job, seed)
    job.model.sync()


def _num_rows_changed(before: Whole, after: Whole) -> int:
    tables = [name for name in after if name.startswith("model.sparse")]
    return sum(int((before[name] != after[name]).any(dim=1).sum()) for name in tables)


def _save_what_any_replica_modified(rank: int, root: str, sharding: str) -> None:
    job = zoo.build(_kind(sharding), seed=1)
    tracker = cnr.RowTracker(job.model)
    _train(job, 1)
    zoo.save(job, tracker, f"{root}/0")
    before = zoo.tensors(job)
    zoo.train(job, 2)
    own = tracker.num_modified
    job.model.sync()
    assert tracker.num_modified > own  # those of the other replica
    after = zoo.tensors(job)
    saved = zoo.save(job, tracker, f"{root}/1")
    assert saved.kind == "delta"
    assert saved.num_rows == _num_rows_changed(before, after)
    other = zoo.build(_kind("row_wise"), seed=2)
    of_other = cnr.RowTracker(other.model)
    assert differing(zoo.tensors(other), after)
    zoo.load(other, f"{root}/1", of_other)
    assert differing(zoo.tensors(other), after) == []
    _train(other, 3)
    assert zoo.save(other, of_other, f"{root}/2").kind == "delta"
    end = zoo.tensors(other)
    zoo.load(job, f"{root}/2", tracker)
    assert differing(zoo.tensors(job), end) == []
    tracker.close()
    of_other.close()


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_delta_holds_what_any_replica_modified(tmp_path: Path, rank_pool: RankPools, sharding: str) -> None:
    """After a synchronisation, whichever replica is saved."""
    rank_pool(4).run(_save_what_any_replica_modified, str(tmp_path), sharding)


def _save_before_synchronising(rank: int, root: str, sharding: str) -> None:
    job = zoo.build(_kind(sharding), seed=1)
    tracker = cnr.RowTracker(job.model)
    _train(job, 1)
    first = zoo.save(job, tracker, f"{root}/0")
    zoo.train(job, 2)
    saved = zoo.save(job, tracker, f"{root}/1")
    assert saved.kind == "delta"
    assert saved.num_rows == first.num_rows  # only one replica is saved, and each has marks of its own
    before = zoo.tensors(job)
    job.model.sync()  # modifies rows again that were in the last save
    end = zoo.tensors(job)
    assert _num_rows_changed(before, end)
    saved = zoo.save(job, tracker, f"{root}/2")
    assert saved.kind == "delta"
    assert saved.num_rows < first.num_rows
    tracker.close()
    other = zoo.build(_kind("row_wise"), seed=2)
    zoo.load(other, f"{root}/2")
    assert differing(zoo.tensors(other), end) == []


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_rows_that_a_later_synchronisation_modifies_are_saved(
    tmp_path: Path, rank_pool: RankPools, sharding: str
) -> None:
    """A save between two synchronisations stores shards whole; the next one holds what the synchronisation changed."""
    rank_pool(4).run(_save_before_synchronising, str(tmp_path), sharding)


def _synchronise_during_a_save(rank: int, root: str, ended_by: str) -> None:
    job = zoo.build(_kind("row_wise"), seed=1)
    tracker = cnr.RowTracker(job.model)
    _train(job, 1)
    zoo.save(job, tracker, f"{root}/0")
    cnr.CNRSavePlanner(tracker).resolve_last_save()
    zoo.train(job, 2)
    if ended_by == "failed cut":
        if rank:
            tracker.freeze()
    elif ended_by == "rollback":
        tracker.freeze()
        if not rank:
            tracker.rollback()
    else:
        zoo.save(job, tracker, f"{root}/between")
        if not rank:
            cnr.CNRSavePlanner(tracker).resolve_last_save()
    job.model.sync()
    if rank and ended_by != "commit":
        tracker.rollback()
    zoo.train(job, 3)
    job.model.sync()
    end = zoo.tensors(job)
    assert zoo.save(job, tracker, f"{root}/1").kind == "delta"
    tracker.close()
    other = zoo.build(_kind("row_wise"), seed=2)
    zoo.load(other, f"{root}/1")
    assert differing(zoo.tensors(other), end) == []


@pytest.mark.parametrize("ended_by", ["failed cut", "rollback", "commit"])
def test_a_save_may_have_ended_on_one_rank_only(tmp_path: Path, rank_pool: RankPools, ended_by: str) -> None:
    """A synchronisation meanwhile exchanges the same on all ranks."""
    rank_pool(4).run(_synchronise_during_a_save, str(tmp_path), ended_by)


def _save_in_one_dimension(rank: int, root: str) -> None:
    job = zoo.build(Kind("EmbeddingBagCollection", "column_wise", "RowWiseAdagrad"), seed=1)
    tracker = cnr.RowTracker(job.model)
    for number in range(2):
        zoo.train(job, number)
        zoo.save(job, tracker, f"{root}/{number}")
    tracker.close()
    end = zoo.tensors(job)
    if rank == 0:
        torch.save(end, f"{root}/end.pt")


def _load_in_two_dimensions(rank: int, root: str) -> None:
    job = zoo.build(_kind("table_wise"), seed=2)
    wanted = torch.load(f"{root}/end.pt")
    assert differing(zoo.tensors(job), wanted)
    zoo.load(job, f"{root}/1")
    assert differing(zoo.tensors(job), wanted) == []


def test_a_model_of_one_dimension_loads_into_one_of_two(tmp_path: Path, rank_pool: RankPools) -> None:
    """Each replica gets all rows."""
    rank_pool(2).run(_save_in_one_dimension, str(tmp_path))
    rank_pool(4).run(_load_in_two_dimensions, str(tmp_path))


def _track_wrapped(rank: int) -> None:
    job = zoo.build(_kind("row_wise"), seed=1)
    with pytest.raises(cnr.ConfigurationError, match="are tracked with the model: pass the DMPCollection"):
        cnr.RowTracker(job.model.module)
    tracker = cnr.RowTracker(nn.ModuleDict({"model": job.model}))
    zoo.train(job, 1)
    own = tracker.num_modified
    job.model.sync()
    assert tracker.num_modified > own
    tracker.close()


def test_replicas_are_found_inside_another_module(rank_pool: RankPools) -> None:
    """A model without its synchronisation is refused: rows of other replicas would be lost."""
    rank_pool(4).run(_track_wrapped)

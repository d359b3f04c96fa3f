"""Tables that are resharded: no save misses their rows, and ``rebind`` tracks them again."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import SGD
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan

import torchrec_cnr as cnr
from tests.support import models
from tests.support.faults import failure_of, failures_of
from tests.support.models import Job, differing, load, state, torchrec_job, train, whole
from tests.support.ranks import RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

MOVES = {"another rank": table_wise(rank=1), "other columns": column_wise(ranks=[1, 0])}


def _reshard(job: Job, sharding: ParameterShardingGenerator) -> None:
    """Move the first table, with TorchRec's own means."""
    model: Any = job.model
    tables = EmbeddingBagCollection(tables=model.module.ebc._embedding_bag_configs, device=torch.device("meta"))
    world_size = dist.get_world_size()
    plan = construct_module_sharding_plan(
        tables,
        {"t0": sharding, "t1": table_wise(rank=1), "t2": table_wise(rank=0)},
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
        sharder=EmbeddingBagCollectionSharder(),
    )
    model.reshard({"ebc": (0.0, EmbeddingModuleShardingPlan({"t0": plan["t0"]}))}, "ebc")


def _saves(rank: int, root: str, move: str) -> None:
    job = torchrec_job(1, "column" if "columns" in move else "table", fused=SGD)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())

    def save(number: int) -> str:
        dcp.save(state(job), storage_writer=models.writer(f"{root}/{number}"), planner=planner)
        return cnr.read_checkpoint(f"{root}/{number}").kind

    train(job, 1)
    assert save(0) == "baseline"
    train(job, 2)
    assert save(1) == "delta"
    before = whole(state(job))
    _reshard(job, MOVES[move])
    assert differing(whole(state(job)), before) == []
    train(job, 3)
    assert "call tracker.rebind(model)" in str(failures_of(lambda: save(2)))
    future = models.save_behind(state(job), f"{root}/3", models.writer(f"{root}/3"), planner)
    assert "call tracker.rebind(model)" in str(failures_of(future.result))
    tracker.rebind(job.model)
    assert save(4) == "baseline"
    assert tracker.num_modified == 0
    train(job, 4)
    assert tracker.num_modified > 0
    models.save_behind(state(job), f"{root}/5", models.writer(f"{root}/5"), planner).result()
    assert cnr.read_checkpoint(f"{root}/5").kind == "delta"
    other = torchrec_job(2, "mixed", fused=SGD)
    of_other = cnr.RowTracker(other.model)
    load(other, f"{root}/5", of_other)
    assert differing(whole(state(other)), whole(state(job))) == []
    of_other.close()
    tracker.close()


@pytest.mark.parametrize("move", MOVES)
def test_a_model_that_was_sharded_anew_is_tracked_again(tmp_path: Path, rank_pool: RankPools, move: str) -> None:
    """Until then no save succeeds, since it would miss rows. Afterwards there is a baseline, and deltas of it."""
    rank_pool(2).run(_saves, str(tmp_path), move)


def test_a_model_that_cannot_be_tracked_changes_nothing() -> None:
    """The tracker goes on with its tables, and the other model has no hooks."""
    table = torch.nn.Embedding(9, 2)
    tracker = cnr.RowTracker(table)
    shared = torch.nn.Embedding(9, 2).share_memory()
    with pytest.raises(cnr.ConfigurationError, match="in shared memory"):
        tracker.rebind(shared)
    assert not shared._forward_hooks
    table(torch.tensor([3])).sum().backward()
    assert tracker.num_modified == 1
    tracker.close()
    with pytest.raises(cnr.ConfigurationError, match="was closed: make a new one"):
        tracker.rebind(table)


def test_another_model_can_take_the_place_of_the_first(tmp_path: Path) -> None:
    """Its next save is a baseline, and the first model is left alone."""
    first, second = torch.nn.Embedding(9, 2), torch.nn.Embedding(9, 2)
    tracker = cnr.RowTracker(first, verify_untracked=True)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    for number, table in enumerate((first, first, second, second)):
        if number == 2:
            tracker.rebind(second)
            assert not first._forward_hooks
        table(torch.tensor([number])).sum().backward()
        with torch.no_grad():
            table.weight[number] += 1.0
        tracker.mark_all()
        dcp.save({"t": table.state_dict()}, storage_writer=models.writer(tmp_path / str(number)), planner=planner)
    kinds = [cnr.read_checkpoint(tmp_path / str(number)).kind for number in range(4)]
    assert kinds == ["baseline", "delta", "baseline", "delta"]
    assert torch.equal(cnr.load_table(tmp_path / "3", "t.weight"), second.weight)
    tracker.close()


def test_a_replaced_weight_is_refused(tmp_path: Path) -> None:
    """Also if the state dict still has the old one, which would be saved with rows that nobody trains any more."""
    model = nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 1))
    tracker = cnr.RowTracker(model)
    planner, state = cnr.CNRSavePlanner(tracker), {"model": model.state_dict()}
    writer = cnr.CNRStorageWriter(tmp_path / "0")
    options = {"storage_writer": writer, "planner": planner, "no_dist": True}
    dcp.save(state, **options)
    old = model[0].weight
    model[0].weight = nn.Parameter(torch.zeros(50, 4))
    error = failure_of(lambda: dcp.save(state, checkpoint_id=str(tmp_path / "1"), **options))
    assert isinstance(error, cnr.ConfigurationError)
    assert "the weight of '0' was replaced by another tensor" in str(error)
    model[0].weight = old
    dcp.save(state, checkpoint_id=str(tmp_path / "2"), **options)
    assert cnr.read_checkpoint(tmp_path / "2").kind == "delta"
    tracker.close()

"""Torn snapshots: every checkpoint is of one step, in weights, optimizer rows and dense part, while training goes on.

Rows encode the steps that they were written in. Each step trains a third of the rows with a gradient of one, so that
row-wise Adagrad's sum of a row is the number of steps that had it, and the dense part is the number of all steps.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import torchrec_cnr as cnr
from tests.support import models
from tests.support.models import Whole, whole
from tests.support.ranks import RankPools

NUM_ROWS, DIM, NUM_CLASSES = 6_000, 16, 3
TABLES = ("by_rows", "by_columns")


class _Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=[name])
                for name in TABLES
            ],
        )
        self.num_steps = nn.Parameter(torch.zeros(DIM))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return torch.as_tensor(self.ebc(features).values().sum())


class _SteppedJob:
    """The model on these ranks, of step 0."""

    def __init__(self) -> None:
        model, world_size = _Steps(), dist.get_world_size()
        apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1, "eps": 0.0})
        sharder = EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            model.ebc,
            {"by_rows": row_wise(), "by_columns": column_wise(ranks=list(range(world_size)))},
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
            sharder=sharder,
        )
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"ebc": plan}),
            sharders=[sharder],
            init_data_parallel=False,
        )
        self.num_steps = model.num_steps
        for name in TABLES:
            for shard in self.model.state_dict()[f"ebc.embedding_bags.{name}.weight"].local_shards():
                shard.tensor.zero_()

    def train(self, step: int) -> None:
        """Each rank looks up its part of a class of rows, once."""
        rows = torch.arange(step % NUM_CLASSES, NUM_ROWS, NUM_CLASSES)
        own = rows[dist.get_rank() :: dist.get_world_size()]
        lengths = torch.ones(2 * len(own), dtype=torch.int64)
        self.model(KeyedJaggedTensor(list(TABLES), torch.cat([own, own]), lengths=lengths)).backward()
        with torch.no_grad():
            self.num_steps += 1

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model.state_dict(), "fused": self.model.fused_optimizer.state_dict()}


def _train_under_saves(rank: int, root: str, executor: AsyncCheckpointerType, num_saves: int) -> list[int]:
    """Save at once whenever the save before has ended, and train meanwhile: after which step each save was begun."""
    job = _SteppedJob()
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.OneShot())
    writer = models.writer(root, pack_bytes=1 << 18)
    group, deciding = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    cuts: list[int] = []
    step, future = 0, None
    while len(cuts) < num_saves:
        step += 1
        job.train(step)
        has_ended = torch.tensor(int(future is None or future.done()))
        dist.all_reduce(has_ended, dist.ReduceOp.MIN, group=deciding)
        if has_ended:
            if future is not None:
                future.result()
            cuts.append(step)
            place = f"{root}/{step}"
            future = models.save_behind(job.state(), place, writer, planner, group=group, executor=executor)
    job.train(step + 1)
    assert future is not None
    future.result(timeout=60)
    writer.close()
    tracker.close()
    return cuts


def _load_all(rank: int, root: str, cuts: list[int]) -> list[Whole]:
    job = _SteppedJob()
    loaded = []
    for step in cuts:
        state = job.state()
        dcp.load(state, storage_reader=cnr.CNRStorageReader(f"{root}/{step}"), planner=cnr.CNRLoadPlanner())
        found = whole(state)
        loaded.append({fqn: value for fqn, value in found.items() if rank == 0})
    return loaded


def _check_one_step(found: Whole, step: int, world_size: int) -> None:
    """Everything is what it was after this step."""
    assert torch.equal(found["model.num_steps"], torch.full((DIM,), float(step)))
    for number in range(NUM_CLASSES):
        num_updates = sum(1 for other in range(1, step + 1) if other % NUM_CLASSES == number)
        for name in TABLES:
            rows = found[f"model.ebc.embedding_bags.{name}.weight"][number::NUM_CLASSES]
            assert torch.equal(rows, rows[:1, :1].expand_as(rows)), f"{name} holds several steps"
        sums = [value for fqn, value in found.items() if "momentum" in fqn]
        assert len(sums) == len(TABLES)
        for of_rows in sums:
            for part in of_rows.split(NUM_ROWS):
                counts = part[number::NUM_CLASSES] * world_size**2  # ranks' gradients are averaged
                assert torch.equal(counts, torch.full_like(counts, float(num_updates)))


def _hold_one_step(tmp_path: Path, ranks: RankPools, executor: AsyncCheckpointerType, num_saves: int) -> None:
    root, world_size = str(tmp_path), 2
    cuts = ranks(world_size).run(_train_under_saves, root, executor, num_saves, timeout_secs=300.0)[0]
    assert cuts[-1] > num_saves + 10  # steps were trained behind the saves
    for first in range(0, num_saves, 50):
        part = cuts[first : first + 50]
        for step, found in zip(part, ranks(world_size).run(_load_all, root, part)[0], strict=True):
            _check_one_step(found, step, world_size)


EXECUTORS = [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS]


def test_checkpoints_hold_one_step(tmp_path: Path, rank_pool: RankPools) -> None:
    """Saves follow one another as fast as they can, and training never waits."""
    _hold_one_step(tmp_path, rank_pool, AsyncCheckpointerType.THREAD, num_saves=30)


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda executor: executor.value)
def test_hundreds_of_checkpoints_hold_one_step(
    tmp_path: Path, rank_pool: RankPools, executor: AsyncCheckpointerType
) -> None:
    """As above, hundreds of them."""
    _hold_one_step(tmp_path, rank_pool, executor, num_saves=400)

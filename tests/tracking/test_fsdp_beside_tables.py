"""A dense part under FSDP2 beside TorchRec's tables: saved as deltas, and loaded on other ranks without FSDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torchrec_cnr as cnr
from tests.support.models import whole
from tests.support.ranks import RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
NUM_ROWS, DIM = 40, 8


class _Job:
    """Tables that are sharded by rows, and a dense part, whose parameters are sharded, too, if there are two ranks."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        num_ranks = dist.get_world_size()
        table = EmbeddingBagConfig(NUM_ROWS, DIM, name="t", feature_names=["f"])
        tables = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
        plan = construct_module_sharding_plan(
            tables,
            {"t": row_wise()},
            EmbeddingBagCollectionSharder(),  # type: ignore[arg-type]  # its own type is narrower
            local_size=num_ranks,
            world_size=num_ranks,
            device_type="cpu",
        )
        dense = nn.Sequential(nn.Linear(DIM, 6), nn.ReLU(), nn.Linear(6, 1))
        if num_ranks > 1:
            fully_shard(dense, mesh=init_device_mesh("cpu", (num_ranks,)))
        self.model = nn.ModuleDict({"tables": shard(tables, plan, device=torch.device("cpu")), "dense": dense})
        self.optimizer = torch.optim.Adam(dense.parameters(), lr=0.1)

    def train(self, step: int) -> None:
        """Train rows 0 to 9 on every rank."""
        ids = torch.arange(10, dtype=torch.int64).roll(step)
        pooled = self.model["tables"](KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.full((5,), 2)))
        self.model["dense"](pooled.values()).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {
            "model": self.model.state_dict(),
            "fused": self.model["tables"].fused_optimizer.state_dict(),  # type: ignore[union-attr]  # of TorchRec
            "adam": get_optimizer_state_dict(self.model["dense"], self.optimizer),
        }


def _full(state: dict[str, Any]) -> dict[str, Any]:
    """All values of a state dict, with whole tensors in place of parts of FSDP's."""
    return whole(torch.utils._pytree.tree_map(_gathered, state))


def _gathered(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _save(rank: int, root: str) -> dict[str, Any]:
    job = _Job(1)
    job.train(1)
    tracker = cnr.RowTracker(job.model)
    manager = cnr.CheckpointManager(root, tracker, policy=cnr.Consecutive())
    kinds = []
    for step in (2, 3):
        job.train(step)
        saved = manager.save(step, job.state())
        assert saved is not None
        kinds.append((saved.kind, saved.num_rows))
    manager.close()
    assert kinds == [("baseline", NUM_ROWS), ("delta", 10)]
    return _full(job.state())


def _load(rank: int, root: str) -> dict[str, Any]:
    job = _Job(2)
    job.train(1)  # Adam makes its state
    state = job.state()
    before = _full(state)
    manager = cnr.CheckpointManager(root, cnr.RowTracker(job.model))
    assert manager.restore(state) == 3
    set_optimizer_state_dict(job.model["dense"], job.optimizer, state["adam"])
    manager.close()
    after = _full(job.state())
    assert not torch.equal(before["model.dense.0.weight"], after["model.dense.0.weight"])
    return after


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_dense_part_under_fsdp_is_saved_beside_tables(tmp_path: Path, rank_pool: RankPools, num_ranks: int) -> None:
    """Exactly the rows that were trained are in the delta, and all values load with FSDP and without it."""
    root = str(tmp_path / "run")
    saved = rank_pool(2).run(_save, root, timeout_secs=100.0)[0]
    loaded = rank_pool(num_ranks).run(_load, root, timeout_secs=100.0)[0]
    tensors = [fqn for fqn, value in saved.items() if isinstance(value, Tensor)]
    assert len(tensors) > 10
    assert saved.keys() == loaded.keys()
    assert [fqn for fqn in tensors if not torch.equal(saved[fqn], loaded[fqn])] == []

"""Optimizer state of TorchRec models whose tables change between data parallel and sharded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    WeightDecayMode,
)
from torch import Tensor, nn
from torch.optim import Adagrad
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.jobs import load_into, warnings
from tests.support.models import Whole, whole
from tests.support.ranks import RankPools
from torchrec_cnr.loading.optimizer_state import StateName

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::FutureWarning")


ROWS_OF = {"t0": 30, "t1": 7}
DIM = 8
COUNTER = {
    "weight_decay_mode": WeightDecayMode.COUNTER,
    "counter_based_regularization": CounterBasedRegularizationDefinition(
        counter_weight_decay_mode=CounterWeightDecayMode.ADAGRADW
    ),
}
SHARDINGS = ("data", "row", "table", "column")


@dataclass
class _TrainedModel:
    """A model of tables, the optimizer within its backward, and the one beside it."""

    model: DistributedModelParallel
    optimizer: KeyedOptimizerWrapper

    def state(self, style: str) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.model.state_dict()}
        fused, dense = self.model.fused_optimizer, self.optimizer
        if style == "two entries":
            return found | {"fused": fused.state_dict(), "dense": dense.state_dict()}
        own = ("fused", "dense") if style == "combined with prefixes" else ("", "")
        combined = CombinedOptimizer(list(zip(own, (fused, dense), strict=True)))
        return found | {"optim": combined.state_dict()}

    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(10 * seed + faults.own_rank())
        ids = [torch.randint(0, rows, (6,), generator=generator) for rows in ROWS_OF.values()]
        features = KeyedJaggedTensor.from_lengths_sync(list(ROWS_OF), torch.cat(ids), torch.full((6,), 2))
        out = self.model.module.over(self.model.module.ebc(features).values())
        (out * torch.randn(out.shape, generator=generator)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _build(seed: int, family: str, shardings: Mapping[str, str]) -> _TrainedModel:
    """A model with a sharding for each table, its state all ones."""
    torch.manual_seed(1000 * seed)
    optimizer = Adagrad if family == "element-wise" else RowWiseAdagrad
    model = nn.Module()
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
        for name, rows in ROWS_OF.items()
    ]
    model.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    model.over = nn.Linear(2 * DIM, 1, bias=False)
    options = {"lr": 0.5} | (COUNTER if family == "counter" else {})
    for name, sharding in shardings.items():
        if sharding != "data":
            apply_optimizer_in_backward(optimizer, model.ebc.embedding_bags[name].parameters(), options)
    kinds = {
        "data": data_parallel(),
        "row": row_wise(),
        "table": table_wise(rank=1),
        "column": column_wise(ranks=[0, 1]),
    }
    sharder = EmbeddingBagCollectionSharder()
    sizes = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    plan = construct_module_sharding_plan(
        model.ebc, {name: kinds[sharding] for name, sharding in shardings.items()}, sharder=sharder, **sizes
    )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(torch.distributed.GroupMember.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return _TrainedModel(sharded, KeyedOptimizerWrapper(dense, lambda parameters: optimizer(parameters, lr=0.5)))


def _by_role(values: Whole) -> dict[str, Tensor]:
    """Weights and state whatever their names and sharding: of each row, [rows, columns] or the mean, [rows]."""
    found: dict[str, Tensor] = {}
    for fqn, value in values.items():
        state = StateName.parse(fqn)
        if state is None or "over." in fqn:
            found[fqn.removeprefix("dense.")] = value
            continue
        table = state.key.split(".")[-2]
        role = {"momentum1": "sum", "iter": "step"}.get(state.name, state.name)
        if role == "step":
            found[f"{table} step"] = value.double().max()
        else:
            is_row_wise = value.dim() == 1 or value.shape[1] == 1
            rows = value.reshape(-1, ROWS_OF[table]).double().mean(dim=0) if is_row_wise else value.double()
            found[f"{table} {role}"] = rows
    return found


def _change_sharding(
    rank: int, root: str, family: str, style: str, old: str, new: str
) -> tuple[cnr.LoadReport, list[str]]:
    """Save a baseline and a delta with one sharding of t0, load with another, go on, and load that with the first."""
    policy = cnr.Consecutive()
    saved = _build(1, family, {"t0": old, "t1": "row"})
    tracker = cnr.RowTracker(saved.model)
    planner = cnr.CNRSavePlanner(tracker, policy=policy)
    for number in range(2):
        saved.train(number)
        dcp.save(saved.state(style), storage_writer=models.writer(f"{root}/{number}"), planner=planner)
    tracker.close()
    assert cnr.read_checkpoint(f"{root}/1").kind == "delta"
    loaded = _build(2, family, {"t0": new, "t1": "row"})
    tracker = cnr.RowTracker(loaded.model)
    with warnings() as messages:
        report = load_into(loaded.state(style), f"{root}/1", tracker=tracker)
    assert_same(whole(loaded.state(style)), whole(saved.state(style)), report)
    loaded.train(2)
    planner = cnr.CNRSavePlanner(tracker, policy=policy)
    dcp.save(loaded.state(style), storage_writer=models.writer(f"{root}/2"), planner=planner)
    tracker.close()
    assert cnr.read_checkpoint(f"{root}/2").kind == "delta"
    again = _build(3, family, {"t0": old, "t1": "row"})
    tracker = cnr.RowTracker(again.model)
    back = load_into(again.state(style), f"{root}/2", tracker=tracker)
    assert_same(whole(again.state(style)), whole(loaded.state(style)), back)
    assert tracker.head is None, "a delta would go on from state that the baseline has under the same name"
    tracker.close()
    assert {*back.renamed.items()} == {(fqn, name) for name, fqn in report.renamed.items()}
    return report, messages


def assert_same(got: Whole, expected: Whole, report: cnr.LoadReport) -> None:
    """Everything that both have is equal, or close where a mean was taken over columns."""
    values, wanted = _by_role(got), _by_role(expected)
    left = {key for fqn in (*report.missing, *report.unexpected) for key in _by_role({fqn: torch.zeros(ROWS_OF["t0"])})}
    assert set(values) ^ set(wanted) <= left
    for key in set(values) & set(wanted):
        torch.testing.assert_close(
            values[key], wanted[key], rtol=1e-6, atol=0.0, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert any(key.endswith("sum") and bool(wanted[key].any()) for key in wanted)


CHANGES = [(old, new) for old in SHARDINGS for new in SHARDINGS if (old == "data") != (new == "data")]


@pytest.mark.parametrize(
    ("family", "style"),
    [("row-wise", "combined"), ("element-wise", "two entries"), ("counter", "combined with prefixes")],
)
def test_a_table_changes_between_data_parallel_and_sharded(
    tmp_path: Path, rank_pool: RankPools, family: str, style: str
) -> None:
    """Between data-parallel and every sharding, with a lineage before and after: weights and state are all there."""
    for number, (old, new) in enumerate(CHANGES):
        results = rank_pool(2).run(_change_sharding, f"{tmp_path}/{number}", family, style, old, new)
        (report, warnings), (other_report, other_warnings) = results
        assert report == other_report
        assert len(report.renamed) == (2 if family == "counter" else 1)
        one_sided = {"prev_iter", "row_counter"} if family == "counter" else {"step"}
        left = report.missing if (family == "counter") == (old == "data") else report.unexpected
        assert {fqn.split(".")[-1] for fqn in left} == one_sided
        assert all("t0" in fqn for fqn in left)
        assert len(report.missing) + len(report.unexpected) == len(one_sided)
        assert len(warnings) == 1
        assert left[0] in warnings[0]
        assert other_warnings == []

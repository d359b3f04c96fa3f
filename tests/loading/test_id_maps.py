"""Loads of managed collisions: id maps come back bit for bit, and in a table with more rows each id keeps its row."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Adagrad
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import torchrec_cnr as cnr
from tests.loading.loads import refusal
from tests.support import models
from tests.support.models import whole
from tests.support.ranks import RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

RAW_IDS, DIM, BATCH = 1000, 4, 16
OLD_IDS, NEW_IDS = range(0, RAW_IDS, 50), (25, 275, 525)  # the shards have room for all of them
SMALL, LARGE = 24, 37
_MODULE = "model.mc._managed_collision_collection._managed_collision_modules.t0."
_TABLE = "model.mc._embedding_module.embedding_bags.t0.weight"
_SUM = "optim.state.mc._embedding_module.embedding_bags.t0.weight.t0.momentum1"
_IDS, _ROWS = f"{_MODULE}_mch_sorted_raw_ids", f"{_MODULE}_mch_remapped_ids_mapping"
_EMPTY = torch.iinfo(torch.int64).max


class _Model(nn.Module):
    def __init__(self, num_rows: int) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(name="t0", num_embeddings=num_rows, embedding_dim=DIM, feature_names=["f0"])]
        ids = MCHManagedCollisionModule(
            zch_size=num_rows,
            device=torch.device("cpu"),
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=2,
            input_hash_size=RAW_IDS,
        )
        self.mc = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables, device=torch.device("meta")), ManagedCollisionCollection({"t0": ids}, tables)
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """[batch, DIM]."""
        return torch.as_tensor(self.mc(features)[0].wait().values())


def _job(num_rows: int, seed: int) -> DistributedModelParallel:
    torch.manual_seed(100 * seed + dist.get_rank())
    model, sharder = _Model(num_rows), ManagedCollisionEmbeddingBagCollectionSharder()
    apply_optimizer_in_backward(Adagrad, model.mc._embedding_module.parameters(), {"lr": 0.5})
    plan = construct_module_sharding_plan(
        model.mc,
        {"t0": row_wise()},
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
        sharder=sharder,
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"mc": plan}),
        sharders=[sharder],
    )


def _train(model: nn.Module, seed: int, raw_ids: Sequence[int] = OLD_IDS) -> None:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    ids = torch.tensor(raw_ids)[torch.randint(0, len(raw_ids), (BATCH,), generator=generator)]
    features = KeyedJaggedTensor.from_lengths_sync(["f0"], ids, torch.ones(BATCH, dtype=torch.int64))
    model(features).square().sum().backward()


def _state(model: DistributedModelParallel) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}


def _rows_of_ids(held: dict[str, Any]) -> dict[int, tuple[Any, ...]]:
    """What a job has for each id: its row, state and counts, whatever the number of the row."""
    found = {}
    ids, rows = (held[_MODULE + name] for name in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"))
    for place, (raw_id, row) in enumerate(zip(ids.tolist(), rows.tolist(), strict=True)):
        if raw_id != _EMPTY:
            counts = [held[_MODULE + name][place].item() for name in ("_mch_counts", "_mch_last_access_iter")]
            found[raw_id] = (held[_TABLE][row].tolist(), held[_SUM][row].tolist(), *counts)
    return found


def _saved(rank: int, root: str) -> dict[int, tuple[Any, ...]]:
    return _rows_of_ids(_whole_saved(rank, root))


def _whole_saved(rank: int, root: str) -> dict[str, Any]:
    model = _job(SMALL, 1)
    tracker = cnr.RowTracker(model)
    for number in range(3):
        for step in range(2):
            _train(model, 2 * number + step)
        planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
        dcp.save(_state(model), storage_writer=models.writer(f"{root}/{number}"), planner=planner)
    tracker.close()
    return whole(_state(model))


def _carried(rank: int, root: str, num_rows: int) -> tuple[dict[int, tuple[Any, ...]], dict[str, Any]]:
    """Load into a table of another size, and train on."""
    model = _job(num_rows, 2)
    tracker = cnr.RowTracker(model)
    state = _state(model)
    planner = cnr.CNRLoadPlanner(tracker, resize=["*"])
    dcp.load(state, storage_reader=cnr.CNRStorageReader(f"{root}/2"), planner=planner)
    model.load_state_dict(state["model"])
    held = whole(_state(model))
    assert held[_MODULE + "_mch_remapped_ids_mapping"].sort().values.tolist() == list(range(num_rows))
    assert planner.report.skipped == (f"{_MODULE}_output_segments_tensor",)
    assert planner.report.mapped_rows[_TABLE] == planner.report.mapped_rows[_SUM] == SMALL
    for step in range(10, 16):
        _train(model, step, [*OLD_IDS, *NEW_IDS])
    later = whole(_state(model))
    dcp.save(_state(model), storage_writer=models.writer(f"{root}/new"), planner=cnr.CNRSavePlanner(tracker))
    tracker.close()
    return _rows_of_ids(held), later


@pytest.mark.parametrize(("num_saved", "num_ranks"), [(2, 2), (2, 1), (1, 1), (4, 2)])
def test_ids_keep_their_rows(tmp_path: Path, rank_pool: RankPools, num_saved: int, num_ranks: int) -> None:
    """On as many ranks, or on a divisor of them. Afterwards the model has room for further ids."""
    saved = rank_pool(num_saved).run(_saved, str(tmp_path))[0]
    assert saved.keys() == set(OLD_IDS)
    carried, later = rank_pool(num_ranks).run(_carried, str(tmp_path), LARGE)[0]
    assert carried == saved
    assert _rows_of_ids(later).keys() == {*OLD_IDS, *NEW_IDS}
    assert cnr.read_checkpoint(tmp_path / "new").kind == "baseline"


def _loaded(rank: int, root: str, number: int) -> dict[str, Any]:
    """Load a checkpoint in place, with DCP's planner, and do nothing else."""
    model = _job(SMALL, 3)
    dcp.load(_state(model), storage_reader=cnr.CNRStorageReader(f"{root}/{number}"))
    ids = [buffer for name, buffer in model.named_buffers() if name.endswith("._mch_sorted_raw_ids")]
    assert [bool((one.diff() >= 0).all()) for one in ids] == [True]
    return whole(_state(model))


def _go_on(rank: int, root: str) -> dict[str, Any]:
    """Load a checkpoint, train, and save the next two."""
    model = _job(SMALL, 2)
    tracker = cnr.RowTracker(model)
    dcp.load(_state(model), storage_reader=cnr.CNRStorageReader(f"{root}/2"), planner=cnr.CNRLoadPlanner(tracker))
    for number in (3, 4):
        for step in range(2):
            _train(model, 2 * number + step, [*OLD_IDS, *NEW_IDS[: number - 2]])
        planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
        dcp.save(_state(model), storage_writer=models.writer(f"{root}/{number}"), planner=planner)
    tracker.close()
    return whole(_state(model))


@pytest.mark.parametrize(("num_saved", "num_ranks"), [(2, 2), (2, 1), (1, 1)])
def test_maps_of_deltas_load_bit_for_bit(tmp_path: Path, rank_pool: RankPools, num_saved: int, num_ranks: int) -> None:
    """On as many ranks; on fewer, sorted together. Deltas have few of their values, also after a restore."""
    saved = rank_pool(num_saved).run(_whole_saved, str(tmp_path))[0]
    loaded = rank_pool(num_ranks).run(_loaded, str(tmp_path), 2)[0]
    if num_ranks < num_saved:
        order = saved[_IDS].argsort(stable=True)
        saved |= {name: value[order] for name, value in saved.items() if f"{_MODULE}_mch_" in name}
    assert models.differing(saved, loaded) == []
    latest = rank_pool(num_ranks).run(_go_on, str(tmp_path))[0]
    assert models.differing(latest, rank_pool(num_ranks).run(_loaded, str(tmp_path), 4)[0]) == []
    for number in (2, 3, 4):
        checkpoint = cnr.read_checkpoint(tmp_path / str(number))
        shards = checkpoint.manifest.tensors[_IDS].shards
        assert checkpoint.kind == "delta"
        assert sum(shard.rows.num_rows for shard in shards) < SMALL / 2
        assert sum(shard.rows.num_rows for shard in checkpoint.manifest.tensors[_ROWS].shards) == 0


def _refused(rank: int, root: str, num_rows: int, resize: Any) -> str:
    model = _job(num_rows, 2)
    before = whole(_state(model))
    message = refusal(_state(model), f"{root}/2", resize=resize)
    assert models.differing(before, whole(_state(model))) == []
    return message


@pytest.mark.parametrize(
    ("num_ranks", "num_rows", "resize", "words"),
    [
        (2, 16, ["*"], "cannot be carried over: rows 0 to 12 need 12 rows of one shard, which has 8"),
        (4, LARGE, ["*"], "cannot be carried over: 2 saved shards cannot be divided among 4"),
        (2, LARGE, {"*": torch.zeros(LARGE, dtype=torch.int64)}, "cannot be carried over: they keep their rows, which"),
        (2, SMALL, {"*bags*": torch.arange(SMALL)}, "cannot be carried over: they keep their rows, which"),
        (2, LARGE, ["*._mch_*"], "of another size"),
        (2, LARGE, ["*bags*"], "of another size"),
    ],
)
def test_ids_that_would_lose_their_rows_are_refused(
    tmp_path: Path, rank_pool: RankPools, num_ranks: int, num_rows: int, resize: Any, words: str
) -> None:
    """And nothing is overwritten."""
    rank_pool(2).run(_saved, str(tmp_path))
    assert words in rank_pool(num_ranks).run(_refused, str(tmp_path), num_rows, resize)[0]


def test_ids_that_are_placed_by_their_hash_are_refused(tmp_path: Path) -> None:
    """As tensors of such a module are named, since its kernels need a GPU."""
    module = "mc._managed_collision_collection._managed_collision_modules.t0."
    saved = {f"{module}_hash_zch_identities": torch.ones(4, 1), "mc._embedding_module.embedding_bags.t0.weight": 1}
    dcp.save(saved, storage_writer=models.writer(tmp_path / "0"))
    target = {**saved, f"{module}_hash_zch_identities": torch.zeros(6, 1)}
    message = refusal(target, str(tmp_path / "0"), resize=["*"])
    assert "its module places ids by their hash and the number of rows" in message

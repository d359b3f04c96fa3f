"""Every kind of model that is checkpointed: modules, shardings, optimizers and forms of state dicts.

A `Kind` says what is built. ``build`` builds it on the ranks of the present gloo group, two of which make a host, with
weights drawn from a seed, and ``train`` trains it. ``state`` is what a user passes to DCP. ``contents`` is what all
ranks hold of it: plain values that share no memory with it and know nothing of its sharding, the perfect model that a
checkpoint is compared with.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets, placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import torchrec_cnr as cnr
from tests.support.models import Whole, whole, writer
from tests.support.two_dimensions import shard_in_two_dimensions

DIM, COLUMNS = 8, 4  # of a row, and of a shard of columns
BATCH, IDS = 4, 2  # samples a batch, ids a feature
RANKS_PER_HOST = 2
RAW_IDS = 100  # ids before they are mapped to rows


class TowerSharder(EmbeddingTowerSharder):
    """TorchRec passes the device on to DistributedDataParallel, which refuses that of CPUs."""

    def shard(self, module: Any, params: Any, env: Any, device: Any = None, module_fqn: Any = None) -> Any:
        """Shard a tower without naming the device."""
        return super().shard(module, params, env, None, module_fqn)


SHARDERS = [
    EmbeddingBagCollectionSharder(),
    EmbeddingCollectionSharder(),
    FeatureProcessedEmbeddingBagCollectionSharder(),
    TowerSharder(),
    ManagedCollisionEmbeddingBagCollectionSharder(),
    ManagedCollisionEmbeddingCollectionSharder(),
]


@dataclass(frozen=True)
class Table:
    """A table of a module."""

    name: str
    num_rows: int
    features: tuple[str, ...]


TABLES = (Table("t0", 40, ("f0",)), Table("t1", 24, ("f1",)))
SHARED_TABLES = (Table("t0", 40, ("f0", "f2", "f3")), Table("t1", 24, ("f1", "f4")))


@dataclass(frozen=True)
class Kind:
    """What is built.

    Attributes:
        module: A key of `MODULES`.
        sharding: One of `SHARDINGS`.
        optimizer: A key of `OPTIMIZERS`.
        form: One of `FORMS`.
        num_replicas: Of the tables' shards: more than one make a 2-D parallel model.
    """

    module: str
    sharding: str
    optimizer: str
    form: str = "sharded tensors"
    num_replicas: int = 1


class Model(nn.Module):
    """A sparse part, and a dense layer over what it looks up."""

    def __init__(self, sparse: nn.Module, num_cols: int) -> None:
        super().__init__()
        self.sparse = sparse
        self.over = nn.Linear(num_cols, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """[batch, 1]."""
        return torch.as_tensor(self.over(_pooled(self.sparse(features))))


class Twins(nn.Module):
    """Two collections with tables of the same names."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """[batch, num_cols]."""
        return torch.cat((_pooled(self.first(features)), _pooled(self.second(features))), dim=1)


class PlainTables(nn.Module):
    """Tables of torch's own."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.t0 = nn.EmbeddingBag(TABLES[0].num_rows, DIM, mode="sum", sparse=sparse)
        self.t1 = nn.Embedding(TABLES[1].num_rows, DIM, sparse=sparse)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """[batch, num_cols]."""
        bags, items = (features[name].values().view(-1, IDS) for name in ("f0", "f1"))
        return torch.cat((self.t0(bags), self.t1(items).sum(dim=1)), dim=1)


def _pooled(found: Any) -> Tensor:
    """[batch, num_cols], of whatever a module looks up."""
    if isinstance(found, tuple):  # with the ids that managed collisions map to
        found = found[0]
    if isinstance(found, LazyAwaitable):
        found = found.wait()
    if isinstance(found, Tensor):
        return found
    if isinstance(found, KeyedTensor):
        return found.values()
    return torch.cat([values.values().view(-1, IDS, DIM).sum(dim=1) for values in found.values()], dim=1)


def _bags(tables: Sequence[Table] = TABLES, *, weighted: bool = False, device: str = "meta") -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=t.name, embedding_dim=DIM, num_embeddings=t.num_rows, feature_names=list(t.features))
        for t in tables
    ]
    return EmbeddingBagCollection(configs, is_weighted=weighted, device=torch.device(device))


def _sequences(tables: Sequence[Table] = TABLES, *, device: str = "meta") -> EmbeddingCollection:
    configs = [
        EmbeddingConfig(name=t.name, embedding_dim=DIM, num_embeddings=t.num_rows, feature_names=list(t.features))
        for t in tables
    ]
    return EmbeddingCollection(configs, device=torch.device(device))


def _processed() -> nn.Module:
    weights = PositionWeightedModuleCollection({"f0": IDS, "f1": IDS}, device=torch.device("cpu"))
    return FeatureProcessedEmbeddingBagCollection(_bags(weighted=True), weights)


def _collisions(configs: Sequence[Any]) -> ManagedCollisionCollection:
    """Id maps that evict rows at every second step."""
    modules: Any = {
        table.name: MCHManagedCollisionModule(
            zch_size=table.num_embeddings,
            device=torch.device("cpu"),
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=2,
            input_hash_size=RAW_IDS,
        )
        for table in configs
    }
    return ManagedCollisionCollection(modules, list(configs))


def _collision_bags() -> nn.Module:
    tables = _bags()
    return ManagedCollisionEmbeddingBagCollection(tables, _collisions(tables.embedding_bag_configs()))


def _collision_sequences() -> nn.Module:
    tables = _sequences()
    return ManagedCollisionEmbeddingCollection(tables, _collisions(tables.embedding_configs()))


MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "EmbeddingBagCollection": _bags,
    "EmbeddingCollection": _sequences,
    "tables shared by features": lambda: _bags(SHARED_TABLES),
    "two modules, equal names": lambda: Twins(_bags(), _bags()),
    "FeatureProcessedEmbeddingBagCollection": _processed,
    "EmbeddingTower": lambda: EmbeddingTower(_bags(), nn.Sequential(_Values(), nn.Linear(2 * DIM, 2 * DIM))),
    "ManagedCollisionEmbeddingBagCollection": _collision_bags,
    "ManagedCollisionEmbeddingCollection": _collision_sequences,
    "unsharded collections": lambda: Twins(_bags(device="cpu"), _sequences(device="cpu")),
    "nn.EmbeddingBag, nn.Embedding": lambda: PlainTables(sparse=False),
    "nn.EmbeddingBag, nn.Embedding, sparse": lambda: PlainTables(sparse=True),
}
REPLICATED = ("unsharded collections", "nn.EmbeddingBag, nn.Embedding", "nn.EmbeddingBag, nn.Embedding, sparse")

SHARDINGS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)

OPTIMIZERS: Mapping[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.5}),
    "Adagrad": (Adagrad, {"lr": 0.5}),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.5}),
    "Adam": (Adam, {"lr": 0.05}),
    "SparseAdam": (SparseAdam, {"lr": 0.05}),
    "PartialRowWiseAdam": (PartialRowWiseAdam, {"lr": 0.05}),
    "LAMB": (LAMB, {"lr": 0.05}),
    "PartialRowWiseLAMB": (PartialRowWiseLAMB, {"lr": 0.05}),
    "LarsSGD": (LarsSGD, {"lr": 0.05}),
}

FORMS = ("sharded tensors", "DTensors", "Stateful objects", "nested")


class _Values(nn.Module):
    def forward(self, found: Any) -> Tensor:
        return _pooled(found)


@dataclass(eq=False)
class ZooJob:
    """A model in training, with the optimizer of all its parameters."""

    kind: Kind
    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    progress: dict[str, Any]


def build(kind: Kind, seed: int) -> ZooJob:
    """Build a job on the ranks of the present group."""
    _align_group_names()
    torch.manual_seed(1000 * seed + dist.get_rank())
    with _hosts():
        num_cols = DIM * len(_features(kind.module)) * (2 if kind.module in _TWINS else 1)
        model = Model(MODULES[kind.module](), num_cols)
        optimizer, options = OPTIMIZERS[kind.optimizer]
        replicated = kind.sharding == "data_parallel" or kind.module in REPLICATED
        if not replicated:
            tables = [parameter for name, parameter in model.named_parameters() if is_table(name)]
            apply_optimizer_in_backward(optimizer, tables, dict(options))
        num_ranks = dist.get_world_size() // kind.num_replicas
        plan = {} if kind.module in REPLICATED else dict(_plans(model.sparse, "sparse", kind.sharding, num_ranks))
        sharded = _shard(model, ShardingPlan(plan), kind)
    _draw_weights(sharded, seed, kind.num_replicas)
    named = dict(sharded.named_parameters())
    dense = {name: p for name, p in named.items() if not hasattr(p, "_in_backward_optimizers")}
    tables = {name: dense.pop(name) for name in list(dense) if is_table(name)}
    wrapped = [KeyedOptimizerWrapper(dense, lambda parameters: Adagrad(parameters, lr=0.1))]
    if tables:
        wrapped.append(KeyedOptimizerWrapper(tables, lambda parameters: optimizer(parameters, **options)))
    for one in wrapped:
        one.init_state(set(tables) if kind.module.endswith(", sparse") else None)
        one.zero_grad()
    return ZooJob(kind, sharded, CombinedOptimizer([sharded.fused_optimizer, *wrapped]), {"step": 0, "tags": ["new"]})


_TWINS = ("two modules, equal names", "unsharded collections")


def _features(module: str) -> dict[str, int]:
    """How many different ids each feature has."""
    tables = SHARED_TABLES if module == "tables shared by features" else TABLES
    many = module.startswith("ManagedCollision")
    return {feature: RAW_IDS if many else table.num_rows for table in tables for feature in table.features}


def is_table(name: str) -> bool:
    """Whether a parameter is a table."""
    return re.search(r"(embedding_bags|embeddings)\.\w+\.weight$|sparse\.t\d\.weight$", name) is not None


def _align_group_names() -> None:
    """Process groups are named by a count that each rank keeps, and towers make groups on some ranks only."""
    count = torch.tensor(distributed_c10d._world.group_count)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    distributed_c10d._world.group_count = int(count)


def _shard(model: nn.Module, plan: ShardingPlan, kind: Kind) -> DistributedModelParallel:
    group, device = dist.GroupMember.WORLD, torch.device("cpu")
    if kind.num_replicas > 1:
        return shard_in_two_dimensions(model, plan, SHARDERS, dist.get_world_size() // kind.num_replicas)
    env = ShardingEnv(dist.get_world_size(), dist.get_rank(), group, output_dtensor=kind.form == "DTensors")
    return DistributedModelParallel(model, env=env, device=device, plan=plan, sharders=list(SHARDERS))


def _local_size(world_size: int) -> int:
    """Ranks of a host."""
    return RANKS_PER_HOST if world_size % RANKS_PER_HOST == 0 else world_size


@contextmanager
def _hosts() -> Iterator[None]:
    """TorchRec learns from the environment how many ranks a host has."""
    local = _local_size(dist.get_world_size())
    values = {"LOCAL_WORLD_SIZE": str(local), "LOCAL_RANK": str(dist.get_rank() % local)}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _plans(
    module: nn.Module, path: str, sharding: str, num_ranks: int
) -> Iterator[tuple[str, EmbeddingModuleShardingPlan]]:
    """A plan for each module that TorchRec shards as one."""
    if isinstance(module, Twins):
        yield from _plans(module.first, f"{path}.first", sharding, num_ranks)
        yield from _plans(module.second, f"{path}.second", sharding, num_ranks)
        return
    tables = [(name, parameter) for name, parameter in module.named_parameters() if is_table(name)]
    is_tower = isinstance(module, EmbeddingTower)  # all on one host
    plan = {
        name.split(".")[-2]: _sharding(sharding, 0 if is_tower else number, parameter, num_ranks)
        for number, (name, parameter) in enumerate(tables)
    }
    yield path, EmbeddingModuleShardingPlan(plan)


def _sharding(sharding: str, number: int, parameter: Tensor, world_size: int) -> ParameterSharding:
    """How a module's table of this number is sharded."""
    local = _local_size(world_size)
    num_hosts = world_size // local
    first = number % num_hosts * local
    ranks = {
        "table_wise": [number % world_size],
        "row_wise": list(range(world_size)),
        "column_wise": [0, world_size - 1],
        "table_row_wise": list(range(first, first + local)),
        "table_column_wise": [first, first + local - 1],
        "grid_shard": [host * local + rank for host in (0, num_hosts - 1) for rank in range(local)],
        "data_parallel": list(range(world_size)),
    }[sharding]
    if sharding == "data_parallel":
        return ParameterSharding(sharding, "dense", ranks)
    sizes, offsets = calculate_shard_sizes_and_offsets(parameter, world_size, local, sharding, COLUMNS)
    shards = [
        ShardMetadata(shard_offsets=offset, shard_sizes=size, placement=placement("cpu", rank, local))
        for offset, size, rank in zip(offsets, sizes, ranks, strict=True)
    ]
    return ParameterSharding(sharding, "fused", ranks, EnumerableShardingSpec(shards))


def _draw_weights(model: nn.Module, seed: int, num_replicas: int) -> None:
    """The same random weights for replicas; shards draw different ones."""
    of_shard = dist.get_rank() // num_replicas
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            is_shard = is_table(name) and hasattr(parameter, "_in_backward_optimizers")
            generator = torch.Generator().manual_seed(1000 * seed + (of_shard if is_shard else 999))
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)


def batch(job: ZooJob, seed: int) -> KeyedJaggedTensor:
    """Random features; ranks draw different ones."""
    generator = torch.Generator().manual_seed(2000 * seed + dist.get_rank())
    features = _features(job.kind.module)
    ids = [torch.randint(0, num_ids, (BATCH * IDS,), generator=generator) for num_ids in features.values()]
    return KeyedJaggedTensor.from_lengths_sync(list(features), torch.cat(ids), torch.full((BATCH * len(ids),), IDS))


def train(job: ZooJob, seed: int) -> None:
    """Train one random batch; ranks draw different ones."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    out = job.model(batch(job, seed))
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.progress["step"] += 1


def state(job: ZooJob) -> dict[str, Any]:
    """What a user passes to DCP."""
    if job.kind.form == "Stateful objects":
        return {"model": job.model, "optim": job.optimizer, "progress": job.progress}
    found = {"model": job.model.state_dict(), "optim": job.optimizer.state_dict()}
    if job.kind.form == "nested":
        return {"job": [{"train": found}, {"progress": {**job.progress, "nothing": None}}], "name": "nested"}
    return {**found, "progress": job.progress}


def save(job: ZooJob, tracker: cnr.RowTracker, path: str) -> cnr.Checkpoint:
    """Save a job: the modified rows since the checkpoint before."""
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    dcp.save(state(job), storage_writer=writer(path), planner=planner)
    return cnr.read_checkpoint(path)


def load(job: ZooJob, path: str, tracker: cnr.RowTracker | None = None) -> dict[str, Any]:
    """Load a checkpoint, and return what was passed to DCP."""
    loaded = state(job)
    dcp.load(loaded, storage_reader=cnr.CNRStorageReader(path), planner=cnr.CNRLoadPlanner(tracker))
    return loaded


def take(job: ZooJob, loaded: Mapping[str, Any]) -> None:
    """Do what a user does after a load, for whatever does not share its memory with what was loaded."""
    if job.kind.form == "nested":
        loaded = {**loaded["job"][0]["train"], "progress": loaded["job"][1]["progress"]}
    if job.kind.form != "Stateful objects":
        if job.kind.module != "EmbeddingTower":  # whose load_state_dict does not know the keys of its state_dict
            job.model.load_state_dict(loaded["model"])
        job.optimizer.load_state_dict(loaded["optim"])
    job.progress = {name: loaded["progress"][name] for name in job.progress}


def contents(job: ZooJob) -> Whole:
    """What all ranks hold, by a name that is the same for every sharding and form.

    The first optimizer state of a table is ``momentum1`` for fused kernels, and otherwise elsewhere. Row-wise state is
    [num_rows], the mean of the values that column shards have. Id maps are in the order of ids.
    """
    found = whole({"model": job.model.state_dict(), "optim": job.optimizer.state_dict(), "progress": job.progress})
    named = dict(_canonical(name, value, found) for name, value in found.items() if not name.endswith(_SEGMENTS))
    return {**named, **{name: _in_order(name, named) for name in named if "._mch_" in name}}


def tensors(job: ZooJob) -> Whole:
    """The tensors among a job's contents."""
    return {name: value for name, value in contents(job).items() if isinstance(value, Tensor)}


_STATE = re.compile(r"optim\.state\.(?P<table>.+\.weight)\.(?P<name>[^.]+|[^.]+\.[^.]+)$")
_FIRST = ("momentum1", "sum", "exp_avg", "momentum_buffer")
_SEGMENTS = "._output_segments_tensor"  # how an id map is divided


def _canonical(name: str, value: Any, found: Whole) -> tuple[str, Any]:
    match = _STATE.match(name)
    if match is None or not is_table(match["table"]):
        return name, value
    table = match["table"].replace("sparse.embedding_bags.", "sparse.embedding.embedding_bags.")  # of a tower
    weight = found.get(f"model.{match['table']}", found.get(f"model.{table}"))
    last = match["name"].split(".")[-1]
    if isinstance(value, Tensor) and value.dim() and (value.dim() == 1 or value.shape[1] == 1):
        value = value.reshape(-1, len(weight)).double().mean(dim=0).float()
    return f"optim.state.{match['table']}.{'first' if last in _FIRST else last}", value


def _in_order(name: str, named: Whole) -> Tensor:
    """A column of an id map, sorted by ids, and by rows where there is no id yet."""
    prefix = name.rpartition(".")[0]
    rows = named[f"{prefix}._mch_remapped_ids_mapping"].argsort(stable=True)
    order = rows[named[f"{prefix}._mch_sorted_raw_ids"][rows].argsort(stable=True)]
    return torch.as_tensor(named[name][order])

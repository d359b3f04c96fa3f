"""TorchRec's DLRM for a stream of samples: tables sharded by hand, with row-wise Adagrad fused into their backward.

Nothing in this module knows about checkpoints, except that ``Trainer.state`` returns the content of one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from samples import Feature, Samples, Stream, table_rows
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

TABLES_PATH = "model.sparse_arch.embedding_bag_collection"
TABLE_LEARNING_RATE = 0.05
DENSE_LEARNING_RATE = 0.01
# Independent of the world size, so that any --dim can be split on any number of ranks; a single rank has both shards.
NUM_COLUMN_SHARDS = 2


@dataclass(frozen=True)
class Trainer:
    """The model and its optimizers on one rank.

    Attributes:
        model: A DLRMTrain with tables sharded over all ranks and a replicated dense part.
        dense_optimizer: The Adagrad of the dense part; that of the tables runs inside backward.
        features: The sparse features, in the order of the ids of a sample.
        num_rows: Number of rows of the large tables.
    """

    model: DistributedModelParallel
    dense_optimizer: KeyedOptimizerWrapper
    features: tuple[Feature, ...]
    num_rows: int

    def train(self, samples: Samples) -> torch.Tensor:
        """Train one step on this rank's share of a batch, and return its mean loss, a float64 scalar."""
        self.dense_optimizer.zero_grad()
        loss, _ = self.model(to_batch(samples, self.features, self.num_rows))
        loss.backward()
        self.dense_optimizer.step()
        return torch.as_tensor(loss.detach(), dtype=torch.float64)

    def state(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Return the complete state of the run; its tensors are the live ones."""
        return {
            "model": self.model.state_dict(),
            "optim": self.model.fused_optimizer.state_dict(),
            "dense_optim": self.dense_optimizer.state_dict(),
            "progress": progress,
        }

    def table_sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the global size of each table, by its name in ``state``."""
        items = self.model.state_dict().items()
        return {f"model.{name}": tuple(value.size()) for name, value in items if name.startswith(TABLES_PATH)}


def build_dlrm(stream: Stream, num_rows: int, dim: int, table_device: torch.device) -> DLRMTrain:
    """Create TorchRec's DLRM with a loss, not sharded."""
    tables = EmbeddingBagCollection(
        device=table_device,
        tables=[
            EmbeddingBagConfig(
                name=feature.name,
                embedding_dim=dim,
                num_embeddings=feature.num_rows(num_rows),
                feature_names=[feature.name],
            )
            for feature in stream.features
        ],
    )
    dlrm = DLRM(tables, stream.num_dense, [64, dim], [64, 32, 1], dense_device=torch.device("cpu"))
    return DLRMTrain(dlrm)


def build_trainer(stream: Stream, num_rows: int, dim: int, sharding: str, seed: int) -> Trainer:
    """Create an untrained model on this rank; the process group must exist."""
    torch.manual_seed(seed)
    train_module = build_dlrm(stream, num_rows, dim, torch.device("meta"))
    tables = train_module.model.sparse_arch.embedding_bag_collection
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": TABLE_LEARNING_RATE})
    model = DistributedModelParallel(
        train_module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan_tables(tables, sharding),
        data_parallel_wrapper=data_parallel_wrapper(),
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    # This Adagrad creates its state at once, so a new trainer already has every tensor that a load fills.
    dense_optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=DENSE_LEARNING_RATE))
    return Trainer(model, dense_optimizer, stream.features, num_rows)


def data_parallel_wrapper() -> DefaultDataParallelWrapper:
    """Return the wrapper that averages the gradients of the dense part, in the same order at each step.

    By default, DDP rearranges gradients after the first step of a process. With three ranks or more, this changes the
    order in which they are added, so a resumed run would differ in its last bits. Searching for unused parameters
    prevents this, but causes a warning that there are none. The sum over two ranks has only one order.
    """
    is_order_free = dist.get_world_size() <= 2
    return DefaultDataParallelWrapper(static_graph=is_order_free, find_unused_parameters=not is_order_free)


def plan_tables(tables: EmbeddingBagCollection, sharding: str) -> ShardingPlan:
    """Return the sharding plan of the tables, for any number of ranks; ``mixed`` alternates the three ways."""
    world_size = dist.get_world_size()
    column_ranks = [shard % world_size for shard in range(NUM_COLUMN_SHARDS)]
    ways = ("row", "table", "column") if sharding == "mixed" else (sharding,)
    plans: dict[str, ParameterShardingGenerator] = {}
    for number, config in enumerate(tables.embedding_bag_configs()):
        plans[config.name] = {
            "row": row_wise(),
            "table": table_wise(rank=number % world_size),
            "column": column_wise(ranks=column_ranks),
        }[ways[number % len(ways)]]
    module_plan = construct_module_sharding_plan(
        tables, plans, local_size=world_size, world_size=world_size, device_type="cpu"
    )
    return ShardingPlan({TABLES_PATH: module_plan})


def to_batch(samples: Samples, features: tuple[Feature, ...], num_rows: int) -> Batch:
    """Convert samples to a TorchRec batch, with ids hashed to rows, feature by feature."""
    values, lengths, at = [], [], 0
    for feature in features:
        rows = table_rows(samples.ids[:, at : at + feature.num_ids], feature.num_rows(num_rows))
        values.append(torch.from_numpy(rows).reshape(-1))
        lengths.append(torch.full((len(samples),), feature.num_ids, dtype=torch.int64))
        at += feature.num_ids
    sparse = KeyedJaggedTensor([f.name for f in features], torch.cat(values), lengths=torch.cat(lengths))
    return Batch(torch.from_numpy(samples.dense), sparse, torch.from_numpy(samples.labels))


def local_tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, or the shards of tensors, that this rank has of a nested state."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from local_tensors(f"{name}/{key}", item)
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield f"{name}{shard.metadata.shard_offsets}", shard.tensor
    elif isinstance(value, torch.Tensor):
        yield name, value

"""Tables that TorchRec shards: the kernels that look them up, several tables at once, and mark their rows."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding, BatchedDenseEmbeddingBag
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.tracking.hooks import Hooks, modules_below, on_gradient, watch_loads
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.torch_optim import OptimizerTables, has_rows
from torchrec_cnr.tracking.tracked_tables import TrackedShard

logger = logging.getLogger(__name__)

ShardedCollection: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection


def sharded_collections(model: nn.Module) -> Iterator[tuple[str, ShardedCollection]]:
    """All sharded collections of tables; the path is that of their tables, as in FQNs."""
    for path, module in modules_below(model):
        if isinstance(module, ShardedCollection):
            tables = "embedding_bags" if isinstance(module, ShardedEmbeddingBagCollection) else "embeddings"
            yield f"{path}.{tables}".removeprefix("."), module


def track_collection(
    path: str, module: ShardedCollection, hooks: Hooks, stepped: OptimizerTables
) -> list[TrackedShard]:
    """Track the shards that this rank has of a collection's tables.

    Raises:
        ConfigurationError: Rows of a table do not lie in memory.
    """
    if module.post_lookup_tracker_fn is not None:
        logger.info("%s has a lookup tracker already; it keeps running, beside the row tracker", path)
    shards: list[TrackedShard] = []
    for lookup in module._lookups:
        kernels = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
        for kernel in kernels._emb_modules:
            shards += _track_kernel(path, kernel, hooks, stepped)
    tables = path.rpartition(".")[2]
    watch_loads(module, [(f"{tables}{shard.rows.name.removeprefix(path)}.weight", shard) for shard in shards], hooks)
    return shards


def _track_kernel(path: str, kernel: Any, hooks: Hooks, stepped: OptimizerTables) -> list[TrackedShard]:
    tables, weights = kernel._config.embedding_tables, kernel.split_embedding_weights()
    for table, weight in zip(tables, weights, strict=True):
        if type(weight) not in (Tensor, nn.Parameter):
            raise ConfigurationError(
                f"{path}.{table.name}: {type(kernel).__name__} keeps rows outside of memory; leave its module out of "
                "the tracked model"
            )
    num_features = [len(table.feature_names) for table in tables]
    marks = KernelMarks.of([len(weight) for weight in weights], num_features, weights[0].device)
    shards: list[TrackedShard] = []
    for index, (table, weight) in enumerate(zip(tables, weights, strict=True)):
        rows = ModifiedRows(f"{path}.{table.name}", _box(table, weight), weight.device, marks.tables[index])
        if isinstance(kernel, BatchedDenseEmbedding | BatchedDenseEmbeddingBag):
            shards.append(stepped.add(rows, weight))
        else:
            shards.append(TrackedShard(rows, weight, partial(_fused_state, kernel.emb_module, index)))

    def on_backward(features: KeyedJaggedTensor) -> None:
        for shard in shards:
            shard.check_restored()
        marks.mark(features)

    hooks.add(kernel.register_forward_hook(lambda _, args, output: on_gradient(output, lambda: on_backward(args[0]))))
    return shards


@dataclass(frozen=True, eq=False)
class KernelMarks:
    """The marks of all tables of a kernel, one after another, so that a device can mark a lookup at once.

    Attributes:
        marked: bool [rows of all tables].
        tables: The marks of each table, views.
        of_feature: The table of each feature.
        first_rows: int64 [num_features], on the device: where the marks of each feature's table begin.
    """

    marked: Tensor
    tables: tuple[Tensor, ...]
    of_feature: tuple[int, ...]
    first_rows: Tensor

    @classmethod
    def of(cls, num_rows: Sequence[int], num_features: Sequence[int], device: torch.device) -> "KernelMarks":
        """Marks of tables of so many rows, looked up by so many features each."""
        marked = torch.zeros(sum(num_rows), dtype=torch.bool, device=device)
        of_feature = [table for table, num in enumerate(num_features) for _ in range(num)]
        first_rows = torch.tensor([sum(num_rows[:table]) for table in of_feature], device=device)
        return cls(marked, marked.split(list(num_rows)), tuple(of_feature), first_rows)

    def mark(self, features: KeyedJaggedTensor) -> None:
        """Mark the rows of a lookup."""
        if features.values().device.type == "cpu" or features.variable_stride_per_key():
            self.mark_by_feature(features)
        else:
            self.mark_at_once(features)

    def mark_by_feature(self, features: KeyedJaggedTensor) -> None:
        """Mark the rows of one feature after another, which on CPUs is faster."""
        ids, offsets = features.values(), features.offset_per_key()
        for table, (start, stop) in zip(self.of_feature, pairwise(offsets), strict=True):
            if start < stop:
                self.tables[table].index_fill_(0, ids[start:stop].long(), True)

    def mark_at_once(self, features: KeyedJaggedTensor) -> None:
        """Mark all rows without asking a device how many ids each feature has, which would wait for it.

        Ids are moved to the marks of their tables on the device, as FBGEMM's ``linearize_cache_indices`` does.
        """
        ids = features.values()
        if len(ids):
            num_ids = features.offsets()[:: features.stride()].diff()
            places = self.first_rows.repeat_interleave(num_ids, output_size=len(ids))
            self.marked.index_fill_(0, places.add_(ids), True)


def _fused_state(kernel: Any, index: int) -> Sequence[Tensor]:
    """The row-shaped optimizer state of one table of a fused kernel."""
    num_rows = len(kernel.split_embedding_weights()[index])
    states = kernel.get_optimizer_state()
    named = states[index].items() if states else ()
    return [state for name, state in named if name != "iter" and has_rows(state, num_rows)]  # one for all tables


def _box(table: Any, weight: Tensor) -> Box:
    """Where a shard lies in its table; replicated tables have no metadata."""
    if table.local_metadata is None:
        return Box.whole(tuple(weight.shape))
    return Box(tuple(table.local_metadata.shard_offsets), tuple(table.local_metadata.shard_sizes))

"""Tables that TorchRec shards: the kernels that look up several tables in one call, and mark their rows."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding, BatchedDenseEmbeddingBag
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from torchrec_cnr import kernels
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.tracking.hooks import Hook, Hooks, modules_below, on_gradient, watch_loads
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.torch_optim import OptimizerTables, has_rows
from torchrec_cnr.tracking.tracked_tables import TrackedShard, accounting

logger = logging.getLogger(__name__)

ShardedCollection: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection


def sharded_collections(model: nn.Module) -> Iterator[tuple[str, ShardedCollection]]:
    """Yield all sharded collections of tables, with the path of their tables as in FQNs."""
    for path, module in modules_below(model):
        if isinstance(module, ShardedCollection):
            tables = "embedding_bags" if isinstance(module, ShardedEmbeddingBagCollection) else "embeddings"
            yield f"{path}.{tables}".removeprefix("."), module


def num_rows_of(module: ShardedCollection) -> Mapping[str, int]:
    """Return the number of rows of each table of a collection, on all ranks together."""
    is_pooled = isinstance(module, ShardedEmbeddingBagCollection)
    tables = module._embedding_bag_configs if is_pooled else module._embedding_configs
    return {table.name: table.num_embeddings for table in tables}


def kernels_of(module: ShardedCollection) -> list[Any]:
    """Return the kernels of a collection. Resharding makes others."""
    lookups = (lookup.module if isinstance(lookup, DistributedDataParallel) else lookup for lookup in module._lookups)
    return [kernel for lookup in lookups for kernel in lookup._emb_modules]


def track_collection(
    path: str, module: ShardedCollection, hooks: Hooks, stepped: OptimizerTables
) -> list[TrackedShard]:
    """Track this rank's shards of a collection's tables.

    Raises:
        ConfigurationError: Rows of a table are not in memory.
    """
    if module.post_lookup_tracker_fn is not None:
        logger.info("%s already has a lookup tracker, which keeps running in parallel with the row tracker", path)
    shards: list[TrackedShard] = []
    for kernel in kernels_of(module):
        shards += _track_kernel(path, kernel, hooks, stepped)
    tables = path.rpartition(".")[2]
    watch_loads(module, [(f"{tables}{shard.rows.name.removeprefix(path)}.weight", shard) for shard in shards], hooks)
    return shards


def device_caches(module: ShardedCollection) -> Iterator[SplitTableBatchedEmbeddingBagsCodegen]:
    """Yield the kernels of a collection that cache rows of host memory on the device (``UVM_CACHING``)."""
    for kernel in kernels_of(module):
        fbgemm = kernel.emb_module
        if isinstance(fbgemm, SplitTableBatchedEmbeddingBagsCodegen) and fbgemm.lxu_cache_weights.numel():
            yield fbgemm


def _track_kernel(path: str, kernel: Any, hooks: Hooks, optimizer_tables: OptimizerTables) -> list[TrackedShard]:
    tables, weights = kernel._config.embedding_tables, kernel.split_embedding_weights()
    for table, weight in zip(tables, weights, strict=True):
        if type(weight) not in (Tensor, nn.Parameter):
            raise ConfigurationError(
                f"{path}.{table.name}: {type(kernel).__name__} keeps rows outside of memory, where they cannot be "
                "tracked: leave its module out of the tracked model"
            )
    num_features = [len(table.feature_names) for table in tables]
    marks = KernelMarks.of([len(weight) for weight in weights], num_features, weights[0].device)
    states = FusedStates(kernel.emb_module)
    shards: list[TrackedShard] = []
    for index, (table, weight) in enumerate(zip(tables, weights, strict=True)):
        rows = ModifiedRows(f"{path}.{table.name}", _box(table, weight), weight.device, marks.tables[index])
        if isinstance(kernel, BatchedDenseEmbedding | BatchedDenseEmbeddingBag):
            shards.append(optimizer_tables.add(rows, weight))
        else:
            shards.append(TrackedShard(rows, weight, partial(states.of_table, index)))

    def on_lookup(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        lookup = KernelLookup.of(module, *args, **kwargs)

        def on_backward() -> None:
            for shard in shards:
                shard.check_restored()
            marks.mark(lookup)

        on_gradient(output, on_backward)

    hooks.add(kernel.emb_module.register_forward_hook(Hook(on_lookup), with_kwargs=True))
    if isinstance(kernel.emb_module, SplitTableBatchedEmbeddingBagsCodegen):
        hooks.around(kernel.emb_module, "forward", torch.compiler.disable(_look_up))
        hooks.around(kernel.emb_module, "reset_embedding_weight_momentum", partial(_reset, shards, marks.of_feature))
        hooks.around(kernel.emb_module, "ema_inplace", partial(_average, shards, kernel.emb_module))
    return shards


def _look_up(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call a kernel's ``forward``, which must not be compiled: a compiled kernel does not keep its ids."""
    return forward(*args, **kwargs)


def _average(
    shards: Sequence[TrackedShard],
    kernel: SplitTableBatchedEmbeddingBagsCodegen,
    average: Callable[..., None],
    mode: Mapping[str, float],
) -> None:
    """Call a kernel's method that averages columns of all rows, and mark them. No version counter shows these writes.

    The kernel calls the method in each lookup. It averages in every ``step_ema``-th step, from ``step_start`` on.
    """
    step = int(kernel.iter_cpu.item())
    average(mode)
    if step >= int(mode["step_start"]) and step % int(mode["step_ema"]) == 0:
        for shard in shards:
            shard.rows.mark_all()


def _reset(
    shards: Sequence[TrackedShard],
    of_feature: Sequence[int],
    reset: Callable[..., None],
    pruned_indices: Tensor,
    pruned_indices_offsets: Tensor,
    logical_table_ids: Tensor,
    buffer_ids: Tensor,
) -> None:
    """Call a kernel's method that resets pruned rows for ``ITEPEmbeddingBagCollection``, and mark these rows.

    Args:
        shards: The kernel's shards.
        of_feature: For each feature, the index of its shard.
        reset: The method.
        pruned_indices: int [num_rows], rows of all buffers, one buffer after another.
        pruned_indices_offsets: int [num_buffers + 1], where the rows of each buffer begin.
        logical_table_ids: int [num_tables], the first feature of each table to reset.
        buffer_ids: int [num_tables], the buffer of each table.
    """
    with accounting(shards):
        reset(pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids)
        offsets = pruned_indices_offsets.tolist()
        for feature, buffer in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
            rows = shards[of_feature[feature]].rows
            pruned_rows = pruned_indices[offsets[buffer] : offsets[buffer + 1]].to(rows.marked.device)
            if len(pruned_rows) and int(pruned_rows.max()) >= rows.box.num_rows:
                # TorchRec's managed collisions pass the number of a table, not of its first feature. So the kernel
                # may reset rows of the tables that follow this one.
                for shard in shards:
                    shard.rows.mark_all()
            else:
                rows.mark(pruned_rows)


@dataclass(frozen=True, eq=False)
class KernelLookup:
    """The ids that an FBGEMM kernel looks up, and later trains.

    These may differ from the caller's. FBGEMM may convert the ids, which makes a copy. Its bounds check replaces
    invalid ones, in that copy or in place.

    Attributes:
        ids: int [num_ids], the ids of all features, one feature after another.
        offsets: int [num_bags + 1], where the ids of each bag begin; the bags of a feature are adjacent.
        first_bags: int [num_features + 1], where the bags of each feature begin; None if all features have as many.
    """

    ids: Tensor
    offsets: Tensor
    first_bags: Tensor | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        indices: Tensor,
        offsets: Tensor,
        *_: Any,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
        **__: Any,
    ) -> "KernelLookup":
        """Return the lookup that a module of FBGEMM has just made, given its arguments."""
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
            return cls(module._indices, module._offsets, module._vbe_B_offsets)
        if batch_size_per_feature_per_rank is None:
            return cls(indices, offsets)
        first_bags = list(accumulate(map(sum, batch_size_per_feature_per_rank), initial=0))
        return cls(indices, offsets, torch.tensor(first_bags, device=offsets.device))

    def first_ids(self, num_features: int) -> Tensor:
        """Return where the ids of each feature begin: int [num_features + 1], on the device of the ids."""
        if self.first_bags is not None:
            return self.offsets.index_select(0, self.first_bags)
        num_bags = (len(self.offsets) - 1) // num_features
        return self.offsets[::num_bags] if num_bags else self.offsets.new_zeros(num_features + 1)


@dataclass(frozen=True, eq=False)
class KernelMarks:
    """The marks of all tables of a kernel in one tensor, so that a device can mark a lookup in one operation.

    Attributes:
        marked: bool [rows of all tables].
        tables: Views of the marks of each table.
        of_feature: For each feature, the index of its table.
        first_rows: int64 [num_features], on the device: where the marks of each feature's table begin.
        end_rows: int64 [num_features], on the device: where they end.
    """

    marked: Tensor
    tables: tuple[Tensor, ...]
    of_feature: tuple[int, ...]
    first_rows: Tensor
    end_rows: Tensor

    @classmethod
    def of(cls, num_rows: Sequence[int], num_features: Sequence[int], device: torch.device) -> "KernelMarks":
        """Return marks for tables with these numbers of rows and of features."""
        marked = torch.zeros(sum(num_rows), dtype=torch.bool, device=device)
        of_feature = [table for table, num in enumerate(num_features) for _ in range(num)]
        bounds = list(accumulate(num_rows, initial=0))
        first_rows = torch.tensor([bounds[table] for table in of_feature], device=device)
        end_rows = torch.tensor([bounds[table + 1] for table in of_feature], device=device)
        return cls(marked, marked.split(list(num_rows)), tuple(of_feature), first_rows, end_rows)

    def mark(self, lookup: KernelLookup) -> None:
        """Mark the rows of a lookup."""
        if kernels.marks_at_once(lookup.ids.device):
            self.mark_at_once(lookup)
        else:
            self.mark_by_feature(lookup)

    def mark_by_feature(self, lookup: KernelLookup) -> None:
        """Mark the rows of one feature after another. On a device, this waits to learn how many ids each has."""
        first_ids = lookup.first_ids(len(self.of_feature)).tolist()
        for table, (start, stop) in zip(self.of_feature, pairwise(first_ids), strict=True):
            if start < stop:
                self.tables[table].index_fill_(0, lookup.ids[start:stop].long(), True)

    def mark_at_once(self, lookup: KernelLookup) -> None:
        """Mark the rows of all features in one operation, without waiting for the device.

        FBGEMM skips -1, a row that was pruned; so does this.
        """
        num_features = len(self.of_feature)
        if lookup.first_bags is None:
            first_ids, num_bags = lookup.offsets, (len(lookup.offsets) - 1) // max(1, num_features)
        else:
            first_ids, num_bags = lookup.first_ids(num_features), 1
        kernels.mark_rows(lookup.ids, first_ids, num_bags, self.first_rows, self.end_rows, self.marked)


class FusedStates:
    """The row-shaped optimizer state of the tables of a fused kernel.

    FBGEMM returns the state of all tables in one call. It is called again only when the kernel's memory has changed.
    Otherwise each access to one of hundreds of tables would cost as much as all of them.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._memory: tuple[tuple[int, int], ...] | None = None
        self._states: list[list[Tensor]] = []

    def of_table(self, index: int) -> Sequence[Tensor]:
        """Return the state of one table."""
        memory = tuple(
            (tensor.data_ptr(), tensor.numel()) for tensor in chain(self._kernel.parameters(), self._kernel.buffers())
        )
        if memory != self._memory:
            weights = self._kernel.split_embedding_weights()
            states_by_name = self._kernel.get_optimizer_state() or [{}] * len(weights)
            self._states = [
                [state for name, state in table_states.items() if name != "iter" and has_rows(state, len(weight))]
                for table_states, weight in zip(states_by_name, weights, strict=True)  # 'iter' is one for all tables
            ]
            self._memory = memory
        return self._states[index]


def _box(table: Any, weight: Tensor) -> Box:
    """Return a shard's region of its table; replicated tables have no metadata."""
    if table.local_metadata is None:
        return Box.whole(tuple(weight.shape))
    return Box(tuple(table.local_metadata.shard_offsets), tuple(table.local_metadata.shard_sizes))

"""The row tracker: notices which rows of a model's tables are modified. The only module that knows TorchRec.

Rows are marked when the gradient of their lookup arrives, by a hook on the lookup's output. That is the moment at
which TorchRec's fused optimizers modify them: evaluation marks nothing, and pipelines that look the next batch up
before the present one is trained cannot lose an update to a cut in between. The hooks sit on TorchRec's lookup kernels,
not in the one slot of ``register_post_lookup_tracker_fn``: a tracker registered there, before or after, keeps working.

Tables that a ``torch.optim`` optimizer modifies are different: the gradient comes first, the modification later. Rows
with a gradient that no step has used yet stay marked across a cut, and a step of an optimizer that also moves rows
without a gradient (momentum, weight decay) marks all rows.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding, BatchedDenseEmbeddingBag
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.modified import ModifiedRows, TrackedRows, TrackedShard
from torchrec_cnr.rows import Box
from torchrec_cnr.shards import memory_key

logger = logging.getLogger(__name__)


class RowTracker(TrackedRows):
    """Tracks the modified rows of all embedding tables of a model, on this rank.

    Finds sharded EmbeddingBagCollections and EmbeddingCollections (under DistributedModelParallel or not), and every
    ``nn.EmbeddingBag`` and ``nn.Embedding``, those inside unsharded collections included.

    Args:
        model: The model, sharded already.

    Raises:
        ConfigurationError: The model has no table, or one whose rows do not lie in memory (SSD and key-value kernels).
    """

    def __init__(self, model: nn.Module) -> None:
        self._handles: list[RemovableHandle] = []
        self._stepped: dict[int, list[_SteppedTable]] = {}
        self._sharded_tables: set[str] = set()
        found = [*self._track_sharded(model), *self._track_plain(model)]
        if not found and not self._sharded_tables:
            raise ConfigurationError(f"{type(model).__name__} has no embedding table; track the sharded model")
        super().__init__(found)
        if self._stepped:
            self._handles.append(register_optimizer_step_post_hook(self._optimizer_stepped))

    def mark(self, table: str, rows: Tensor) -> None:
        """Mark rows that something else than training modifies.

        Args:
            table: FQN of the table in the model, ending in its name or ``<name>.weight``.
            rows: int [N], numbered within the whole table; those on other ranks are left to them.

        Raises:
            ConfigurationError: No table has this name.
        """
        for tracked in self._named(table):
            box = tracked.rows.box
            local = rows[(rows >= box.offsets[0]) & (rows < box.offsets[0] + box.num_rows)] - box.offsets[0]
            tracked.rows.mark(local.to(tracked.weight.device))

    def mark_all(self, table: str | None = None) -> None:
        """Mark every row, of one table or of all.

        Raises:
            ConfigurationError: No table has this name.
        """
        for tracked in self.shards if table is None else self._named(table):
            tracked.rows.mark_all()

    def close(self) -> None:
        """Remove all hooks; nothing is marked from here on."""
        while self._handles:
            self._handles.pop().remove()

    def _named(self, table: str) -> Sequence[TrackedShard]:
        stem = table.removesuffix(".weight")
        names = {shard.rows.name for shard in self.shards} | self._sharded_tables
        if not any(f".{name}".endswith(f".{stem}") for name in names):
            raise ConfigurationError(f"no table {table!r} is tracked; there are {', '.join(sorted(names))}")
        return [shard for shard in self.shards if f".{shard.rows.name}".endswith(f".{stem}")]

    def _track_sharded(self, model: nn.Module) -> Iterator[TrackedShard]:
        for path, module in model.named_modules():
            if not isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
                continue
            self._sharded_tables.update(f"{path}.{table}" for table in module.module_sharding_plan)
            if module.post_lookup_tracker_fn is not None:
                logger.info("%s has a lookup tracker already; it keeps running, beside the row tracker", path)
            for lookup in module._lookups:
                kernels = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
                for kernel in kernels._emb_modules:
                    yield from self._track_kernel(path, kernel)

    def _track_kernel(self, path: str, kernel: Any) -> Iterator[TrackedShard]:
        """The shards of one TorchRec lookup kernel, which looks up several tables at once."""
        tables = kernel._config.embedding_tables
        weights = kernel.split_embedding_weights()
        is_stepped = isinstance(kernel, BatchedDenseEmbedding | BatchedDenseEmbeddingBag)
        by_feature: list[ModifiedRows] = []
        for index, (table, weight) in enumerate(zip(tables, weights, strict=True)):
            if type(weight) not in (Tensor, nn.Parameter):
                raise ConfigurationError(
                    f"{path}.{table.name}: {type(kernel).__name__} keeps rows outside of memory; leave its "
                    "module out of the tracked model"
                )
            rows = ModifiedRows(f"{path}.{table.name}", _box(table, weight), weight.device)
            by_feature += [rows] * len(table.feature_names)
            state = self._by_optimizer(rows, weight) if is_stepped else _FusedState(kernel.emb_module, index)
            yield TrackedShard(rows, weight, state)

        def mark(features: KeyedJaggedTensor) -> None:
            ids, offsets = features.values(), features.offset_per_key()
            for rows, (start, stop) in zip(by_feature, pairwise(offsets), strict=True):
                if start < stop:
                    rows.mark(ids[start:stop])

        self._handles.append(
            kernel.register_forward_hook(lambda _, args, output: _on_gradient(output, lambda: mark(args[0])))
        )

    def _track_plain(self, model: nn.Module) -> Iterator[TrackedShard]:
        by_memory: dict[Any, ModifiedRows] = {}
        for path, module in model.named_modules():
            if not isinstance(module, nn.EmbeddingBag | nn.Embedding):
                continue
            weight = module.weight
            key = memory_key(weight)
            if key not in by_memory:
                rows = by_memory[key] = ModifiedRows(path, Box.whole(tuple(weight.shape)), weight.device)
                yield TrackedShard(rows, weight, self._by_optimizer(rows, weight))
            hook = _PlainHook(by_memory[key], has_max_norm=module.max_norm is not None)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def _by_optimizer(self, rows: ModifiedRows, weight: Tensor) -> "_SteppedTable":
        table = _SteppedTable(rows)
        self._stepped.setdefault(weight.untyped_storage().data_ptr(), []).append(table)
        return table

    def _optimizer_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if isinstance(optimizer, KeyedOptimizer):
            return  # a wrapper: the optimizer within reports for itself
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for table in self._stepped.get(parameter.untyped_storage().data_ptr(), ()):
                    table.optimizer, table.parameter = ref(optimizer), parameter
                    table.rows.stepped()
                    if not _moves_only_rows_with_gradient(optimizer, group):
                        table.rows.mark_all()


@dataclass(frozen=True, eq=False)
class _FusedState:
    """The row-shaped optimizer state of one table of a fused kernel, asked for anew each time."""

    kernel: Any
    index: int

    def __call__(self) -> Sequence[Tensor]:
        weight = self.kernel.split_embedding_weights()[self.index]
        states = self.kernel.get_optimizer_state()[self.index] if self.kernel.get_optimizer_state() else {}
        return [state for state in states.values() if state.dim() and len(state) == len(weight)]


@dataclass(eq=False)
class _SteppedTable:
    """A table that a ``torch.optim`` optimizer modifies; which one, and so its state, shows at the first step."""

    rows: ModifiedRows
    optimizer: ReferenceType[Optimizer] | None = None
    parameter: Tensor | None = None

    def __call__(self) -> Sequence[Tensor]:
        optimizer = self.optimizer() if self.optimizer else None
        if optimizer is None or self.parameter is None:
            return ()
        states = optimizer.state.get(self.parameter, {})
        return [
            state
            for state in states.values()
            if isinstance(state, Tensor) and state.dim() and len(state) == self.rows.box.num_rows
        ]


@dataclass(frozen=True, eq=False)
class _PlainHook:
    """Forward hook of an ``nn.EmbeddingBag`` or ``nn.Embedding``."""

    rows: ModifiedRows
    has_max_norm: bool

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        ids = (args[0] if args else kwargs["input"]).detach().reshape(-1)
        if self.has_max_norm:  # the lookup itself renormalises rows, in evaluation too
            self.rows.mark(ids)
        _on_gradient(output, lambda: self.rows.mark_until_step(ids))


def _on_gradient(output: Tensor, act: Callable[[], None]) -> None:
    if output.requires_grad:
        output.register_hook(lambda _: act())


def _moves_only_rows_with_gradient(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a step leaves rows alone whose gradient is zero; in doubt it does not."""
    if isinstance(optimizer, SparseAdam):
        return True
    is_plain = not group.get("weight_decay") and not group.get("momentum")
    return is_plain and isinstance(optimizer, SGD | Adagrad | RowWiseAdagrad)


def _box(table: Any, weight: Tensor) -> Box:
    """Where a shard lies in its table; replicated tables have no metadata."""
    if table.local_metadata is None:
        return Box.whole(tuple(weight.shape))
    return Box(tuple(table.local_metadata.shard_offsets), tuple(table.local_metadata.shard_sizes))

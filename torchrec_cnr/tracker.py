"""The row tracker: notices which rows of a model's tables are modified. The only module that knows TorchRec.

Rows are marked when the gradient of their lookup arrives, by a hook on the lookup's output. That is the moment at
which TorchRec's fused optimizers modify them: evaluation marks nothing, and pipelines that look the next batch up
before the present one is trained cannot lose an update to a cut in between. The hooks sit on TorchRec's lookup kernels,
not in the one slot of ``register_post_lookup_tracker_fn``: a tracker registered there, before or after, keeps working.

Tables that a ``torch.optim`` optimizer modifies are marked once more when it steps; see ``stepped``.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding, BatchedDenseEmbeddingBag
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.manifest import Head
from torchrec_cnr.modified import ModifiedRows, TrackedRows, TrackedShard
from torchrec_cnr.rows import Box
from torchrec_cnr.shards import local_shards, memory_key
from torchrec_cnr.stepped import SteppedTables, has_rows
from torchrec_cnr.untracked import ReferenceDigests

logger = logging.getLogger(__name__)

_WRAPPERS = ("_dmp_wrapped_module", "module")  # parts of a module's path that are in no FQN


class RowTracker(TrackedRows):
    """Tracks the modified rows of all embedding tables of a model, on this rank.

    Finds sharded EmbeddingBagCollections and EmbeddingCollections (under DistributedModelParallel or not), and every
    ``nn.EmbeddingBag`` and ``nn.Embedding``, those inside unsharded collections included.

    Args:
        model: The model, sharded already.
        verify_untracked: At every save, check that the rows that are not marked are, bit for bit, what they were at
            the save before or the load in between; their row-shaped optimizer state too. A save that finds others
            fails. For this a digest is kept of each row, and another of each of its optimizer states: 8 bytes each, on
            the table's device. Every save then reads the tables whole, and so does the end of every load.

    Raises:
        ConfigurationError: The model has no table, or one that cannot be tracked: its rows do not lie in memory (SSD
            and key-value kernels), or replicas of it are synchronised behind the optimizer (``DMPCollection``).
    """

    def __init__(self, model: nn.Module, *, verify_untracked: bool = False) -> None:
        if isinstance(model, DMPCollection):
            raise ConfigurationError("DMPCollection (2-D parallel) cannot be tracked yet; save it without a tracker")
        self._handles: list[RemovableHandle] = []
        self._stepped = SteppedTables(rows_with_gradient_only=(RowWiseAdagrad,))
        self._sharded_tables: set[str] = set()
        self._is_closed = False
        found = [*self._track_sharded(model), *self._track_plain(model)]
        if not found and not self._sharded_tables:
            raise ConfigurationError(f"{type(model).__name__} has no embedding table; track the sharded model")
        super().__init__(found)
        self._references = ReferenceDigests(self.shards if verify_untracked else ())
        if self._stepped:
            self._handles.append(self._stepped.watch())

    def mark(self, table: str, rows: Tensor) -> None:
        """Mark rows that something else than training modifies.

        Args:
            table: FQN of the table in the model, or its end, such as its name.
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

    def freeze(self) -> None:
        """Cut every shard at once.

        Raises:
            ConfigurationError: The tracker was closed.
            UntrackedRowsError: Rows that are not marked have changed since the last cut; nothing was cut.
        """
        if self._is_closed:
            raise ConfigurationError("the tracker was closed and has not seen what was modified since; make a new one")
        self._references.check()
        super().freeze()

    def forget(self) -> None:
        """The tables are about to be overwritten."""
        super().forget()
        self._references.drop()

    def restore(self, head: Head) -> None:
        """The tables hold what ``head`` holds."""
        super().restore(head)
        self._references.take()

    def close(self) -> None:
        """Remove all hooks; nothing is marked from here on, and nothing can be saved with this tracker."""
        self._is_closed = True
        self._references = ReferenceDigests(())
        while self._handles:
            self._handles.pop().remove()

    def _named(self, table: str) -> Sequence[TrackedShard]:
        end = f".{table.removesuffix('.weight')}"
        names = {shard.rows.name for shard in self.shards} | self._sharded_tables
        if not any(f".{name}".endswith(end) for name in names):
            raise ConfigurationError(f"no table {table!r} is tracked; there are {', '.join(sorted(names))}")
        return [shard for shard in self.shards if f".{shard.rows.name}".endswith(end)]

    def _track_sharded(self, model: nn.Module) -> Iterator[TrackedShard]:
        for path, module in model.named_modules():
            if not isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
                continue
            tables = "embedding_bags" if isinstance(module, ShardedEmbeddingBagCollection) else "embeddings"
            prefix = _fqn(path, tables)
            self._sharded_tables.update(f"{prefix}.{table}" for table in module.module_sharding_plan)
            if module.post_lookup_tracker_fn is not None:
                logger.info("%s has a lookup tracker already; it keeps running, beside the row tracker", path)
            found: list[TrackedShard] = []
            for lookup in module._lookups:
                kernels = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
                for kernel in kernels._emb_modules:
                    found += self._track_kernel(prefix, kernel)
            hook = _LoadHook([(f"{shard.rows.name.removeprefix(_fqn(path) + '.')}.weight", shard) for shard in found])
            self._handles.append(_before_load(module, hook))
            yield from found

    def _track_kernel(self, prefix: str, kernel: Any) -> Iterator[TrackedShard]:
        """The shards of one TorchRec lookup kernel, which looks up several tables at once."""
        by_feature: list[ModifiedRows] = []
        weights = kernel.split_embedding_weights()
        for index, (table, weight) in enumerate(zip(kernel._config.embedding_tables, weights, strict=True)):
            if type(weight) not in (Tensor, nn.Parameter):
                raise ConfigurationError(
                    f"{prefix}.{table.name}: {type(kernel).__name__} keeps rows outside of memory; leave its module "
                    "out of the tracked model"
                )
            rows = ModifiedRows(f"{prefix}.{table.name}", _box(table, weight), weight.device)
            by_feature += [rows] * len(table.feature_names)
            if isinstance(kernel, BatchedDenseEmbedding | BatchedDenseEmbeddingBag):
                yield self._stepped.add(rows, weight)
            else:
                yield TrackedShard(rows, weight, _FusedState(kernel.emb_module, index))

        def mark(features: KeyedJaggedTensor) -> None:
            ids, offsets = features.values(), features.offset_per_key()
            for rows, (start, stop) in zip(by_feature, pairwise(offsets), strict=True):
                if start < stop:
                    rows.mark(ids[start:stop])

        self._handles.append(
            kernel.register_forward_hook(lambda _, args, output: _on_gradient(output, lambda: mark(args[0])))
        )

    def _track_plain(self, model: nn.Module) -> Iterator[TrackedShard]:
        found: dict[int, TrackedShard] = {}
        for path, module in model.named_modules():
            if not isinstance(module, nn.EmbeddingBag | nn.Embedding):
                continue
            weight = module.weight
            if id(weight) not in found:
                rows = ModifiedRows(_fqn(path), Box.whole(tuple(weight.shape)), weight.device)
                found[id(weight)] = self._stepped.add(rows, weight)
                yield found[id(weight)]
            shard = found[id(weight)]
            hook = _PlainHook(shard.rows, has_max_norm=module.max_norm is not None)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
            self._handles.append(_before_load(module, _LoadHook([("weight", shard)])))


@dataclass(frozen=True, eq=False)
class _FusedState:
    """The row-shaped optimizer state of one table of a fused kernel."""

    kernel: Any
    index: int

    def __call__(self) -> Sequence[Tensor]:
        num_rows = len(self.kernel.split_embedding_weights()[self.index])
        states = self.kernel.get_optimizer_state()
        return [state for state in states[self.index].values() if has_rows(state, num_rows)] if states else ()


@dataclass(frozen=True, eq=False)
class _PlainHook:
    """Forward hook of an ``nn.EmbeddingBag`` or ``nn.Embedding``."""

    rows: ModifiedRows
    has_max_norm: bool

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        ids = (args[0] if args else kwargs["input"]).detach().reshape(-1)
        if self.has_max_norm:  # the lookup itself renormalises rows, in evaluation too
            self.rows.mark(ids)
        _on_gradient(output, lambda: self.rows.mark(ids))


@dataclass(frozen=True, eq=False)
class _LoadHook:
    """Hook of ``load_state_dict``: tables that are overwritten from elsewhere are modified in every row."""

    shards: Sequence[tuple[str, TrackedShard]]

    def __call__(self, _: nn.Module, state_dict: Mapping[str, Any], prefix: str, *__: Any) -> None:
        for name, shard in self.shards:
            new = state_dict.get(f"{prefix}{name}")
            keys = [memory_key(local.tensor) for local in local_shards(new)]
            if new is not None and memory_key(shard.weight) not in keys:
                shard.rows.mark_all()


def _on_gradient(output: Tensor, act: Callable[[], None]) -> None:
    if output.requires_grad:
        output.register_hook(lambda _: act())


def _before_load(module: nn.Module, hook: _LoadHook) -> RemovableHandle:
    handle: RemovableHandle = module.register_load_state_dict_pre_hook(hook)
    return handle


def _fqn(path: str, *more: str) -> str:
    return ".".join([*(part for part in path.split(".") if part and part not in _WRAPPERS), *more])


def _box(table: Any, weight: Tensor) -> Box:
    """Where a shard lies in its table; replicated tables have no metadata."""
    if table.local_metadata is None:
        return Box.whole(tuple(weight.shape))
    return Box(tuple(table.local_metadata.shard_offsets), tuple(table.local_metadata.shard_sizes))

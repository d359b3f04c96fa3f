"""The tracker itself: finds the tables of a model, and is told of what nothing can notice."""

from collections.abc import Sequence

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed.embedding_tower_sharding import ShardedEmbeddingTower, ShardedEmbeddingTowerCollection

from torchrec_cnr.arguments import check_type
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.human_text import count_text
from torchrec_cnr.lineage.checkpoint import Head
from torchrec_cnr.tracking.hooks import Hooks, modules_below
from torchrec_cnr.tracking.managed_collisions import IdMaps, track_evictions
from torchrec_cnr.tracking.plain_tables import Aliases, track_plain
from torchrec_cnr.tracking.replicas import track_replicas
from torchrec_cnr.tracking.sharded_tables import device_caches, num_rows_of, sharded_collections, track_collection
from torchrec_cnr.tracking.torch_optim import OptimizerTables
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard
from torchrec_cnr.tracking.untracked_rows import ReferenceDigests

_TOWERS = (ShardedEmbeddingTower, ShardedEmbeddingTowerCollection)  # some ranks know nothing of their tables

_ROW_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# A caller may be in inference mode, where tensors are made that nothing outside of it can write to.
_OUTSIDE_INFERENCE = torch.inference_mode(False)


class RowTracker(TrackedRows):
    """Tracks the modified rows of all embedding tables of a model, on this rank.

    Finds sharded EmbeddingBagCollections and EmbeddingCollections, also inside towers, feature processors and
    managed-collision modules (under DistributedModelParallel, DMPCollection, or neither), and every ``nn.EmbeddingBag``
    and ``nn.Embedding``, those inside unsharded collections included.

    Writes in place by anything but training (``load_state_dict``, ``reset_parameters``, an assignment to rows) are
    noticed at the next cut or step by PyTorch's version counters, which all tables of one kernel share: then all rows
    of these tables count as modified. Writes through ``.data``, by collectives such as ``dist.broadcast``, or by
    custom kernels cannot be detected: mark their rows.

    Args:
        model: The model, sharded already.
        verify_untracked: At every save, check that the rows that are not marked are, bit for bit, what they were at
            the save before or the load in between; their row-shaped optimizer state too. A save that finds others
            fails. For this a digest is kept of each row, and another of each of its optimizer states: 8 bytes each, on
            the table's device. Every save then reads the tables whole, and so does the end of every load.

    Raises:
        ConfigurationError: The model has no table, or one that cannot be tracked: its rows do not lie in memory (SSD
            and key-value kernels, ``DMPCollection`` with ``FULLY_SHARDED``), or it is a DTensor (FSDP2, tensor
            parallelism), or in shared memory (Hogwild), where other processes train it.
    """

    @_OUTSIDE_INFERENCE
    def __init__(self, model: nn.Module, *, verify_untracked: bool = False) -> None:
        check_type("model", model, nn.Module, "a torch module")
        self._id_maps = IdMaps(model)
        self._hooks = Hooks()
        self._is_closed = False
        self._num_rows: dict[str, int] = {}
        self._device_caches: list[SplitTableBatchedEmbeddingBagsCodegen] = []
        stepped = OptimizerTables()
        sharded: list[TrackedShard] = []
        for path, module in sharded_collections(model):
            self._num_rows.update((f"{path}.{table}", num_rows) for table, num_rows in num_rows_of(module).items())
            sharded += track_collection(path, module, self._hooks, stepped)
            self._device_caches += device_caches(module)
        track_evictions(model, self._hooks, sharded)
        self._replicas = track_replicas(model, self._hooks, sharded)
        plain = list(track_plain(model, self._hooks, stepped))
        self._num_rows.update((shard.rows.name, shard.rows.box.num_rows) for shard in plain)
        self._aliases = Aliases(model, plain)
        found = [*sharded, *plain]
        self._has_tables_elsewhere = any(isinstance(module, _TOWERS) for _, module in modules_below(model))
        if not found and not self._num_rows and not self._has_tables_elsewhere:
            raise ConfigurationError(f"{type(model).__name__} has no embedding table; track the sharded model")
        super().__init__(found)
        self._check_shared()
        self._references = ReferenceDigests(self.shards if verify_untracked else ())
        self._stepped = stepped
        if stepped:
            for handle in stepped.watch():
                self._hooks.add(handle)

    def __repr__(self) -> str:
        num_tables = len({shard.rows.name for shard in self.shards})
        num_rows = sum(shard.rows.box.num_rows for shard in self.shards)
        try:
            modified = f"{self.num_modified:,}"
        except RuntimeError:  # such as a device that has failed: a repr shows what it can
            modified = "?"
        closed = ", closed" if self._is_closed else ""
        return f"RowTracker({count_text(num_tables, 'table')}, {modified} of {num_rows:,} rows modified{closed})"

    @property
    def num_modified(self) -> int:
        """Rows marked on this rank since the last cut."""
        return super().num_modified + (self._replicas.num_modified if self._replicas is not None else 0)

    def mark(self, table: str, rows: Tensor) -> None:
        """Mark rows that something else than training has just modified.

        Call it right after the write, before the next step or save. It accounts for all writes in place to this table
        up to now, and to tables that share its storage; a ``load_state_dict`` of the model still counts as a write to
        all rows.

        Args:
            table: FQN of the table in the model, or its end, such as its name.
            rows: int [N] of any integer dtype, numbered within the whole table; those on other ranks are left to them.

        Raises:
            ConfigurationError: No table has this name, the table has no such row, or these are no row numbers.
        """
        kind = getattr(rows, "dtype", type(rows).__name__)
        if kind not in _ROW_DTYPES and (not isinstance(kind, torch.dtype) or rows.numel()):
            raise ConfigurationError(f"rows of table {table!r}: expected a tensor of integers, got {kind}")
        rows = rows.long().reshape(-1)  # a comparison would wrap a table's bounds to a narrower dtype
        found = self._named(table)
        self._check_rows(table, rows)
        for tracked in found:
            box = tracked.rows.box
            local = rows[(rows >= box.offsets[0]) & (rows < box.offsets[0] + box.num_rows)] - box.offsets[0]
            tracked.rows.mark(local.to(tracked.weight.device))
            for shard in self.shards:
                if shard.shares_storage(tracked):
                    shard.accept_writes()

    def mark_all(self, table: str | None = None) -> None:
        """Mark every row, of one table or of all.

        Raises:
            ConfigurationError: No table has this name.
        """
        for tracked in self.shards if table is None else self._named(table):
            tracked.rows.mark_all()

    @_OUTSIDE_INFERENCE
    def freeze(self) -> None:
        """Cut every shard at once.

        Raises:
            ConfigurationError: The tracker was closed, or a table was put into shared memory.
            UntrackedRowsError: Rows that are not marked have changed since the last cut; nothing was cut.
        """
        if self._is_closed:
            raise ConfigurationError("the tracker was closed and has not seen what was modified since; make a new one")
        self._check_shared()
        self._aliases.find()
        self.check_writes()
        self._flush()
        if self._replicas is not None:
            self._replicas.before_cut()
        self._references.check()
        super().freeze()

    @_OUTSIDE_INFERENCE
    def commit(self, head: Head, has_heat: bool = True) -> None:
        """The save in flight became ``head``; ``has_heat`` says whether rows of different heat will be kept apart."""
        super().commit(head, has_heat)

    def forget(self) -> None:
        """The tables are about to be overwritten: rows in caches of devices go, or they would be written over them."""
        super().forget()
        self._references.drop()
        self._flush()
        for kernel in self._device_caches:
            kernel.reset_cache_states()

    def _flush(self) -> None:
        """Tables in host memory hold what their caches on devices hold; what was trained there is marked already."""
        if not self._device_caches:
            return
        for kernel in self._device_caches:
            kernel.flush()
        for device in {kernel.current_device for kernel in self._device_caches if kernel.lxu_cache_weights.is_cuda}:
            torch.cuda.synchronize(device)  # the rows are read in host memory
        for shard in self.shards:
            shard.accept_writes()

    @_OUTSIDE_INFERENCE
    def restore(self, head: Head) -> None:
        """The tables hold what ``head`` holds.

        Raises:
            StateMismatchError: An id map cannot be divided as the ranks divide its table.
        """
        self._id_maps.restored()
        super().restore(head)
        if self._replicas is not None:
            self._replicas.restored()
        self._references.take()

    def close(self) -> None:
        """Remove all hooks; nothing is marked from here on, and nothing can be saved with this tracker."""
        self._is_closed = True
        self.saves = None
        self._references = ReferenceDigests(())
        self._hooks.remove()

    def _named(self, table: str) -> Sequence[TrackedShard]:
        if not any(_is_named(name, table) for name in self._num_rows) and not self._has_tables_elsewhere:
            raise ConfigurationError(f"no table {table!r} is tracked; there are {', '.join(sorted(self._num_rows))}")
        return [shard for shard in self.shards if _is_named(shard.rows.name, table)]

    def _check_shared(self) -> None:
        for shard in self.shards:
            if shard.weight.device.type == "cpu" and shard.weight.is_shared():
                raise ConfigurationError(
                    f"table {shard.rows.name!r} is in shared memory, where other processes can modify its rows without "
                    "this tracker: train it in one process, or save it without a tracker"
                )

    def _check_rows(self, table: str, rows: Tensor) -> None:
        if not len(rows):
            return
        first, last = int(rows.min()), int(rows.max())
        for name, num_rows in self._num_rows.items():
            if _is_named(name, table) and (first < 0 or last >= num_rows):
                raise ConfigurationError(
                    f"table {name!r} has rows 0 to {num_rows - 1}, got row {first if first < 0 else last}; nothing was "
                    "marked: pass row numbers of the whole table"
                )


def _is_named(name: str, table: str) -> bool:
    """Whether a table is meant by its FQN, or the end of it."""
    return f".{name}".endswith(f".{table.removesuffix('.weight')}")

"""The tracker: finds the tables of a model, and offers methods to mark writes that it cannot detect."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed.embedding_tower_sharding import ShardedEmbeddingTower, ShardedEmbeddingTowerCollection

from torchrec_cnr.arguments import check_type
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.human_text import count_text
from torchrec_cnr.lineage.checkpoint import Head
from torchrec_cnr.tracking.hooks import Hooks, modules_below
from torchrec_cnr.tracking.id_map_buffers import IdMapModule
from torchrec_cnr.tracking.managed_collisions import IdMaps, find_id_maps, track_evictions
from torchrec_cnr.tracking.plain_tables import Aliases, track_plain
from torchrec_cnr.tracking.replicas import Replicas, track_replicas
from torchrec_cnr.tracking.sharded_tables import (
    ShardedCollection,
    device_caches,
    kernels_of,
    num_rows_of,
    sharded_collections,
    track_collection,
)
from torchrec_cnr.tracking.torch_optim import OptimizerTables
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard
from torchrec_cnr.tracking.untracked_rows import ReferenceDigests

_TOWERS = (ShardedEmbeddingTower, ShardedEmbeddingTowerCollection)  # only some ranks have the modules of their tables

_ROW_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# A caller may be in inference mode. Tensors that are made in it cannot be written to outside of it.
_OUTSIDE_INFERENCE = torch.inference_mode(False)


class RowTracker(TrackedRows):
    """Tracker of the modified rows of all embedding tables of a model, on this rank.

    It finds sharded ``EmbeddingBagCollection`` and ``EmbeddingCollection`` modules, also inside towers, feature
    processors and managed-collision modules. They may be under ``DistributedModelParallel``, ``DMPCollection``, or
    neither. It also finds every ``nn.EmbeddingBag`` and ``nn.Embedding``, including those inside unsharded collections.

    The tracker detects in-place writes by anything but training (``load_state_dict``, ``reset_parameters``, an
    assignment to rows) at the next save or step. It uses PyTorch's version counters, which all tables of one kernel
    share, so all rows of these tables count as modified. Writes through ``.data``, by collectives such as
    ``dist.broadcast``, or by custom kernels cannot be detected; call ``mark`` after them.

    A trainer uses ``num_modified``, ``mark``, ``mark_all``, ``forget``, ``rebind`` and ``close``. The planners call
    all else.

    Args:
        model: The sharded model.
        verify_untracked: Whether to check at every save that all unmarked rows, and their row-shaped optimizer state,
            are bit for bit unchanged since the previous save or load. A save that finds a changed row fails. The
            tracker keeps digests on the table's device: 8 bytes per row, and 8 more for each of its optimizer states.
            Every save and the end of every load then read the tables completely.

    Raises:
        ConfigurationError: The model has no table, or one that cannot be tracked. Its rows may not be in memory (SSD
            and key-value kernels, ``DMPCollection`` with ``FULLY_SHARDED``). Or it is a DTensor (FSDP2, tensor
            parallelism), or in shared memory, where other processes train it (Hogwild).

    Examples:
        >>> tracker = cnr.RowTracker(model)
        >>> train()
        >>> tracker.num_modified
        100
        >>> model["users"].weight.data[500] = 0.0  # a write through .data, which cannot be detected
        >>> tracker.mark("users", torch.tensor([500]))
        >>> tracker.num_modified
        101
    """

    _forks: "Sequence[RowTracker]" = ()

    @_OUTSIDE_INFERENCE
    def __init__(self, model: nn.Module, *, verify_untracked: bool = False) -> None:
        self._is_closed = False
        self._model = model
        self._tables = _Tables.of(model, verify_untracked)
        super().__init__(self._tables.shards, self._tables.id_map_modules)

    def fork(self) -> "RowTracker":
        """Return a second tracker of the same model, whose saves go to another root.

        Training marks rows in both, and each knows which of them its own checkpoints lack. ``mark``, ``mark_all``,
        ``forget``, ``rebind`` and ``close`` of this tracker apply to the fork, too. An asynchronous save with either
        needs ``CNRStorageWriter(tracker=...)``.

        Raises:
            ConfigurationError: The tracker was closed.

        Examples:
            >>> fork = tracker.fork()
            >>> train()
            >>> fork.num_modified
            100
            >>> fork.close()
        """
        if self._is_closed:
            raise ConfigurationError("the tracker was closed: make a new one")
        fork = RowTracker(self._model, verify_untracked=self._tables.verifies_untracked)
        self._forks = [*self._open_forks(), fork]
        return fork

    @_OUTSIDE_INFERENCE
    def rebind(self, model: nn.Module) -> None:
        """Track the tables of a model that was resharded, such as by ``DistributedModelParallel.reshard``.

        Collective: call on every rank, right after that, and before training goes on. The next save is a baseline.

        Args:
            model: The model, or another one that replaces it.

        Raises:
            ConfigurationError: The tracker was closed, or the model has no table, or one that cannot be tracked.

        Examples:
            >>> model.reshard(changed_plan)  # doctest: +SKIP
            >>> tracker.rebind(model)
            >>> tracker.num_modified
            0
        """
        if self._is_closed:
            raise ConfigurationError("the tracker was closed: make a new one")
        tables = _Tables.of(model, self._tables.verifies_untracked)
        self._tables.hooks.remove()
        self._tables, self.shards, self.id_map_modules = tables, tuple(tables.shards), tuple(tables.id_map_modules)
        self.head = self.pending = None
        self._model = model
        for fork in self._open_forks():
            fork.rebind(model)

    def _open_forks(self) -> "Sequence[RowTracker]":
        self._forks = [fork for fork in self._forks if not fork._is_closed]
        return self._forks

    def check_model(self) -> None:
        """Check that the model's tables are those that are tracked.

        Raises:
            ConfigurationError: A module was resharded.
        """
        for path, module, kernels in self._tables.kernels:
            if not self._is_closed and [*map(id, kernels_of(module))] != [*map(id, kernels)]:
                raise ConfigurationError(
                    f"the tables of {path!r} were resharded after the tracker was made, so it does not mark their "
                    "rows: call tracker.rebind(model) after DistributedModelParallel.reshard, on every rank; the next "
                    "save is then a baseline"
                )

    def __repr__(self) -> str:
        num_tables = len({shard.rows.name for shard in self.shards})
        num_rows = sum(shard.rows.box.num_rows for shard in self.shards)
        try:
            modified_text = f"{self.num_modified:,}"
        except RuntimeError:  # a device may have failed, and a repr must not raise
            modified_text = "?"
        closed_text = ", closed" if self._is_closed else ""
        return (
            f"RowTracker({count_text(num_tables, 'table')}, {modified_text} of {num_rows:,} rows modified{closed_text})"
        )

    @property
    def num_modified(self) -> int:
        """Number of rows marked on this rank since the last snapshot."""
        return super().num_modified + (self._tables.replicas.num_modified if self._tables.replicas is not None else 0)

    def mark(self, table: str, rows: Tensor) -> None:
        """Mark rows that something other than training has just modified.

        Call this right after the write, before the next step or save. It accounts for all in-place writes to this table
        up to now, and to tables that share its storage. A ``load_state_dict`` of the model still counts as a write to
        all rows.

        Args:
            table: FQN of the table in the model, or the end of it, such as the table's name.
            rows: int [N] of any integer dtype, row numbers within the whole table; rows of other ranks are ignored.

        Raises:
            ConfigurationError: No table has this name, the table has no such row, or ``rows`` is not a tensor of
                integers.
        """
        kind = getattr(rows, "dtype", type(rows).__name__)
        if kind not in _ROW_DTYPES and (not isinstance(kind, torch.dtype) or rows.numel()):
            raise ConfigurationError(f"rows of table {table!r}: expected a tensor of integers, got {kind}")
        rows = rows.long().reshape(-1)  # in a narrower dtype, a comparison would wrap the table's bounds
        named_shards = self._named(table)
        self._check_rows(table, rows)
        for named_shard in named_shards:
            box = named_shard.rows.box
            local = rows[(rows >= box.offsets[0]) & (rows < box.offsets[0] + box.num_rows)] - box.offsets[0]
            named_shard.rows.mark(local.to(named_shard.weight.device))
            for shard in self.shards:
                if shard.shares_storage(named_shard):
                    shard.accept_writes()
        for fork in self._open_forks():
            fork.mark(table, rows)

    def mark_all(self, table: str | None = None) -> None:
        """Mark every row, of one table or of all.

        Raises:
            ConfigurationError: No table has this name.
        """
        for shard in self.shards if table is None else self._named(table):
            shard.rows.mark_all()
        for fork in self._open_forks():
            fork.mark_all(table)

    @_OUTSIDE_INFERENCE
    def freeze(self) -> None:
        """Freeze the modified rows of all shards for a save. The planner calls this.

        Raises:
            ConfigurationError: The tracker was closed, or a table was put into shared memory.
            UntrackedRowsError: Rows that are not marked have changed since the last snapshot; nothing was frozen.
        """
        if self._is_closed:
            raise ConfigurationError("the tracker was closed, and has missed later modifications: make a new one")
        _check_shared(self.shards)
        self._tables.aliases.find()
        self.check_writes()
        self._flush()
        if self._tables.replicas is not None:
            self._tables.replicas.before_cut()
        self._tables.references.check()
        super().freeze()

    @_OUTSIDE_INFERENCE
    def commit(self, head: Head, has_heat: bool = True) -> None:
        """Commit the frozen rows: their save became ``head``. The planner calls this.

        Args:
            head: The committed checkpoint.
            has_heat: Whether to record how often rows are modified, for ``Compacted``.
        """
        super().commit(head, has_heat)

    def forget(self) -> None:
        """Make the next save a baseline, as after a load that failed when it had changed tensors.

        Caches on devices are written back and emptied, so that they do not overwrite loaded rows later.
        """
        super().forget()
        self._tables.references.drop()
        self._flush()
        for kernel in self._tables.device_caches:
            kernel.reset_cache_states()
        for fork in self._open_forks():
            fork.forget()

    def _flush(self) -> None:
        """Write rows in device caches back to the tables in host memory. Their modifications are already marked."""
        if not self._tables.device_caches:
            return
        for kernel in self._tables.device_caches:
            kernel.flush()
        for device in {
            kernel.current_device for kernel in self._tables.device_caches if kernel.lxu_cache_weights.is_cuda
        }:
            torch.cuda.synchronize(device)  # a save reads the rows in host memory
        for shard in self.shards:
            shard.accept_writes()

    @_OUTSIDE_INFERENCE
    def restore(self, head: Head, known_buffers: Collection[int] = ()) -> None:
        """Record that the tables hold what ``head`` holds. ``CNRLoadPlanner`` calls this after a load.

        Args:
            head: The checkpoint that was loaded.
            known_buffers: Ids of the id map buffers that it has in the order of a snapshot; others are stored whole.

        Raises:
            StateMismatchError: An id map cannot be divided as the ranks divide its table.
        """
        self._tables.id_maps.restored()
        super().restore(head, known_buffers)
        if self._tables.replicas is not None:
            self._tables.replicas.restored()
        self._tables.references.take()

    def close(self) -> None:
        """Remove all hooks. From now on nothing is marked, and saves with this tracker fail."""
        for fork in self._open_forks():
            fork.close()
        self._is_closed = True
        self.saves = None
        self._tables.hooks.remove()
        self.id_map_modules = ()  # their copies of the buffers take memory
        self._tables = replace(self._tables, references=ReferenceDigests(()), id_map_modules=())

    def _named(self, table: str) -> Sequence[TrackedShard]:
        if not any(_is_named(name, table) for name in self._tables.num_rows) and not self._tables.has_tables_elsewhere:
            raise ConfigurationError(
                f"unknown table {table!r}; tracked tables: {', '.join(sorted(self._tables.num_rows))}"
            )
        return [shard for shard in self.shards if _is_named(shard.rows.name, table)]

    def _check_rows(self, table: str, rows: Tensor) -> None:
        if not len(rows):
            return
        first, last = int(rows.min()), int(rows.max())
        for name, num_rows in self._tables.num_rows.items():
            if _is_named(name, table) and (first < 0 or last >= num_rows):
                raise ConfigurationError(
                    f"table {name!r}: expected rows 0 to {num_rows - 1}, got row {first if first < 0 else last}; "
                    "nothing was marked: pass row numbers of the whole table"
                )


@dataclass(frozen=True, eq=False)
class _Tables:
    """The tables of a model, and what marks their rows.

    Attributes:
        shards: This rank's shards of the tables.
        num_rows: Numbers of rows of all ranks together, by table.
        kernels: The path, the module and the kernels of each sharded collection.
        device_caches: Kernels that cache rows of host memory on a device.
        hooks: All hooks.
        id_maps: The id maps of managed collisions.
        id_map_modules: The modules of these maps of which a delta has some values.
        replicas: The replicas of a 2-D parallel model, or None.
        aliases: Other tensors over the memory of unsharded tables.
        references: Digests of the rows that should be unchanged.
        verifies_untracked: Whether there are such digests.
        has_tables_elsewhere: Whether modules of some tables are only on other ranks.
    """

    shards: Sequence[TrackedShard]
    num_rows: Mapping[str, int]
    kernels: Sequence[tuple[str, ShardedCollection, Sequence[Any]]]
    device_caches: Sequence[SplitTableBatchedEmbeddingBagsCodegen]
    hooks: Hooks
    id_maps: IdMaps
    id_map_modules: Sequence[IdMapModule]
    replicas: Replicas | None
    aliases: Aliases
    references: ReferenceDigests
    verifies_untracked: bool
    has_tables_elsewhere: bool

    @classmethod
    def of(cls, model: nn.Module, verify_untracked: bool) -> "_Tables":
        """Find the tables of a model, and add hooks that mark their rows.

        Raises:
            ConfigurationError: It has no table, or one that cannot be tracked. It has no hooks then.
        """
        check_type("model", model, nn.Module, "a torch module")
        hooks = Hooks()
        try:
            return cls._with_hooks(model, verify_untracked, hooks)
        except ConfigurationError:
            hooks.remove()
            raise

    @classmethod
    def _with_hooks(cls, model: nn.Module, verify_untracked: bool, hooks: Hooks) -> "_Tables":
        num_rows: dict[str, int] = {}
        collections = list(sharded_collections(model))
        optimizer_tables = OptimizerTables()
        sharded: list[TrackedShard] = []
        for path, module in collections:
            num_rows |= {f"{path}.{table}": num for table, num in num_rows_of(module).items()}
            sharded += track_collection(path, module, hooks, optimizer_tables)
        track_evictions(model, hooks, sharded)
        replicas = track_replicas(model, hooks, sharded)
        plain = list(track_plain(model, hooks, optimizer_tables))
        num_rows |= {shard.rows.name: shard.rows.box.num_rows for shard in plain}
        has_tables_elsewhere = any(isinstance(module, _TOWERS) for _, module in modules_below(model))
        shards = [*sharded, *plain]
        if not shards and not num_rows and not has_tables_elsewhere:
            raise ConfigurationError(f"{type(model).__name__} has no embedding table; track the sharded model")
        _check_shared(shards)
        if optimizer_tables:
            optimizer_tables.watch()
            hooks.add(optimizer_tables)
        return cls(
            shards,
            num_rows,
            [(path, module, kernels_of(module)) for path, module in collections],
            [cache for _, module in collections for cache in device_caches(module)],
            hooks,
            IdMaps(model),
            # Replicas of a map may differ, and DCP stores one of them, each time another. So it is stored whole.
            find_id_maps(model) if replicas is None else (),
            replicas,
            Aliases(model, plain),
            ReferenceDigests(shards if verify_untracked else ()),
            verify_untracked,
            has_tables_elsewhere,
        )


def _check_shared(shards: Sequence[TrackedShard]) -> None:
    for shard in shards:
        if shard.weight.device.type == "cpu" and shard.weight.is_shared():
            raise ConfigurationError(
                f"table {shard.rows.name!r} is in shared memory, where other processes can modify its rows without "
                "this tracker: train it in one process, or save it without a tracker"
            )


def _is_named(name: str, table: str) -> bool:
    """Return whether ``table`` is this name, or the end of it."""
    return f".{name}".endswith(f".{table.removesuffix('.weight')}")

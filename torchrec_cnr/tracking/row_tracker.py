"""The tracker itself: finds the tables of a model, and is told of what nothing can notice."""

from collections.abc import Sequence

from torch import Tensor, nn
from torchrec.distributed.embedding_tower_sharding import ShardedEmbeddingTower, ShardedEmbeddingTowerCollection

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.human_text import count_text
from torchrec_cnr.lineage.checkpoint import Head
from torchrec_cnr.tracking.hooks import Hooks, modules_below
from torchrec_cnr.tracking.managed_collisions import IdMaps, track_evictions
from torchrec_cnr.tracking.plain_tables import track_plain
from torchrec_cnr.tracking.replicas import track_replicas
from torchrec_cnr.tracking.sharded_tables import sharded_collections, track_collection
from torchrec_cnr.tracking.torch_optim import OptimizerTables
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard, trackers
from torchrec_cnr.tracking.untracked_rows import ReferenceDigests

_TOWERS = (ShardedEmbeddingTower, ShardedEmbeddingTowerCollection)  # some ranks know nothing of their tables


class RowTracker(TrackedRows):
    """Tracks the modified rows of all embedding tables of a model, on this rank.

    Finds sharded EmbeddingBagCollections and EmbeddingCollections, also inside towers, feature processors and
    managed-collision modules (under DistributedModelParallel, DMPCollection, or neither), and every ``nn.EmbeddingBag``
    and ``nn.Embedding``, those inside unsharded collections included.

    Writes in place by anything but training (``load_state_dict``, ``reset_parameters``, an assignment to rows) are
    noticed at the next cut or step by PyTorch's version counters, which all tables of one kernel share: then all rows
    of these tables count as modified. Writes to ``.data``, or by kernels of your own, pass unnoticed: mark their rows.

    Args:
        model: The model, sharded already.
        verify_untracked: At every save, check that the rows that are not marked are, bit for bit, what they were at
            the save before or the load in between; their row-shaped optimizer state too. A save that finds others
            fails. For this a digest is kept of each row, and another of each of its optimizer states: 8 bytes each, on
            the table's device. Every save then reads the tables whole, and so does the end of every load.

    Raises:
        ConfigurationError: The model has no table, or one that cannot be tracked: its rows do not lie in memory (SSD
            and key-value kernels, ``DMPCollection`` with ``FULLY_SHARDED``).
    """

    def __init__(self, model: nn.Module, *, verify_untracked: bool = False) -> None:
        self._id_maps = IdMaps(model)
        self._hooks = Hooks()
        self._is_closed = False
        self._sharded_tables: set[str] = set()
        stepped = OptimizerTables()
        sharded: list[TrackedShard] = []
        for path, module in sharded_collections(model):
            self._sharded_tables.update(f"{path}.{table}" for table in module.module_sharding_plan)
            sharded += track_collection(path, module, self._hooks, stepped)
        track_evictions(model, self._hooks, sharded)
        self._replicas = track_replicas(model, self._hooks, sharded)
        found = [*sharded, *track_plain(model, self._hooks, stepped)]
        self._has_tables_elsewhere = any(isinstance(module, _TOWERS) for _, module in modules_below(model))
        if not found and not self._sharded_tables and not self._has_tables_elsewhere:
            raise ConfigurationError(f"{type(model).__name__} has no embedding table; track the sharded model")
        super().__init__(found)
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
        """Mark rows that something else than training modifies.

        Until the next save you are taken at your word: other writes in place to this table, or to one that shares its
        storage, are not looked for.

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
            for shard in self.shards:
                shard.is_told |= shard.shares_storage(tracked)

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
        self.check_writes()
        if self._replicas is not None:
            self._replicas.before_cut()
        self._references.check()
        super().freeze()

    def forget(self) -> None:
        """The tables are about to be overwritten."""
        super().forget()
        self._references.drop()

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
        trackers.plan(self, None)
        self._references = ReferenceDigests(())
        self._hooks.remove()

    def _named(self, table: str) -> Sequence[TrackedShard]:
        end = f".{table.removesuffix('.weight')}"
        names = {shard.rows.name for shard in self.shards} | self._sharded_tables
        if not any(f".{name}".endswith(end) for name in names) and not self._has_tables_elsewhere:
            raise ConfigurationError(f"no table {table!r} is tracked; there are {', '.join(sorted(names))}")
        return [shard for shard in self.shards if f".{shard.rows.name}".endswith(end)]

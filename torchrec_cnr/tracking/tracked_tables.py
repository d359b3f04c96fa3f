"""Tracked tables: the shards on this rank, the checkpoint that their marks relate to, and writes that were not marked.

Training marks the rows that it modifies. Other code may write to a table in place, such as ``load_state_dict``,
``reset_parameters`` or an assignment to some rows. Such writes increment the version counter of autograd; those of
fused kernels do not. The tracker records the counter whenever all writes of training are marked. If it then finds
another value, there was another write. The counter does not show which rows it modified, so all of them count as
modified.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.lineage.checkpoint import Head
from torchrec_cnr.sharding import MemoryKey, memory_key
from torchrec_cnr.tracking.id_map_buffers import IdMapModule
from torchrec_cnr.tracking.modified_rows import ModifiedRows, count_rows
from torchrec_cnr.tracking.row_digests import digest_rows

logger = logging.getLogger(__name__)

_PAGE_BYTES = 16 << 10
_LENGTH_BYTES = 8


class TrackedShard:
    """A shard of a table whose modified rows are recorded.

    Attributes:
        rows: Its modified rows.
        weight: Its values [num_rows, num_cols], shared with the model.
        state: Function that returns the optimizer state of its rows, each [num_rows, ...], shared with the optimizer.
        is_state_replaceable: Whether the optimizer may replace the state by other tensors, all of whose rows are then
            new.
        was_written: Whether an unmarked write has been detected since the last snapshot.
        num_accounting: Number of nested calls in progress that mark what they write.
    """

    def __init__(
        self,
        rows: ModifiedRows,
        weight: Tensor,
        state: Callable[[], Sequence[Tensor]],
        is_state_replaceable: bool = False,
    ) -> None:
        self.rows = rows
        self.weight = weight
        self.state = state
        self.is_state_replaceable = is_state_replaceable
        self.was_written = False
        self.num_accounting = 0
        self._aliases: list[Tensor] = []
        self._restored_state: int | None = None
        self.accept_writes()

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the weights and the optimizer state."""
        return (self.weight, *self.state())

    def watch(self, alias: Tensor) -> None:
        """Also detect writes through another tensor over the same memory, which has a version counter of its own."""
        if all(alias is not other for other in (self.weight, *self._aliases)):
            self._aliases.append(alias)

    def shares_storage(self, other: "TrackedShard") -> bool:
        """Return whether both shards are in one storage, and so have one version counter."""
        return self.weight.untyped_storage().data_ptr() == other.weight.untyped_storage().data_ptr()

    def accept_writes(self) -> None:
        """Record that marks account for all writes up to now."""
        self.accept_weight()
        self._state_versions = self._versions_of_state()
        self._restored_state = None

    def accept_weight(self) -> None:
        """Record that marks account for all writes to the weights up to now."""
        self._weight_version = self._version_of_weight()
        self._memory = self._memory_of_weight()

    def expect_copy(self) -> None:
        """Expect one copy of the weights onto themselves, or of other weights in their storage."""
        self._weight_version += 1

    def check_writes(self) -> None:
        """Mark all rows if something has written to them without marking rows."""
        if self.num_accounting:
            return
        versions = self._versions_of_state()
        has_moved = any(versions.get(key, version) != version for key, version in self._state_versions.items())
        if has_moved and self._restored_state is not None and self._restored_state == self._digest_of_state():
            has_moved = False
        # Some functions (conversions, vector_to_parameters) give a parameter other memory, which no counter shows.
        is_other = self._memory_of_weight() != self._memory
        if has_moved or is_other or self._version_of_weight() != self._weight_version:
            self.mark_written()
        self._state_versions = versions
        self.accept_weight()

    def mark_written(self) -> None:
        """Mark all rows, because code that does not mark rows writes to them."""
        self.rows.mark_all()
        self.was_written = True

    def restored(self) -> None:
        """Record that the shard was loaded.

        Loading ``Stateful`` objects may later copy optimizer state onto itself, which must not count as a write. So a
        digest of the state is kept. For modules, hooks detect such copies.
        """
        self.accept_writes()
        self._restored_state = self._digest_of_state()

    def check_restored(self) -> None:
        """Check for writes since the load, before training modifies the shard and they cannot be detected any more."""
        if self._restored_state is not None:
            self.check_writes()
            self._restored_state = None

    def _version_of_weight(self) -> int:
        return sum(tensor._version for tensor in (self.weight, *self._aliases))

    def _memory_of_weight(self) -> tuple[MemoryKey | None, StorageWeakRef]:
        # The address alone is not enough: the memory may have been freed and allocated again.
        return memory_key(self.weight), StorageWeakRef(self.weight.untyped_storage())

    def _versions_of_state(self) -> dict[MemoryKey, int]:
        keys = ((memory_key(tensor), tensor._version) for tensor in self.state())
        return {key: version for key, version in keys if key is not None}

    def _digest_of_state(self) -> int:
        total = 0
        for tensor in self.state():
            for rows, digests in digest_rows(tensor):
                places = torch.arange(rows.start, rows.stop, device=digests.device)
                total = hash((total, int((digests * (2 * places + 1)).sum())))
        return total


@contextmanager
def accounting(shards: Sequence[TrackedShard]) -> Iterator[None]:
    """Check for earlier writes, then run a block that itself marks all rows it writes."""
    for shard in shards:
        shard.check_writes()
        shard.num_accounting += 1
    try:
        yield
    finally:
        for shard in shards:
            shard.num_accounting -= 1
            shard.accept_writes()


class Pending:
    """A save whose outcome is not known yet.

    The save is planned, and announces its path, possibly in another process. So the path is written to memory that both
    processes share: a tensor that is sent to another process shares its memory with it.
    """

    def __init__(self) -> None:
        self._page = torch.zeros(_PAGE_BYTES, dtype=torch.uint8, device="cpu")

    def announce(self, path: str, save_id: str) -> None:
        """Record where the save goes; from now on it may write rows.

        Args:
            path: Full path of its checkpoint.
            save_id: Id of the save.

        Raises:
            ConfigurationError: The path is too long.
        """
        data = json.dumps([path, save_id]).encode()
        if len(data) > _PAGE_BYTES - _LENGTH_BYTES:
            raise ConfigurationError(f"checkpoint_id is too long: {path[:80]!r}...")
        self._page[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._page[:_LENGTH_BYTES].view(torch.int64)[0] = len(data)  # last, because a length of 0 means no path

    @property
    def place(self) -> tuple[str, str] | None:
        """Path of its checkpoint, and id of the save; None if it was not planned."""
        num_bytes = int(self._page[:_LENGTH_BYTES].view(torch.int64)[0])
        if num_bytes == 0:
            return None
        path, save_id = json.loads(self._page[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes].numpy().tobytes())
        return path, save_id


class PlannedSaves(Protocol):
    """The part of ``CNRSavePlanner`` that a tracker uses."""

    @property
    def has_planner(self) -> bool:
        """Whether a planner exists that saves with these snapshots."""
        ...


class TrackedRows:
    """All shards of tables on this rank, and the checkpoint that their marks relate to.

    Attributes:
        shards: The shards.
        id_map_modules: The managed-collision modules on this rank.
        head: The checkpoint since which the ``marked`` rows were modified; if None, the next save must be a baseline.
        pending: The save whose rows are frozen.
        num_restores: Number of restores from a checkpoint in the history of the tables.
        saves: What the saves of these tables share, set by the first ``CNRSavePlanner``; None before.
    """

    def __init__(self, shards: Sequence[TrackedShard], id_map_modules: Sequence[IdMapModule] = ()) -> None:
        self.shards = tuple(shards)
        self.id_map_modules = tuple(id_map_modules)
        self.head: Head | None = None
        self.pending: Pending | None = None
        self.num_restores = 0
        self.saves: PlannedSaves | None = None
        trackers.add(self)

    @property
    def has_rows(self) -> bool:
        """Whether this rank has any row of the tables."""
        return any(shard.rows.box.num_rows for shard in self.shards)

    @property
    def num_modified(self) -> int:
        """Number of rows marked on this rank since the last snapshot."""
        return count_rows(shard.rows.marked for shard in self.shards)

    @property
    def all_rows(self) -> Sequence[ModifiedRows]:
        """The modified rows of all shards, and those of all buffers of id maps."""
        buffers = (buffer for module in self.id_map_modules for buffer in module.buffers)
        return [*(shard.rows for shard in self.shards), *(buffer.rows for buffer in buffers)]

    def fork(self) -> "TrackedRows":
        """Return a second tracker of the same tables; see ``RowTracker.fork``."""
        raise ConfigurationError(f"a {type(self).__name__} has no model that a second tracker could track")

    def close(self) -> None:
        """Stop tracking, if this tracks a model."""

    def check_model(self) -> None:
        """Check that the shards are still those of the model's tables; the planner calls this before a save."""

    def freeze(self) -> None:
        """Freeze the modified rows of all shards for a save, and those of all id maps."""
        for module in self.id_map_modules:
            module.take()
        for rows in self.all_rows:
            rows.freeze()
        self.pending = Pending()

    def check_writes(self) -> None:
        """Mark all rows of tables with unmarked writes, and log a warning."""
        for shard in self.shards:
            shard.check_writes()
        written_names = sorted({shard.rows.name for shard in self.shards if shard.was_written})
        if written_names and self.head is not None:
            logger.warning(
                "%s: written to in place by something other than training (load_state_dict, reset_parameters, an "
                "assignment), or shares a kernel with a table that was: all rows count as modified; to mark only some, "
                "call tracker.mark(table, rows) right after such a write",
                ", ".join(written_names),
            )
        for shard in self.shards:
            shard.was_written = False

    def commit(self, head: Head, has_heat: bool = True) -> None:
        """Commit the frozen rows: their save became ``head``. ``has_heat`` says whether to record heat."""
        for rows in self.all_rows:
            rows.commit(len(head.lineage) == 1, has_heat)
        self.head, self.pending = head, None

    def rollback(self) -> None:
        """Mark the frozen rows again, because their save failed. The planner calls this."""
        for rows in self.all_rows:
            rows.rollback()
        self.pending = None

    def forget(self) -> None:
        """Forget the latest checkpoint. Until a commit or :meth:`restore`, the next save must be a baseline."""
        self.head = self.pending = None

    def restore(self, head: Head, known_buffers: Collection[int] = ()) -> None:
        """Record that the tables hold what ``head`` holds. The caller has already recorded the rows of its deltas.

        Args:
            head: The checkpoint that was loaded.
            known_buffers: Ids of the id map buffers that it has in the order of a snapshot; others are stored whole.
        """
        self.head, self.pending = head, None
        self.num_restores = head.num_restores + 1
        for shard in self.shards:
            shard.restored()
        for module in self.id_map_modules:
            module.restored(known_buffers)

    def restore_partly(self, head: Head) -> None:
        """Record that the tables hold a part of ``head``: its restores count for them, and so does this one."""
        self.num_restores = max(self.num_restores, head.num_restores + 1)


def check_tracker(tracker: object) -> None:
    """Raise an error if the argument is not a tracker, but a model, for example.

    Raises:
        ConfigurationError: It is not.
    """
    if not isinstance(tracker, TrackedRows):
        raise ConfigurationError(
            f"'tracker' must be a RowTracker of the model (got {type(tracker).__name__}): make one, RowTracker(model)"
        )


class TrackerRegistry:
    """The trackers of this process, by the memory of their tables.

    DCP passes only tensors to a stager and a reader. With the registry, a stager finds the tracker of these tensors,
    and a reader finds the trackers whose rows it overwrites. The registry keeps no tracker alive.
    """

    def __init__(self) -> None:
        self._trackers: WeakSet[TrackedRows] = WeakSet()

    def add(self, tracker: TrackedRows) -> None:
        """Add a tracker."""
        self._trackers.add(tracker)

    def planned_for(self, tensors: Iterable[Tensor]) -> list[TrackedRows]:
        """Return the trackers of some memory that have a planner.

        If there are none, return trackers without rows that have a planner: a rank may have no shard of any table.
        """
        with_planner = [tracker for tracker in self.tracking(tensors) if _has_planner(tracker)]
        return with_planner or [tracker for tracker in self._trackers if not tracker.has_rows and _has_planner(tracker)]

    def planned(self) -> list[TrackedRows]:
        """Return all trackers that have a planner."""
        return [tracker for tracker in self._trackers if _has_planner(tracker)]

    def tracking(self, tensors: Iterable[Tensor]) -> list[TrackedRows]:
        """Return the trackers with a tensor in the same storage as one of these tensors."""
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors if memory_key(tensor) is not None}
        return [
            tracker
            for tracker in self._trackers
            if any(
                tensor.untyped_storage().data_ptr() in storages
                for shard in tracker.shards
                for tensor in shard.tensors()
            )
        ]


def _has_planner(tracker: TrackedRows) -> bool:
    return tracker.saves is not None and tracker.saves.has_planner


trackers = TrackerRegistry()


def forget_overwritten(targets: Iterable[Tensor]) -> None:
    """Let the trackers of these tensors forget their latest checkpoint, because a load is about to overwrite rows.

    A load planner that has the tracker restores it afterwards. After any other load, such as one with DCP's own
    planner, some modified rows would otherwise be unmarked. The next delta would lack them.
    """
    for tracker in trackers.tracking(targets):
        tracker.forget()

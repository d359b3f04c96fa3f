"""Tracked tables: the shards on this rank, the checkpoint their marks relate to, and writes that nobody marked.

Training marks the rows it modifies. Whatever else writes to a table in place, such as ``load_state_dict``,
``reset_parameters`` or an assignment to some rows, moves the version counter by which autograd notices such writes;
fused kernels write beneath it. So a counter that moved between two points that account for every write of training
tells that there was another one. It does not tell which rows, so all of them count as modified.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.lineage.checkpoint import Head
from torchrec_cnr.sharding import MemoryKey, memory_key
from torchrec_cnr.tracking.modified_rows import ModifiedRows, count_rows
from torchrec_cnr.tracking.row_digests import digest_rows

logger = logging.getLogger(__name__)

_PAGE_BYTES = 16 << 10
_LENGTH_BYTES = 8


class TrackedShard:
    """A shard of a table whose modified rows are known.

    Attributes:
        rows: Its modified rows.
        weight: Its values [num_rows, num_cols], shared with the model.
        state: The optimizer state of its rows, each [num_rows, ...], shared with the optimizer.
        is_state_replaceable: Whether the optimizer may put other tensors in its place, all of whose rows are then new.
        was_written: Whether something unknown has written to it since the last cut.
        num_accounting: How many calls are under way that mark what they write, one within another.
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
        """Weights and optimizer state."""
        return (self.weight, *self.state())

    def watch(self, alias: Tensor) -> None:
        """Look for writes by another tensor over the same memory, which has a version counter of its own."""
        if all(alias is not other for other in (self.weight, *self._aliases)):
            self._aliases.append(alias)

    def shares_storage(self, other: "TrackedShard") -> bool:
        """Whether both lie in one storage, and so have one version counter."""
        return self.weight.untyped_storage().data_ptr() == other.weight.untyped_storage().data_ptr()

    def accept_writes(self) -> None:
        """All writes up to now are accounted for by marks."""
        self.accept_weight()
        self._state_versions = self._versions_of_state()
        self._restored_state = None

    def accept_weight(self) -> None:
        """Writes to the weights up to now are accounted for."""
        self._weight_version = self._version_of_weight()
        self._memory = self._memory_of_weight()

    def expect_copy(self) -> None:
        """The weights, or others in their storage, are about to be copied onto themselves."""
        self._weight_version += 1

    def check_writes(self) -> None:
        """Mark all rows if something has written to them that accounted for nothing."""
        if self.num_accounting:
            return
        versions = self._versions_of_state()
        has_moved = any(versions.get(key, version) != version for key, version in self._state_versions.items())
        if has_moved and self._restored_state is not None and self._restored_state == self._digest_of_state():
            has_moved = False
        # Some put other memory into a parameter, which moves no counter: conversions, vector_to_parameters.
        is_other = self._memory_of_weight() != self._memory
        if has_moved or is_other or self._version_of_weight() != self._weight_version:
            self.mark_written()
        self._state_versions = versions
        self.accept_weight()

    def mark_written(self) -> None:
        """Mark all rows: something unknown writes to them."""
        self.rows.mark_all()
        self.was_written = True

    def restored(self) -> None:
        """The shard was loaded.

        Optimizer state may be copied onto itself afterwards, as loading ``Stateful`` objects does, which is no write:
        so it is remembered what it was. Modules have hooks that tell of theirs.
        """
        self.accept_writes()
        self._restored_state = self._digest_of_state()

    def check_restored(self) -> None:
        """Training is about to modify the shard: see what was written since it was loaded, while that can be told."""
        if self._restored_state is not None:
            self.check_writes()
            self._restored_state = None

    def _version_of_weight(self) -> int:
        return sum(tensor._version for tensor in (self.weight, *self._aliases))

    def _memory_of_weight(self) -> tuple[MemoryKey | None, StorageWeakRef]:
        # An address alone may be that of memory which was freed and allocated again meanwhile.
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
    """What is written meanwhile is marked by whoever writes it; what was written before is looked for first."""
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
    """A save whose fate is not known yet.

    Where it goes is announced when it is planned, which may happen in another process. It is written into memory,
    therefore, that both share: a tensor that goes to another process takes its memory along.
    """

    def __init__(self) -> None:
        self._page = torch.zeros(_PAGE_BYTES, dtype=torch.uint8, device="cpu")

    def announce(self, path: str, save_id: str) -> None:
        """From now on, rows are written.

        Args:
            path: Full path of its checkpoint.
            save_id: The save.

        Raises:
            ConfigurationError: The path is too long.
        """
        data = json.dumps([path, save_id]).encode()
        if len(data) > _PAGE_BYTES - _LENGTH_BYTES:
            raise ConfigurationError(f"checkpoint_id is too long: {path[:80]!r}...")
        self._page[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._page[:_LENGTH_BYTES].view(torch.int64)[0] = len(data)  # last: until then nothing is there

    @property
    def place(self) -> tuple[str, str] | None:
        """Path of its checkpoint, and the save; None if it was not planned."""
        num_bytes = int(self._page[:_LENGTH_BYTES].view(torch.int64)[0])
        if num_bytes == 0:
            return None
        path, save_id = json.loads(self._page[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes].numpy().tobytes())
        return path, save_id


class PlannedSaves(Protocol):
    """What makes the cuts of a tracker's saves."""

    @property
    def has_planner(self) -> bool:
        """Whether there is a planner that saves by them."""
        ...


class TrackedRows:
    """All shards of tables on this rank, and the checkpoint that their marks relate to.

    Attributes:
        shards: The shards.
        head: The checkpoint that ``marked`` rows were modified since, or None: then only a baseline is right.
        pending: The save whose rows are frozen.
        num_restores: Restores from a checkpoint that the tables have been through.
        saves: What makes the cuts of its saves, which belongs to a package above; None until there is a planner.
    """

    def __init__(self, shards: Sequence[TrackedShard]) -> None:
        self.shards = tuple(shards)
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
        """Rows marked on this rank since the last cut."""
        return count_rows(shard.rows.marked for shard in self.shards)

    def freeze(self) -> None:
        """Cut every shard at once."""
        for shard in self.shards:
            shard.rows.freeze()
        self.pending = Pending()

    def check_writes(self) -> None:
        """Mark tables that something unknown has written to, all their rows, and say so."""
        for shard in self.shards:
            shard.check_writes()
        written = sorted({shard.rows.name for shard in self.shards if shard.was_written})
        if written and self.head is not None:
            logger.warning(
                "%s: written to in place by something else than training (load_state_dict, reset_parameters, an "
                "assignment), or shares a kernel with a table that was: all rows count as modified; to have only some, "
                "call tracker.mark(table, rows) right after such a write",
                ", ".join(written),
            )
        for shard in self.shards:
            shard.was_written = False

    def commit(self, head: Head, has_heat: bool = True) -> None:
        """The save in flight became ``head``; ``has_heat`` says whether rows of different heat will be kept apart."""
        for shard in self.shards:
            shard.rows.commit(len(head.lineage) == 1, has_heat)
        self.head, self.pending = head, None

    def rollback(self) -> None:
        """The save in flight failed."""
        for shard in self.shards:
            shard.rows.rollback()
        self.pending = None

    def forget(self) -> None:
        """No checkpoint is what rows were modified since, until a save or :meth:`restore`: only a baseline is right."""
        self.head = self.pending = None

    def restore(self, head: Head) -> None:
        """The tables hold what ``head`` holds; whoever loaded it has told the rows of its deltas."""
        self.head, self.pending = head, None
        self.num_restores = head.num_restores + 1
        for shard in self.shards:
            shard.restored()

    def restore_partly(self, head: Head) -> None:
        """The tables hold some of what ``head`` holds: they have been through its restores, and this one."""
        self.num_restores = max(self.num_restores, head.num_restores + 1)


def check_tracker(tracker: object) -> None:
    """Refuse what is no tracker, such as the model.

    Raises:
        ConfigurationError: It is not.
    """
    if not isinstance(tracker, TrackedRows):
        raise ConfigurationError(
            f"'tracker' must be a RowTracker of the model (got {type(tracker).__name__}): make one, RowTracker(model)"
        )


class TrackerRegistry:
    """The trackers of this process, found by the memory that their tables lie in.

    DCP hands a stager and a reader nothing but tensors. So this is how a stager finds the tracker that they belong to,
    and how a reader finds the trackers whose rows it overwrites. It keeps none alive.
    """

    def __init__(self) -> None:
        self._trackers: WeakSet[TrackedRows] = WeakSet()

    def add(self, tracker: TrackedRows) -> None:
        """From now on a tracker is found."""
        self._trackers.add(tracker)

    def planned_for(self, tensors: Iterable[Tensor]) -> list[TrackedRows]:
        """The trackers of some memory that have a planner.

        If none of them has, those of no rows: a rank may have no shard of any table.
        """
        found = [tracker for tracker in self.tracking(tensors) if _has_planner(tracker)]
        return found or [tracker for tracker in self._trackers if not tracker.has_rows and _has_planner(tracker)]

    def planned(self) -> list[TrackedRows]:
        """All trackers that have a planner."""
        return [tracker for tracker in self._trackers if _has_planner(tracker)]

    def tracking(self, tensors: Iterable[Tensor]) -> list[TrackedRows]:
        """The trackers of memory that one of the tensors lies in."""
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
    """Tensors are about to be loaded: whoever tracks one of them knows its rows no longer.

    A load planner that has the tracker restores it afterwards. Any other load, with DCP's own planner say, would
    otherwise leave rows that are modified and not marked, and the next delta would lack them.
    """
    for tracker in trackers.tracking(targets):
        tracker.forget()

"""The history of a run: each save, compaction and prune under its root, and the checkpoints that exist now.

A history is a value that ``read_run_history`` builds; nothing here reads a store. It computes the totals for a report.
``model_bytes`` is the size of one full checkpoint at the same quantization, and values with ``models`` in their names
are multiples of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, get_args

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.manifest import CheckpointKind

EventKind = Literal["baseline", "delta", "compaction", "prune"]

_MAX_COUNT = 1 << 62  # the limit of any count, as in a manifest


@dataclass(frozen=True)
class Event:
    """A save, a compaction or a prune.

    Attributes:
        at_ns: The time of the event, in nanoseconds since 1970.
        kind: ``baseline`` or ``delta`` for a save; ``compaction`` for a lineage that was merged into one baseline; or
            ``prune``.
        name: The directory of the checkpoint that was written, or the newest one from which files were removed.
        written_bytes: The bytes of all files that were written; 0 for a prune.
        freed_bytes: The bytes of all files that were removed after that.
        modified_share: The rows stored in a delta, divided by all rows of the tables, from 0 to 1; None for other
            kinds.
        restore_bytes: The bytes that a load of the written checkpoint reads; None for a prune, or if unknown.
        model_bytes: The bytes of a full checkpoint at that time and at the same quantization; at least 1.
        log_bytes: The bytes of rows that were written to Kafka instead of files.

    Raises:
        ConfigurationError: A value is out of range, or this kind of event has no such value.
    """

    at_ns: int
    kind: EventKind
    name: str
    written_bytes: int
    freed_bytes: int
    modified_share: float | None
    restore_bytes: int | None
    model_bytes: int
    log_bytes: int = 0

    def __post_init__(self) -> None:
        where = f"event {self.name!r}"
        _check_choice(where, "kind", self.kind, get_args(EventKind))
        for field in ("at_ns", "written_bytes", "freed_bytes", "log_bytes"):
            _check_count(where, field, getattr(self, field))
        _check_count(where, "model_bytes", self.model_bytes, least=1)
        if self.restore_bytes is not None:
            _check_count(where, "restore_bytes", self.restore_bytes)
        if self.modified_share is not None and not 0.0 <= self.modified_share <= 1.0:
            raise ConfigurationError(f"{where}: 'modified_share' must be from 0 to 1 (got {self.modified_share!r})")
        if self.kind != "delta" and self.modified_share is not None:
            raise ConfigurationError(f"{where}: a {self.kind} has no 'modified_share' (got {self.modified_share!r})")
        if self.kind == "prune" and (self.written_bytes or self.log_bytes or self.restore_bytes is not None):
            got = f"{self.written_bytes} bytes, {self.restore_bytes!r} to restore"
            raise ConfigurationError(f"{where}: a prune writes no bytes and has no restore (got {got})")

    @property
    def is_save(self) -> bool:
        """Return whether the event is a save."""
        return self.kind in get_args(CheckpointKind)

    @property
    def all_bytes(self) -> int:
        """Return the bytes that were written to files and to Kafka."""
        return self.written_bytes + self.log_bytes

    @property
    def restore_models(self) -> float | None:
        """Return what a load of the checkpoint reads, as a multiple of a full checkpoint."""
        return None if self.restore_bytes is None else self.restore_bytes / self.model_bytes


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint that exists under the root now.

    Attributes:
        name: The name of its directory.
        kind: ``baseline`` or ``delta``, as it was saved.
        created_ns: The time of its commit, in nanoseconds since 1970.
        num_bytes: The bytes of all its files.
        parent: The directory of its parent; None if it needs none.
        restore_bytes: The bytes that a load of its whole chain reads; None if unknown.
        is_compacted: Whether it was compacted since, so that it has no parent any more.

    Raises:
        ConfigurationError: A value is out of range.
    """

    name: str
    kind: CheckpointKind
    created_ns: int
    num_bytes: int
    parent: str | None
    restore_bytes: int | None
    is_compacted: bool = False

    def __post_init__(self) -> None:
        where = f"checkpoint {self.name!r}"
        _check_choice(where, "kind", self.kind, get_args(CheckpointKind))
        for field in ("created_ns", "num_bytes"):
            _check_count(where, field, getattr(self, field))
        if self.restore_bytes is not None:
            _check_count(where, "restore_bytes", self.restore_bytes)
        if not self.is_compacted and (self.parent is None) != (self.kind == "baseline"):
            raise ConfigurationError(f"{where}: a delta has a parent, a baseline has none (got {self.parent!r})")


@dataclass(frozen=True)
class Capacity:
    """The bytes stored under the root around an event.

    Attributes:
        at_ns: The time of the event, in nanoseconds since 1970.
        before_bytes: The bytes stored before the event.
        peak_bytes: The bytes stored after the event wrote its files, and before it removed others.
        after_bytes: The bytes stored after the event.
        model_bytes: The bytes of a full checkpoint at that time.
    """

    at_ns: int
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    model_bytes: int

    @property
    def peak_models(self) -> float:
        """Return the peak as a multiple of a full checkpoint."""
        return self.peak_bytes / self.model_bytes


@dataclass(frozen=True)
class RunHistory:
    """The known events under a root, and the checkpoints that exist there now.

    Attributes:
        root: The path or URL of the root.
        events: The events, in order of time.
        kept: The checkpoints that exist now, in any order.
        left_bytes: The bytes of remaining files of pruned checkpoints, which compacted ones may use.
        unreadable: The directories of checkpoints that cannot be read. They are not in ``events`` or ``kept``.
        exact_bytes: The bytes of a full checkpoint now without quantization; 0 if unknown.

    Raises:
        ConfigurationError: Events are not in order of time, or a value is out of range.
    """

    root: str
    events: tuple[Event, ...]
    kept: tuple[KeptCheckpoint, ...]
    left_bytes: int = 0
    unreadable: tuple[str, ...] = ()
    exact_bytes: int = 0

    def __post_init__(self) -> None:
        _check_count(self.root, "left_bytes", self.left_bytes)
        _check_count(self.root, "exact_bytes", self.exact_bytes)
        for earlier, later in pairwise(self.events):
            if later.at_ns < earlier.at_ns:
                raise ConfigurationError(
                    f"{self.root}: events must be in order of time: {later.name!r} at {later.at_ns} ns follows "
                    f"{earlier.name!r} at {earlier.at_ns} ns"
                )

    @cached_property
    def saves(self) -> tuple[Event, ...]:
        """Return the saves, of kept and removed checkpoints."""
        return tuple(event for event in self.events if event.is_save)

    def of_kind(self, kind: EventKind) -> tuple[Event, ...]:
        """Return the events of one kind."""
        return tuple(event for event in self.events if event.kind == kind)

    @cached_property
    def written_bytes(self) -> int:
        """Return the bytes of all files that were written, including those of compactions."""
        return sum(event.written_bytes for event in self.events)

    @cached_property
    def log_bytes(self) -> int:
        """Return the bytes of all rows that were written to Kafka."""
        return sum(event.log_bytes for event in self.events)

    @property
    def all_bytes(self) -> int:
        """Return the bytes of all files and all rows in Kafka that were written."""
        return self.written_bytes + self.log_bytes

    @cached_property
    def full_bytes(self) -> int:
        """Return the bytes that the saves would have written if each were a full checkpoint, quantized alike."""
        return sum(event.model_bytes for event in self.saves)

    @property
    def model_bytes(self) -> int | None:
        """Return the bytes of a full checkpoint now; None if there are no events."""
        return self.events[-1].model_bytes if self.events else None

    def restore_models_of(self, checkpoint: KeptCheckpoint) -> float | None:
        """Return what a load of a kept checkpoint reads, as a multiple of a full checkpoint; None if unknown.

        The full checkpoint is that of the time of the save or compaction, or the current one if that is unknown.
        """
        model_bytes = self._model_bytes_by_name.get(checkpoint.name, self.model_bytes)
        if model_bytes is None or checkpoint.restore_bytes is None:
            return None
        return checkpoint.restore_bytes / model_bytes

    @cached_property
    def _model_bytes_by_name(self) -> dict[str, int]:
        """Return the bytes of a full checkpoint when each checkpoint was last written, by name."""
        return {event.name: event.model_bytes for event in self.events if event.kind != "prune"}

    @cached_property
    def kept_bytes(self) -> int:
        """Return the bytes that are stored now."""
        return self.left_bytes + sum(checkpoint.num_bytes for checkpoint in self.kept)

    @cached_property
    def newest_first(self) -> tuple[KeptCheckpoint, ...]:
        """Return the kept checkpoints, newest first; those with the same time by name, in descending order."""
        return tuple(sorted(self.kept, key=lambda kept: (kept.created_ns, kept.name), reverse=True))

    @cached_property
    def opening_bytes(self) -> int:
        """Return the minimum of bytes stored before the first event that is consistent with events and kept bytes."""
        changes = [change for event in self.events for change in (event.written_bytes, -event.freed_bytes)]
        balances = list(accumulate(changes, initial=0))
        return max(self.kept_bytes - balances[-1], -min(balances))

    @cached_property
    def vanished_bytes(self) -> int:
        """Return the bytes that should be stored according to the events, and are not."""
        return (self.capacities[-1].after_bytes if self.capacities else self.opening_bytes) - self.kept_bytes

    @cached_property
    def capacities(self) -> tuple[Capacity, ...]:
        """Return the bytes stored under the root around each event."""
        capacities, stored_bytes = [], self.opening_bytes
        for event in self.events:
            peak_bytes = stored_bytes + event.written_bytes
            capacities.append(
                Capacity(event.at_ns, stored_bytes, peak_bytes, peak_bytes - event.freed_bytes, event.model_bytes)
            )
            stored_bytes = capacities[-1].after_bytes
        return tuple(capacities)

    @property
    def highest(self) -> Capacity | None:
        """Return the first event with the highest peak, as a multiple of a full checkpoint; None without events."""
        return max(self.capacities, key=lambda capacity: capacity.peak_models, default=None)


def _check_count(where: str, name: str, value: object, least: int = 0) -> None:
    if type(value) is not int or not least <= value <= _MAX_COUNT:
        raise ConfigurationError(f"{where}: {name!r} must be a whole number from {least} to 2^62 (got {value!r})")


def _check_choice(where: str, name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{where}: {name!r} must be one of {', '.join(choices)} (got {value!r})")

"""What happened under the root of a run: each save, compaction and prune, and what lies there now.

A history is a value, put together by whoever read the store. It adds up what a report tells, and reads nothing itself.
Where sizes are told in models, a model is one full baseline, quantized like the checkpoint that it is compared with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, get_args

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.manifest import CheckpointKind

EventKind = Literal["baseline", "delta", "compaction", "prune"]

_MAX_COUNT = 1 << 62  # of any count, as in a manifest


@dataclass(frozen=True)
class Event:
    """Something that changed what lies under a root.

    Attributes:
        at_ns: When, in nanoseconds of Unix time.
        kind: ``baseline`` or ``delta``, a save; ``compaction``, a lineage was written as one baseline; or ``prune``.
        name: Directory of the checkpoint that was written, or of the newest that something was removed from.
        written_bytes: Bytes of all files that were written; a prune writes none.
        freed_bytes: Bytes of all files that were removed, after the others had been written.
        modified_share: Rows stored in a delta as a part of all rows of the tables, 0 to 1; None for all other kinds.
        restore_bytes: What a load of the checkpoint that was written reads; None for a prune, or if it is not known.
        model_bytes: One full baseline at that time, quantized alike; at least 1.
        log_bytes: Bytes of rows that were written to a log, not to files.

    Raises:
        ConfigurationError: A value is out of its bounds, or its kind of event has no such value.
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
            raise ConfigurationError(f"{where}: a prune writes nothing that could be restored (got {got})")

    @property
    def is_save(self) -> bool:
        """Whether it is a checkpoint that the job saved."""
        return self.kind in get_args(CheckpointKind)

    @property
    def all_bytes(self) -> int:
        """Bytes that were written to files and to a log."""
        return self.written_bytes + self.log_bytes

    @property
    def restore_models(self) -> float | None:
        """What a load of the checkpoint reads, in models."""
        return None if self.restore_bytes is None else self.restore_bytes / self.model_bytes


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint that lies under the root now.

    Attributes:
        name: Its directory.
        kind: ``baseline``, whether it was saved or compacted, or ``delta``.
        created_ns: Time of its commit, in nanoseconds of Unix time.
        num_bytes: Bytes of all its files.
        parent: Directory of its parent; None for a baseline.
        restore_bytes: What a load of it reads, with the checkpoints that it stands on; None if that is not known.

    Raises:
        ConfigurationError: A value is out of its bounds.
    """

    name: str
    kind: CheckpointKind
    created_ns: int
    num_bytes: int
    parent: str | None
    restore_bytes: int | None

    def __post_init__(self) -> None:
        where = f"checkpoint {self.name!r}"
        _check_choice(where, "kind", self.kind, get_args(CheckpointKind))
        for field in ("created_ns", "num_bytes"):
            _check_count(where, field, getattr(self, field))
        if self.restore_bytes is not None:
            _check_count(where, "restore_bytes", self.restore_bytes)
        if (self.parent is None) != (self.kind == "baseline"):
            raise ConfigurationError(f"{where}: a delta has a parent, a baseline none (got {self.parent!r})")


@dataclass(frozen=True)
class Capacity:
    """What lay under the root around an event.

    Attributes:
        at_ns: Time of the event.
        before_bytes: Before it.
        peak_bytes: When it had written what it wrote, and not yet removed what it removed.
        after_bytes: After it.
        model_bytes: One full baseline at that time.
    """

    at_ns: int
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    model_bytes: int

    @property
    def peak_models(self) -> float:
        """The most, in models."""
        return self.peak_bytes / self.model_bytes


@dataclass(frozen=True)
class RunHistory:
    """All that is known to have happened under a root, and what lies there now.

    Attributes:
        root: The root's path or URL.
        events: In order of time.
        kept: The checkpoints that lie there now, in any order.
        left_bytes: Bytes of files that lie there of checkpoints that were pruned: compacted ones may use them.
        unreadable: Directories of checkpoints that cannot be read, of which nothing is known.

    Raises:
        ConfigurationError: Events are not in order of time, or a value is out of its bounds.
    """

    root: str
    events: tuple[Event, ...]
    kept: tuple[KeptCheckpoint, ...]
    left_bytes: int = 0
    unreadable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_count(self.root, "left_bytes", self.left_bytes)
        for earlier, later in pairwise(self.events):
            if later.at_ns < earlier.at_ns:
                raise ConfigurationError(
                    f"{self.root}: events must be in order of time: {later.name!r} at {later.at_ns} ns comes behind "
                    f"{earlier.name!r} at {earlier.at_ns} ns"
                )

    @cached_property
    def saves(self) -> tuple[Event, ...]:
        """The checkpoints that the job saved, kept or not."""
        return tuple(event for event in self.events if event.is_save)

    def of_kind(self, kind: EventKind) -> tuple[Event, ...]:
        """The events of one kind."""
        return tuple(event for event in self.events if event.kind == kind)

    @cached_property
    def written_bytes(self) -> int:
        """Bytes of files written in all, compactions included."""
        return sum(event.written_bytes for event in self.events)

    @cached_property
    def log_bytes(self) -> int:
        """Bytes of rows written to a log in all."""
        return sum(event.log_bytes for event in self.events)

    @cached_property
    def full_bytes(self) -> int:
        """Bytes that would have been written if every save had been a full baseline, quantized alike."""
        return sum(event.model_bytes for event in self.saves)

    @property
    def model_bytes(self) -> int | None:
        """One full baseline now; None where nothing happened."""
        return self.events[-1].model_bytes if self.events else None

    def restore_models_of(self, checkpoint: KeptCheckpoint) -> float | None:
        """What a load of a kept checkpoint reads, in models of the time of its event, or else of now; or None."""
        model_bytes = self._model_bytes_by_name.get(checkpoint.name, self.model_bytes)
        if model_bytes is None or checkpoint.restore_bytes is None:
            return None
        return checkpoint.restore_bytes / model_bytes

    @cached_property
    def _model_bytes_by_name(self) -> dict[str, int]:
        """For each checkpoint that was written."""
        return {event.name: event.model_bytes for event in self.events if event.kind != "prune"}

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes that lie there now."""
        return self.left_bytes + sum(checkpoint.num_bytes for checkpoint in self.kept)

    @cached_property
    def newest_first(self) -> tuple[KeptCheckpoint, ...]:
        """What lies there now, by time of commit; of those of one time the greater name first."""
        return tuple(sorted(self.kept, key=lambda kept: (kept.created_ns, kept.name), reverse=True))

    @cached_property
    def opening_bytes(self) -> int:
        """The least that must have lain there before the first event, for the events and what is kept to add up."""
        changes = [change for event in self.events for change in (event.written_bytes, -event.freed_bytes)]
        balances = list(accumulate(changes, initial=0))
        return max(self.kept_bytes - balances[-1], -min(balances))

    @cached_property
    def vanished_bytes(self) -> int:
        """Bytes that should lie there by what the events tell, and do not."""
        return (self.capacities[-1].after_bytes if self.capacities else self.opening_bytes) - self.kept_bytes

    @cached_property
    def capacities(self) -> tuple[Capacity, ...]:
        """What lay under the root, around each event."""
        found, level = [], self.opening_bytes
        for event in self.events:
            peak = level + event.written_bytes
            found.append(Capacity(event.at_ns, level, peak, peak - event.freed_bytes, event.model_bytes))
            level = found[-1].after_bytes
        return tuple(found)

    @property
    def highest(self) -> Capacity | None:
        """When most lay there, in models; the first such time."""
        return max(self.capacities, key=lambda capacity: capacity.peak_models, default=None)


def _check_count(where: str, name: str, value: object, least: int = 0) -> None:
    if type(value) is not int or not least <= value <= _MAX_COUNT:
        raise ConfigurationError(f"{where}: {name!r} must be a whole number from {least} to 2^62 (got {value!r})")


def _check_choice(where: str, name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{where}: {name!r} must be one of {', '.join(choices)} (got {value!r})")

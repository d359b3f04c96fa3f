"""The plan of a prune, as a value: what goes, in which order, and what stays and why. Its text is a dry run."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torchrec_cnr.maintenance.catalog import Catalog, Entry, total_bytes
from torchrec_cnr.maintenance.journal import Journal, Prune, PrunedCheckpoint
from torchrec_cnr.maintenance.retention import Keep
from torchrec_cnr.quantities import bytes_text, count_text, instant_text, name_text


@dataclass(frozen=True)
class Removal:
    """What goes from one directory.

    Attributes:
        entry: The directory.
        files: Names, in the order in which they are removed.
        pruned: What the journal tells of the checkpoint, if that goes; or None.
        takes_directory: Whether nothing is left in it, and it goes, too.
        loading: Checkpoints that stay, and needed something of this before they were compacted: who has begun to load
            one of them then still does.
    """

    entry: Entry
    files: tuple[str, ...]
    pruned: PrunedCheckpoint | None
    takes_directory: bool
    loading: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(self.entry.files[name] for name in self.files)

    @property
    def is_dead_save(self) -> bool:
        """Whether it is all that a save that died has left."""
        return self.takes_directory and bool(self.files) and self.entry.checkpoint is None

    def __str__(self) -> str:
        if self.pruned is not None:
            what = f"{self.pruned.kind} of {instant_text(self.pruned.created_ns)}"
        elif self.is_dead_save:
            what = f"{count_text(len(self.files), 'file')} of a save that died"
        elif self.files:
            what = f"{count_text(len(self.files), 'file')} that nothing uses"
        else:
            what = "empty directory"
        return f"{name_text(self.entry.name)}: {what}, {bytes_text(self.num_bytes)}"


@dataclass(frozen=True)
class PrunePlan:
    """What a prune will do.

    Attributes:
        catalog: What there is.
        keep: What was asked for.
        now_ns: Unix time for which it was made, in nanoseconds.
        removals: What goes, in the order in which it goes: checkpoints, newest first, then what nothing uses.
        stays: Every directory of which something stays, and why.
        folds_journal: Whether the journal's files become one.
    """

    catalog: Catalog
    keep: Keep
    now_ns: int
    removals: tuple[Removal, ...]
    stays: Mapping[str, tuple[str, ...]]
    folds_journal: bool

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.removals or self.folds_journal or self.catalog.journal.abandoned)

    @cached_property
    def pruned(self) -> tuple[PrunedCheckpoint, ...]:
        """The checkpoints that go, newest first."""
        return tuple(removal.pruned for removal in self.removals if removal.pruned is not None)

    @cached_property
    def died(self) -> tuple[str, ...]:
        """Directories of saves that died, that go."""
        return tuple(removal.entry.name for removal in self.removals if removal.is_dead_save)

    @cached_property
    def told(self) -> Journal:
        """What the journal is told of it: nothing, if no file goes."""
        names = [removal.entry.name for removal in self.removals if removal.files]
        if not names:
            return Journal()
        prune = Prune(self.now_ns, names[0], self.freed_bytes)
        return Journal(self.pruned, frozenset(self.died), (prune,))

    @cached_property
    def freed_bytes(self) -> int:
        """Bytes of all files that go."""
        return sum(removal.num_bytes for removal in self.removals)

    @cached_property
    def left_bytes(self) -> int:
        """Bytes of all files that stay in the root and its directories, the journal's not counted."""
        there = total_bytes(self.catalog.entries.values()) + sum(self.catalog.files.values())
        return there - self.freed_bytes

    def __str__(self) -> str:
        lines = [f"{name_text(self.catalog.root.url)}: keep {self.keep}"]
        lines += [f"  goes   {removal}" for removal in self.removals]
        lines += [f"  stays  {name_text(name)}: {'; '.join(reasons)}" for name, reasons in self.stays.items()]
        gone = count_text(len(self.pruned), "checkpoint")
        lines.append(f"{gone} to remove, {bytes_text(self.freed_bytes)} to free, {bytes_text(self.left_bytes)} left")
        return "\n".join(lines)

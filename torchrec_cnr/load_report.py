"""Load reports: what a load did with every name of the checkpoint and of the state dicts."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

Size = tuple[int, ...]

_NUM_LISTED = 5


@dataclass(frozen=True)
class LoadReport:
    """What one load did, the same on all ranks.

    Attributes:
        url: The checkpoint, a path or URL.
        loaded: FQNs that were loaded, sorted.
        missing: FQNs that a state dict has and the checkpoint has not, sorted. They stayed as they were.
        unexpected: FQNs that the checkpoint has and no rank's state dict, sorted. They were left out.
        reshaped: FQNs that were loaded under another size than they were saved with: the saved size, then the size.
        renamed: FQNs that were loaded from another FQN of the checkpoint, which is the value.
    """

    url: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: Mapping[str, tuple[Size, Size]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} loaded from {self.url}"]
        if self.missing:
            lines.append(f"{len(self.missing)} missing, left as they were: {some(self.missing)}")
        if self.unexpected:
            lines.append(f"{len(self.unexpected)} unexpected, left out: {some(self.unexpected)}")
        if self.reshaped:
            sizes = (f"{fqn!r} from {list(old)} to {list(new)}" for fqn, (old, new) in self.reshaped.items())
            lines.append(f"{len(self.reshaped)} reshaped: {listed(sizes, len(self.reshaped))}")
        if self.renamed:
            names = (f"{fqn!r} was {saved!r}" for fqn, saved in self.renamed.items())
            lines.append(f"{len(self.renamed)} renamed: {listed(names, len(self.renamed))}")
        return "\n".join(lines)


def some(names: Collection[str]) -> str:
    """The first names of many, quoted."""
    return listed(map(repr, names), len(names))


def listed(parts: Iterable[str], count: int) -> str:
    """The first parts of ``count``."""
    return ", ".join(islice(parts, _NUM_LISTED)) + (", ..." if count > _NUM_LISTED else "")

"""Load reports: what a load did with every name of the checkpoint and of the state dicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchrec_cnr.optimizer_state import Size

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
        sizes = [f"{fqn!r} from {list(old)} to {list(new)}" for fqn, (old, new) in self.reshaped.items()]
        parts = {
            "missing, left as they were": [repr(fqn) for fqn in self.missing],
            "unexpected, left out": [repr(fqn) for fqn in self.unexpected],
            "reshaped": sizes,
            "renamed": [f"{fqn!r} was {saved!r}" for fqn, saved in self.renamed.items()],
        }
        lines += [f"{len(found)} {what}: {listed(found)}" for what, found in parts.items() if found]
        return "\n".join(lines)


def listed(parts: Sequence[str]) -> str:
    """The first few of many."""
    return ", ".join(parts[:_NUM_LISTED]) + (", ..." if len(parts) > _NUM_LISTED else "")

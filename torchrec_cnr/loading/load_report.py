"""The report of a load: what was loaded, under which names and with which sizes, and what was left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchrec_cnr.human_text import url_text
from torchrec_cnr.loading.optimizer_state import Size

_NUM_LISTED = 5


@dataclass(frozen=True)
class LoadReport:
    """The result of one load, the same on all ranks.

    Attributes:
        url: The checkpoint, a path or URL.
        loaded: FQNs that were loaded, sorted.
        missing: FQNs that only a state dict has, sorted. Their values are unchanged.
        unexpected: FQNs that only the checkpoint has, sorted. They were not loaded.
        reshaped: FQNs whose size differs from the saved one. The values are the saved size and the size in the state
            dict.
        mapped_rows: FQNs of which a map of rows was loaded. The values are the numbers of rows that were loaded.
        renamed: FQNs that have another FQN in the checkpoint, which is the value.
        skipped: FQNs of the state dict that the planner's ``only`` excludes, sorted. Their values are unchanged.

    Examples:
        >>> path, report = cnr.restore_newest("run", state, tracker)
        >>> report.loaded[0]
        'model.users.weight'
        >>> report.missing, report.unexpected
        ((), ())
    """

    url: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: Mapping[str, tuple[Size, Size]] = field(default_factory=dict)
    mapped_rows: Mapping[str, int] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    def __repr__(self) -> str:
        kinds = ("missing", "unexpected", "reshaped", "mapped_rows", "renamed", "skipped")
        counts = [f"{len(names):,} {what.replace('_', ' ')}" for what in kinds if (names := getattr(self, what))]
        return f"LoadReport({', '.join([f'{len(self.loaded):,} loaded', *counts])}, {url_text(self.url)})"

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} loaded from {self.url}"]
        sizes = [f"{fqn!r} from {list(old)} to {list(new)}" for fqn, (old, new) in self.reshaped.items()]
        names_by_kind = {
            "missing, left as they were": [repr(fqn) for fqn in self.missing],
            "unexpected, left out": [repr(fqn) for fqn in self.unexpected],
            "reshaped": sizes,
            "of which a map of rows was loaded": [f"{fqn!r} ({n:,} rows)" for fqn, n in self.mapped_rows.items()],
            "renamed": [f"{fqn!r} was {saved!r}" for fqn, saved in self.renamed.items()],
            "skipped, left as they were": [repr(fqn) for fqn in self.skipped],
        }
        lines += [f"{len(names)} {what}: {listed(names)}" for what, names in names_by_kind.items() if names]
        return "\n".join(lines)


def listed(parts: Sequence[str]) -> str:
    """Return the first few names as one text."""
    return ", ".join(parts[:_NUM_LISTED]) + (", ..." if len(parts) > _NUM_LISTED else "")

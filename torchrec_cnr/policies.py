"""Policies: what the next checkpoint is a delta of (Check-N-Run, section 4.1).

A policy is a frozen value; it decides from the bytes of the lineage's checkpoints since the baseline and from nothing
else, so every run with the same history decides alike.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torchrec_cnr.arguments import check_count
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.manifest import History


class Since(Enum):
    """What the rows of a save were modified since, and so what its checkpoint is a delta of."""

    EVER = "ever"
    BASELINE = "baseline"
    HEAD = "head"


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MAX_RATIO = 1.16  # with row numbers, which deltas need and a full checkpoint does not, a restore reads 1.2 models


class Policy(Protocol):
    """What every policy has."""

    def decide(self, history: History) -> Since:
        """What the next checkpoint holds, given a lineage that has a baseline."""
        ...


@dataclass(frozen=True)
class Full:
    """Every checkpoint is a baseline."""

    def decide(self, history: History) -> Since:
        """Everything."""
        return Since.EVER


@dataclass(frozen=True)
class OneShot:
    """One baseline, and each delta holds the rows modified since it. A restore reads two checkpoints."""

    def decide(self, history: History) -> Since:
        """Rows modified since the baseline."""
        return Since.BASELINE


@dataclass(frozen=True)
class Consecutive:
    """Each delta holds the rows modified since the checkpoint before. A restore reads the whole lineage."""

    def decide(self, history: History) -> Since:
        """Rows modified since the last checkpoint."""
        return Since.HEAD


@dataclass(frozen=True)
class Compacted:
    """Consecutive deltas on a lineage that is compacted meanwhile, by a manager or by ``cnr compact``.

    A delta keeps rows apart by their heat: those that most deltas before it held, too, are likely to be in the next.

    Attributes:
        max_deltas: A baseline is taken when that many deltas were not compacted yet, so that restores stay bounded if
            nobody compacts.
        max_ratio: How much a restore may read after a manager's compaction, of what it needs. The less, the less lies
            there; the more, the less is copied.
    """

    max_deltas: int = 64
    max_ratio: float = MAX_RATIO

    def __post_init__(self) -> None:
        check_max_ratio(self.max_ratio)
        check_count("max_deltas", self.max_deltas, least=1)

    def decide(self, history: History) -> Since:
        """Rows modified since the last checkpoint."""
        return Since.HEAD if len(history.delta_bytes) < self.max_deltas else Since.EVER


@dataclass(frozen=True)
class Intermittent:
    """Deltas on the last baseline, and a new baseline when history says that it pays (the default).

    With S_i the size of the i-th delta as a fraction of the baseline, a baseline now makes the next i + 1 checkpoints
    cost F = 1 + S_1 + ... + S_i if history repeats itself; none makes them cost at least I = (i + 1) * S_i. A baseline
    is taken when F <= I.
    """

    def decide(self, history: History) -> Since:
        """Everything if F <= I, else rows modified since the baseline."""
        if not history.delta_bytes:
            return Since.BASELINE
        with_baseline = history.baseline_bytes + sum(history.delta_bytes)
        without = (len(history.delta_bytes) + 1) * history.delta_bytes[-1]
        return Since.EVER if with_baseline <= without else Since.BASELINE


def check_policy(policy: object) -> None:
    """Refuse what is no policy, such as the class of one.

    Raises:
        ConfigurationError: It is not.
    """
    if isinstance(policy, type) or not callable(getattr(policy, "decide", None)):
        made = f"; make one: {policy.__name__}()" if isinstance(policy, type) else ""
        raise ConfigurationError(f"'policy' must be a policy such as Compacted() or OneShot() (got {policy!r}){made}")


def policy_text(policy: Policy) -> str:
    """Return a policy as text, in which those of one class with equal attributes are alike in all processes.

    Where objects lie in memory is left out, and sets are sorted: their order differs between processes.
    """
    kind, state = type(policy), object.__getstate__(policy)  # the attributes, and those in slots
    parts = state if isinstance(state, tuple) else (state,)
    attributes = {name: _text(value) for part in parts if part for name, value in part.items()}
    if not attributes and kind.__repr__ is not object.__repr__:
        return _ADDRESS.sub("", repr(policy))
    values = ", ".join(f"{name}={value}" for name, value in attributes.items())
    return _ADDRESS.sub("", f"{kind.__module__}.{kind.__qualname__}({values})")


def _text(value: object) -> str:
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    return repr(value)


def check_max_ratio(max_ratio: float) -> None:
    """Refuse what no compaction can reach.

    Raises:
        ConfigurationError: It is less than 1, or no number.
    """
    given: object = max_ratio
    if not isinstance(given, int | float) or isinstance(given, bool) or not given >= 1:
        raise ConfigurationError(f"'max_ratio' must be at least 1 (got {max_ratio!r})")

"""Policies, which decide which earlier checkpoint each delta is based on (Check-N-Run, section 4.1).

A policy is a frozen value. It decides only from the sizes of the checkpoints since the baseline, so it makes the same
decisions in every run with the same sizes.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torchrec_cnr.arguments import check_count
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.manifest import History


class Since(Enum):
    """The checkpoint since which the rows of a save were modified.

    ``EVER`` means all rows, which is a baseline. ``BASELINE`` is the last baseline. ``HEAD`` is the latest checkpoint.
    """

    EVER = "ever"
    BASELINE = "baseline"
    HEAD = "head"


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Deltas store row numbers, which a full checkpoint does not need. With these, a restore reads 1.2 × a full checkpoint.
MAX_RATIO = 1.16
_RATIO_WITHOUT_HEAT = 2.0  # compactions copy few rows then, so there is little to save


class Policy(Protocol):
    """The interface of every policy.

    Examples:
        >>> from torchrec_cnr.policies import Since
        >>> class EverySecond:
        ...     def decide(self, history):
        ...         return Since.EVER if history.delta_bytes else Since.HEAD
        >>> planner = cnr.CNRSavePlanner(tracker, policy=EverySecond())
        >>> metadata = dcp.save(state, checkpoint_id="run/step-3", storage_writer=writer, planner=planner)
        >>> cnr.read_checkpoint("run/step-3").kind
        'baseline'
    """

    def decide(self, history: History) -> Since:
        """Return the checkpoint since which the next save stores modified rows, if there is a baseline already."""
        ...


@dataclass(frozen=True)
class Full:
    """A policy of full checkpoints: every checkpoint is a baseline.

    Examples:
        >>> planner = cnr.CNRSavePlanner(tracker, policy=cnr.Full())
        >>> train()
        >>> metadata = dcp.save(state, checkpoint_id="run/step-3", storage_writer=writer, planner=planner)
        >>> cnr.read_checkpoint("run/step-3").kind
        'baseline'
    """

    def decide(self, history: History) -> Since:
        """Return ``EVER``: the next checkpoint is a baseline."""
        return Since.EVER


@dataclass(frozen=True)
class OneShot:
    """A policy of one baseline, on which all deltas are based. A restore reads two checkpoints.

    Examples:
        >>> planner = cnr.CNRSavePlanner(tracker, policy=cnr.OneShot())
        >>> train()
        >>> metadata = dcp.save(state, checkpoint_id="run/step-3", storage_writer=writer, planner=planner)
        >>> cnr.read_checkpoint("run/step-3").parent
        '/.../run/step-1'
    """

    def decide(self, history: History) -> Since:
        """Return ``BASELINE``: the next delta contains the rows modified since the baseline."""
        return Since.BASELINE


@dataclass(frozen=True)
class Consecutive:
    """A policy of consecutive deltas: each is based on the checkpoint before it. A restore reads the whole chain.

    Examples:
        >>> planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
        >>> train()
        >>> metadata = dcp.save(state, checkpoint_id="run/step-3", storage_writer=writer, planner=planner)
        >>> cnr.read_checkpoint("run/step-3").parent
        '/.../run/step-2'
    """

    def decide(self, history: History) -> Since:
        """Return ``HEAD``: the next delta contains the rows modified since the last checkpoint."""
        return Since.HEAD


@dataclass(frozen=True)
class Compacted:
    """A policy of consecutive deltas, while a manager or ``cnr compact`` compacts the checkpoint chain.

    A delta stores hot and cold rows separately. Hot rows are those that most earlier deltas contained, so the next
    delta is likely to contain them again. With a ``max_ratio`` of 2 or more, where compactions copy few rows anyway, it
    stores them together, in a quarter as many blocks.

    Attributes:
        max_deltas: The number of deltas after which the next checkpoint is a baseline, if none of them was compacted.
            This bounds restores if the chain is not compacted.
        max_ratio: The most bytes that a restore reads after a manager's compaction, as a multiple of the bytes that it
            needs, by default 1.16. With a smaller ratio less storage is used; with a larger one compactions copy less.

    Raises:
        ConfigurationError: ``max_deltas`` or ``max_ratio`` is less than 1.

    Examples:
        >>> planner = cnr.CNRSavePlanner(tracker, policy=cnr.Compacted(max_deltas=1))
        >>> train()
        >>> metadata = dcp.save(state, checkpoint_id="run/step-3", storage_writer=writer, planner=planner)
        >>> cnr.read_checkpoint("run/step-3").kind
        'baseline'
    """

    max_deltas: int = 64
    max_ratio: float = MAX_RATIO

    def __post_init__(self) -> None:
        check_max_ratio(self.max_ratio)
        check_count("max_deltas", self.max_deltas, least=1)

    def decide(self, history: History) -> Since:
        """Return ``HEAD``, or ``EVER`` after ``max_deltas`` deltas that were not compacted."""
        return Since.HEAD if len(history.delta_bytes) < self.max_deltas else Since.EVER


@dataclass(frozen=True)
class Intermittent:
    """A policy of deltas that are based on the last baseline, with a new baseline when this pays.

    Let S_i be the size of the i-th delta as a fraction of the baseline. If the next save is a baseline and the deltas
    then grow as before, the next i + 1 checkpoints cost F = 1 + S_1 + ... + S_i. Without a new baseline they cost at
    least I = (i + 1) * S_i. The next checkpoint is a baseline if F <= I.

    Examples:
        >>> planner = cnr.CNRSavePlanner(tracker, policy=cnr.Intermittent())
        >>> train()
        >>> metadata = dcp.save(state, checkpoint_id="run/step-3", storage_writer=writer, planner=planner)
        >>> cnr.read_checkpoint("run/step-3").parent
        '/.../run/step-1'
    """

    def decide(self, history: History) -> Since:
        """Return ``EVER`` if F <= I, otherwise ``BASELINE``."""
        if not history.delta_bytes:
            return Since.BASELINE
        with_baseline = history.baseline_bytes + sum(history.delta_bytes)
        without = (len(history.delta_bytes) + 1) * history.delta_bytes[-1]
        return Since.EVER if with_baseline <= without else Since.BASELINE


def separates_heat(policy: Policy) -> bool:
    """Return whether deltas of consecutive checkpoints store hot and cold rows separately."""
    return isinstance(policy, Compacted) and policy.max_ratio < _RATIO_WITHOUT_HEAT


def check_policy(policy: object) -> None:
    """Raise an error if ``policy`` is not a policy, for example if it is a class instead of an instance.

    Raises:
        ConfigurationError: ``policy`` is not a policy.
    """
    if isinstance(policy, type) or not callable(getattr(policy, "decide", None)):
        hint = f"; pass an instance: {policy.__name__}()" if isinstance(policy, type) else ""
        raise ConfigurationError(f"'policy' must be a policy such as Compacted() or OneShot() (got {policy!r}){hint}")


def policy_text(policy: Policy) -> str:
    """Return a policy as text that is the same in all processes for policies of one class with equal attributes.

    Memory addresses are left out, and sets are sorted, because their order differs between processes.
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
    """Raise an error if no compaction can reach ``max_ratio``.

    Raises:
        ConfigurationError: ``max_ratio`` is less than 1, or not a number.
    """
    value: object = max_ratio
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 1:
        raise ConfigurationError(f"'max_ratio' must be a number, at least 1 (got {max_ratio!r})")

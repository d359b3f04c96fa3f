"""Optimizer state of tables under other names: pairs the state of a checkpoint with that of a state dict.

The sharding plan decides which optimizer steps a table, and that decides the names of the optimizer state::

    fused optimizer    fused.state.ebc.embedding_bags.t0.weight.t0.momentum1      [rows] or [rows, cols]
    torch.optim        dense.state.ebc.embedding_bags.t0.weight.sum               [rows, 1] or [rows, cols]
                       └ group, with the parameter's key in it ┘ └ name

TorchRec steps data-parallel tables with a ``torch.optim`` optimizer, and all others with a fused one. A fused optimizer
calls its first state ``momentum1``, whatever it is, and names the others as FBGEMM does. So a table that changes
between the two has state under names that only one side has. This module pairs them by names alone: the same table, the
same role, one side fused and the other not. It never pairs anything else.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

Size = tuple[int, ...]

_FIRST = "momentum1"  # name of the first state of all fused optimizers
# Names in torch.optim of the state that fused optimizers also have, without the first; see ``_is_same`` for that.
_ROLES: Mapping[str, str] = {"exp_avg_sq": "exp_avg_sq", "iter": "step"}
_OF_ADAM = "exp_avg_sq"
_COUNTS = frozenset({"iter", "step"})
# Without these an optimizer would continue with another state than the saved one.
_NEEDED = frozenset({_FIRST, "sum", "exp_avg", "exp_avg_sq", "momentum_buffer"})


@dataclass(frozen=True)
class StateName:
    """The FQN of a table's optimizer state, split into its parts.

    Attributes:
        fqn: The whole FQN.
        group: The part before the name, which all state of one table in one optimizer shares.
        key: The parameter's key in the optimizer: an optimizer's own prefix, if it has one, and the table's FQN.
        name: Name of the state, such as ``momentum1`` or ``sum``.
        is_fused: Whether a fused optimizer named it.
    """

    fqn: str
    group: str
    key: str
    name: str
    is_fused: bool

    @classmethod
    def parse(cls, fqn: str) -> "StateName | None":
        """Parse an FQN; return None if it is not that of optimizer state of a parameter called ``weight``."""
        parts = f".{fqn}".partition(".state.")[2].split(".")
        *key, name = parts
        # A fused optimizer repeats the table's name after ``weight``.
        is_fused = len(key) > 2 and key[-2] == "weight" and key[-1] == key[-3]
        key = key[:-1] if is_fused else key
        if len(key) < 2 or key[-1] != "weight" or not all(parts):
            return None
        return cls(fqn, fqn[: -len(name)], ".".join(key), name, is_fused)


@dataclass(frozen=True)
class Pairing:
    """The saved state that is loaded under other names.

    Attributes:
        renamed: By wanted FQN, the saved FQN.
        tolerated: FQNs without a counterpart on the other side, of tables whose state was renamed.
        ambiguous: By wanted FQN, several possible saved FQNs; and by saved FQN, several possible wanted ones.
        of_others: FQNs that both sides have, for state with different roles, such as Adam's average and Adagrad's sum.
    """

    renamed: Mapping[str, str]
    tolerated: frozenset[str]
    ambiguous: Mapping[str, tuple[str, ...]]
    of_others: frozenset[str] = frozenset()


def pair(wanted: Mapping[str, Size | None], saved: Mapping[str, Size | None], weights: Collection[str]) -> Pairing:
    """Pair optimizer state that only one side has under its name.

    Args:
        wanted: Sizes by FQN in the state dicts of all ranks; None for items that are not tensors.
        saved: The same for the checkpoint.
        weights: Names of parameters in their models, without what a state dict puts before them. They show where an
            optimizer's own prefix ends; without them, keys must be the same on both sides.
    """
    missing, unexpected = _parse(set(wanted) - set(saved)), _parse(set(saved) - set(wanted))
    siblings: dict[str, set[str]] = defaultdict(set)
    for state in _parse({*wanted, *saved}):
        siblings[state.group].add(state.name)
    by_weight: dict[str, list[StateName]] = defaultdict(list)
    for state in unexpected:
        if saved[state.fqn] is not None:
            by_weight[weight_of(state.key, weights)].append(state)
    candidates = {
        state.fqn: tuple(
            other.fqn
            for other in by_weight.get(weight_of(state.key, weights), ())
            if other.is_fused != state.is_fused and _is_same(state, other, siblings)
        )
        for state in missing
        if wanted[state.fqn] is not None
    }
    claims: dict[str, list[str]] = defaultdict(list)
    for fqn, other_fqns in candidates.items():
        for other_fqn in other_fqns:
            claims[other_fqn].append(fqn)
    ambiguous = {fqn: names for fqn, names in candidates.items() if len(names) > 1}
    ambiguous |= {fqn: tuple(names) for fqn, names in claims.items() if len(names) > 1}
    renamed = {fqn: names[0] for fqn, names in candidates.items() if names and not {fqn, *names} & set(ambiguous)}
    paired = {*renamed, *renamed.values()}
    groups = {state.group for state in (*missing, *unexpected) if state.fqn in paired}
    tolerated = frozenset(
        state.fqn
        for state in (*missing, *unexpected)
        if state.group in groups and state.fqn not in paired and state.name not in _NEEDED
    )
    of_others = frozenset(
        state.fqn
        for state in _parse(set(wanted) & set(saved))
        if state.is_fused
        and state.name == _FIRST
        and (f"{state.group}{_OF_ADAM}" in wanted) != (f"{state.group}{_OF_ADAM}" in saved)
    )
    return Pairing(renamed, tolerated, ambiguous, of_others)


def is_count(fqn: str, saved: str) -> bool:
    """Return whether state is a count of steps, and a fused optimizer's on at least one side: one value per shard."""
    states = [state for state in _parse((fqn, saved)) if state.name in _COUNTS]
    return len(states) == 2 and any(state.is_fused for state in states)


def weight_of(key: str, weights: Collection[str]) -> str:
    """Return the longest end of a parameter's key that is a parameter's name, or all of the key if none is.

    A name without a dot, as in a state dict of a single module, would be the end of too many keys.
    """
    suffix = key
    while "." in suffix and suffix not in weights:
        suffix = suffix.partition(".")[2]
    return suffix if "." in suffix else key


def _parse(fqns: Iterable[str]) -> list[StateName]:
    return [state for state in map(StateName.parse, sorted(fqns)) if state is not None]


def _is_same(state: StateName, other: StateName, siblings: Mapping[str, set[str]]) -> bool:
    """Return whether two states, one of them fused, have the same role in their optimizers."""
    fused, plain = (state, other) if state.is_fused else (other, state)
    if fused.name != _FIRST:
        return _ROLES.get(fused.name) == plain.name
    # ``momentum1`` of TorchRec's optimizers is never a ``momentum_buffer``; used as a sum of squares, that gives NaN.
    return plain.name == ("exp_avg" if _OF_ADAM in siblings[fused.group] else "sum")

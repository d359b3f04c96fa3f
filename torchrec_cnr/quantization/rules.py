"""Which scheme each tensor gets, and schemes as manifests record them."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from torchrec_cnr.arguments import check_type
from torchrec_cnr.errors import ConfigurationError, DamagedError
from torchrec_cnr.quantization.choose_bits import ByErrorBudget, ByExpectedRestores
from torchrec_cnr.quantization.kmeans import KMeans
from torchrec_cnr.quantization.scheme import HalfPrecision, NoQuantization, Quantization, Scheme
from torchrec_cnr.quantization.uniform import (
    LADDERS,
    MAX_CUTS,
    AdaptiveAsymmetric,
    Asymmetric,
    GreedySearch,
    LeastSquares,
    Search,
    Symmetric,
)

_ALL = (
    NoQuantization | HalfPrecision | Symmetric | Asymmetric | AdaptiveAsymmetric | KMeans
    | ByExpectedRestores | ByErrorBudget
)  # fmt: skip

_NUM_NEAREST = 3  # FQNs in a message


@dataclass(frozen=True)
class SchemeRules:
    """Which scheme each tensor gets: one for all tables, or by FQN patterns, first match wins.

    Attributes:
        tables: For every table, where ``patterns`` is empty.
        patterns: Pairs of an ``fnmatch`` pattern and a scheme or a rule, for tables and all other tensors.
    """

    tables: Quantization
    patterns: tuple[tuple[str, Quantization], ...] = ()

    @classmethod
    def of(cls, quantization: Quantization | Mapping[str, Quantization]) -> "SchemeRules":
        """From the writer's ``quantization`` argument.

        Raises:
            ConfigurationError: It is neither a scheme nor a mapping of patterns to schemes.
        """
        if isinstance(quantization, Mapping):
            for pattern in quantization:
                check_type("quantization", pattern, str, "a scheme, or a mapping of patterns to schemes")
            rules = cls(NoQuantization(), tuple(quantization.items()))
        else:
            rules = cls(quantization)
        for scheme in (rules.tables, *(scheme for _, scheme in rules.patterns)):
            if not isinstance(scheme, _ALL):
                raise ConfigurationError(f"'quantization' must be a scheme or a mapping to schemes (got {scheme!r})")
        return rules

    def rule_for(self, fqn: str, dtype: torch.dtype, is_table: bool) -> Quantization:
        """What chooses the scheme of one tensor; dtypes that it does not know are stored exactly."""
        for pattern, scheme in self.patterns:
            if fnmatchcase(fqn, pattern):
                return scheme if scheme.supports(dtype) else NoQuantization()
        return self.tables if is_table and self.tables.supports(dtype) else NoQuantization()

    def possible(self, dtype: torch.dtype) -> Iterator[Scheme]:
        """Every scheme that a tensor of this dtype may get, whatever its name and values are."""
        for rule in (self.tables, *(rule for _, rule in self.patterns)):
            if rule.supports(dtype):
                yield from possible_schemes(rule)

    def unused(self, fqns: Collection[str]) -> Iterator[tuple[str, list[str]]]:
        """Patterns that no tensor of a save matches, each with the FQNs that are most like it."""
        for pattern, _ in self.patterns:
            if not any(fnmatchcase(fqn, pattern) for fqn in fqns):
                yield pattern, get_close_matches(pattern, fqns, n=_NUM_NEAREST, cutoff=0.0)


def possible_schemes(rule: Quantization) -> Iterator[Scheme]:
    """Every scheme that a rule may choose or try, with its search."""
    match rule:
        case AdaptiveAsymmetric(bits, None):
            yield from (AdaptiveAsymmetric(bits, search) for search in LADDERS[bits])
        case ByExpectedRestores() | ByErrorBudget():
            for choice in rule.choices():
                yield from possible_schemes(choice)
        case NoQuantization() | HalfPrecision() | Symmetric() | Asymmetric() | AdaptiveAsymmetric() | KMeans():
            yield rule


def scheme_from_json(value: Mapping[str, Any], where: str) -> Scheme:
    """The scheme that a manifest records.

    Raises:
        DamagedError: Not a scheme of this version of the format.
    """
    try:
        scheme = _parsed(value)
    except ConfigurationError as error:
        raise DamagedError(f"{where}: {str(value)[:80]} is not a quantization scheme: {error}") from error
    if scheme is None or json.dumps(scheme.to_json()) != json.dumps(value):  # which tells 1 from True, and orders
        raise DamagedError(f"{where}: {str(value)[:80]} is not a quantization scheme of this format version")
    return scheme


def _parsed(value: Mapping[str, Any]) -> Scheme | None:
    match value:
        case {"name": "none"}:
            return NoQuantization()
        case {"name": "half", "dtype": "float16" | "bfloat16" as dtype}:
            return HalfPrecision(torch.float16 if dtype == "float16" else torch.bfloat16)
        case {"name": "symmetric", "bits": bits}:
            return Symmetric(bits)
        case {"name": "asymmetric", "bits": bits}:
            return Asymmetric(bits)
        case {"name": "adaptive_asymmetric", "bits": bits, "search": {} as search}:
            return AdaptiveAsymmetric(bits, _parsed_search(search))
        case {"name": "kmeans", "bits": bits}:
            return KMeans(bits)
    return None


def _parsed_search(value: Mapping[str, Any]) -> Search | None:
    match value:
        case {"name": "greedy", "num_bins": num_bins, "ratio": str(ratio)}:
            return GreedySearch(num_bins, _decimal(ratio))
        case {"name": "least_squares", "cuts": [*cuts], "rounds": rounds, "kept": kept, "polish": polish}:
            return LeastSquares(tuple(_decimal(cut) for cut in cuts[: MAX_CUTS + 1]), rounds, kept, polish)
    return None


def _decimal(value: Any) -> float:
    """Numbers with a point are strings in a manifest: there is one way to write those."""
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        number = None
    if number is None or repr(number) != value:
        raise ConfigurationError(f"not a decimal number: {value!r}")
    return number

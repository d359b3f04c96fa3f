"""Rules that choose the scheme of each tensor, and the parser for schemes in manifests."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from torchrec_cnr.arguments import check_type
from torchrec_cnr.errors import ConfigurationError, DamagedError
from torchrec_cnr.quantization.choose_bits import ByErrorBudget, ByExpectedRestores
from torchrec_cnr.quantization.kmeans import KMeans
from torchrec_cnr.quantization.scheme import HalfPrecision, NoQuantization, Quantization, Scheme
from torchrec_cnr.quantization.transform_coded import TransformCoded, Transformed
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
    | ByExpectedRestores | ByErrorBudget | TransformCoded
)  # fmt: skip

_NUM_NEAREST = 3  # FQNs that a message suggests


@dataclass(frozen=True)
class SchemeRules:
    """The choice of a scheme for each tensor: one scheme for all tables, or FQN patterns. The first match wins.

    Attributes:
        tables: The scheme or rule for every table; used if ``patterns`` is empty.
        patterns: Pairs of an ``fnmatch`` pattern and a scheme or rule, for tables and all other tensors.

    Examples:
        >>> from torchrec_cnr.quantization import SchemeRules
        >>> rules = SchemeRules.of({"*users*": cnr.Asymmetric(bits=8)})
        >>> rules.rule_for("model.users.weight", torch.float32, is_table=True)
        Asymmetric(bits=8)
        >>> rules.rule_for("model.items.weight", torch.float32, is_table=True)
        NoQuantization()
    """

    tables: Quantization
    patterns: tuple[tuple[str, Quantization], ...] = ()

    @classmethod
    def of(cls, quantization: Quantization | Mapping[str, Quantization]) -> "SchemeRules":
        """Create rules from the writer's ``quantization`` argument.

        Raises:
            ConfigurationError: The argument is neither a scheme or rule nor a mapping from patterns to these.
        """
        if isinstance(quantization, Mapping):
            for pattern in quantization:
                check_type("quantization", pattern, str, "a scheme, or a mapping from FQN patterns to schemes")
            rules = cls(NoQuantization(), tuple(quantization.items()))
        else:
            rules = cls(quantization)
        for scheme in (rules.tables, *(scheme for _, scheme in rules.patterns)):
            if not isinstance(scheme, _ALL):
                raise ConfigurationError(
                    f"'quantization' must be a scheme such as Asymmetric(8), or a mapping from FQN patterns to schemes "
                    f"(got {scheme!r})"
                )
        return rules

    def rule_for(self, fqn: str, dtype: torch.dtype, is_table: bool) -> Quantization:
        """Return the scheme or rule of one tensor: ``NoQuantization`` if it does not support the dtype."""
        for pattern, scheme in self.patterns:
            if fnmatchcase(fqn, pattern):
                return scheme if scheme.supports(dtype) else NoQuantization()
        return self.tables if is_table and self.tables.supports(dtype) else NoQuantization()

    def possible(self, dtype: torch.dtype) -> Iterator[Scheme]:
        """Yield every scheme that a tensor of this dtype may get, for any name and any values."""
        for rule in (self.tables, *(rule for _, rule in self.patterns)):
            if rule.supports(dtype):
                yield from possible_schemes(rule)

    def unused(self, fqns: Collection[str]) -> Iterator[tuple[str, list[str]]]:
        """Yield the patterns that match no tensor of a save, each with the FQNs that are most similar to it."""
        for pattern, _ in self.patterns:
            if not any(fnmatchcase(fqn, pattern) for fqn in fqns):
                yield pattern, get_close_matches(pattern, fqns, n=_NUM_NEAREST, cutoff=0.0)


def possible_schemes(rule: Quantization) -> Iterator[Scheme]:
    """Yield every scheme that a rule may choose or try, with its search."""
    match rule:
        case AdaptiveAsymmetric(bits, None):
            yield from (replace(rule, search=search) for search in LADDERS[bits])
        case ByExpectedRestores() | ByErrorBudget():
            for choice in rule.choices():
                yield from possible_schemes(choice)
        case TransformCoded(error_of):
            yield from possible_schemes(error_of)
        case NoQuantization() | HalfPrecision() | Symmetric() | Asymmetric() | AdaptiveAsymmetric() | KMeans():
            yield rule


def scheme_from_json(value: Mapping[str, Any], where: str) -> Scheme:
    """Parse a scheme from a manifest.

    Args:
        value: The scheme, as its ``to_json`` returns it.
        where: The path of the manifest, for the error message.

    Raises:
        DamagedError: ``value`` is not a scheme of this version of the format.

    Examples:
        >>> from torchrec_cnr.quantization import scheme_from_json
        >>> scheme_from_json({"name": "asymmetric", "bits": 8}, "manifest.json")
        Asymmetric(bits=8)
    """
    try:
        scheme = _parsed(value)
    except ConfigurationError as error:
        raise DamagedError(f"{where}: {str(value)[:80]} is not a quantization scheme: {error}") from error
    # As JSON text, unlike as dicts, 1 differs from True, and the order of the keys counts.
    if scheme is None or json.dumps(scheme.to_json()) != json.dumps(value):
        raise DamagedError(f"{where}: {str(value)[:80]} is not a quantization scheme of this format version")
    return scheme


def _parsed(value: Mapping[str, Any]) -> Scheme | None:
    match value:
        case {"name": "none"}:
            return NoQuantization()
        case {"name": "half", "dtype": "float16" | "bfloat16" as dtype}:
            return HalfPrecision(torch.float16 if dtype == "float16" else torch.bfloat16)
        case {"name": "symmetric", "bits": bits}:
            return Symmetric(bits, entropy_coded=value.get("entropy_coded", False))
        case {"name": "asymmetric", "bits": bits}:
            return Asymmetric(bits, entropy_coded=value.get("entropy_coded", False))
        case {"name": "adaptive_asymmetric", "bits": bits, "search": {} as search}:
            found = _parsed_search(search)
            return AdaptiveAsymmetric(bits, found, entropy_coded=value.get("entropy_coded", False))
        case {"name": "kmeans", "bits": bits}:
            return KMeans(bits)
        case {"name": "transformed", "digest": digest, "basis": basis}:
            return Transformed(digest, basis)
    return None


def _parsed_search(value: Mapping[str, Any]) -> Search | None:
    match value:
        case {"name": "greedy", "num_bins": num_bins, "ratio": str(ratio)}:
            return GreedySearch(num_bins, _decimal(ratio))
        case {"name": "least_squares", "cuts": [*cuts], "rounds": rounds, "kept": kept, "polish": polish}:
            return LeastSquares(tuple(_decimal(cut) for cut in cuts[: MAX_CUTS + 1]), rounds, kept, polish)
    return None


def _decimal(value: Any) -> float:
    """Parse a decimal number. Manifests store these as strings, because a string has one canonical form."""
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        number = None
    if number is None or repr(number) != value:
        raise ConfigurationError(f"not a decimal number: {value!r}")
    return number

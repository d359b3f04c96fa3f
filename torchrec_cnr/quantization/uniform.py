"""Uniform quantization of each row: codes at even distances, and what the range they cover is chosen by.

The three schemes of Check-N-Run (section 5.2) differ in that choice alone. Their bytes are FBGEMM's fused row-wise
layout: the codes, lowest bits first, filled up to pairs of bytes, then scale and bias in fp16. FBGEMM has no 3 bits;
there, eight codes take three bytes, and the last of a row are filled up to one byte.

Scale and bias are rounded to fp16 before a range is judged, so an element within the range is off by half a step at
most, the step being the scale as stored (and what rounding to the table's dtype adds), and encoding what was decoded
changes nothing. A row is stored exactly where fp16 cannot hold its range to within a factor of two, which is also where
a value is NaN or infinite; a row of one value, where fp16 does not hold that value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr import kernels
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.kernels.search_plan import (
    COVERING,
    GREEDY,
    LEAST_SQUARES,
    MIRRORED,
    SCALE_AND_BIAS_BYTES,
    SearchPlan,
    search_plan,
)
from torchrec_cnr.quantization.scheme import Encoded, RowCodes, Sample, Scheme, all_rows, positions

_MAX_BINS = 10_000
MAX_CUTS = 64
_MAX_ROUNDS = 1_000


def _check_whole(name: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ConfigurationError(f"{name!r} must be a whole number from {least} to {most} (got {value!r})")


@dataclass(frozen=True)
class GreedySearch:
    """The search of Check-N-Run (section 5.2), with scale and bias rounded to fp16 before each is judged.

    Each step tries to cut one bin off the low end of the range and one off the high end, and keeps what has the smaller
    error; the best range met on the way wins. PyTorch's ``choose_qparams_optimized`` is another one of its kind.

    Attributes:
        num_bins: Into how many bins the range from least to greatest value is divided.
        ratio: The part of the range that is searched at most.

    Raises:
        ConfigurationError: One of them cannot be.
    """

    num_bins: int = 25
    ratio: float = 1.0
    name: ClassVar[str] = "greedy"

    def __post_init__(self) -> None:
        _check_whole("num_bins", self.num_bins, 1, _MAX_BINS)
        if type(self.ratio) not in (int, float) or not 0.0 < self.ratio <= 1.0:
            raise ConfigurationError(f"'ratio' must be above 0 and at most 1 (got {self.ratio!r})")

    @property
    def plan(self) -> SearchPlan:
        """For the kernels: the last bin is never cut."""
        num_steps = min(round(self.num_bins * self.ratio), self.num_bins - 1)
        return search_plan(GREEDY, num_bins=self.num_bins, num_steps=num_steps)

    def to_json(self) -> dict[str, Any]:
        """As the manifest records it."""
        return {"name": self.name, "num_bins": self.num_bins, "ratio": repr(float(self.ratio))}


@dataclass(frozen=True)
class LeastSquares:
    """Alternating least squares: the nearest codes for a range, then the range that fits these codes best, and so on.

    With codes fixed, the best scale and bias are the linear regression of the values on them; with scale and bias
    fixed, the best codes are the nearest. This finds the nearest local optimum, so it begins from several ranges: every
    pair of ``cuts``, one from below and one from above. Lloyd's algorithm ("Least squares quantization in PCM", IEEE
    Transactions on Information Theory 28(2), 1982), with levels held at even distances.

    Attributes:
        cuts: Parts of the range from least to greatest value, each from 0 to below .5.
        rounds: Rounds from each start.
        kept: How many of the best ranges then go on.
        polish: Further rounds of these.

    Raises:
        ConfigurationError: One of them cannot be.
    """

    cuts: tuple[float, ...]
    rounds: int = 1
    kept: int = 2
    polish: int = 2
    name: ClassVar[str] = "least_squares"

    def __post_init__(self) -> None:
        cuts: Any = self.cuts  # whatever was given
        is_tuple = isinstance(cuts, tuple) and 1 <= len(cuts) <= MAX_CUTS
        if not is_tuple or not all(type(cut) in (int, float) and 0.0 <= cut < 0.5 for cut in cuts):
            got = str(cuts)[:80]
            raise ConfigurationError(f"'cuts' must be a tuple of 1 to {MAX_CUTS} parts from 0 to below .5 (got {got})")
        _check_whole("rounds", self.rounds, 1, _MAX_ROUNDS)
        _check_whole("kept", self.kept, 1, MAX_CUTS)
        _check_whole("polish", self.polish, 0, _MAX_ROUNDS)

    @property
    def plan(self) -> SearchPlan:
        """For the kernels."""
        cuts = np.array(self.cuts, np.float32)
        return search_plan(LEAST_SQUARES, cuts=cuts, rounds=self.rounds, kept=self.kept, polish=self.polish)

    def to_json(self) -> dict[str, Any]:
        """As the manifest records it."""
        cuts = [repr(float(cut)) for cut in self.cuts]
        return {"name": self.name, "cuts": cuts, "rounds": self.rounds, "kept": self.kept, "polish": self.polish}


Search = GreedySearch | LeastSquares


def _ladder(*thirds: float) -> tuple[LeastSquares, ...]:
    """Least squares in steps of cost, about 4, 11, 15, 22, 32 and 66 passes over a row; the last one is the best.

    They lie on the front of what was tried (numbers of cuts, rounds, kept and polish, over widths from 16 to 128 and
    four distributions): no cheaper search among these had a smaller error than any of them.
    """
    most = thirds[-1]
    sixths = tuple(round(most * number / 5, 4) for number in range(6))
    halves = (0.0, round(most / 2, 4), most)
    return (
        LeastSquares((0.0,), kept=1, polish=2),
        LeastSquares(halves, kept=1, polish=1),
        LeastSquares(halves, kept=2, polish=2),
        LeastSquares(thirds, kept=2, polish=2),
        LeastSquares(thirds, kept=4, polish=3),
        LeastSquares(sixths, kept=6, polish=4),
    )


# By bits: the fewer codes, the more it pays to cut off the ends of a row.
LADDERS: Mapping[int, tuple[LeastSquares, ...]] = {
    2: _ladder(0.0, 0.1, 0.2, 0.3),
    3: _ladder(0.0, 0.05, 0.1, 0.15),
    4: _ladder(0.0, 0.033, 0.067, 0.1),
    8: _ladder(0.0, 0.002, 0.004, 0.006),
}


BITS = (2, 3, 4, 8)
_PLATEAU = 1.005  # a search this close to the best one of its ladder has reached the plateau of the error


def check_bits(bits: int) -> None:
    """Raise a ConfigurationError for what is no width of codes."""
    if type(bits) is not int or bits not in BITS:
        raise ConfigurationError(f"'bits' must be 2, 3, 4 or 8 (got {bits!r})")


@dataclass(frozen=True)
class _Uniform(RowCodes):
    """Codes at even distances, of ``bits`` bits each."""

    bits: int
    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_bits(self.bits)

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Whole pairs of bytes of codes (3 bits: whole bytes), and four bytes of scale and bias."""
        if self.bits == 3:
            return -(-num_cols * 3 // 8) + SCALE_AND_BIAS_BYTES
        return -(-num_cols * self.bits // 16) * 2 + SCALE_AND_BIAS_BYTES

    def tail_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Scale and bias."""
        return SCALE_AND_BIAS_BYTES

    def encode(self, table: Tensor, rows: Tensor | None = None) -> Encoded:
        """Search each row's range and quantize it, in one pass over the table's rows."""
        row_bytes = self.row_bytes(table.shape[1], table.dtype)
        numbers = all_rows(table) if rows is None else rows
        codes, is_exact = kernels.encode_rows(table, numbers, self.bits, self._plan(table, numbers), row_bytes)
        return Encoded(codes, positions(is_exact))

    def encode_without_waiting(self, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The same; which rows are stored exactly stays on the device."""
        row_bytes = self.row_bytes(table.shape[1], table.dtype)
        return kernels.encode_rows(table, rows, self.bits, self._plan(table, rows), row_bytes, are_checked=True)

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """``bias + scale * code``, rounded once to fp32 and then to the target's dtype."""
        kernels.decode_rows(codes, positions, self.bits, first_col, target, rows)

    def to_json(self) -> dict[str, Any]:
        """``{"name": ..., "bits": ...}``."""
        return {"name": self.name, "bits": self.bits}

    def _plan(self, table: Tensor, rows: Tensor) -> SearchPlan:
        raise NotImplementedError


@dataclass(frozen=True)
class Symmetric(_Uniform):
    """As far to both sides of zero as the value farthest from it. The worst of the three, for comparison.

    Attributes:
        bits: 2, 3, 4 or 8 bits an element.

    Raises:
        ConfigurationError: ``bits`` is none of these.
    """

    name: ClassVar[str] = "symmetric"

    def _plan(self, table: Tensor, rows: Tensor) -> SearchPlan:
        return search_plan(MIRRORED)


@dataclass(frozen=True)
class Asymmetric(_Uniform):
    """From the least to the greatest value of a row. Good enough with 8 bits, and by far the fastest.

    Attributes:
        bits: 2, 3, 4 or 8 bits an element.

    Raises:
        ConfigurationError: ``bits`` is none of these.
    """

    name: ClassVar[str] = "asymmetric"

    def _plan(self, table: Tensor, rows: Tensor) -> SearchPlan:
        return search_plan(COVERING)


@dataclass(frozen=True)
class AdaptiveAsymmetric(_Uniform):
    """The range of the least error, which with 2 to 4 bits is smaller than that from least to greatest value.

    Without a ``search``, it is chosen for every shard and save from a sample of the rows that are stored: the cheapest
    one whose error comes within half a percent of the best's. The manifest records which.

    Attributes:
        bits: 2, 3, 4 or 8 bits an element.
        search: How the range is searched, or None to choose.

    Raises:
        ConfigurationError: ``bits`` is none of these.
    """

    search: Search | None = None
    name: ClassVar[str] = "adaptive_asymmetric"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search is not None and not isinstance(self.search, Search):
            raise ConfigurationError(f"'search' must be a GreedySearch or LeastSquares (got {self.search!r})")

    @classmethod
    def best(cls, bits: int) -> "AdaptiveAsymmetric":
        """With the best search there is: about three times the time of the usual choice, for half a percent of error.

        Raises:
            ConfigurationError: ``bits`` is not 2, 3, 4 or 8.
        """
        check_bits(bits)
        return cls(bits, LADDERS[bits][-1])

    def choose(self, sample: Sample, num_restores: int) -> "AdaptiveAsymmetric":
        """With a search: the cheapest of its ladder that reaches the plateau of the error on the sample."""
        return self if self.search is not None else AdaptiveAsymmetric(self.bits, _cheapest(self.bits, sample()))

    def to_json(self) -> dict[str, Any]:
        """``{"name": ..., "bits": ..., "search": ...}``."""
        return super().to_json() | {"search": None if self.search is None else self.search.to_json()}

    def _plan(self, table: Tensor, rows: Tensor) -> SearchPlan:
        search = self.search or _cheapest(self.bits, table.index_select(0, rows[:: len(rows) // 512 + 1]))
        return search.plan


def fused_bits(scheme: Scheme) -> int | None:
    """Bits of a code, if the rows that a scheme makes are fused rows of uniform codes; None if they are others."""
    return scheme.bits if isinstance(scheme, _Uniform) else None


def warm_up(scheme: Scheme, table: Tensor) -> None:
    """Compile now, if the table lies on a GPU, what rows of it will be encoded by.

    Args:
        scheme: One with its search, if it has any.
        table: [num_rows, num_cols], at least one of both, the elements of a row side by side.
    """
    if isinstance(scheme, _Uniform):
        plan = scheme._plan(table, torch.empty(0, dtype=torch.int64, device="cpu"))
        kernels.warm_up(table, scheme.bits, plan, scheme.row_bytes(table.shape[1], table.dtype))


def _cheapest(bits: int, rows: Tensor) -> LeastSquares:
    ladder: Sequence[LeastSquares] = LADDERS[bits]
    plateau = mean_error(AdaptiveAsymmetric(bits, ladder[-1]), rows) * _PLATEAU
    cheaper = (search for search in ladder[:-1] if mean_error(AdaptiveAsymmetric(bits, search), rows) <= plateau)
    return next(cheaper, ladder[-1])


def mean_error(scheme: Scheme, rows: Tensor) -> float:
    """The mean l2 norm of the rows' errors (Check-N-Run's measure), without rows that would be stored exactly."""
    errors, _ = _errors_and_rows(scheme, rows)
    return float(errors.norm(dim=1).mean()) if len(errors) else 0.0


def relative_error(scheme: Scheme, rows: Tensor) -> float | None:
    """The squared errors of rows, as a part of their squared values, without rows that would be stored exactly.

    None where there is nothing but zeros.
    """
    errors, values = _errors_and_rows(scheme, rows)
    total = float(values.square().sum())
    return float(errors.square().sum()) / total if total > 0 else None


def _errors_and_rows(scheme: Scheme, rows: Tensor) -> tuple[Tensor, Tensor]:
    """float64 [k, num_cols]: what encoding and decoding adds to rows, and the rows, but those stored exactly."""
    encoded = scheme.encode(rows)
    is_coded = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    is_coded[encoded.exact] = False
    values = rows[is_coded].double()
    return scheme.decode(encoded.codes, rows.shape[1], rows.dtype)[is_coded].double() - values, values

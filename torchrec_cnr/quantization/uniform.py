"""Uniform quantization of each row: evenly spaced codes over a range, and the searches that choose the range.

The three schemes of Check-N-Run (section 5.2) differ only in how they choose the range. Their bytes have FBGEMM's fused
row-wise layout: the codes, lowest bits first, padded to an even number of bytes, then scale and bias in fp16. FBGEMM
does not support 3 bits; with 3 bits, eight codes take three bytes, and the codes are padded to whole bytes.

Scale and bias are rounded to fp16 before the error of a range is computed. Thus the error of an element within the
range is at most half the stored scale, plus the error of rounding to the table's dtype. Encoding decoded rows again
changes nothing. A row is stored exactly if it contains NaN or infinity, or if fp16 cannot represent its range to
within a factor of two. A row of equal values is stored exactly if fp16 cannot represent this value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
    """The greedy search of Check-N-Run (section 5.2), with scale and bias rounded to fp16 before each comparison.

    Each step tries to cut one bin off the low end of the range, or one off the high end, and takes the cut with the
    smaller error. It returns the best range of all steps. PyTorch's ``choose_qparams_optimized`` is a similar search.

    Attributes:
        num_bins: The number of bins into which the range from the least to the greatest value is divided.
        ratio: The fraction of the bins that may be cut off, more than 0 and at most 1.

    Raises:
        ConfigurationError: An attribute is out of bounds.

    Examples:
        >>> cnr.AdaptiveAsymmetric(bits=2, search=cnr.GreedySearch(num_bins=50, ratio=0.6))
        AdaptiveAsymmetric(bits=2, search=GreedySearch(num_bins=50, ratio=0.6))
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
        """The search as the kernels take it."""
        # The last bin is never cut off.
        num_steps = min(round(self.num_bins * self.ratio), self.num_bins - 1)
        return search_plan(GREEDY, num_bins=self.num_bins, num_steps=num_steps)

    def to_json(self) -> dict[str, Any]:
        """Return the search as the manifest records it."""
        return {"name": self.name, "num_bins": self.num_bins, "ratio": repr(float(self.ratio))}


@dataclass(frozen=True)
class LeastSquares:
    """Alternating least squares: each round finds the nearest codes for a range, then the best range for these codes.

    With fixed codes, a linear regression of the values on the codes gives the best scale and bias. With fixed scale and
    bias, the nearest codes are the best. This converges to a local optimum, so the search starts from several ranges:
    every pair of ``cuts``, one at the low end and one at the high end. It is Lloyd's algorithm ("Least squares
    quantization in PCM", IEEE Transactions on Information Theory 28(2), 1982) with evenly spaced levels.

    Attributes:
        cuts: Fractions of the range from the least to the greatest value to cut off at the start, each from 0 to
            below .5.
        rounds: Number of rounds from each start.
        kept: Number of best ranges with which the search continues after these rounds.
        polish: Number of further rounds for the kept ranges.

    Raises:
        ConfigurationError: An attribute is out of bounds.

    Examples:
        >>> cnr.AdaptiveAsymmetric(bits=2, search=cnr.LeastSquares(cuts=(0.1, 0.2), rounds=2))
        AdaptiveAsymmetric(bits=2, search=LeastSquares(cuts=(0.1, 0.2), rounds=2, kept=2, polish=2))
    """

    cuts: tuple[float, ...]
    rounds: int = 1
    kept: int = 2
    polish: int = 2
    name: ClassVar[str] = "least_squares"

    def __post_init__(self) -> None:
        cuts: Any = self.cuts  # callers may pass other types than the annotated one
        is_tuple = isinstance(cuts, tuple) and 1 <= len(cuts) <= MAX_CUTS
        if not is_tuple or not all(type(cut) in (int, float) and 0.0 <= cut < 0.5 for cut in cuts):
            got = str(cuts)[:80]
            raise ConfigurationError(f"'cuts' must be a tuple of 1 to {MAX_CUTS} parts from 0 to below .5 (got {got})")
        _check_whole("rounds", self.rounds, 1, _MAX_ROUNDS)
        _check_whole("kept", self.kept, 1, MAX_CUTS)
        _check_whole("polish", self.polish, 0, _MAX_ROUNDS)

    @property
    def plan(self) -> SearchPlan:
        """The search as the kernels take it."""
        cuts = np.array(self.cuts, np.float32)
        return search_plan(LEAST_SQUARES, cuts=cuts, rounds=self.rounds, kept=self.kept, polish=self.polish)

    def to_json(self) -> dict[str, Any]:
        """Return the search as the manifest records it."""
        cuts = [repr(float(cut)) for cut in self.cuts]
        return {"name": self.name, "cuts": cuts, "rounds": self.rounds, "kept": self.kept, "polish": self.polish}


Search = GreedySearch | LeastSquares


def _ladder(*thirds: float) -> tuple[LeastSquares, ...]:
    """Return searches of increasing cost, about 4, 11, 15, 22, 32 and 66 passes over a row; the last one is the best.

    They are the Pareto front of all tried numbers of cuts, rounds, kept and polish, over widths from 16 to 128 and four
    distributions: no tried search was cheaper than one of these and had a smaller error.
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


# By bits per code. With fewer codes, it pays to cut more off the ends of a row.
LADDERS: Mapping[int, tuple[LeastSquares, ...]] = {
    2: _ladder(0.0, 0.1, 0.2, 0.3),
    3: _ladder(0.0, 0.05, 0.1, 0.15),
    4: _ladder(0.0, 0.033, 0.067, 0.1),
    8: _ladder(0.0, 0.002, 0.004, 0.006),
}


BITS = (2, 3, 4, 8)
_PLATEAU = 1.005  # a search is good enough if its error is at most this times that of the best search of its ladder


def check_bits(bits: int) -> None:
    """Raise a ``ConfigurationError`` if codes cannot have this many bits."""
    if type(bits) is not int or bits not in BITS:
        raise ConfigurationError(f"'bits' must be 2, 3, 4 or 8 (got {bits!r})")


@dataclass(frozen=True)
class _Uniform(RowCodes):
    """The base class of the schemes with evenly spaced codes of ``bits`` bits each."""

    bits: int
    entropy_coded: bool = field(default=False, kw_only=True)
    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if type(self.entropy_coded) is not bool:
            raise ConfigurationError(f"'entropy_coded' must be True or False (got {self.entropy_coded!r})")

    def __repr__(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        if not values["entropy_coded"]:
            del values["entropy_coded"]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Return the bytes per row: its codes, padded to an even number (3 bits: whole bytes), plus scale and bias."""
        if self.bits == 3:
            return -(-num_cols * 3 // 8) + SCALE_AND_BIAS_BYTES
        return -(-num_cols * self.bits // 16) * 2 + SCALE_AND_BIAS_BYTES

    def tail_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Return the bytes of scale and bias, or of all of the row if its codes are worth compressing, too."""
        return self.row_bytes(num_cols, dtype) if self.entropy_coded else SCALE_AND_BIAS_BYTES

    def encode(self, table: Tensor, rows: Tensor | None = None) -> Encoded:
        """Choose each row's range and quantize the row, in one pass over the rows of the table."""
        row_bytes = self.row_bytes(table.shape[1], table.dtype)
        row_numbers = all_rows(table) if rows is None else rows
        codes, is_exact = kernels.encode_rows(table, row_numbers, self.bits, self._plan(table, row_numbers), row_bytes)
        return Encoded(codes, positions(is_exact))

    def encode_without_waiting(self, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Encode as ``encode`` does; the mask of the exact rows is returned on the device."""
        row_bytes = self.row_bytes(table.shape[1], table.dtype)
        return kernels.encode_rows(table, rows, self.bits, self._plan(table, rows), row_bytes, are_checked=True)

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Compute ``bias + scale * code``, rounded once to fp32 and then to the target's dtype."""
        kernels.decode_rows(codes, positions, self.bits, first_col, target, rows)

    def to_json(self) -> dict[str, Any]:
        """Return ``{"name": ..., "bits": ...}``, with ``"entropy_coded": True`` where it is."""
        return {"name": self.name, "bits": self.bits} | ({"entropy_coded": True} if self.entropy_coded else {})

    def _plan(self, table: Tensor, rows: Tensor) -> SearchPlan:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Symmetric(_Uniform):
    """Uniform codes over a range symmetric about zero, up to the row's largest absolute value.

    It has the largest error of the three uniform schemes, and exists for comparison.

    Attributes:
        bits: Bits per element: 2, 3, 4 or 8.
        entropy_coded: Whether the codes are compressed, too, without loss: by a few percent, more with fewer bits.

    Raises:
        ConfigurationError: ``bits`` is not 2, 3, 4 or 8, or ``entropy_coded`` is not a bool.

    Examples:
        >>> scheme = cnr.Symmetric(bits=4)
        >>> writer = cnr.CNRStorageWriter("run", quantization=scheme)
        >>> scheme.row_bytes(64, torch.float32)
        36
    """

    name: ClassVar[str] = "symmetric"

    def _plan(self, table: Tensor, rows: Tensor) -> SearchPlan:
        return search_plan(MIRRORED)


@dataclass(frozen=True, repr=False)
class Asymmetric(_Uniform):
    """Uniform codes over the range from the least to the greatest value of a row.

    With 8 bits its error is small enough for most uses, and it is by far the fastest scheme with codes.

    Attributes:
        bits: Bits per element: 2, 3, 4 or 8.
        entropy_coded: Whether the codes are compressed, too, without loss: by a few percent, more with fewer bits.

    Raises:
        ConfigurationError: ``bits`` is not 2, 3, 4 or 8, or ``entropy_coded`` is not a bool.

    Examples:
        >>> scheme = cnr.Asymmetric(bits=8)
        >>> writer = cnr.CNRStorageWriter("run", quantization=scheme)
        >>> scheme.row_bytes(64, torch.float32)
        68
    """

    name: ClassVar[str] = "asymmetric"

    def _plan(self, table: Tensor, rows: Tensor) -> SearchPlan:
        return search_plan(COVERING)


@dataclass(frozen=True, repr=False)
class AdaptiveAsymmetric(_Uniform):
    """Uniform codes over the range that has the least error, found for each row by a search.

    With 2 to 4 bits, this range is narrower than the range from the least to the greatest value. If ``search`` is None,
    the writer chooses a search for every shard and save, from a sample of the rows to be stored. It takes the cheapest
    search whose error is within half a percent of the best search's error. The manifest records the choice.

    Attributes:
        bits: Bits per element: 2, 3, 4 or 8.
        search: How to search the range, or None to choose a search from a sample.
        entropy_coded: Whether the codes are compressed, too, without loss: by a few percent, more with fewer bits.

    Raises:
        ConfigurationError: ``bits`` is not 2, 3, 4 or 8, ``search`` is not a search, or ``entropy_coded`` not a bool.

    Examples:
        >>> scheme = cnr.AdaptiveAsymmetric(bits=4)
        >>> writer = cnr.CNRStorageWriter("run", quantization=scheme)
        >>> scheme.row_bytes(64, torch.float32)
        36
    """

    search: Search | None = None
    name: ClassVar[str] = "adaptive_asymmetric"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search is not None and not isinstance(self.search, Search):
            raise ConfigurationError(f"'search' must be a GreedySearch or LeastSquares (got {self.search!r})")

    @classmethod
    def best(cls, bits: int) -> "AdaptiveAsymmetric":
        """Return a scheme with the best search.

        It takes about three times as long as the search that is usually chosen, for about half a percent less error.

        Raises:
            ConfigurationError: ``bits`` is not 2, 3, 4 or 8.
        """
        check_bits(bits)
        return cls(bits, LADDERS[bits][-1])

    def choose(self, sample: Sample, num_restores: int) -> "AdaptiveAsymmetric":
        """Return a scheme with a search: the cheapest one that is good enough for the sample."""
        return self if self.search is not None else replace(self, search=_cheapest(self.bits, sample()))

    def to_json(self) -> dict[str, Any]:
        """Return ``{"name": ..., "bits": ..., "search": ...}``."""
        return super().to_json() | {"search": None if self.search is None else self.search.to_json()}

    def _plan(self, table: Tensor, rows: Tensor) -> SearchPlan:
        search = self.search or _cheapest(self.bits, table.index_select(0, rows[:: len(rows) // 512 + 1]))
        return search.plan


def fused_bits(scheme: Scheme) -> int | None:
    """Return the bits per code, 2, 3, 4 or 8, if a scheme stores fused rows of uniform codes, otherwise None.

    Examples:
        >>> from torchrec_cnr.quantization import fused_bits
        >>> fused_bits(cnr.Asymmetric(bits=8)), fused_bits(cnr.KMeans(bits=4))
        (8, None)
    """
    return scheme.bits if isinstance(scheme, _Uniform) else None


def warm_up(scheme: Scheme, table: Tensor) -> None:
    """Compile the kernels that will encode rows of a table, if the table is on a GPU.

    Args:
        scheme: The scheme, with its search if it has one.
        table: [num_rows, num_cols], at least one of both; the elements of a row are contiguous.

    Examples:
        >>> from torchrec_cnr.quantization import warm_up
        >>> warm_up(cnr.Asymmetric(bits=8), model["users"].weight)
    """
    if isinstance(scheme, _Uniform):
        plan = scheme._plan(table, torch.empty(0, dtype=torch.int64, device="cpu"))
        kernels.warm_up(table, scheme.bits, plan, scheme.row_bytes(table.shape[1], table.dtype))


def _cheapest(bits: int, rows: Tensor) -> LeastSquares:
    ladder: Sequence[LeastSquares] = LADDERS[bits]
    if rows.device.type != "cpu":  # where each result of its own would have to be waited for
        *errors, best = torch.stack([_mean_error_on_device(bits, search, rows) for search in ladder]).tolist()
        is_good = [error <= best * _PLATEAU for error in errors]
        return next((search for search, good in zip(ladder, is_good, strict=False) if good), ladder[-1])
    plateau = mean_error(AdaptiveAsymmetric(bits, ladder[-1]), rows) * _PLATEAU
    cheaper = (search for search in ladder[:-1] if mean_error(AdaptiveAsymmetric(bits, search), rows) <= plateau)
    return next(cheaper, ladder[-1])


def _mean_error_on_device(bits: int, search: LeastSquares, rows: Tensor) -> Tensor:
    """Return ``mean_error`` as a tensor on the device of the rows, without waiting for it."""
    numbers = all_rows(rows)
    codes, is_exact = AdaptiveAsymmetric(bits, search).encode_without_waiting(rows, numbers)
    decoded = torch.empty_like(rows)
    kernels.decode_rows(codes, numbers, bits, 0, decoded, numbers, are_checked=True)
    norms = torch.linalg.vector_norm(decoded.double() - rows.double(), dim=1)
    mean: Tensor = norms.where(~is_exact, 0.0).sum() / (~is_exact).sum().clamp(min=1)
    return mean


def mean_error(scheme: Scheme, rows: Tensor) -> float:
    """Return the mean l2 norm of the rows' errors (Check-N-Run's measure), leaving out exact rows."""
    errors, _ = _errors_and_rows(scheme, rows)
    return float(errors.norm(dim=1).mean()) if len(errors) else 0.0


def row_errors(scheme: Scheme, rows: Tensor, encoded: Encoded | None = None) -> Tensor:
    """Return the l2 norm of each row's error, float64 [n]; 0 for exact rows. ``encoded`` is all rows, if at hand."""
    encoded = scheme.encode(rows) if encoded is None else encoded
    decoded = scheme.decode(encoded.codes, rows.shape[1], rows.dtype)
    errors: Tensor = (decoded.double() - rows.double()).norm(dim=1)
    errors[encoded.exact] = 0.0
    return errors


def relative_error(scheme: Scheme, rows: Tensor) -> float | None:
    """Return the rows' sum of squared errors divided by their sum of squared values, or None if all values are zero.

    Rows that would be stored exactly are left out.
    """
    errors, values = _errors_and_rows(scheme, rows)
    total = float(values.square().sum())
    return float(errors.square().sum()) / total if total > 0 else None


def _errors_and_rows(scheme: Scheme, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the errors of encoding, and the rows, each float64 [k, num_cols], without rows stored exactly."""
    encoded = scheme.encode(rows)
    is_coded = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    is_coded[encoded.exact] = False
    values = rows[is_coded].double()
    return scheme.decode(encoded.codes, rows.shape[1], rows.dtype)[is_coded].double() - values, values

"""The error of every scheme by its bytes per row, measured and as tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchrec_cnr as cnr
from benchmarks.support.data.embedding_rows import trained_rows
from benchmarks.support.report import number
from torchrec_cnr.format.blob_bytes import exact_row_bytes
from torchrec_cnr.quantization import Scheme, SchemeRules, Transformed
from torchrec_cnr.quantization.packed_rows import pack_rows
from torchrec_cnr.quantization.uniform import BITS, mean_error, relative_error
from torchrec_cnr.saving.encoding import choose_scheme, sampled_rows

WIDTHS = (64, 16)
BASE, DEFAULT, TRANSFORMED = "Asymmetric", "AdaptiveAsymmetric", "TransformCoded"
TRANSFORMED_BITS = (3, 4)


@dataclass(frozen=True)
class Series:
    """A scheme with all its numbers of bits.

    Attributes:
        name: Name in the tables.
        schemes: Functions that return the scheme for given rows, by label, such as ``4`` (bits) or ``fp16``.
        is_uniform: Whether its codes are uniform, so that it differs from other uniform schemes only in the range.
    """

    name: str
    schemes: Mapping[str, Callable[[Tensor], Scheme]]
    is_uniform: bool = False


@dataclass(frozen=True)
class Point:
    """The measured values of one scheme.

    Attributes:
        num_cols: Number of columns of the table.
        series: Name of the series.
        bits: Label of the scheme in the series.
        row_bytes: Bytes per row, including the additional bytes of exact rows, and of the transform and its basis.
        error: Mean l2 norm of the rows' errors, divided by the mean l2 norm of the rows.
        relative_square: Sum of the squared errors of all rows, divided by the sum of their squared values.
        num_exact: Number of rows that are stored exactly.
        scheme: The scheme as a manifest records it.
    """

    num_cols: int
    series: str
    bits: str
    row_bytes: float
    error: float
    relative_square: float
    num_exact: int
    scheme: Mapping[str, Any]


def _by_bits(make: Callable[[int, Tensor], Scheme]) -> Mapping[str, Callable[[Tensor], Scheme]]:
    return {str(bits): lambda rows, bits=bits: make(bits, rows) for bits in BITS}  # type: ignore[misc]  # bound now


def _default(bits: int, rows: Tensor) -> Scheme:
    """Return the default scheme, with the search that a save chooses."""
    return cnr.AdaptiveAsymmetric(bits).choose(lambda: sampled_rows(rows, None), 0)


def _transformed(bits: int, rows: Tensor) -> Scheme:
    """Return the scheme that a save of these rows chooses, at the error of the default scheme."""
    rules = SchemeRules.of(cnr.TransformCoded(cnr.AdaptiveAsymmetric(bits)))
    return choose_scheme(rules, "table", is_table=True, values=rows, rows=None, num_restores=0)


SERIES = (
    Series("Symmetric", _by_bits(lambda bits, _: cnr.Symmetric(bits)), is_uniform=True),
    Series(BASE, _by_bits(lambda bits, _: cnr.Asymmetric(bits)), is_uniform=True),
    Series(
        "AdaptiveAsymmetric, GreedySearch(25, 0.6)",
        _by_bits(lambda bits, _: cnr.AdaptiveAsymmetric(bits, cnr.GreedySearch(25, 0.6))),
        is_uniform=True,
    ),
    Series(DEFAULT, _by_bits(_default), is_uniform=True),
    Series("KMeans", _by_bits(lambda bits, _: cnr.KMeans(bits))),
    Series(
        "HalfPrecision",
        {
            "bf16": lambda _: cnr.HalfPrecision(torch.bfloat16),
            "fp16": lambda _: cnr.HalfPrecision(torch.float16),
        },
    ),
    Series(TRANSFORMED, {str(bits): partial(_transformed, bits) for bits in TRANSFORMED_BITS}),
)


def measure(widths: Iterable[int], num_rows: int, say: Callable[[str], None]) -> list[Point]:
    """Measure every scheme on trained rows of every width, except schemes that take as many bytes as fp32."""
    points = []
    for num_cols in widths:
        say(f"training tables of {num_cols} columns")
        rows = trained_rows(num_rows, num_cols)
        for series in SERIES:
            say(f"{num_cols} columns, {series.name}")
            found = [_point(rows, series.name, bits, make(rows)) for bits, make in series.schemes.items()]
            points += [point for point in found if point.row_bytes < rows[0].nbytes]
    return points


def _point(rows: Tensor, series: str, bits: str, scheme: Scheme) -> Point:
    num_rows, num_cols = rows.shape
    encoded = scheme.encode(rows)
    num_exact = len(encoded.exact)
    num_bytes = num_exact * exact_row_bytes(num_cols, rows.itemsize)
    if isinstance(scheme, Transformed):
        transform = scheme.known
        num_bytes += pack_rows(encoded.codes.view(torch.int16).numpy(), transform).nbytes + len(transform.data)
        num_bytes += 0 if transform.basis is None else len(transform.basis.data)
    else:
        num_bytes += num_rows * scheme.row_bytes(num_cols, rows.dtype)
    return Point(
        num_cols=num_cols,
        series=series,
        bits=bits,
        row_bytes=num_bytes / num_rows,
        error=mean_error(scheme, rows) / float(rows.double().norm(dim=1).mean()),
        relative_square=relative_error(scheme, rows) or 0.0,
        num_exact=num_exact,
        scheme=scheme.to_json(),
    )


def error_table(points: Sequence[Point]) -> str:
    """Return a table of bytes and errors of all schemes, in Markdown."""
    by_place = {(point.series, point.bits, point.num_cols): point for point in points}
    widths = widths_of(points)
    lines = [["scheme", "bits", *(f"{num} columns: {what}" for num in widths for what in ("bytes per row", "error"))]]
    for series, bits in dict.fromkeys((point.series, point.bits) for point in points):
        cells = [f"`{series}`", bits]
        for num_cols in widths:
            found = by_place.get((series, bits, num_cols))
            cells += [number(found.row_bytes), f"{100 * found.error:#.3g} %"] if found else ["–", "–"]
        lines.append(cells)
    return _markdown(lines)


def restore_table(points: Sequence[Point]) -> str:
    """Return a table of the restores that the default error budget allows for each scheme of the rules, in Markdown."""
    by_place = {(point.series, point.bits, point.num_cols): point for point in points}
    widths = widths_of(points)
    lines = [["scheme", *(f"restores, {num_cols} columns" for num_cols in widths)]]
    budget = cnr.ByErrorBudget(0).budget
    for bits in BITS:
        series = BASE if bits == 8 else DEFAULT
        allowed = [budget / by_place[series, str(bits), num_cols].relative_square for num_cols in widths]
        lines.append([f"`{series}({bits})`", *(f"{int(num_restores):,}" for num_restores in allowed)])
    return _markdown(lines)


def widths_of(points: Sequence[Point]) -> list[int]:
    """Return the numbers of columns that were measured."""
    return list(dict.fromkeys(point.num_cols for point in points))


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *others = lines
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *others))

"""The error of every scheme against the bytes that a row takes: measured, and as tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torchrec_cnr as cnr
from benchmarks.support.data.embedding_rows import trained_rows
from benchmarks.support.report import number
from torchrec_cnr.format.blob_bytes import exact_row_bytes
from torchrec_cnr.quantization import Scheme
from torchrec_cnr.quantization.uniform import BITS, mean_error, relative_error
from torchrec_cnr.saving.encoding import sampled_rows

WIDTHS = (64, 16)
BASE, DEFAULT = "Asymmetric", "AdaptiveAsymmetric"


@dataclass(frozen=True)
class Series:
    """A scheme with all its widths of codes, and how it is drawn.

    Attributes:
        name: As in the legend and the tables.
        schemes: What makes the scheme from the rows, by label: ``4`` bits, or ``fp16``.
        color: Of line and marker; as light or dark in grey as no other one nearby.
        marker: Of each point.
        line: Between the points.
        is_uniform: Whether it differs from the others of its bits in the range only, and takes as many bytes.
        label: Where a point's label stands: offset in points, and how it is aligned; None without labels.
    """

    name: str
    schemes: Mapping[str, Callable[[Tensor], Scheme]]
    color: str
    marker: str
    line: str = "-"
    is_uniform: bool = False
    label: tuple[tuple[float, float], str, str] | None = None


@dataclass(frozen=True)
class Point:
    """What was measured of one scheme.

    Attributes:
        num_cols: Columns of the table.
        series: The series' name.
        bits: The scheme's label in it.
        row_bytes: Bytes that a row takes, with what rows stored exactly take in addition.
        error: Mean l2 norm of the rows' errors, as a part of the mean l2 norm of the rows.
        relative_square: Squared errors of all rows, as a part of their squared values.
        num_exact: Rows stored exactly.
        scheme: As a manifest records it.
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
    """The default, settled as a save does it."""
    return cnr.AdaptiveAsymmetric(bits).choose(lambda: sampled_rows(rows, None), 0)


SERIES = (
    Series("Symmetric", _by_bits(lambda bits, _: cnr.Symmetric(bits)), color="#999999", marker="v", is_uniform=True),
    Series(BASE, _by_bits(lambda bits, _: cnr.Asymmetric(bits)), color="#000000", marker="s", is_uniform=True),
    Series(
        "AdaptiveAsymmetric, GreedySearch(25, 0.6)",
        _by_bits(lambda bits, _: cnr.AdaptiveAsymmetric(bits, cnr.GreedySearch(25, 0.6))),
        color="#56b4e9",
        marker="^",
        is_uniform=True,
    ),
    Series(
        DEFAULT,
        _by_bits(_default),
        color="#b34700",
        marker="o",
        is_uniform=True,
        label=((-6, -4), "right", "top"),
    ),
    Series(
        "KMeans",
        _by_bits(lambda bits, _: cnr.KMeans(bits)),
        color="#0072b2",
        marker="D",
        line=":",
        label=((6, 4), "left", "bottom"),
    ),
    Series(
        "HalfPrecision",
        {
            "bf16": lambda _: cnr.HalfPrecision(torch.bfloat16),
            "fp16": lambda _: cnr.HalfPrecision(torch.float16),
        },
        color="#009e73",
        marker="P",
        line="none",
        label=((-7, 0), "right", "center"),
    ),
)


def measure(widths: Iterable[int], num_rows: int, say: Callable[[str], None]) -> list[Point]:
    """Every scheme, on trained rows of every width, unless it takes as many bytes as fp32."""
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
    num_exact = len(scheme.encode(rows).exact)
    exact_bytes = num_exact * exact_row_bytes(num_cols, rows.itemsize)
    return Point(
        num_cols=num_cols,
        series=series,
        bits=bits,
        row_bytes=scheme.row_bytes(num_cols, rows.dtype) + exact_bytes / num_rows,
        error=mean_error(scheme, rows) / float(rows.double().norm(dim=1).mean()),
        relative_square=relative_error(scheme, rows) or 0.0,
        num_exact=num_exact,
        scheme=scheme.to_json(),
    )


def error_table(points: Sequence[Point]) -> str:
    """Bytes and errors of all schemes, in Markdown."""
    by_place = {(point.series, point.bits, point.num_cols): point for point in points}
    widths = widths_of(points)
    lines = [["scheme", "bits", *(f"{num} columns: {what}" for num in widths for what in ("bytes a row", "error"))]]
    for series, bits in dict.fromkeys((point.series, point.bits) for point in points):
        cells = [f"`{series}`", bits]
        for num_cols in widths:
            found = by_place.get((series, bits, num_cols))
            cells += [number(found.row_bytes), f"{100 * found.error:#.3g} %"] if found else ["–", "–"]
        lines.append(cells)
    return _markdown(lines)


def restore_table(points: Sequence[Point]) -> str:
    """How many restores the default error budget allows to what the rules choose among, in Markdown."""
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
    """The numbers of columns that were measured."""
    return list(dict.fromkeys(point.num_cols for point in points))


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *others = lines
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *others))

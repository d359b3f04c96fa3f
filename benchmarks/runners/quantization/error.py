"""The error of every scheme and width on trained tables, by bytes per row, and the rows that a search improves.

The error is that of Check-N-Run: the mean l2 norm of the rows' errors (NSDI '22, section 4.2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from torch import Tensor

from benchmarks.plots.quantization import PLOT
from benchmarks.support.data.clicks import trained_on
from benchmarks.support.data.embedding_rows import trained_rows
from benchmarks.support.quantization_errors import (
    BASE,
    DEFAULT,
    SERIES,
    TRANSFORMED,
    TRANSFORMED_BITS,
    WIDTHS,
    Point,
    measure,
)
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table, number
from benchmarks.support.rounds import Setup
from torchrec_cnr.quantization import Scheme

NUM_ROWS, NUM_QUICK_ROWS = 50_000, 500
DIM = 64


def run(setup: Setup) -> Report:
    """Measure errors, and compare each scheme with the plain one of the same bits, row by row."""
    num_rows = NUM_QUICK_ROWS if setup.quick else NUM_ROWS
    points = measure(WIDTHS, num_rows, setup.say)
    rows = trained_rows(num_rows, DIM)
    shares = {}
    for series in SERIES:
        if series.is_uniform and series.name != BASE:
            setup.say(f"rows that {series.name} improves")
            shares[series.name] = {bits: _improved(rows, series.name, bits) for bits in series.schemes}
    widths = list(shares[DEFAULT])
    return Report(
        title=f"errors of {num_rows:,} rows of tables trained on {trained_on()}",
        notes=(
            "Mean l2 norm of the rows' errors, as a part of the rows' mean l2 norm; bytes with those of rows that a",
            f"scheme stores exactly. A row is improved if its l2 error is less than with {BASE} of as many bits.",
            f"{TRANSFORMED} has the error of {DEFAULT} with as many bits, and bytes with those of its transform. The",
            "tables were trained by matrix factorisation. It makes other tables much smaller; see `transforms`.",
        ),
        figures=(*(_gain(points, bits) for bits in widths), *_transform_gains(points)),
        tables=(
            _errors(points),
            Table(
                (f"rows improved, {DIM} columns, %", *(f"{bits} bits" for bits in widths)),
                tuple((name, *(f"{100 * share:.1f}" for share in found.values())) for name, found in shares.items()),
            ),
        ),
        plot={"points": [asdict(point) for point in points]},
    )


def _errors(points: Sequence[Point]) -> Table:
    rows = [
        (point.series, point.bits, f"{point.num_cols}", number(point.row_bytes), f"{100 * point.error:#.3g}")
        for point in points
    ]
    return Table(("scheme", "bits", "columns", "bytes a row", "error, %"), tuple(rows))


def _gain(points: Sequence[Point], bits: str) -> Figure:
    found = {point.series: point.error for point in points if point.bits == bits and point.num_cols == DIM}
    return Figure(f"error of {DEFAULT}({bits}), of {BASE}'s", found[DEFAULT] / found[BASE], "×")


def _transform_gains(points: Sequence[Point]) -> Iterator[Figure]:
    found = {(point.series, point.bits): point for point in points if point.num_cols == DIM}
    for bits in map(str, TRANSFORMED_BITS):
        transformed, default = found[TRANSFORMED, bits], found[DEFAULT, bits]
        share, error = transformed.row_bytes / default.row_bytes, transformed.error / default.error
        what = f"of {TRANSFORMED} at {bits} bits' error, of {DEFAULT}'s"
        yield Figure(f"bytes {what}", share, "×", at_most=1.0)
        yield Figure(f"error {what}", error, "×", at_most=1.0)


def _improved(rows: Tensor, name: str, bits: str) -> float:
    """Return the share of rows that a scheme decodes with less error than the plain scheme."""
    schemes = {series.name: series.schemes[bits](rows) for series in SERIES if series.name in (name, BASE)}
    errors = {series: _row_errors(scheme, rows) for series, scheme in schemes.items()}
    return float((errors[name] < errors[BASE]).double().mean())


def _row_errors(scheme: Scheme, rows: Tensor) -> Tensor:
    """Return the l2 norm of each row's error, float64 [num_rows]."""
    encoded = scheme.encode(rows)
    decoded = scheme.decode(encoded.codes, rows.shape[1], rows.dtype)
    decoded[encoded.exact] = rows[encoded.exact]
    errors: Tensor = (decoded.double() - rows.double()).norm(dim=1)
    return errors


BENCHMARK = Benchmark(run, "error of every scheme and number of bits on trained tables, by bytes per row", plot=PLOT)

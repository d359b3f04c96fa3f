"""The plot and the tables of docs/quantization.md: the error of every scheme against the bytes that a row takes.

``python -m benchmarks.plots.quantization --help`` tells how to run it. It times nothing, so it is not among the names
of ``python -m benchmarks``.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor

import torchrec_cnr as cnr
from benchmarks.support.data.clicks import trained_on
from benchmarks.support.data.embedding_rows import trained_rows
from benchmarks.support.processes import Progress
from benchmarks.support.report import number
from torchrec_cnr.quantization import Scheme, exact_row_bytes
from torchrec_cnr.quantization.uniform import BITS, mean_error, relative_error
from torchrec_cnr.saving.scheme_choice import sampled_rows

WIDTHS = (64, 16)
NUM_ROWS = 50_000
BASE, DEFAULT = "Asymmetric", "AdaptiveAsymmetric"
EPILOG = """\
examples:
  python -m benchmarks.plots.quantization        write docs/quantization.svg, print the tables of docs/quantization.md
  python -m benchmarks.plots.quantization --rows 500 --output /tmp/try.svg --json /tmp/try.json

The rows are those of two tables that were trained on the clicks that the benchmarks use. It takes some seconds.
"""


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
    widths = _widths(points)
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
    widths = _widths(points)
    lines = [["scheme", *(f"restores, {num_cols} columns" for num_cols in widths)]]
    budget = cnr.ByErrorBudget(0).budget
    for bits in BITS:
        series = BASE if bits == 8 else DEFAULT
        allowed = [budget / by_place[series, str(bits), num_cols].relative_square for num_cols in widths]
        lines.append([f"`{series}({bits})`", *(f"{int(num_restores):,}" for num_restores in allowed)])
    return _markdown(lines)


def _widths(points: Sequence[Point]) -> list[int]:
    return list(dict.fromkeys(point.num_cols for point in points))


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *others = lines
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *others))


def draw(points: Sequence[Point]) -> Figure:
    """Above, the errors; below, those of uniform codes as parts of ``BASE``'s. A column of panels for each width."""
    widths = _widths(points)
    figure = Figure(figsize=(8.6, 6.6), layout="constrained")
    panels = figure.subplots(2, len(widths), sharex="col", sharey="row", height_ratios=(3, 1.7), squeeze=False)
    for (upper, lower), num_cols in zip(panels.T, widths, strict=True):
        here = [point for point in points if point.num_cols == num_cols]
        _draw_errors(upper, here)
        _draw_parts(lower, here)
        _draw_bytes(upper, lower, here, 4 * num_cols)
        upper.set_title(f"{num_cols} columns", fontsize=10)
    panels[0, 0].set_ylabel("mean l2 error, % of the rows' mean l2 norm")
    panels[1, 0].set_ylabel(f"error, % of {BASE}'s")
    lines, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


def _draw_errors(axes: Axes, points: Sequence[Point]) -> None:
    for series in SERIES:
        own = [point for point in points if point.series == series.name]
        _draw_line(axes, series, [(point.row_bytes, 100 * point.error) for point in own])
        for point in own if series.label else ():
            offset, side, level = series.label or ((0, 0), "", "")
            text = f"{point.bits} bits" if point.bits.isdigit() else point.bits
            axes.annotate(
                text,
                (point.row_bytes, 100 * point.error),
                xytext=offset,
                textcoords="offset points",
                ha=side,
                va=level,
                fontsize=8,
                color="black" if series.is_uniform else series.color,  # black: it is for all of its bits
            )
    axes.set_yscale("log")
    axes.set_ylim(0.01, 100)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_parts(axes: Axes, points: Sequence[Point]) -> None:
    bases = {point.bits: point.error for point in points if point.series == BASE}
    for series in SERIES:
        if series.is_uniform:
            own = [point for point in points if point.series == series.name]
            _draw_line(axes, series, [(point.row_bytes, 100 * point.error / bases[point.bits]) for point in own])
    axes.yaxis.set_major_locator(FixedLocator(range(60, 130, 10)))
    axes.set_ylim(68, 117)


def _draw_line(axes: Axes, series: Series, places: Sequence[tuple[float, float]]) -> None:
    xs, ys = zip(*places, strict=True) if places else ((), ())
    axes.plot(
        xs,
        ys,
        linestyle=series.line,
        color=series.color,
        marker=series.marker,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.5,
        linewidth=1.8 if series.name == DEFAULT else 1.2,
        label=series.name,
        clip_on=False,
    )


def _draw_bytes(upper: Axes, lower: Axes, points: Sequence[Point], fp32_bytes: int) -> None:
    """The axis that a column of panels shares, with a tick for each width of uniform codes, and fp32 on the right."""
    names = {series.name for series in SERIES if series.is_uniform}
    ticks = sorted({point.row_bytes for point in points if point.series in names} | {fp32_bytes // 2, fp32_bytes})
    lower.set_xscale("log")
    lower.set_xlim(min(ticks) / 1.4, fp32_bytes * 1.02)
    lower.xaxis.set_major_locator(FixedLocator(ticks))
    lower.xaxis.set_minor_locator(NullLocator())
    lower.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    lower.set_xlabel(f"bytes a row ({fp32_bytes} as fp32)")
    for axes in (upper, lower):
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.axvline(fp32_bytes, color="black", linewidth=1.2, linestyle="--")
    upper.annotate(
        "fp32: no error",
        (fp32_bytes, 0.5),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        rotation=90,
        fontsize=8,
    )


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, with the same bytes for the same figures."""
    with mpl.rc_context({"svg.hashsalt": "torchrec_cnr", "svg.fonttype": "path", "path.simplify": False}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, draw, and print the tables."""
    args = _parse(arguments)
    say = Progress("quantization", time.monotonic())
    points = measure(WIDTHS, args.rows, say)
    say(f"drawing {args.output}")
    save(draw(points), args.output)
    if args.json:
        content = {"rows": args.rows, "trained_on": trained_on(), "points": [asdict(point) for point in points]}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{args.rows:,} rows of each width, trained on {trained_on()}\n")
    print(error_table(points), restore_table(points), sep="\n\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots.quantization",
        description="Plot the error of every quantization scheme against the bytes that a row takes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Path(__file__).parents[2] / "docs" / "quantization.svg"
    parser.add_argument("--output", type=Path, default=default, metavar="FILE", help="SVG (default: the page's)")
    parser.add_argument("--rows", type=int, default=NUM_ROWS, help=f"of each width (default: {NUM_ROWS:,})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file too")
    args = parser.parse_args(arguments)
    if args.rows < 1:
        parser.error(f"--rows must be at least 1 (got {args.rows})")
    for path in filter(None, (args.output, args.json)):
        if not path.parent.is_dir():
            parser.error(f"{path}: no folder {path.parent}")
    return args


if __name__ == "__main__":
    sys.exit(main())

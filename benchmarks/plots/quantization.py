"""The plot and the tables of docs/concepts/quantization.md: the error of every scheme by its bytes per row.

``python -m benchmarks.plots.quantization --help`` describes how to run it. It measures no times, so it is not one of
the benchmarks of ``python -m benchmarks``.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.support.data.clicks import trained_on
from benchmarks.support.processes import Progress
from benchmarks.support.quantization_errors import (
    BASE,
    DEFAULT,
    SERIES,
    WIDTHS,
    Point,
    Series,
    error_table,
    measure,
    restore_table,
    widths_of,
)

NUM_ROWS = 50_000
EPILOG = """\
examples:
  python -m benchmarks.plots.quantization        write the plot of the page, print its tables
  python -m benchmarks.plots.quantization --rows 500 --output /tmp/try.svg --json /tmp/try.json

The rows are those of two tables that were trained on the clicks that the benchmarks use. It takes some seconds.
"""


def draw(points: Sequence[Point]) -> Figure:
    """Draw a column of panels for each width: above the errors, below those of uniform codes relative to ``BASE``."""
    widths = widths_of(points)
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
                color="black" if series.is_uniform else series.color,  # black, because it is not specific to one scheme
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
    """Draw the axis of a column of panels, with a tick for each width of uniform codes, and fp32 at the right."""
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
    """Write a figure as SVG, with the same bytes for the same content."""
    with mpl.rc_context({"svg.hashsalt": "torchrec_cnr", "svg.fonttype": "path", "path.simplify": False}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the errors, draw the plot, and print the tables."""
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
    default = Path(__file__).parents[2] / "docs" / "images" / "quantization.svg"
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

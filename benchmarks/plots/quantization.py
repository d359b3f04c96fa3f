"""The plot and the tables of docs/concepts/quantization.md: the error of every scheme by its bytes per row.

``python -m benchmarks.plots.quantization --help`` describes how to run it. It measures no times, so it is not one of
the benchmarks of ``python -m benchmarks``.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.plots.style import OTHER, OURS, Bar, Plot, draw_bars
from benchmarks.support.data.clicks import trained_on
from benchmarks.support.processes import Progress
from benchmarks.support.quantization_errors import (
    BASE,
    DEFAULT,
    TRANSFORMED,
    WIDTHS,
    error_table,
    measure,
    restore_table,
)
from benchmarks.support.report import number
from torchrec_cnr.human_text import number_text

NUM_ROWS = 50_000
SHOWN = (BASE, DEFAULT, "KMeans", "HalfPrecision", TRANSFORMED)
EPILOG = """\
examples:
  python -m benchmarks.plots.quantization        write the plot of the page, print its tables
  python -m benchmarks.plots.quantization --rows 500 --output /tmp/try.svg --json /tmp/try.json

The rows are those of two tables that were trained on the clicks that the benchmarks use. It takes some seconds.
"""


def draw(report: Mapping[str, Any], figure: Figure) -> None:
    """Draw the bytes and the error of each scheme at the greatest number of columns, by bytes."""
    points = [point for point in report["plot"]["points"] if point["series"] in SHOWN]
    num_cols = max(point["num_cols"] for point in points)
    points = sorted(
        (point for point in points if point["num_cols"] == num_cols),
        key=lambda point: (point["row_bytes"], -point["error"]),
    )
    names = [f"{point['series']}({point['bits']})" for point in points]
    colors = [OURS if point["series"] == DEFAULT else OTHER for point in points]
    row_bytes = [point["row_bytes"] for point in points]
    errors = [100 * point["error"] for point in points]
    left, right = figure.subplots(1, 2, sharey=True)
    draw_bars(left, [Bar(*bar) for bar in zip(names, row_bytes, map(number, row_bytes), colors, strict=True)])
    draw_bars(right, [Bar(*bar) for bar in zip(names, errors, map(number_text, errors), colors, strict=True)])
    left.set_title(f"Bytes per row\n(fp32: {4 * num_cols})")
    right.set_title("Mean error,\n% of norm")


PLOT = Plot("quantization.svg", 460, draw)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the errors, draw the plot, and print the tables."""
    args = _parse(arguments)
    say = Progress("quantization", time.monotonic())
    points = measure(WIDTHS, args.rows, say)
    say(f"drawing {args.output}")
    content = {"rows": args.rows, "trained_on": trained_on(), "points": [asdict(point) for point in points]}
    PLOT.write({"plot": content}, args.output)
    if args.json:
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

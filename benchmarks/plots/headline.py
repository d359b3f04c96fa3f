"""The picture at the top of the README: bytes of a checkpoint by method, and stall by size of the table."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.plots.style import svg_figure
from benchmarks.support.report import Report

OURS, OTHERS = "#0b6bcb", "#8a8f98"  # legible on white and on black
BARS = {
    "plain DCP": "bytes, dcp.save",
    "delta by hand": "bytes, ModelDeltaTracker, by hand",
    "exact": "bytes, exact",
    "8-bit": "bytes, 8-bit",
    "4-bit": "bytes, 4-bit",
    "2-bit": "bytes, 2-bit",
}
LINES = {
    "dcp.async_save": ("dcp.async_save", OTHERS, "-"),
    "ModelDeltaTracker, by hand": ("delta by hand", OTHERS, "--"),
    "exact": ("exact", OURS, "--"),
    "4-bit": ("4-bit", OURS, "-"),
}
NUM_OTHERS = 2  # bars that are not ours


def draw(report: Report, all_rows: Sequence[int], path: Path) -> None:
    """Write an SVG of two plots with linear axes, on a transparent ground."""
    values = {figure.what: figure.value for figure in report.figures}
    with svg_figure(path, 8.4, 3.2) as figure:
        figure.patch.set_alpha(0)
        left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.12})
        megabytes = [values[what] / 1e6 for what in BARS.values()]
        colors = [OTHERS] * NUM_OTHERS + [OURS] * (len(BARS) - NUM_OTHERS)
        bars = left.barh(list(BARS), megabytes, color=colors)
        texts = [f"{size:,.0f} MB" for size in megabytes]
        left.bar_label(bars, texts, padding=4, color=OTHERS, fontsize=11)
        left.invert_yaxis()
        left.set_title("Bytes of a checkpoint", color=OTHERS, loc="left", fontsize=13)
        left.set_xlim(0, 1.25 * max(megabytes))
        left.xaxis.set_visible(False)
        for name, (label, color, style) in LINES.items():
            heights = [values[f"stall, {name}, {num_rows:,} rows"] / 1e3 for num_rows in all_rows]
            right.plot([num_rows / 1e6 for num_rows in all_rows], heights, style, marker="o", color=color)
            right.annotate(
                label,
                (all_rows[-1] / 1e6, heights[-1]),
                xytext=(8, -4),
                textcoords="offset points",
                color=color,
                fontsize=11,
            )
        right.set_title("Training waits, seconds", color=OTHERS, loc="left", fontsize=13)
        right.set_xlabel("million rows × 64", color=OTHERS, fontsize=11)
        right.set_xlim(0, 1.5 * all_rows[-1] / 1e6)
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.patch.set_alpha(0)
            axes.tick_params(colors=OTHERS, labelsize=11)
            for spine in axes.spines.values():
                spine.set_color(OTHERS)
        left.spines["bottom"].set_visible(False)

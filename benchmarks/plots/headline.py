"""The picture at the top of the README: bytes per checkpoint by method, and stall by size of the table."""

import re
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.plots.style import FAINT, OTHER, OURS, TEXT, TINTS, Bar, Plot, draw_bars, label_lines
from torchrec_cnr.human_text import bytes_text, ratio_text

PLAIN = "bytes, dcp.save"
BARS = {
    "plain DCP": (PLAIN, OTHER),
    "TorchRec deltas": ("bytes, ModelDeltaTracker, by hand", OTHER),
    "exact": ("bytes, exact", TINTS["exact"]),
    "8-bit": ("bytes, 8-bit", TINTS["8"]),
    "4-bit": ("bytes, 4-bit", TINTS["4"]),
    "transform-\ncoded": ("bytes, transform-coded, error of 4-bit", TINTS["4"]),
    "2-bit": ("bytes, 2-bit", TINTS["2"]),
}
NUM_OTHERS = 2  # bars that are not ours
NAME_OFFSET = 122  # pixels from the bars to the name of the library, which is left of the names of our bars
LINES = {
    "ModelDeltaTracker, by hand": ("TorchRec deltas", OTHER, TEXT, "--"),
    "dcp.async_save": ("plain DCP", OTHER, TEXT, "-"),
    "exact": ("exact", TINTS["exact"], TINTS["exact"], "--"),
    "4-bit": ("4-bit", OURS, OURS, "-"),
}
SAME_SECS = 0.05  # lines whose ends are closer share a label
STALL = re.compile(r"stall, (.*), ([\d,]+) rows")


def draw(report: Mapping[str, Any], figure: Figure) -> None:
    """Draw bars of bytes, and lines of stalls."""
    values = {found["what"]: found["value"] for found in report["figures"]}
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_bytes(left, values, report["title"])
    _draw_stalls(right, values)


def _draw_bytes(axes: Axes, values: Mapping[str, float], title: str) -> None:
    bars = []
    for number, (name, (what, color)) in enumerate(BARS.items()):
        text = bytes_text(round(values[what]))
        if number >= NUM_OTHERS:
            text += f" ({ratio_text(values[PLAIN] / values[what])} × less)"
        bars.append(Bar(name, values[what], text, color))
    draw_bars(axes, bars)
    share = re.search(r"\d+ % of the rows", title)
    axes.set_title("Bytes per checkpoint" + (f",\n{share[0]} modified" if share else ""))
    for label in axes.get_yticklabels()[NUM_OTHERS:]:
        label.set(color=OURS, fontweight="bold")
    middle = 1 - (NUM_OTHERS + len(BARS)) / 2 / len(BARS)
    axes.annotate(
        "torchrec_cnr",
        (0, middle),
        (-NAME_OFFSET, 0),
        "axes fraction",
        "offset points",
        color=OURS,
        fontweight="bold",
        rotation=90,
        ha="center",
        va="center",
    )


def _draw_stalls(axes: Axes, values: Mapping[str, float]) -> None:
    stalls: dict[str, dict[float, float]] = {name: {} for name in LINES}
    for what, value in values.items():
        found = STALL.fullmatch(what)
        if found and found[1] in stalls:
            stalls[found[1]][float(found[2].replace(",", "")) / 1e6] = value / 1e3
    labels: list[tuple[float, str, str]] = []
    for name, (label, color, text_color, style) in LINES.items():
        axes.plot(list(stalls[name]), list(stalls[name].values()), style, marker="o", color=color, clip_on=False)
        end = list(stalls[name].values())[-1]
        if labels and abs(end - labels[-1][0]) < SAME_SECS:
            label, text_color = f"{labels.pop()[1]}, {label}", OURS
        labels.append((end, label, text_color))
    axes.set_title("Training waits for\na save, seconds")
    axes.set_xlabel("million rows × 64")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)))
    axes.grid(axis="y", color=FAINT)
    axes.set_axisbelow(True)
    label_lines(axes, labels, 0.11)


PLOT = Plot("hero.svg", 350, draw)

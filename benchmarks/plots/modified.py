"""The plot of modified rows: the share that is modified since the first interval, by the number of intervals."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.plots.style import FAINT, OTHER, OURS, TEXT, Plot, label_lines

REPORTED = ((1, 26.0), (11, 52.0))  # intervals and percent; NSDI '22, section 3.2
MOST_INTERVALS = 20


def draw(report: Mapping[str, Any], figure: Figure) -> None:
    """Draw a line for each length of the stream's intervals, and the paper's curve with what Check-N-Run reports."""
    data = report["plot"]
    axes = figure.subplots()
    axes.set(xlim=(0, MOST_INTERVALS), ylim=(0, 105), xlabel="intervals", ylabel="% of all rows")
    labels = []
    for share, since in data["stream_since"].items():
        percents = [100 * modified for modified in since[:MOST_INTERVALS]]
        axes.plot(range(1, len(percents) + 1), percents, color=OTHER)
        label = f"each {share} of clicks"
        if len(percents) == MOST_INTERVALS:
            labels.append((percents[-1], label, TEXT))
        else:
            axes.annotate(
                label, (len(percents), percents[-1]), (-8, 0), textcoords="offset points", ha="right", va="center"
            )
    paper = [100 * modified for modified in data["paper_since"][:MOST_INTERVALS]]
    axes.plot(range(1, len(paper) + 1), paper, color=OURS)
    axes.plot(*zip(*REPORTED, strict=True), "x", color=OURS, markersize=11, markeredgewidth=3, clip_on=False)
    labels.append((paper[-1], "the paper's curve,\n× as reported", OURS))
    axes.set_title(f"Rows modified since the first interval:\n{data['stream']} (grey), and the paper's curve (blue)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=FAINT)
    axes.set_axisbelow(True)
    label_lines(axes, labels, 0.1)


PLOT = Plot("modified-rows.svg", 430, draw)

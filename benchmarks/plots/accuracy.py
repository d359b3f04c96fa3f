"""The plot of accuracy after restores: the change of each measure, by the number of restores and of bits."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots.style import FAINT, TEXT, TINTS, Plot, label_lines

BITS = {"2": ("o", "●"), "3": ("s", "■"), "4": ("^", "▲"), "8": ("D", "◆")}  # markers, and their characters in labels
MEASURES = {  # titles, and signs with which up is worse
    "log_loss": ("Log loss on\nlater clicks", 1),
    "auc": ("AUC lost on\nlater clicks", -1),
    "training": ("Loss while\ntraining", 1),
}


def draw(report: Mapping[str, Any], figure: Figure) -> None:
    """Draw a panel for each measure, in which up is worse, with a line for each number of bits."""
    cells = {(cell["bits"], cell["restores"]): cell for cell in report["plot"]["cells"]}
    restores = sorted({number for _, number in cells})
    panels = figure.subplots(1, len(MEASURES), sharey=True)
    for axes, (measure, (title, sign)) in zip(panels, MEASURES.items(), strict=True):
        ends = []
        for number, (bits, (marker, character)) in enumerate(BITS.items()):
            found = [cells[bits, num_restores][measure] for num_restores in restores]
            means = [sign * change["mean"] for change in found]
            _draw_line(axes, 0.12 * (number - 1.5), means, found, (TINTS[bits], marker))
            ends.append((means[-1], f"{character} {bits} bits", TINTS[bits]))
        axes.axhline(0, color=TEXT, linewidth=1)
        axes.set_title(title)
        axes.set_xticks(range(len(restores)), [str(num_restores) for num_restores in restores])
        axes.set_xlabel("restores")
        axes.grid(axis="y")
        axes.set_axisbelow(True)
    panels[0].set_ylabel("change, % (up is worse)")
    label_lines(panels[-1], ends, 0.1)


def _draw_line(
    axes: Axes, shift: float, means: list[float], found: list[Mapping[str, float]], look: tuple[str, str]
) -> None:
    """Draw means with their confidence intervals, shifted so that the intervals of different bits do not overlap."""
    color, marker = look
    axes.errorbar(
        [number + shift for number in range(len(means))],
        means,
        yerr=[change["half_width"] for change in found],
        color=color,
        ecolor=color,
        elinewidth=1.5,
        marker=marker,
        markersize=8,
        markeredgecolor=FAINT,
        markeredgewidth=0.5,
    )


PLOT = Plot("accuracy.svg", 380, draw)

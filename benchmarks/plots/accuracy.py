"""The plot of accuracy after restores: the change of each measure, by the number of restores and of bits."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots.style import FAINT, TEXT, TINTS, Plot, label_lines

BITS = ("2", "3", "4", "8")
MEASURES = {"log_loss": "Log loss on\nlater clicks", "auc": "AUC on\nlater clicks", "training": "Loss while\ntraining"}
WORST, BEST = 6.0, -1.0  # limits of all axes, in percent


def draw(report: Mapping[str, Any], figure: Figure) -> None:
    """Draw a panel for each measure, in which up is worse, with a line for each number of bits."""
    cells = {(cell["bits"], cell["restores"]): cell for cell in report["plot"]["cells"]}
    restores = sorted({number for _, number in cells})
    panels = figure.subplots(1, len(MEASURES))
    for axes, (measure, title) in zip(panels, MEASURES.items(), strict=True):
        ends = []
        for number, bits in enumerate(BITS):
            found = [cells[bits, num_restores][measure] for num_restores in restores]
            _draw_line(axes, 0.12 * (number - 1.5), [change["mean"] for change in found], found, TINTS[bits])
            ends.append((found[-1]["mean"], f"{bits} bits", TEXT))
        axes.axhline(0, color=TEXT, linewidth=1)
        axes.set_title(title)
        axes.set_ylim(*((-BEST, -WORST) if measure == "auc" else (BEST, WORST)))
        axes.set_xticks(range(len(restores)), [str(num_restores) for num_restores in restores])
        axes.set_xlabel("restores")
        axes.grid(axis="y")
        axes.set_axisbelow(True)
    panels[0].set_ylabel("change, % (up is worse)")
    label_lines(panels[-1], ends, 0.1)


def _draw_line(axes: Axes, shift: float, means: list[float], found: list[Mapping[str, float]], color: str) -> None:
    """Draw means with their confidence intervals, shifted so that the intervals of different bits do not overlap."""
    axes.errorbar(
        [number + shift for number in range(len(means))],
        means,
        yerr=[change["half_width"] for change in found],
        color=color,
        ecolor=color,
        elinewidth=1.5,
        marker="o",
        markersize=6,
        markeredgecolor=FAINT,
        markeredgewidth=0.5,
    )


PLOT = Plot("accuracy.svg", 380, draw)

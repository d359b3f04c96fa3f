"""The plot of write bandwidth and capacity by policy and width, with what Check-N-Run reports."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.plots.style import svg_figure

COLORS = {
    "Compacted": "#0072b2",
    "Compacted(max_ratio=1.7)": "#56b4e9",
    "Full": "#999999",
    "OneShot": "#e69f00",
    "Intermittent": "#009e73",
    "Consecutive": "#cc79a7",
    "Check-N-Run's bytes": "#222222",
}
REPORTED = {"written": (6.0, 17.0), "capacity": (2.5, 8.0)}  # at 8 bits and at 2 bits; NSDI '22, abstract


class Cell(Protocol):
    """The values to draw for a policy and width: the ratios of full fp32 checkpoints to its bytes."""

    @property
    def written(self) -> float: ...

    @property
    def capacity(self) -> float: ...


def draw(cells: Mapping[tuple[str, str], Cell], widths: Sequence[str], path: Path) -> None:
    """Write an SVG of two plots, with bars by width and a color for each policy."""
    with svg_figure(path, 11, 4.5) as figure:
        titles = {"written": "Written in all", "capacity": "Kept, at its most"}
        bar_width = 0.8 / len(COLORS)
        places = np.arange(len(widths))
        for axes, (what, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
            for number, (name, color) in enumerate(COLORS.items()):
                heights = [getattr(cells[name, width], what) for width in widths]
                axes.bar(
                    places + (number - (len(COLORS) - 1) / 2) * bar_width, heights, bar_width, color=color, label=name
                )
            for value in REPORTED[what]:
                axes.axhline(value, color="#222222", linestyle=":", linewidth=1)
                axes.annotate(f"reported: {value:g} ×", (len(widths) - 0.5, value), ha="right", va="bottom", fontsize=8)
            axes.set(title=title, ylabel="times less than full fp32 checkpoints")
            axes.set_xticks(places, widths)
        handles = axes.get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)

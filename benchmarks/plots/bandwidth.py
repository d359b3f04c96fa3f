"""The plot of write bandwidth and capacity by policy and width, with what Check-N-Run reports."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.plots.style import FAINT, OTHER, TEXT, TINTS, Plot

TITLES = {"written": "Bytes written", "capacity": "Bytes kept, at most"}
SHOWN = {"2 bits": "2", "4 bits": "4", "8 bits": "8", "exact": "exact"}  # widths, and their tints
REPORTED = {"written": (17.0, 6.0), "capacity": (8.0, 2.5)}  # at 2 bits and at 8 bits; NSDI '22, abstract


def draw(report: Mapping[str, Any], figure: Figure) -> None:
    """Draw the bytes written and those kept, each with a line of points for each policy, by the bytes written."""
    policies, paper = report["plot"]["policies"], report["plot"]["paper"]
    names = sorted(policies, key=lambda name: (name == paper, -policies[name]["written"]["2 bits"]))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (what, title) in zip(panels, TITLES.items(), strict=True):
        for place, name in enumerate(names):
            colors = [OTHER if name == paper else TINTS[tint] for tint in SHOWN.values()]
            _draw_points(axes, place, [policies[name][what][width] for width in SHOWN], colors)
        _draw_points(axes, len(names), REPORTED[what], [OTHER] * 2)
        axes.set_title(title, pad=24)
        axes.set_xlabel("× less than full\nfp32 checkpoints")
        axes.set_xlim(left=0)
        axes.set_ylim(len(names) + 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    labels = [name.replace("(", "\n(") for name in [*names, "the same, reported"]]
    panels[0].set_yticks(range(len(labels)), labels)
    for width, tint in SHOWN.items():
        point = policies[names[0]]["written"][width], 0
        panels[0].annotate(
            tint if tint in ("4", "8") else width, point, (0, 12), textcoords="offset points", color=TEXT, ha="center"
        )


def _draw_points(axes: Axes, place: int, values: Sequence[float], colors: Sequence[str]) -> None:
    axes.plot([0, max(values)], [place, place], color=FAINT, linewidth=2, zorder=1)
    axes.scatter(values, [place] * len(values), s=90, c=colors, zorder=2, clip_on=False)


PLOT = Plot("bandwidth.svg", 490, draw)

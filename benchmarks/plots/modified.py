"""The plot of modified rows, in each interval and since the first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.plots.style import svg_figure

COLORS = ("#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#0072b2", "#555555")
REPORTED = ((1, 26.0), (11, 52.0))  # intervals and percent; NSDI '22, section 3.2


class Curve(Protocol):
    """The values to draw, as shares of all rows."""

    @property
    def each(self) -> NDArray[np.float64]: ...

    @property
    def since(self) -> NDArray[np.float64]: ...


def draw(curves: Mapping[str, Curve], path: Path) -> None:
    """Write an SVG of two plots."""
    with svg_figure(path, 11, 4.2) as figure:
        each, since = figure.subplots(1, 2)
        for color, (name, curve) in zip(COLORS, curves.items(), strict=False):
            each.plot(np.linspace(0, 100, len(curve.each)), 100 * curve.each, color=color, label=name)
            since.plot(np.arange(1, len(curve.since) + 1), 100 * curve.since, color=color)
        for interval, share in REPORTED:
            since.plot(interval, share, "x", color="#222222")
            since.annotate(f"Check-N-Run: {share:g} %", (interval, share), (6, -10), textcoords="offset points")
        each.set(title="Modified in each interval", xlabel="time, % of the run", ylabel="rows, %", ylim=(0, None))
        since.set(title="Modified since the first", xlabel="intervals", ylabel="rows, %", xscale="log", ylim=(0, 100))
        figure.legend(loc="outside lower center", ncols=3, frameon=False)

"""The plot of movement: the distances that rows move between checkpoints, and the bits of their residuals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from benchmarks.plots.style import svg_figure
from benchmarks.support.residuals import SCALE_AND_BIAS_BITS, Tally

COLORS = ("#0072b2", "#009e73", "#d55e00")
NUM_POINTS = 200


class Course(Protocol):
    """The values to draw for checkpoints after each ``share`` of the clicks."""

    dim: int
    share: float

    def moved(self, *kinds: str) -> NDArray[np.float32]: ...

    def tally(self, bits: int) -> Tally: ...


def draw(courses: Sequence[Course], bits: Sequence[int], kinds: tuple[str, str], path: Path) -> None:
    """Write an SVG of two plots.

    Args:
        courses: The values for tables of one width.
        bits: The bits of residuals.
        kinds: The names of the rows that were touched before, and of those that were not.
        path: The file to write.
    """
    with svg_figure(path, 10, 4) as figure:
        moved, stored = figure.subplots(1, 2)
        for color, course in zip(COLORS, courses, strict=False):
            _draw_movement(moved, course, kinds, color)
            tallies = [course.tally(number) for number in bits]
            taken = [tally.residual_bits + tally.step_bits for tally in tallies]
            stored.plot(bits, taken, color=color, marker="o", label=f"residuals, each {course.share:.0%}")
        plain = [number + SCALE_AND_BIAS_BITS / courses[0].dim for number in bits]
        stored.plot(bits, plain, color="#555555", marker="s", linestyle="--", label="plain codes")
        moved.set(title="Modified rows", xlabel="movement since the checkpoint before, ||x - y|| / ||x||", xscale="log")
        moved.set(ylabel="% of rows that moved no further", xlim=(1e-3, 3))
        stored.set(title="Entropy of what is stored", xlabel="quality: bits of the plain code", xticks=list(bits))
        stored.set(ylabel="bits an element, scale or step included", ylim=(0, None))
        for axes in (moved, stored):
            axes.legend(frameon=False)


def _draw_movement(axes: Axes, course: Course, kinds: tuple[str, str], color: str) -> None:
    """Draw the share of rows that moved at most a distance: solid for those touched before, dotted for the others."""
    percents = np.linspace(0, 100, NUM_POINTS)
    for kind, line in zip(kinds, ("-", ":"), strict=True):
        found = course.moved(kind)
        if len(found):
            label = f"each {course.share:.0%}, {kind}"
            axes.plot(np.percentile(found, percents), percents, color=color, linestyle=line, label=label)

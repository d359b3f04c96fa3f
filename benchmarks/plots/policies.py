"""The plot of a long run: the bytes that each policy writes, keeps and reads for each checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.plots.style import svg_figure

COLORS = {
    "Compacted": "#0072b2",
    "Full": "#555555",
    "OneShot": "#e69f00",
    "Intermittent": "#009e73",
    "Consecutive": "#cc79a7",
}


class Course(Protocol):
    """The values to draw for a policy: a number per checkpoint, as a multiple of a full checkpoint."""

    written: list[float]
    capacity: list[float]
    restore: list[float]


def draw(courses: Mapping[str, Course], path: Path) -> None:
    """Write an SVG of three plots."""
    with svg_figure(path, 11, 3.8) as figure:
        written, capacity, restore = figure.subplots(1, 3)
        for name, course in courses.items():
            steps = np.arange(1, len(course.written) + 1)
            is_ours = name == "Compacted"
            style = {
                "color": COLORS[name],
                "label": name,
                "linewidth": 2.4 if is_ours else 1.2,
                "zorder": 3 if is_ours else 2,
            }
            written.plot(steps, np.cumsum(course.written) / steps, **style)
            capacity.plot(steps, course.capacity, **style)
            restore.plot(steps, course.restore, **style)
        written.set(title="Written a checkpoint, mean so far", ylim=(0, 1.05))
        for axes, limit, title in ((capacity, 1.6, "Kept, at its most"), (restore, 1.2, "Read by a restore")):
            axes.axhline(limit, color="#888888", linestyle=":", linewidth=1)
            axes.set(title=title, ylim=(0, 5))
        for axes in (written, capacity, restore):
            axes.set(xscale="log", xlabel="checkpoint", ylabel="full checkpoints")
        figure.legend(
            *written.get_legend_handles_labels(), loc="outside lower center", ncols=len(courses), frameon=False
        )

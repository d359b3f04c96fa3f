"""The plot of movement: how far rows move between checkpoints, and the bits that their residuals would take."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from benchmarks.plots.style import OTHER, OURS, Bar, Plot, draw_bars


def draw(report: Mapping[str, Any], figure: Figure) -> None:
    """Draw the shares of rows by their movement, and for each quality the bits of plain codes and of residuals."""
    courses = report["plot"]["courses"]
    moved, stored = figure.subplots(1, 2)
    draw_bars(moved, [Bar(name, share, f"{share:.0%}", OTHER) for name, share in courses[0]["moved"].items()])
    moved.set_title("How far rows moved,\n% of modified rows")
    bars = []
    for bits, plain in report["plot"]["plain"].items():
        bars.append(Bar(f"{bits}-bit codes", plain, f"{plain:.1f}", OURS))
        for course in courses:
            value = course["residuals"][bits]
            bars.append(Bar(f"residuals, {course['share']:.0%} later", value, f"{value:.1f}", OTHER))
    draw_bars(stored, bars)
    stored.set_title("Bits per value")


PLOT = Plot("movement.svg", 420, draw)

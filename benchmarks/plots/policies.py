"""The plot of a long run: what each policy writes, keeps and reads, in full checkpoints."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from benchmarks.plots.style import OTHER, OURS, Bar, Plot, draw_bars

TITLES = {"written": "Written per\ncheckpoint", "capacity": "Kept,\nat most", "restore": "Read by\na restore"}
LONGEST = 4.0  # full checkpoints; longer bars are not to scale


def draw(report: Mapping[str, Any], figure: Figure) -> None:
    """Draw a panel of bars for each measure."""
    policies, ours = report["plot"]["policies"], report["plot"]["ours"]
    for axes, (measure, title) in zip(figure.subplots(1, 3, sharey=True), TITLES.items(), strict=True):
        values = {name: found[measure] for name, found in policies.items()}
        bars = [Bar(name, value, _text(value), OURS if name == ours else OTHER) for name, value in values.items()]
        draw_bars(axes, bars, end=max(value for value in values.values() if value <= LONGEST))
        axes.set_title(title)
    figure.supxlabel("× a full checkpoint with as many bits")


def _text(value: float) -> str:
    return f"{value:.2f}" if value <= LONGEST else f"{value:,.0f}"


PLOT = Plot("policies.svg", 330, draw)

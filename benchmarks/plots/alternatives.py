"""The plot of the alternatives: stall, time to save and to restore, and memory, for the largest table."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from benchmarks.plots.style import OTHER, OURS, Bar, Plot, draw_bars
from torchrec_cnr.human_text import number_text

TITLES = {
    "stall": "Training waits, seconds",
    "save": "Until saved, seconds",
    "restore": "Restore, seconds",
    "memory": "Memory of a save, MiB",
}


def draw(report: Mapping[str, Any], figure: Figure) -> None:
    """Draw a panel of bars for each measure, and name the size of the table below."""
    data = report["plot"]
    names = list(data["values"]["stall"])
    panels = figure.subplots(2, 2, sharey=True)
    for axes, (measure, title) in zip(panels.flat, TITLES.items(), strict=True):
        found = data["values"][measure]
        bars = []
        for name in names:
            value = found.get(name, 0.0)
            text = f"{value:,.0f}" if measure == "memory" else number_text(value)
            color = OURS if name == data["ours"] else OTHER
            bars.append(Bar(name.replace(", ", ",\n"), value, text if name in found else "(as dcp.save)", color))
        draw_bars(axes, bars)
        axes.set_title(title)
    figure.supxlabel(f"{data['rows']:,} rows × {data['columns']}, {data['share']:.0%} modified by training")


PLOT = Plot("alternatives.svg", 560, draw)

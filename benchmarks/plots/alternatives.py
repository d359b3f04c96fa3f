"""The plot of the alternatives: stall, time to save and to restore, and memory, by the number of rows."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks.plots.style import svg_figure
from benchmarks.support.jobs.save_methods import DCP, DCP_ASYNC, OURS, OWN_DELTAS, TORCH_SAVE
from benchmarks.support.rounds import Timings

COLORS = {OURS: "#0072b2", TORCH_SAVE: "#e69f00", DCP: "#555555", DCP_ASYNC: "#cc79a7", OWN_DELTAS: "#009e73"}


def draw(timings: Mapping[int, Mapping[str, Timings]], memory: Mapping[int, Mapping[str, float]], path: Path) -> None:
    """Write an SVG of four plots, with logarithmic axes."""
    with svg_figure(path, 12, 3.8) as figure:
        *timed, last = figure.subplots(1, 4)
        titles = {"stall": "Stall", "save": "Save", "restore": "Restore"}
        for axes, (phase, title) in zip(timed, titles.items(), strict=True):
            for name in next(iter(timings.values()))[phase]:
                heights = [median(took.secs for took in phases[phase][name]) for phases in timings.values()]
                axes.plot(list(timings), heights, marker="o", color=COLORS[name], label=name)
            axes.set(title=title, ylabel="seconds", xlabel="rows", xscale="log", yscale="log")
        for name, color in COLORS.items():
            last.plot(
                list(memory), [max(1.0, found[name]) for found in memory.values()], marker="o", color=color, label=name
            )
        last.set(title="Memory beyond the state", ylabel="MiB", xlabel="rows", xscale="log", yscale="log")
        figure.legend(*last.get_legend_handles_labels(), loc="outside lower center", ncols=len(COLORS), frameon=False)

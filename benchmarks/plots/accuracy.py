"""The plot of accuracy after restores: the change of each measure, by restores and bits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from matplotlib.axes import Axes

from benchmarks.plots.style import svg_figure
from benchmarks.support.confidence_intervals import Interval

COLORS = {"2": "#d55e00", "3": "#e69f00", "4": "#009e73", "8": "#0072b2"}


class Compared(Protocol):
    """The values to draw for a kind of run, each a change in percent."""

    @property
    def log_loss(self) -> Interval: ...

    @property
    def auc(self) -> Interval: ...

    @property
    def training(self) -> Interval: ...


def draw(compared: Mapping[tuple[str, int], Compared], bar: float, path: Path) -> None:
    """Write an SVG with a plot of each measure.

    Args:
        compared: The values by bits and number of restores; runs without bits are left out.
        bar: The accepted change, in percent.
        path: The file to write.
    """
    with svg_figure(path, 11, 3.8) as figure:
        log_loss, auc, training = figure.subplots(1, 3)
        for number, bits in enumerate(COLORS):
            cells = {restores: found for (scheme, restores), found in compared.items() if scheme == bits}
            shift = 1.08 ** (number - 1.5)  # shifted, so that bars do not overlap
            _draw_line(log_loss, bits, shift, {restores: found.log_loss for restores, found in cells.items()})
            _draw_line(auc, bits, shift, {restores: found.auc for restores, found in cells.items()})
            _draw_line(training, bits, shift, {restores: found.training for restores, found in cells.items()})
        numbers = sorted({restores for _, restores in compared})
        titles = ("Log loss on later clicks", "AUC on later clicks", "Loss while training")
        for axes, title in zip((log_loss, auc, training), titles, strict=True):
            axes.axhspan(-bar, bar, color="#888888", alpha=0.4, linewidth=0)
            axes.axhline(0, color="#888888", linewidth=0.8)
            axes.set(title=title, xlabel="restores", ylabel="change from bit-exact, %", xscale="log")
            axes.set_yscale("symlog", linthresh=0.1)
            axes.set_xticks(numbers, [str(number) for number in numbers])
            axes.minorticks_off()
        figure.legend(
            *log_loss.get_legend_handles_labels(), loc="outside lower center", ncols=len(COLORS), frameon=False
        )


def _draw_line(axes: Axes, bits: str, shift: float, changes: Mapping[int, Interval]) -> None:
    axes.errorbar(
        [restores * shift for restores in changes],
        [change.mean for change in changes.values()],
        yerr=[change.half_width for change in changes.values()],
        color=COLORS[bits],
        marker="o",
        markersize=4,
        capsize=2,
        linewidth=1.2,
        label=f"{bits} bits",
    )

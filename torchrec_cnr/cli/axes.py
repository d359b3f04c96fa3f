"""The axes of a plot: what they count, where their ticks stand, and the legend above them."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC

from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from torchrec_cnr.cli.inline_svg import page_style

_SIZE = (480 / 72, 276 / 72)  # inches of 72 units
_NUM_TICKS = 6


@contextmanager
def plot_axes(unit: str) -> Iterator[tuple[Figure, Axes]]:
    """A figure of one plot, with what its vertical axis counts."""
    with page_style():
        figure = Figure(figsize=_SIZE, dpi=72, layout="constrained")
        axes = figure.subplots()
        axes.set_ylabel(unit)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        yield figure, axes


def number_checkpoints(axes: Axes, num_saves: int) -> None:
    """The axis of checkpoints, with whole numbers from the first to the last."""
    last = max(num_saves, 1)
    room = 0.5 + 0.01 * last
    axes.set_xlim(1 - room, last + room)
    ticks = MaxNLocator(_NUM_TICKS, integer=True, steps=[1, 2, 5, 10]).tick_values(1, last)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if tick in range(1, last + 1)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("checkpoint")


def date_axis(axes: Axes) -> None:
    """An axis of time, in days since 1970: a tick has what changes, what does not stands at the right."""
    locator = AutoDateLocator(tz=UTC, minticks=2, maxticks=5)  # with 3 it would know no interval for 50 hours
    form = ConciseDateFormatter(
        locator,
        tz=UTC,
        formats=["%Y", "%b", "%d %b", "%H:%M", "%H:%M", "%H:%M:%S"],
        zero_formats=["", "%Y", "%d %b", "%d %b", "%H:%M", "%H:%M:%S"],
        offset_formats=["", "%Y", "%Y", "%d %b %Y", "%d %b %Y", "%d %b %Y"],
    )
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(form)
    axes.set_xlabel("time, UTC")


def add_legend(figure: Figure) -> None:
    """Above the plot; marks have one size there, however small they are in the plot."""
    legend = figure.legend(loc="outside upper left", ncols=5, handlelength=1.6, columnspacing=1.2, borderaxespad=0)
    for handle in legend.legend_handles:
        if isinstance(handle, Line2D) and handle.get_linestyle() == "None":
            handle.set_markersize(7)

"""The plots of a run's history. Each is 480 units wide, so that it is readable on a phone and in a two-column layout.

Plots by checkpoint number the checkpoints that the job saved, beginning with 1. A compaction is drawn between the
checkpoint after which it ran and the next one. Plots contain no names from the store.

A line of many points is thinned: each pixel column keeps only its first, last, lowest and highest point (M4
aggregation, Jugel et al., VLDB 2014). So the size of a plot does not grow with the run, and no extreme is lost.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from torchrec_cnr.cli.report.svg import LIGHT, page_style
from torchrec_cnr.human_text import bytes_unit
from torchrec_cnr.maintenance.run_history import Event, EventKind, RunHistory


def thin(xs: NDArray[np.float64], ys: NDArray[np.float64], num_columns: int) -> NDArray[np.intp]:
    """Return which points of a line to draw: all if they are few, otherwise at most four in each column.

    Args:
        xs: float64 [N], the horizontal coordinates, not decreasing.
        ys: float64 [N], the vertical coordinates.
        num_columns: The number of columns into which the span of ``xs`` is divided.

    Returns:
        The indices of the points, strictly increasing.
    """
    if len(xs) <= 4 * num_columns:
        return np.arange(len(xs))
    span = xs[-1] - xs[0]
    columns = ((xs - xs[0]) * (num_columns / span)).astype(np.intp) if span else np.zeros(len(xs), np.intp)
    columns = np.minimum(columns, num_columns - 1)
    starts = np.flatnonzero(np.diff(columns, prepend=-1))
    ends = np.append(starts[1:], len(xs)) - 1
    by_height = np.lexsort((ys, columns))  # sorts within each column, so its lowest point is first, its highest last
    return np.unique(np.concatenate((starts, ends, by_height[starts], by_height[ends])))


_SIZE = (480 / 72, 276 / 72)  # inches of 72 units
_NUM_TICKS = 6


@contextmanager
def plot_axes(unit: str) -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure of one plot, and its axes. ``unit`` is the label of the vertical axis."""
    with page_style():
        figure = Figure(figsize=_SIZE, dpi=72, layout="constrained")
        axes = figure.subplots()
        axes.set_ylabel(unit)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        yield figure, axes


def number_checkpoints(axes: Axes, num_saves: int) -> None:
    """Set up the horizontal axis of checkpoints, with whole numbers from the first to the last."""
    last = max(num_saves, 1)
    room = 0.5 + 0.01 * last
    axes.set_xlim(1 - room, last + room)
    ticks = MaxNLocator(_NUM_TICKS, integer=True, steps=[1, 2, 5, 10]).tick_values(1, last)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if tick in range(1, last + 1)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("checkpoint")


def date_axis(axes: Axes) -> None:
    """Set up the horizontal axis of time, in days since 1970.

    A tick shows the parts of a date that change. The parts that do not change are shown once, at the right end.
    """
    locator = AutoDateLocator(tz=UTC, minticks=2, maxticks=5)  # with 3, matplotlib finds no interval for 50 hours
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
    """Add a legend above the plot. Its markers have a fixed size, however small they are in the plot."""
    legend = figure.legend(loc="outside upper left", ncols=5, handlelength=1.6, columnspacing=1.2, borderaxespad=0)
    for handle in legend.legend_handles:
        if isinstance(handle, Line2D) and handle.get_linestyle() == "None":
            handle.set_markersize(7)


Floats = NDArray[np.float64]

GOAL_MODELS = 1.2  # a restore should read at most this multiple of a full checkpoint
_UNIT = "x a full checkpoint"
_NUM_COLUMNS = 400  # about the width of the axes in units
_MAX_STEMS = 200  # more cannot be distinguished
_MIN_NS = 10 * 10**9  # the span of the time axis: a shorter one would need fractions of a second


@dataclass(frozen=True)
class _Look:
    """The style in which events of one kind are drawn, so that they can be distinguished even without colours.

    Attributes:
        kind: The kind of event; its colour has the same name.
        marker: The shape of the marker.
        sizes: The smallest and the largest size of the marker. The more events there are, the smaller it is.
    """

    kind: EventKind
    marker: str
    sizes: tuple[float, float]

    @property
    def color(self) -> str:
        return LIGHT[self.kind]


class _Marks(NamedTuple):
    """The markers that were drawn for one kind of event. Markers with a greater ``order`` are drawn above others."""

    look: _Look
    places: Floats
    values: Floats
    order: float


_LOOKS = (
    _Look("baseline", "s", (2.2, 5.5)),
    _Look("delta", "o", (2.2, 5.0)),
    _Look("compaction", "^", (5.0, 7.0)),  # larger than baselines of the same height, which would cover it
)


def draw_written(history: RunHistory) -> Figure:
    """Draw the bytes that each checkpoint and each compaction wrote."""
    unit, one = bytes_unit(max(event.all_bytes for event in history.events))
    with plot_axes(f"{unit} written") as (figure, axes):
        _draw_amounts(axes, history, lambda event: event.all_bytes / one)
        number_checkpoints(axes, len(history.saves))
        add_legend(figure)
    return figure


def draw_cumulative(history: RunHistory) -> Figure:
    """Draw the bytes written so far, stacked by kind, and the total if each checkpoint had been a full one."""
    placed = [(0.0, None), *_placed(history)]
    places = np.array([place for place, _ in placed])
    full = _sums([event.model_bytes if event and event.is_save else 0 for _, event in placed])
    unit, one = bytes_unit(max(full[-1], history.written_bytes + history.log_bytes))
    with plot_axes(f"{unit} so far") as (figure, axes):
        below = np.zeros(len(places))
        for look in _LOOKS:
            own = _sums([event.all_bytes if event and event.kind == look.kind else 0 for _, event in placed])
            if history.of_kind(look.kind):
                kept = thin(places, below + own, _NUM_COLUMNS)
                low, high = below[kept] / one, (below + own)[kept] / one
                axes.fill_between(
                    places[kept], low, high, color=look.color, linewidth=0, label=look.kind, gid=look.kind
                )
            below += own
        is_save = np.array([event is None or event.is_save for _, event in placed])
        kept = np.flatnonzero(is_save)[thin(places[is_save], full[is_save], _NUM_COLUMNS)]
        full_line = axes.plot(places[kept], full[kept] / one, color=LIGHT["ink"], linestyle="--", linewidth=1.4)
        full_line[0].set(label="if each were full", gid="full")
        axes.set_ylim(bottom=0)
        number_checkpoints(axes, len(history.saves))
        axes.set_xlim(left=0)
        add_legend(figure)
    return figure


def draw_capacity(history: RunHistory) -> Figure:
    """Draw the bytes stored under the root over time, as multiples of a full checkpoint.

    An event that wrote files before it removed others shows as a spike.
    """
    levels = [
        (at.at_ns, num_bytes / at.model_bytes)
        for at in history.capacities
        for num_bytes in (at.before_bytes, at.peak_bytes, at.after_bytes)
    ]
    (first, before), (last, after) = levels[0], levels[-1]
    room = max((last - first) // 50, (_MIN_NS - (last - first)) // 2)
    levels = [(first - room, before), *levels, (last + room, after)]
    all_days: Floats = date2num(np.array([at_ns for at_ns, _ in levels], "datetime64[ns]"))
    all_models = np.array([models for _, models in levels])
    kept = thin(all_days, all_models, _NUM_COLUMNS)
    days, models = all_days[kept], all_models[kept]
    with plot_axes(_UNIT) as (figure, axes):
        axes.fill_between(days, 0, models, color=LIGHT["level"], alpha=0.18, linewidth=0)
        axes.plot(
            days, models, color=LIGHT["level"], linewidth=1.6 if len(days) < 500 else 0.8, label="kept", gid="level"
        )
        axes.axhline(1, color=LIGHT["ink"], linestyle="--", linewidth=1.2, label="1x, a full checkpoint")
        axes.set_ylim(0, 1.08 * max(1.0, models.max()))
        axes.set_xlim(days[0], days[-1])
        date_axis(axes)
        add_legend(figure)
    return figure


def draw_modified(history: RunHistory) -> Figure:
    """Draw the rows that each delta stores, in percent of all rows of the tables."""
    with plot_axes("% of rows") as (figure, axes):
        _draw_amounts(axes, history, lambda event: None if event.modified_share is None else 100 * event.modified_share)
        number_checkpoints(axes, len(history.saves))
        add_legend(figure)
    return figure


def draw_restores(history: RunHistory) -> Figure:
    """Draw the bytes that a load of each checkpoint reads, as multiples of a full checkpoint."""
    known = [(place, event.restore_models) for place, event in _placed(history) if event.restore_models is not None]
    places, models = np.array(known, np.float64).T
    kept = thin(places, models, _NUM_COLUMNS)
    low, high = min(1.0, *models), max(GOAL_MODELS, *models)
    room = 0.12 * (high - low)
    with plot_axes(f"{_UNIT}, read") as (figure, axes):
        _draw_events(axes, history, lambda event: event.restore_models)
        axes.plot(places[kept], models[kept], color=LIGHT["quiet"], linewidth=0.6, alpha=0.6)
        axes.axhline(1, color=LIGHT["ink"], linestyle="--", linewidth=1.2, zorder=2.4, label="1x")
        goal = axes.axhline(GOAL_MODELS, color=LIGHT["ink"], linestyle=":", linewidth=1.6, zorder=4)
        goal.set_label(f"{GOAL_MODELS}x, bound")
        axes.set_ylim(max(low - room, 0), high + room)
        number_checkpoints(axes, len(history.saves))
        add_legend(figure)
    return figure


def _placed(history: RunHistory) -> Iterator[tuple[float, Event]]:
    """Yield each event that wrote something, with its place on the axis of checkpoints."""
    num_saves = 0
    for event in history.events:
        num_saves += event.is_save
        if event.kind != "prune":
            yield (num_saves if event.is_save else num_saves + 0.5), event


def _sums(sizes: Sequence[int]) -> Floats:
    return np.cumsum(np.array(sizes, np.float64))


def _draw_events(axes: Axes, history: RunHistory, height: Callable[[Event], float | None]) -> list[_Marks]:
    """Draw a marker for each event that has a height. The fewer there are of a kind, the further above they are."""
    placed = [(place, value, event.kind) for place, event in _placed(history) if (value := height(event)) is not None]
    drawn = []
    for look in _LOOKS:
        own = [(place, value) for place, value, kind in placed if kind == look.kind]
        if own:
            places, values = np.array(own, np.float64).T
            kept = thin(places, values, _NUM_COLUMNS)
            order = 3 - 0.5 * len(own) / len(placed)
            drawn.append(_Marks(look, places[kept], values[kept], order))
            axes.plot(
                places[kept],
                values[kept],
                color=look.color,
                linestyle="none",
                marker=look.marker,
                markersize=float(np.clip(300 / len(placed), *look.sizes)),
                markeredgewidth=0,
                label=look.kind,
                clip_on=False,
                zorder=order,
                gid=look.kind,
            )
    return drawn


def _draw_amounts(axes: Axes, history: RunHistory, amount: Callable[[Event], float | None]) -> None:
    """Draw markers of amounts, on stems if these can be distinguished. Otherwise, a line connects the deltas."""
    drawn = _draw_events(axes, history, amount)
    num_marks = sum(len(marks.places) for marks in drawn)
    for look, places, values, order in drawn:
        if num_marks <= _MAX_STEMS:
            width = float(np.clip(120 / num_marks, 0.8, 2.0))
            axes.vlines(places, 0, values, color=look.color, linewidth=width, zorder=order - 0.6)
        elif look.kind == "delta":
            axes.plot(places, values, color=look.color, linewidth=0.6, alpha=0.6, zorder=order - 0.6)
    axes.set_ylim(bottom=0)

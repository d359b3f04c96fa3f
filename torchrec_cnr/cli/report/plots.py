"""The plots of a run's history. Each is 480 wide, so that it can be read on a phone and in one of two columns.

Plots by checkpoint number the checkpoints that the job saved, from 1 on; a compaction is drawn between the checkpoint
that it followed and the next. No name of the store appears in a plot.

A line of many points is thinned: in each column of the picture only the first, last, lowest and highest point are kept
(M4 aggregation, Jugel et al., VLDB 2014). So a plot stays small however long a run was, and no extreme is lost.
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
    """Which points to draw: all, where they are few, else at most four in each column.

    Args:
        xs: [N], not decreasing.
        ys: [N].
        num_columns: Into which the span of ``xs`` is divided.

    Returns:
        Indices of points, strictly increasing.
    """
    if len(xs) <= 4 * num_columns:
        return np.arange(len(xs))
    span = xs[-1] - xs[0]
    columns = ((xs - xs[0]) * (num_columns / span)).astype(np.intp) if span else np.zeros(len(xs), np.intp)
    columns = np.minimum(columns, num_columns - 1)
    starts = np.flatnonzero(np.diff(columns, prepend=-1))
    ends = np.append(starts[1:], len(xs)) - 1
    by_height = np.lexsort((ys, columns))  # columns stay where they are, and begin with their lowest point
    return np.unique(np.concatenate((starts, ends, by_height[starts], by_height[ends])))


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


Floats = NDArray[np.float64]

GOAL_MODELS = 1.2  # what a restore should read at most
_NUM_COLUMNS = 400  # about as many as the axes are wide
_MAX_STEMS = 200  # that can be told apart
_MIN_NS = 10 * 10**9  # of an axis of time: in less, ticks would need parts of a second


@dataclass(frozen=True)
class _Look:
    """How events of a kind are told from others, also without colours.

    Attributes:
        kind: Of event; its colour has the same name.
        marker: Its shape.
        sizes: Of the marker, from least to greatest: the more there are, the smaller.
    """

    kind: EventKind
    marker: str
    sizes: tuple[float, float]

    @property
    def color(self) -> str:
        return LIGHT[self.kind]


class _Marks(NamedTuple):
    """What was drawn of a kind; what has a greater ``order`` is drawn above."""

    look: _Look
    places: Floats
    values: Floats
    order: float


_LOOKS = (
    _Look("baseline", "s", (2.2, 5.5)),
    _Look("delta", "o", (2.2, 5.0)),
    _Look("compaction", "^", (5.0, 7.0)),  # as high as baselines, it would hide behind them
)


def draw_written(history: RunHistory) -> Figure:
    """Bytes that each checkpoint and each compaction wrote."""
    unit, one = bytes_unit(max(event.all_bytes for event in history.events))
    with plot_axes(f"{unit} written") as (figure, axes):
        _draw_amounts(axes, history, lambda event: event.all_bytes / one)
        number_checkpoints(axes, len(history.saves))
        add_legend(figure)
    return figure


def draw_cumulative(history: RunHistory) -> Figure:
    """Bytes written so far, by kind, one on top of the other, and what full checkpoints would have come to."""
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
    """What lay under the root, in models, over time. What an event wrote before it removed shows as a spike."""
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
    with plot_axes("models") as (figure, axes):
        axes.fill_between(days, 0, models, color=LIGHT["level"], alpha=0.18, linewidth=0)
        axes.plot(
            days, models, color=LIGHT["level"], linewidth=1.6 if len(days) < 500 else 0.8, label="capacity", gid="level"
        )
        axes.axhline(1, color=LIGHT["ink"], linestyle="--", linewidth=1.2, label="1.0, one full baseline")
        axes.set_ylim(0, 1.08 * max(1.0, models.max()))
        axes.set_xlim(days[0], days[-1])
        date_axis(axes)
        add_legend(figure)
    return figure


def draw_modified(history: RunHistory) -> Figure:
    """Rows that each delta stores, in percent of all rows of the tables."""
    with plot_axes("% of rows") as (figure, axes):
        _draw_amounts(axes, history, lambda event: None if event.modified_share is None else 100 * event.modified_share)
        number_checkpoints(axes, len(history.saves))
        add_legend(figure)
    return figure


def draw_restores(history: RunHistory) -> Figure:
    """What a load of each checkpoint reads, in models."""
    known = [(place, event.restore_models) for place, event in _placed(history) if event.restore_models is not None]
    places, models = np.array(known, np.float64).T
    kept = thin(places, models, _NUM_COLUMNS)
    low, high = min(1.0, *models), max(GOAL_MODELS, *models)
    room = 0.12 * (high - low)
    with plot_axes("models read") as (figure, axes):
        _draw_events(axes, history, lambda event: event.restore_models)
        axes.plot(places[kept], models[kept], color=LIGHT["quiet"], linewidth=0.6, alpha=0.6)
        axes.axhline(1, color=LIGHT["ink"], linestyle="--", linewidth=1.2, zorder=2.4, label="1.0")
        goal = axes.axhline(GOAL_MODELS, color=LIGHT["ink"], linestyle=":", linewidth=1.6, zorder=4)
        goal.set_label(f"{GOAL_MODELS}, the goal")
        axes.set_ylim(max(low - room, 0), high + room)
        number_checkpoints(axes, len(history.saves))
        add_legend(figure)
    return figure


def _placed(history: RunHistory) -> Iterator[tuple[float, Event]]:
    """What was written, and where it stands on an axis of checkpoints."""
    num_saves = 0
    for event in history.events:
        num_saves += event.is_save
        if event.kind != "prune":
            yield (num_saves if event.is_save else num_saves + 0.5), event


def _sums(sizes: Sequence[int]) -> Floats:
    return np.cumsum(np.array(sizes, np.float64))


def _draw_events(axes: Axes, history: RunHistory, height: Callable[[Event], float | None]) -> list[_Marks]:
    """A mark for each event that has a height; the fewer of a kind, the further above."""
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
    """Marks of amounts: on stems where these can be told apart, else a line leads from delta to delta."""
    drawn = _draw_events(axes, history, amount)
    num_marks = sum(len(marks.places) for marks in drawn)
    for look, places, values, order in drawn:
        if num_marks <= _MAX_STEMS:
            width = float(np.clip(120 / num_marks, 0.8, 2.0))
            axes.vlines(places, 0, values, color=look.color, linewidth=width, zorder=order - 0.6)
        elif look.kind == "delta":
            axes.plot(places, values, color=look.color, linewidth=0.6, alpha=0.6, zorder=order - 0.6)
    axes.set_ylim(bottom=0)

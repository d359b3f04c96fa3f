"""The plots of a run's history. Each is 480 wide, so that it is read on a phone as well as in one of two columns.

Plots by checkpoint count the checkpoints that the job saved, from 1 on; a compaction stands between the checkpoint that
it followed and the next. Of many points, those are drawn that can be told apart, and all extremes; see ``thinning``. No
name of the store appears in a plot.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import date2num
from matplotlib.figure import Figure
from numpy.typing import NDArray

from torchrec_cnr.cli.axes import add_legend, date_axis, number_checkpoints, plot_axes
from torchrec_cnr.cli.inline_svg import LIGHT
from torchrec_cnr.cli.thinning import thin
from torchrec_cnr.maintenance.history import Event, EventKind, RunHistory
from torchrec_cnr.quantities import bytes_unit

Floats = NDArray[np.float64]

GOAL_MODELS = 1.2  # what a restore should read at most
_NUM_COLUMNS = 400  # about as many as the axes are wide
_MOST_STEMS = 200  # that can be told apart
_LEAST_NS = 10 * 10**9  # of an axis of time: in less, ticks would need parts of a second


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
    unit, one = bytes_unit(max(event.written_bytes + event.log_bytes for event in history.events))
    with plot_axes(f"{unit} written") as (figure, axes):
        _draw_amounts(axes, history, lambda event: (event.written_bytes + event.log_bytes) / one)
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
            own = _sums(
                [
                    event.written_bytes + event.log_bytes if event and event.kind == look.kind else 0
                    for _, event in placed
                ]
            )
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
    room = max((last - first) // 50, (_LEAST_NS - (last - first)) // 2)
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
        _draw_amounts(axes, history, lambda event: _percent(event.modified_share))
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


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


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
        if num_marks <= _MOST_STEMS:
            width = float(np.clip(120 / num_marks, 0.8, 2.0))
            axes.vlines(places, 0, values, color=look.color, linewidth=width, zorder=order - 0.6)
        elif look.kind == "delta":
            axes.plot(places, values, color=look.color, linewidth=0.6, alpha=0.6, zorder=order - 0.6)
    axes.set_ylim(bottom=0)

"""The text of a report: the totals of a run, and a sentence or two below each plot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median_low
from typing import TypeVar

from torchrec_cnr.cli.report.plots import GOAL_MODELS
from torchrec_cnr.human_text import (
    bytes_text,
    count_text,
    duration_text,
    full_checkpoints_text,
    instant_text,
    name_text,
    number_text,
    relation_text,
    share_text,
)
from torchrec_cnr.maintenance.run_history import EventKind, KeptCheckpoint, RunHistory

_Size = TypeVar("_Size", int, float)

_NUM_NAMED = 5  # directories that a note lists

_MEANINGS: Mapping[EventKind, tuple[str, str]] = {
    "baseline": ("Baselines", "saved with every row"),
    "delta": ("Deltas", "saved with the rows that were modified since their parent"),
    "compaction": ("Compactions", "merged a checkpoint and all that it is based on into one checkpoint"),
    "prune": ("Prunes", "removed the checkpoints that need not be kept"),
}


@dataclass(frozen=True)
class Total:
    """A number at the top of the page: what it counts, its value, and a note that explains it."""

    what: str
    value: str
    note: str


def span(history: RunHistory) -> str:
    """Return the time from the first to the last event, as a sentence."""
    times = [event.at_ns for event in history.events] or [kept.created_ns for kept in history.kept]
    first, last = min(times), max(times)
    if first == last:
        return f"At {instant_text(first)}"
    return f"From {instant_text(first)} to {instant_text(last)}: {duration_text(last - first)}"


def totals(history: RunHistory) -> tuple[Total, ...]:
    """Return the numbers at the top of the page."""
    return (_num_saved(history), _written(history), _capacity(history), _newest_restore(history))


def _num_saved(history: RunHistory) -> Total:
    kept = f"{len(history.kept):,} {'is' if len(history.kept) == 1 else 'are'} kept"
    return Total(
        "Checkpoints saved", f"{len(history.saves):,}", f"{_kinds([event.kind for event in history.saves])}; {kept}"
    )


def _kinds(kinds: Sequence[str]) -> str:
    """Return how many there are of each kind, as text."""
    return " and ".join(count_text(len(list(group)), kind) for kind, group in groupby(sorted(kinds))) or "none"


def _written(history: RunHistory) -> Total:
    included = ", including compactions" if history.of_kind("compaction") else ""
    in_log = f"; {bytes_text(history.log_bytes)} of it to Kafka" if history.log_bytes else ""
    return Total(
        "Written", bytes_text(history.all_bytes), f"{_to_exact(history) or _comparison(history)}{included}{in_log}"
    )


def _comparison(history: RunHistory) -> str:
    """Return a comparison of the bytes written with those of full checkpoints at the same bit width, as text."""
    full, others = history.full_bytes, _full_checkpoints(history)
    relation = relation_text(history.all_bytes, full, f"{others} at the same bit width ({bytes_text(full)})")
    return relation or "no save is known"


def _to_exact(history: RunHistory) -> str:
    """Return a comparison of the bytes written with those of full checkpoints without quantization, "" if unknown."""
    full = len(history.saves) * history.exact_bytes
    others = f"{_full_checkpoints(history)} without quantization ({bytes_text(full)})"
    return relation_text(history.all_bytes, full, others)


def _full_checkpoints(history: RunHistory) -> str:
    num = len(history.saves)
    return "a full checkpoint" if num == 1 else f"{num:,} full checkpoints"


def _capacity(history: RunHistory) -> Total:
    highest, model_bytes = history.highest, history.model_bytes
    if highest is None or model_bytes is None:
        return Total("Kept now", bytes_text(history.kept_bytes), "no events are known")
    most = max(highest.peak_models, history.kept_bytes / model_bytes)
    now = full_checkpoints_text(history.kept_bytes / model_bytes)
    return Total("Kept now", bytes_text(history.kept_bytes), f"{now}; at most {number_text(most)}x")


def _newest_restore(history: RunHistory) -> Total:
    what = "Restore of the newest reads"
    if not history.kept:
        return Total(what, "–", "no checkpoint is kept")
    newest = history.newest_first[0]
    if newest.restore_bytes is None:
        return Total(what, "–", "its parent is missing")
    models = history.restore_models_of(newest)
    return Total(what, bytes_text(newest.restore_bytes), "" if models is None else full_checkpoints_text(models))


def on_written(history: RunHistory) -> str:
    """Return the caption of the plot of bytes written."""
    parts = []
    for kind in ("baseline", "delta", "compaction"):
        sizes = [event.all_bytes for event in history.of_kind(kind)]
        if sizes:
            parts.append(f"{count_text(len(sizes), kind)}: {_spread(sizes, bytes_text)}.")
    return " ".join(parts)


def on_cumulative(history: RunHistory) -> str:
    """Return the caption of the plot of bytes written so far."""
    compacted = sum(event.written_bytes for event in history.of_kind("compaction"))
    share = share_text(compacted / history.all_bytes) if compacted else "none"
    of_compactions = f" Compactions wrote {bytes_text(compacted)} of it, {share}." if compacted else ""
    return f"{bytes_text(history.all_bytes)}, {_comparison(history)}.{of_compactions}"


def on_capacity(history: RunHistory) -> str:
    """Return the caption of the plot of bytes kept."""
    highest = history.highest
    if highest is None:
        return ""
    freed = sum(event.freed_bytes for event in history.events)
    removed = f" Prunes removed {bytes_text(freed)}." if freed else " Nothing was removed."
    return f"At most {full_checkpoints_text(highest.peak_models)}, first at {instant_text(highest.at_ns)}.{removed}"


def on_modified(history: RunHistory) -> str:
    """Return the caption of the plot of modified rows."""
    shares = [event.modified_share for event in history.of_kind("delta") if event.modified_share is not None]
    return f"{count_text(len(shares), 'delta')}: {_spread(shares, share_text)} of all rows of the tables."


def on_restores(history: RunHistory) -> str:
    """Return the caption of the plot of restores."""
    models = [event.restore_models for event in history.events if event.restore_models is not None]
    within = sum(value <= GOAL_MODELS for value in models)
    read = _spread(models, lambda times: f"{number_text(times)}x")
    return f"Read by a load, as x a full checkpoint: {read}. {within:,} of {len(models):,} are within {GOAL_MODELS}x."


def _spread(values: Sequence[_Size], text: Callable[[_Size], str]) -> str:
    """Return the median (the lower of the two middle values) and the maximum, as text; or the only value."""
    middle, most = text(median_low(values)), text(max(values))
    if len(set(values)) == 1:
        return f"{most} each" if len(values) > 1 else most
    return f"median {middle}, at most {most}"


def on_older(older: Sequence[KeptCheckpoint]) -> str:
    """Return a summary of the checkpoints that the table does not show."""
    size = bytes_text(sum(kept.num_bytes for kept in older))
    return f"And {len(older):,} older: {_kinds([kept.kind for kept in older])}, {size} together."


def notes(history: RunHistory) -> tuple[str, ...]:
    """Return notes about everything that the events do not account for."""
    found = []
    if history.unreadable:
        which = ", ".join(map(name_text, history.unreadable[:_NUM_NAMED]))
        more = f" and {len(history.unreadable) - _NUM_NAMED} more" if len(history.unreadable) > _NUM_NAMED else ""
        found.append(f"Directories that cannot be read are not in this report: {which}{more}.")
    if history.log_bytes:
        found.append(f"{bytes_text(history.log_bytes)} of rows were written to Kafka; kept bytes are those of files.")
    if history.left_bytes:
        left = bytes_text(history.left_bytes)
        found.append(f"{left} of removed checkpoints remain, in data files that other checkpoints use.")
    if history.events and history.opening_bytes > history.kept_bytes / 1000:  # less is leases and the like
        found.append(f"{bytes_text(history.opening_bytes)} were stored here before the first known event.")
    if history.vanished_bytes:
        gone = bytes_text(history.vanished_bytes)
        found.append(f"{gone} have disappeared without an event; the plot of bytes kept still includes them.")
    return tuple(found)


@dataclass(frozen=True)
class KindTotals:
    """The totals of all events of one kind, as text; ``meaning`` explains the kind."""

    name: str
    meaning: str
    num: str
    written: str
    freed: str


def totals_by_kind(history: RunHistory) -> tuple[KindTotals, ...]:
    """Return the totals of each kind of event."""
    lines = []
    for kind, (name, meaning) in _MEANINGS.items():
        events = history.of_kind(kind)
        written = bytes_text(sum(event.all_bytes for event in events))
        freed = bytes_text(sum(event.freed_bytes for event in events))
        lines.append(KindTotals(name, meaning, f"{len(events):,}", written, freed))
    return tuple(lines)

"""What a run's history adds up to, whatever its events are."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.maintenance.run_history import Event, KeptCheckpoint, RunHistory

BASELINE = Event(5, "baseline", "step-1", 100, 0, None, 100, 100)
DELTA = Event(7, "delta", "step-2", 30, 0, 0.25, 130, 100)
KEPT = KeptCheckpoint("step-1", "baseline", 5, 100, None, 100)

sizes = st.integers(0, 1_000)
events = st.builds(
    lambda at_ns, kind, written, freed, model: Event(
        at_ns, kind, "a", 0 if kind == "prune" else written, freed, None, None, model
    ),
    st.integers(0, 50),
    st.sampled_from(["baseline", "delta", "compaction", "prune"]),
    sizes,
    sizes,
    st.integers(1, 100),
)
histories = st.builds(
    lambda events, kept: RunHistory(
        "root",
        tuple(sorted(events, key=lambda event: event.at_ns)),
        tuple(KeptCheckpoint(str(number), "baseline", number, size, None, size) for number, size in enumerate(kept)),
    ),
    st.lists(events, max_size=12),
    st.lists(sizes, max_size=4),
)


@given(histories)
def test_capacity_adds_up(history: RunHistory) -> None:
    """From what lay there at first, through every event, to what lies there now and what is gone; never negative."""
    level = history.opening_bytes
    for event, capacity in zip(history.events, history.capacities, strict=True):
        assert (capacity.at_ns, capacity.model_bytes) == (event.at_ns, event.model_bytes)
        assert capacity.before_bytes == level
        assert capacity.peak_bytes == level + event.written_bytes
        level += event.written_bytes - event.freed_bytes
        assert capacity.after_bytes == level >= 0
    assert level == history.kept_bytes + history.vanished_bytes
    assert history.vanished_bytes >= 0
    lows = [capacity.after_bytes for capacity in history.capacities]
    assert 0 in (history.opening_bytes, history.vanished_bytes, *lows)  # no more is assumed than must be


@given(histories)
def test_totals_add_up(history: RunHistory) -> None:
    """Every event is of one kind, and each save counts as a model for what full checkpoints would have written."""
    saves = [event for event in history.events if event.kind in ("baseline", "delta")]
    assert list(history.saves) == saves
    assert history.full_bytes == sum(event.model_bytes for event in saves)
    assert history.written_bytes == sum(
        event.written_bytes
        for kind in ("baseline", "delta", "compaction", "prune")
        for event in history.of_kind(kind)  # type: ignore[arg-type]  # a loop over literals
    )
    if history.highest:
        assert history.highest.peak_models == max(capacity.peak_models for capacity in history.capacities)


def test_newest_is_first_by_time_and_then_by_name() -> None:
    """The order does not depend on that in which checkpoints were found."""
    a, b, c = (replace(KEPT, name=name, created_ns=created) for name, created in (("a", 9), ("b", 9), ("c", 5)))
    for kept in ((a, b, c), (c, b, a)):
        assert RunHistory("root", (), kept).newest_first == (b, a, c)


def test_models_are_those_of_their_time() -> None:
    """A checkpoint is compared with a baseline that is quantized as it was; an unknown one with the baseline of now."""
    later = Event(9, "baseline", "step-3", 200, 0, None, 200, 200)  # with twice the bits
    history = RunHistory("root", (BASELINE, DELTA, later), ())
    assert history.restore_models_of(KEPT) == 1.0
    assert history.restore_models_of(replace(KEPT, name="step-3", restore_bytes=200)) == 1.0
    assert history.restore_models_of(replace(KEPT, name="unknown", restore_bytes=100)) == 0.5
    assert RunHistory("root", (), (KEPT,)).restore_models_of(KEPT) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "full"}, r"event 'step-2': 'kind' must be one of baseline, delta, compaction, prune \(got 'full'\)"),
        ({"at_ns": -1}, r"'at_ns' must be a whole number from 0 to 2\^62 \(got -1\)"),
        ({"at_ns": (1 << 62) + 1}, r"'at_ns'"),
        ({"written_bytes": 1.5}, r"'written_bytes' .* \(got 1.5\)"),
        ({"freed_bytes": None}, r"'freed_bytes' .* \(got None\)"),
        ({"restore_bytes": -2}, r"'restore_bytes' .* \(got -2\)"),
        ({"model_bytes": 0}, r"'model_bytes' must be a whole number from 1 to 2\^62 \(got 0\)"),
        ({"modified_share": 1.01}, r"'modified_share' must be from 0 to 1 \(got 1.01\)"),
        ({"kind": "baseline"}, r"a baseline has no 'modified_share' \(got 0.25\)"),
        ({"kind": "prune", "modified_share": None}, r"a prune writes no bytes .* \(got 30 bytes, 130 to restore\)"),
        ({"modified_share": float("nan")}, r"'modified_share' must be from 0 to 1 \(got nan\)"),
    ],
)
def test_bad_events_are_refused(changes: dict[str, Any], message: str) -> None:
    """An event says which of its values is wrong, and which are right."""
    with pytest.raises(ConfigurationError, match=message):
        replace(DELTA, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "prune"}, r"checkpoint 'step-1': 'kind' must be one of baseline, delta \(got 'prune'\)"),
        ({"num_bytes": -1}, r"'num_bytes' .* \(got -1\)"),
        ({"parent": "step-0"}, r"a delta has a parent, a baseline has none \(got 'step-0'\)"),
        ({"kind": "delta"}, r"a delta has a parent, a baseline has none \(got None\)"),
    ],
)
def test_bad_checkpoints_are_refused(changes: dict[str, Any], message: str) -> None:
    """So does a checkpoint."""
    with pytest.raises(ConfigurationError, match=message):
        replace(KEPT, **changes)


def test_events_must_be_in_order() -> None:
    """The error names the two that are not; two at one time are in order."""
    RunHistory("root", (BASELINE, replace(DELTA, at_ns=5)), ())
    with pytest.raises(ConfigurationError, match=r"root: .*'step-1' at 5 ns follows 'step-2' at 7 ns"):
        RunHistory("root", (DELTA, BASELINE), ())

"""Policies: what the next checkpoint is a delta of, given the bytes of those before."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch import nn

import torchrec_cnr as cnr
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.manifest import History
from torchrec_cnr.policies import Compacted, Consecutive, Full, Intermittent, OneShot, Policy, Since, policy_text

BASELINE_BYTES = 1_000_000
sizes = st.integers(0, 2**40)
histories = st.builds(History, sizes, st.lists(sizes, max_size=20).map(tuple))


@hypothesis.given(histories)
def test_simple_policies_do_not_look_back(history: History) -> None:
    """Whatever was saved before, they decide the same."""
    assert Full().decide(history) is Since.EVER
    assert OneShot().decide(history) is Since.BASELINE
    assert Consecutive().decide(history) is Since.HEAD


@pytest.mark.parametrize(
    "limits", [{"max_deltas": 0}, {"max_ratio": 0.99}, {"max_ratio": math.nan}, {"max_ratio": True}]
)
def test_limits_that_no_compaction_reaches_are_refused(limits: dict[str, Any]) -> None:
    """Before anything is trained, and by the name of what is wrong."""
    with pytest.raises(ConfigurationError, match=f"'{next(iter(limits))}' must be a (whole )?number, at least 1"):
        Compacted(**limits)


@pytest.mark.parametrize(
    ("delta_bytes", "expected"),
    [
        ([], Since.BASELINE),  # nothing to go by
        ([0], Since.BASELINE),
        ([50], Since.BASELINE),  # F = 150, I = 100
        ([99], Since.BASELINE),  # F = 199, I = 198
        ([100], Since.EVER),  # F = 200 = I: a delta as large as a baseline
        ([150], Since.EVER),
        ([10, 60], Since.EVER),  # F = 170, I = 180: growth, however small the sum
        ([10, 54], Since.BASELINE),  # F = 164, I = 162
        ([50, 50], Since.BASELINE),  # F = 200, I = 150
        ([50, 75], Since.EVER),  # F = 225 = I
        ([50, 74], Since.BASELINE),  # F = 224, I = 222
        ([50, 10], Since.BASELINE),  # an idle interval
        ([26] * 100, Since.BASELINE),  # what does not grow never pays for a baseline
        ([50] * 100, Since.BASELINE),
    ],
)
def test_intermittent_weighs_both_ways_to_go_on(delta_bytes: list[int], expected: Since) -> None:
    """A baseline is taken if and only if F <= I, on a baseline of 100 bytes."""
    with_baseline, without = 100 + sum(delta_bytes), (len(delta_bytes) + 1) * (delta_bytes or [0])[-1]
    if delta_bytes:
        assert (with_baseline <= without) == (expected is Since.EVER)
    assert Intermittent().decide(History(100, tuple(delta_bytes))) is expected


def _intervals(policy: Policy, fraction: Callable[[int], float], num_intervals: int) -> list[Since]:
    """What a policy decides at the end of each interval, of which the first always makes the baseline.

    Args:
        fraction: Size of the i-th delta on a baseline, as a fraction of it; i counts from 1.
    """
    decisions = [Since.EVER]
    history = History(BASELINE_BYTES)
    for _ in range(1, num_intervals):
        since = policy.decide(history)
        decisions.append(since)
        if since is Since.EVER:
            history = History(BASELINE_BYTES)
        else:
            size = round(BASELINE_BYTES * fraction(len(history.delta_bytes) + 1))
            history = History(BASELINE_BYTES, (*history.delta_bytes, size))
    return decisions


def _check_n_run(i: int) -> float:
    """The modified rows of Check-N-Run's model, 26 % after one interval and 48 % after eight."""
    return 0.26 + 0.105 * math.log(i)


def test_intermittent_takes_a_baseline_after_eight_deltas() -> None:
    """On Check-N-Run's model S_i = .26 + .105 ln i the predictor fires for the first time when it knows S_8.

    Counted from the baseline as checkpoint 0, checkpoints 1 to 8 are deltas of it, and checkpoint 9 is the next
    baseline: the decision is made at the end of the interval after the eighth delta. After the seventh, F = 3.7151 is
    still above I = 3.7146.
    """
    decisions = _intervals(Intermittent(), _check_n_run, 28)
    assert [number for number, since in enumerate(decisions) if since is Since.EVER] == [0, 9, 18, 27]
    expected_costs = [1 + sum(map(_check_n_run, range(1, i + 1))) for i in (7, 8)]
    assert expected_costs == pytest.approx([3.7151, 4.1935], abs=1e-4)
    assert [8 * _check_n_run(7), 9 * _check_n_run(8)] == pytest.approx([3.7146, 4.3051], abs=1e-4)


def test_intermittent_writes_less_than_its_rivals() -> None:
    """Over many intervals of that model it writes .466 of a baseline each, less than one-shot, which keeps growing."""
    num_intervals = 900
    written = {}
    for policy in (Full(), OneShot(), Intermittent()):
        total, since_baseline = 0.0, 0
        for since in _intervals(policy, _check_n_run, num_intervals):
            since_baseline = 0 if since is Since.EVER else since_baseline + 1
            total += _check_n_run(since_baseline) if since_baseline else 1.0
        written[type(policy).__name__] = total / num_intervals
    assert written["Full"] == 1
    assert written["Intermittent"] == pytest.approx(0.466, abs=0.001)
    assert written["Intermittent"] < written["OneShot"] < written["Full"]


@hypothesis.given(histories, st.integers(2, 1000))
def test_intermittent_knows_no_units(history: History, factor: int) -> None:
    """Only proportions count: a model that is many times larger gets the same decisions."""
    larger = History(history.baseline_bytes * factor, tuple(size * factor for size in history.delta_bytes))
    assert Intermittent().decide(larger) is Intermittent().decide(history)


@hypothesis.given(histories)
def test_intermittent_never_takes_the_head_for_a_parent(history: History) -> None:
    """Its deltas stand on the baseline: a restore reads two checkpoints."""
    assert Intermittent().decide(history) in (Since.EVER, Since.BASELINE)


@hypothesis.given(st.lists(st.integers(0, 100), min_size=1, max_size=10), st.integers(101, 10**6))
def test_growth_is_answered_by_a_baseline(steps: list[int], baseline_bytes: int) -> None:
    """Deltas that have grown to the size of a baseline are ended by one, if they only ever grew."""
    grown = (*accumulate(steps), baseline_bytes * len(steps))
    assert Intermittent().decide(History(baseline_bytes, grown)) is Since.EVER


@pytest.mark.parametrize("policy", [Full(), OneShot(), Consecutive(), Intermittent()])
def test_policies_are_values(policy: Policy) -> None:
    """Two policies of one kind are equal, and hash alike."""
    assert policy == type(policy)()
    assert hash(policy) == hash(type(policy)())


class _Slots:
    __slots__ = ("since",)

    def __init__(self, since: Since) -> None:
        self.since = since

    def decide(self, history: History) -> Since:
        return self.since


@dataclass(frozen=True)
class _Named:
    rule: Callable[[], None]
    names: frozenset[str]

    def decide(self, history: History) -> Since:
        return Since.HEAD


def _rule() -> Callable[[], None]:
    """Another function of the same name each time, as another process has."""

    def rule() -> None: ...

    return rule


class _BackToFront(frozenset[str]):
    """A set in another order, as another process may have it."""

    def __iter__(self) -> Iterator[str]:
        return reversed(list(super().__iter__()))


def test_policies_as_text() -> None:
    """They differ if and only if what they decide by does, in whatever process they are."""
    assert policy_text(_Slots(Since.HEAD)) == policy_text(_Slots(Since.HEAD))
    assert policy_text(_Slots(Since.HEAD)) != policy_text(_Slots(Since.BASELINE))
    names = frozenset("abcdef")
    assert policy_text(_Named(_rule(), names)) == policy_text(_Named(_rule(), _BackToFront(names)))
    assert policy_text(_Named(_rule(), names)) != policy_text(_Named(_rule(), frozenset("abc")))
    assert policy_text(Full()) != policy_text(OneShot())
    assert policy_text(Compacted(max_deltas=3)) != policy_text(Compacted(max_deltas=4))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(("max_ratio", "heats"), [(1.9, {0, 3}), (2.0, {0})])
def test_hot_rows_are_stored_apart_where_compactions_copy_many(
    tmp_path: Path, max_ratio: float, heats: set[int]
) -> None:
    """With few copies there is little to save. Either way, each delta has the rows that were modified."""
    model = nn.Sequential(nn.EmbeddingBag(1_000, 4, sparse=True))
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=Compacted(max_ratio=max_ratio))
    for number in range(5):
        tracker.mark("0.weight", torch.tensor([1, 2, 10 + number]))
        path = tmp_path / f"step-{number}"
        dcp.save(model.state_dict(), checkpoint_id=path, storage_writer=cnr.CNRStorageWriter(path), planner=planner)
    manifest = cnr.read_checkpoint(path).manifest
    assert {pack.heat for pack in manifest.packs} == heats
    assert sum(shard.rows.num_rows for shard in manifest.tensors["0.weight"].shards) == 3

"""Runs: what a policy writes, keeps and reads, against the measured figures; and how estimates grow."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import torchrec_cnr as cnr
from benchmarks.support.jobs import policy_runs
from benchmarks.support.process_memory import peak_mib
from torchrec_cnr.sharding import Box
from torchrec_cnr.sizing.estimate import Estimate, estimate
from torchrec_cnr.sizing.inputs import FIRST_SHARE, GROWTH, Sizing, Table
from torchrec_cnr.sizing.rank_memory import rank_memory
from torchrec_cnr.tracking.modified_rows import ModifiedRows, RowMask, Since

FIGURES = Path(__file__).parents[2] / "docs" / "benchmarks" / "figures.md"
SCHEMES: list[cnr.Scheme] = [
    *(cnr.AdaptiveAsymmetric(bits) for bits in (2, 3, 4)),
    cnr.Asymmetric(8),
    cnr.NoQuantization(),
]
CHAINED: list[cnr.Policy] = [cnr.Compacted(), cnr.Consecutive(), cnr.Full()]


@pytest.mark.parametrize(
    "policy", [cnr.Compacted(), cnr.Full(), cnr.Intermittent(), cnr.OneShot(), cnr.Consecutive()], ids=repr
)
def test_runs_are_as_the_measured_ones(policy: cnr.Policy) -> None:
    """The figures of 2,000 checkpoints: written per save, capacity, and restores, in full checkpoints."""
    line = re.search(rf"^{type(policy).__name__} +([\d. ]+)$", FIGURES.read_text().partition("== policies:")[2], re.M)
    assert line is not None
    written, _, capacity, restore, fresh = map(float, line[1].split())
    sizing = Sizing((Table(400_000, 64),), policy=policy, keep_last=1, interval_secs=1800, run_secs=2_000 * 1800)
    found = estimate(sizing)
    full = found.baseline.num_bytes
    # The curve reaches all rows after 1,150 intervals; rows that are drawn by it take a little longer.
    assert found.costs.bytes_per_save / full == pytest.approx(written, rel=0.04 if policy == cnr.OneShot() else 0.03)
    assert found.costs.peak_bytes / full == pytest.approx(capacity, rel=0.03)
    assert found.costs.restore_bytes / full == pytest.approx(restore, rel=0.03)
    assert found.costs.uncompacted_restore_bytes / full == pytest.approx(fresh, rel=0.03)


def test_the_curve_is_that_of_the_benchmarks() -> None:
    """Rows that the benchmarks modify, and those that estimates assume for several intervals, grow alike."""
    assert (FIRST_SHARE, GROWTH) == (policy_runs.FIRST_SHARE, policy_runs.GROWTH)
    sizing = Sizing((Table(1, 64),))
    assert sizing.modified_in(1) == FIRST_SHARE
    assert sizing.modified_in(11) == pytest.approx(0.5118, abs=0.0001)
    assert sizing.modified_in(10**9) == 1.0
    assert replace(sizing, modified=0.13).modified_in(11) == pytest.approx(sizing.modified_in(11) / 2)


@pytest.mark.long
@pytest.mark.parametrize("policy", [cnr.Compacted(), cnr.OneShot()], ids=repr)
def test_masks_take_the_estimated_memory(policy: cnr.Policy) -> None:
    """The modified rows of a delta that is not staged, as masks, with their union or their digest."""
    num_rows = 40_000_000  # masks so large that the allocator returns each to the system
    rows = ModifiedRows("t", Box((0, 0), (num_rows, 64)), torch.device("cpu"))
    head = torch.arange(num_rows) % 4 == 0
    for _ in range(2):  # the second set has heat, of the first
        rows.mark_where(head)
        rows.freeze()
        rows.commit(True)
    rows.mark_where(head)
    rows.freeze()

    def select() -> None:
        parts = rows.select_parts(Since.HEAD, isinstance(policy, cnr.Compacted))
        assert len(RowMask.union(parts).digest()) == 16

    memory = rank_memory(Sizing((Table(num_rows, 64),), policy=policy), largest_share=0.26)
    estimated_mib = (memory.peak_save - memory.save_buffers) / 2**20
    assert peak_mib(select) == pytest.approx(estimated_mib, rel=0.1)


@pytest.mark.parametrize("policy", [*CHAINED, cnr.Intermittent(), cnr.OneShot()], ids=repr)
def test_costs_follow_from_each_other(policy: cnr.Policy) -> None:
    """Rates are those of the bytes per save; more kept checkpoints take more, and a run of one save is a baseline."""
    sizing = Sizing((Table(10**9, 64),), policy=policy, num_ranks=16)
    costs = estimate(sizing).costs
    assert costs.bytes_per_day == pytest.approx(48 * costs.bytes_per_save, rel=1e-6)
    assert costs.bytes_per_hour == pytest.approx(2 * costs.bytes_per_save, rel=1e-6)
    assert 16 * costs.bytes_per_sec_of_rank + costs.compaction_bytes_per_sec == pytest.approx(
        costs.bytes_per_save / 1800, rel=1e-6
    )
    assert (costs.compaction_bytes_per_sec > 0) == isinstance(policy, cnr.Compacted)
    more = estimate(replace(sizing, keep_last=4)).costs
    assert costs.kept_bytes <= costs.peak_bytes <= more.kept_bytes + 1
    assert (costs.kept_bytes < more.kept_bytes) == (not isinstance(policy, cnr.Consecutive))
    once = estimate(replace(sizing, run_secs=60.0))
    assert once.delta is None
    assert once.costs.bytes_per_save == once.costs.peak_bytes == once.baseline.num_bytes
    assert (once.largest_delta_bytes, once.delta_files, once.memory.staging_delta) == (0, 0, 0)


def test_compaction_copies_nothing_if_all_rows_are_modified() -> None:
    """Each delta then replaces all rows before it; with fewer rows, copies add to what is written."""
    found = estimate(Sizing((Table(10**9, 64),), modified=1.0))
    assert found.delta is not None
    assert found.costs.bytes_per_save == pytest.approx(found.delta.num_bytes, rel=1e-6)
    fewer = estimate(Sizing((Table(10**9, 64),), modified=0.9))
    assert fewer.delta is not None
    assert fewer.costs.bytes_per_save > 1.05 * fewer.delta.num_bytes


def test_plain_dcp_writes_full_checkpoints() -> None:
    """It keeps as many as it should, and one more while it writes."""
    found = estimate(Sizing((Table(10**9, 64),), keep_last=2))
    full = found.full_fp32_bytes
    assert full == 260 * 10**9
    plain = found.plain_dcp
    assert (plain.bytes_per_save, plain.kept_bytes, plain.peak_bytes, plain.restore_bytes) == (
        full,
        2 * full,
        3 * full,
        full,
    )


def test_wide_staging_is_limited() -> None:
    """Rows beyond ``staging_bytes`` are not copied; a GPU copies codes."""
    sizing = Sizing((Table(10**9, 64),), num_ranks=16)
    on_host, on_gpu = estimate(sizing).memory, estimate(replace(sizing, is_on_gpu=True)).memory
    assert on_host.staging_baseline == round(1.25 * on_host.staging_limit)
    assert on_gpu.staging_delta < on_host.staging_delta / 4
    assert on_gpu.tracker > on_host.tracker


def _table(num_rows: int, num_cols: int) -> Table:
    return Table(num_rows, 8 * num_cols)


sizings = st.builds(
    Sizing,
    tables=st.lists(st.builds(_table, st.integers(1, 10**11), st.integers(2, 64)), min_size=1, max_size=3).map(tuple),
    modified=st.integers(1, 1000).map(lambda part: part / 1000),
    scheme=st.sampled_from(SCHEMES),
    state=st.sampled_from([None, cnr.NoQuantization()]),
    interval_secs=st.sampled_from([60.0, 1800.0, 86400.0]),
    policy=st.sampled_from(CHAINED),
    num_ranks=st.integers(1, 2_000),
    keep_last=st.integers(1, 10),
    is_on_gpu=st.booleans(),
)


def _more_rows(sizing: Sizing, times: int) -> Sizing:
    first, *others = sizing.tables
    return replace(sizing, tables=(Table(times * first.num_rows, first.num_cols), *others))


def _more_modified(sizing: Sizing, times: int) -> Sizing:
    return replace(sizing, modified=min(1.0, times * sizing.modified))


def _more_bits(sizing: Sizing, times: int) -> Sizing:
    return replace(sizing, scheme=SCHEMES[min(len(SCHEMES) - 1, SCHEMES.index(sizing.scheme) + times)])


def _more_kept(sizing: Sizing, times: int) -> Sizing:
    return replace(sizing, keep_last=times * sizing.keep_last)


def _sizes(found: Estimate) -> dict[str, Any]:
    """All that must not shrink."""
    delta = 0 if found.delta is None else found.delta.num_bytes
    costs, memory = dict(vars(found.costs)), vars(found.memory)
    for name in ("compaction_bytes_per_day", "compaction_bytes_per_sec"):
        del costs[name]  # deltas that replace more rows leave fewer to copy
    return {"full": found.full_fp32_bytes, "baseline": found.baseline.num_bytes, "delta": delta, **costs, **memory}


@pytest.mark.parametrize("more", [_more_rows, _more_modified, _more_bits, _more_kept], ids=lambda more: more.__name__)
@given(sizing=sizings, times=st.integers(2, 4))
def test_more_of_anything_never_takes_less(more: Callable[[Sizing, int], Sizing], sizing: Sizing, times: int) -> None:
    """More rows, a larger share, more bits or more kept checkpoints: no size and no bandwidth becomes smaller."""
    before, after = _sizes(estimate(sizing)), _sizes(estimate(more(sizing, times)))
    assert {name: (size, after[name]) for name, size in before.items() if after[name] < size - 1} == {}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tables": ()}, "'tables' must contain"),
        ({"modified": 0.0}, "'modified' must be"),
        ({"modified": 1.1}, "'modified' must be"),
        ({"interval_secs": float("nan")}, "'interval_secs' must be"),
        ({"num_ranks": 0}, "'num_ranks' must be"),
        ({"keep_last": 0}, "'keep_last' must be"),
        ({"policy": cnr.Full}, "'policy' must be"),
    ],
)
def test_wrong_inputs_are_refused(wrong: dict[str, Any], words: str) -> None:
    """The error names the attribute."""
    with pytest.raises(cnr.ConfigurationError, match=re.escape(words)):
        replace(Sizing((Table(10, 64),)), **wrong)
    with pytest.raises(cnr.ConfigurationError, match="'num_rows' must be a whole number from 1 to"):
        Table(0, 64)

"""Row bits: whatever is packed, cleared, added and read as numbers is what numpy and PyTorch say."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchrec_cnr.kernels.cpu import bitsets, compiling
from torchrec_cnr.tracking.modified_rows import RowBits, numbers_of

CPU = torch.device("cpu")
any_function_fixture = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def masks(draw: st.DrawFn, num_rows: int | None = None) -> torch.Tensor:
    """Masks of none to all rows, of any density, in runs or not."""
    size = draw(st.integers(0, 700)) if num_rows is None else num_rows
    share = draw(st.sampled_from([0.0, 0.02, 0.05, 0.3, 0.95, 1.0]))
    generator = np.random.default_rng(draw(st.integers(0, 10**6)))
    mask = generator.random(size) < share
    first, length = draw(st.integers(0, 700)), draw(st.integers(0, 200))
    mask[first : first + length] = draw(st.booleans())
    return torch.from_numpy(mask)


@any_function_fixture
@given(mask=masks(), first=st.integers(0, 70), num_threads=st.integers(1, 3))
def test_numbers_of_a_mask(monkeypatch: pytest.MonkeyPatch, mask: torch.Tensor, first: int, num_threads: int) -> None:
    """The places of what is true, in order, in a part of a larger mask too, however threads divide it."""
    _divide_finely(monkeypatch, num_threads)
    part = mask[first:]
    expected = part.nonzero().squeeze(1)
    assert numbers_of(part).equal(expected)
    assert numbers_of(mask[::2]).equal(mask[::2].nonzero().squeeze(1))
    assert numbers_of(part).dtype is torch.int64


@any_function_fixture
@given(mask=masks(), before=st.integers(0, 70), num_threads=st.integers(1, 3))
def test_marks_are_taken_and_no_others(
    monkeypatch: pytest.MonkeyPatch, mask: torch.Tensor, before: int, num_threads: int
) -> None:
    """What was marked is in the set, nothing is marked afterwards, and the marks of other tables beside it stay."""
    _divide_finely(monkeypatch, num_threads)
    whole = torch.ones(before + len(mask) + 70, dtype=torch.bool)
    marked = whole[before : before + len(mask)]
    marked.copy_(mask)
    rows = RowBits.none_of(len(mask), CPU)
    rows.put(torch.ones(len(mask), dtype=torch.bool))
    rows.take(marked)
    assert rows.mask().equal(mask)
    assert rows.numbers().equal(mask.nonzero().squeeze(1))
    assert not marked.any()
    assert whole[:before].all()
    assert whole[before + len(mask) :].all()


def _divide_finely(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    monkeypatch.setattr(compiling.torch, "get_num_threads", lambda: num_threads)
    for name, size in (("_CHUNK_WORDS", 2), ("_CHUNK_BLOCKS", 1), ("_BLOCK_WORDS", 1 + num_threads)):
        monkeypatch.setattr(bitsets, name, size)


@given(data=st.data(), num_rows=st.integers(0, 400))
@settings(deadline=None)
def test_sets_are_put_together(data: st.DataObject, num_rows: int) -> None:
    """Unions, additions and rows told by their numbers, any order and repeated, are those of masks."""
    mine, others = data.draw(masks(num_rows)), data.draw(masks(num_rows))
    rows, other = RowBits.none_of(num_rows, CPU), RowBits.none_of(num_rows, CPU)
    rows.put(mine)
    other.put(others)
    assert rows.union(other).mask().equal(mine | others)
    assert rows.mask().equal(mine)
    told = torch.from_numpy(np.random.default_rng(0).permutation(others.nonzero().squeeze(1).repeat(2).numpy()))
    rows.add_numbers(told)
    assert rows.mask().equal(mine | others)
    rows.put(mine)
    rows.add(other)
    assert rows.mask().equal(mine | others)
    assert other.mask().equal(others)
    rows.clear()
    assert not rows.mask().any()


@pytest.mark.parametrize("number", [-1, 70, 10**12])
def test_rows_that_are_not_there_are_refused(number: int) -> None:
    """Compiled code would write beside the set."""
    rows = RowBits.none_of(70, CPU)
    with pytest.raises(IndexError, match=f"of 70 rows, got rows .*{number}"):
        rows.add_numbers(torch.tensor([3, number]))
    assert not rows.mask().any()

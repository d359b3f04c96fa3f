"""Gathering rows: the same as PyTorch's, however rows lie, and never outside of the table."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchrec_cnr as cnr
from torchrec_cnr.kernels.cpu import compiling
from torchrec_cnr.kernels.cpu import gather_rows as gather_rows_module
from torchrec_cnr.kernels.cpu.gather_rows import gather_rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_rows=st.integers(1, 400),
    row_shape=st.sampled_from([(), (1,), (2,), (3,), (16,), (17,), (33,), (64,), (2, 8), (200,), (0,)]),
    dtype=st.sampled_from(DTYPES),
    share=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    first_row=st.integers(0, 3),
    padding=st.integers(0, 3),
    is_sorted=st.booleans(),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_rows_are_those_that_pytorch_selects(  # one argument for each thing that may differ
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    share: float,
    first_row: int,
    padding: int,
    is_sorted: bool,
    num_threads: int,
    seed: int,
) -> None:
    """Any dtype and width, in order or not, also in a part of a wider table, however threads divide it."""
    monkeypatch.setattr(compiling.torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(gather_rows_module, "_CHUNK_WORDS", 8)
    generator = torch.Generator().manual_seed(seed)
    widened = (*row_shape[:-1], row_shape[-1] + padding) if row_shape else ()
    whole = torch.randint(0, 2 if dtype is torch.bool else 100, (num_rows + first_row, *widened), generator=generator)
    source = whole.to(dtype)[first_row:]
    source = source[..., : row_shape[-1]] if row_shape else source
    numbers = torch.randperm(num_rows, generator=generator)[: round(share * num_rows)]
    numbers = numbers.sort().values if is_sorted else numbers
    expected = source.index_select(0, numbers)
    beside = torch.full((len(expected) + 2, *row_shape), 7, dtype=torch.float64).to(dtype)
    gather_rows(source, numbers, beside[1:-1])
    assert beside[1:-1].equal(expected)
    assert (beside[0] == torch.tensor(7.0).to(dtype)).all()
    assert (beside[-1] == torch.tensor(7.0).to(dtype)).all()


@pytest.mark.parametrize(
    ("numbers", "target", "message"),
    [
        ([1, 2], torch.zeros(1, 64), "2 rows of torch.float32"),
        ([1, 2], torch.zeros(2, 32), "do not go to"),
        ([1, 2], torch.zeros(2, 64, dtype=torch.int32), "torch.int32"),
    ],
)
def test_other_targets_are_refused(numbers: list[int], target: Tensor, message: str) -> None:
    """Targets of another kind are refused."""
    with pytest.raises(cnr.ConfigurationError, match=message):
        gather_rows(torch.ones(40, 64), torch.tensor(numbers), target)
    assert not target.any()


@pytest.mark.parametrize("row_shape", [(), (2,), (64,)])
@pytest.mark.parametrize("numbers", [[0, 100], [-1, 3], [1, 10**12]])
def test_rows_that_are_not_there_are_refused(numbers: list[int], row_shape: tuple[int, ...]) -> None:
    """Compiled code checks nothing: rows outside of the table are refused before."""
    target = torch.zeros(2, *row_shape)
    with pytest.raises(IndexError):
        gather_rows(torch.ones(100, *row_shape), torch.tensor(numbers), target)
    assert not target.any()

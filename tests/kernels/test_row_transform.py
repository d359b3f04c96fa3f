"""Rows as multiples of a step in a basis, compared with NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrec_cnr as cnr
from torchrec_cnr import kernels
from torchrec_cnr.kernels.cpu import compiling


def _basis(random: np.random.Generator, num_cols: int) -> Any:
    return np.linalg.qr(random.normal(size=(num_cols, num_cols)))[0].astype(np.float32).astype(np.float64)


@given(
    num_rows=st.integers(0, 30),
    num_cols=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    has_basis=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_components_are_those_of_numpy(
    num_rows: int, num_cols: int, dtype: torch.dtype, has_basis: bool, seed: int
) -> None:
    """Rows in any order, of tables with gaps between rows; and back, for any columns."""
    random = np.random.default_rng(seed)
    table = torch.from_numpy(random.normal(size=(50, num_cols + 3))).to(dtype)[:, 1 : 1 + num_cols]
    rows = torch.from_numpy(random.integers(0, 50, num_rows))
    basis, step = _basis(random, num_cols) if has_basis else np.empty((0, 0)), 0.05
    numbers, is_exact = kernels.transform_rows(table, rows, basis, step)
    values = table[rows].double().numpy()
    components = values @ basis.T if has_basis else values
    assert not is_exact.any()
    assert np.abs(numbers.numpy() - components / step).max(initial=0) <= 0.5001
    first, last = sorted(random.integers(0, num_cols + 1, 2).tolist())
    target = torch.full((60, last - first), 7.0, dtype=dtype)
    places = torch.from_numpy(random.permutation(60)[:num_rows])
    positions = torch.arange(num_rows)
    kernels.restore_rows(numbers, positions, basis, step, first, target, places)
    whole = numbers.numpy().astype(np.float64)
    wanted = ((whole @ basis if has_basis else whole) * step)[:, first:last]
    rounded = torch.from_numpy(wanted).float().to(dtype)
    torch.testing.assert_close(target[places], rounded, rtol=2e-2 if dtype is torch.bfloat16 else 2e-3, atol=1e-5)
    others = np.setdiff1d(np.arange(60), places.numpy())
    assert bool((target[others] == 7.0).all())


def test_rows_without_numbers_are_exact() -> None:
    """NaN, infinity, and more steps than 16 bits count."""
    table = torch.zeros(5, 4)
    table[1, 2], table[2, 0], table[3, 1] = float("nan"), float("-inf"), 4000.0
    numbers, is_exact = kernels.transform_rows(table, torch.arange(5), np.eye(4), 0.1)
    assert is_exact.tolist() == [False, True, True, True, False]
    assert not numbers.any()


def test_threads_and_order_change_nothing() -> None:
    """Bit for bit."""
    random = np.random.default_rng(0)
    table, rows, basis = (
        torch.from_numpy(random.normal(size=(5000, 33))).float(),
        torch.arange(5000),
        _basis(random, 33),
    )
    numbers, _ = kernels.transform_rows(table, rows, basis, 0.01)
    backwards, _ = kernels.transform_rows(table, rows.flip(0), basis, 0.01)
    assert torch.equal(numbers, backwards.flip(0))
    decoded, alone = torch.empty(5000, 33), torch.empty(5000, 33)
    kernels.restore_rows(numbers, rows, basis, 0.01, 0, decoded, rows)
    with compiling.one_thread():
        kernels.restore_rows(numbers, rows, basis, 0.01, 0, alone, rows)
    assert torch.equal(decoded, alone)


def test_wrong_arguments_are_refused() -> None:
    """Before compiled code, which checks no bounds, gets them."""
    numbers, rows = torch.zeros(3, 4, dtype=torch.int16), torch.arange(3)
    with pytest.raises(cnr.ConfigurationError, match="so many columns"):
        kernels.restore_rows(numbers, rows, np.eye(4), 1.0, 1, torch.zeros(3, 4), rows)
    with pytest.raises(cnr.ConfigurationError, match="rows 0 to 3"):
        kernels.restore_rows(numbers, torch.arange(4), np.eye(4), 1.0, 0, torch.zeros(4, 4), torch.arange(4))
    with pytest.raises(cnr.ConfigurationError, match="fp32"):
        kernels.transform_rows(torch.zeros(3, 4, dtype=torch.float64), rows, np.eye(4), 1.0)

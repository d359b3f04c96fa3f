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
    has_zone=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_components_are_those_of_numpy(
    num_rows: int, num_cols: int, dtype: torch.dtype, has_basis: bool, has_zone: bool, seed: int
) -> None:
    """Rows in any order, of tables with gaps between rows; and back, for any columns."""
    random = np.random.default_rng(seed)
    table = torch.from_numpy(random.normal(size=(50, num_cols + 3))).to(dtype)[:, 1 : 1 + num_cols]
    rows = torch.from_numpy(random.integers(0, 50, num_rows))
    basis, step = _basis(random, num_cols) if has_basis else np.empty((0, 0)), 0.05
    dead_zone = random.uniform(0, 0.35, num_cols) if has_zone else np.zeros(num_cols)
    numbers, is_exact = kernels.transform_rows(table, rows, basis, step, dead_zone)
    values = table[rows].double().numpy()
    components = values @ basis.T if has_basis else values
    assert not is_exact.any()
    scaled = components / step
    errors = np.where(components < 0, -1, 1) * (scaled - numbers.numpy())
    assert (errors <= 0.501 + dead_zone).all()
    assert (errors >= np.where(numbers.numpy() == 0, -0.501, -0.501 + dead_zone)).all()
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
    numbers, is_exact = kernels.transform_rows(table, torch.arange(5), np.eye(4), 0.1, np.zeros(4))
    assert is_exact.tolist() == [False, True, True, True, False]
    assert not numbers.any()


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float16, 65504.0), (torch.bfloat16, 3.38e38), (torch.float32, 3.4e38)]
)
def test_rows_that_might_become_infinite_are_exact(dtype: torch.dtype, most: float) -> None:
    """Rounded to multiples of a step, the largest values of a dtype might be above it."""
    table = torch.full((2, 4), most, dtype=dtype)
    table[1] = most / 2
    numbers, is_exact = kernels.transform_rows(table, torch.arange(2), np.eye(4), most / 99, np.zeros(4))
    assert is_exact.tolist() == [True, False]
    target = torch.zeros(2, 4, dtype=dtype)
    kernels.restore_rows(numbers, torch.arange(2), np.eye(4), most / 99, 0, target, torch.arange(2))
    assert bool(target.isfinite().all())


def test_threads_and_order_change_nothing() -> None:
    """Bit for bit."""
    random = np.random.default_rng(0)
    table, rows, basis = (
        torch.from_numpy(random.normal(size=(5000, 33))).float(),
        torch.arange(5000),
        _basis(random, 33),
    )
    numbers, _ = kernels.transform_rows(table, rows, basis, 0.01, np.full(33, 0.2))
    backwards, _ = kernels.transform_rows(table, rows.flip(0), basis, 0.01, np.full(33, 0.2))
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
        kernels.transform_rows(torch.zeros(3, 4, dtype=torch.float64), rows, np.eye(4), 1.0, np.zeros(4))
    with pytest.raises(cnr.ConfigurationError, match="not a basis of rows of 4 columns"):
        kernels.transform_rows(torch.zeros(3, 4), rows, np.eye(5), 1.0, np.zeros(5))

"""Rows as multiples of a step in a basis, compared with NumPy."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrec_cnr as cnr
from torchrec_cnr import kernels
from torchrec_cnr.kernels.cpu import compiling
from torchrec_cnr.kernels.gpu import row_transform

Kernel = Callable[[], AbstractContextManager[None]]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _basis(random: np.random.Generator, num_cols: int) -> Any:
    return np.linalg.qr(random.normal(size=(num_cols, num_cols)))[0].astype(np.float32).astype(np.float64)


TABLES: dict[str, Any] = {
    "num_rows": st.integers(0, 30),
    "num_cols": st.integers(1, 70),
    "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    "has_basis": st.booleans(),
    "has_zone": st.booleans(),
    "seed": st.integers(0, 2**32),
}


@given(**TABLES)
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


@contextmanager
def _as_on_another_device() -> Iterator[None]:
    with mock.patch.object(kernels.cpu, "transform_rows", row_transform.transform_rows):
        yield


@pytest.mark.parametrize("kernel", [nullcontext, _as_on_another_device])
def test_rows_without_numbers_are_exact(kernel: Kernel) -> None:
    """NaN, infinity, and more steps than 16 bits count: of a value, or of a component alone."""
    table = torch.zeros(6, 4)
    table[1, 2], table[2, 0], table[3, 1], table[5] = float("nan"), float("-inf"), 4000.0, 3000.0
    basis = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2.0
    with kernel():
        numbers, is_exact = kernels.transform_rows(table, torch.arange(6), basis, 0.1, np.zeros(4))
    assert is_exact.tolist() == [False, True, True, True, False, True]
    assert not numbers.any()


@pytest.mark.parametrize("kernel", [nullcontext, _as_on_another_device])
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float16, 65504.0), (torch.bfloat16, 3.38e38), (torch.float32, 3.4e38)]
)
def test_rows_that_might_become_infinite_are_exact(dtype: torch.dtype, most: float, kernel: Kernel) -> None:
    """Rounded to multiples of a step, the largest values of a dtype might be above it."""
    table = torch.full((2, 4), most, dtype=dtype)
    table[1] = most / 2
    with kernel():
        numbers, is_exact = kernels.transform_rows(table, torch.arange(2), np.eye(4), most / 99, np.zeros(4))
    assert is_exact.tolist() == [True, False]
    target = torch.zeros(2, 4, dtype=dtype)
    kernels.restore_rows(numbers, torch.arange(2), np.eye(4), most / 99, 0, target, torch.arange(2))
    assert bool(target.isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
@given(
    **TABLES,
    log_step=st.floats(-4.5, 0),
    block_rows=st.integers(1, 40),
)
@settings(deadline=None)
def test_devices_compute_the_numbers_of_cpus(
    device: str,
    num_rows: int,
    num_cols: int,
    dtype: torch.dtype,
    has_basis: bool,
    has_zone: bool,
    log_step: float,
    block_rows: int,
    seed: int,
) -> None:
    """And the same exact rows, except where a component is next to the middle of two numbers, or to the limit."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(50, num_cols + 3))
    values[random.integers(0, 50, 8), random.integers(0, num_cols + 3, 8)] = random.choice([np.nan, np.inf, 1e4], 8)
    table = torch.from_numpy(values).to(dtype)[:, 1 : 1 + num_cols]
    rows = torch.from_numpy(random.integers(0, 50, num_rows))
    basis, step = _basis(random, num_cols) if has_basis else np.empty((0, 0)), 10.0**log_step
    dead_zone = random.uniform(0, 0.35, num_cols) if has_zone else np.zeros(num_cols)
    wanted, is_exact = kernels.transform_rows(table, rows, basis, step, dead_zone)
    on_device = table.to(device), rows.to(device)
    most_value = min(32767 * step, torch.finfo(dtype).max / 2)
    with mock.patch.object(row_transform, "_BLOCK_BYTES", 8 * num_cols * block_rows):
        found, is_found_exact = row_transform.transform_rows(*on_device, basis, step, dead_zone, most_value)
    assert found.device.type == is_found_exact.device.type == device
    is_finite = table[rows].isfinite().all(1).numpy()
    wide = np.where(is_finite[:, None], table[rows].double().numpy(), 0.0) / step
    components = wide @ basis.T if has_basis else wide
    moved = components - np.copysign(dead_zone, components)
    largest = np.abs(np.concatenate((moved, wide), axis=1)).max(1)
    is_limit = np.abs(largest - 32767.25) < 2
    assert (is_exact.numpy() == is_found_exact.cpu().numpy())[~is_limit].all()
    # What fp32 may be off by, when it adds as many products, each of them rounded.
    terms = np.abs(wide) @ np.abs(basis.T) if has_basis else np.abs(wide)
    is_near = np.abs(moved % 1 - 0.5) < np.maximum(1e-3, terms * (num_cols + 3) * 2.0**-24)
    differing = (wanted != found.cpu()).numpy() & ~is_limit[:, None]
    assert not (differing & ~is_near).any()
    assert np.abs(wanted.numpy().astype(int) - found.cpu().numpy())[~is_limit].max(initial=0) <= 1


@pytest.mark.gpu
def test_a_gpu_transforms_in_bounded_memory_and_is_not_waited_for() -> None:
    """Also where PyTorch may multiply fp32 with fewer bits."""
    random = np.random.default_rng(0)
    table, rows = torch.randn(4_000_000, 64, device="cuda"), torch.arange(0, 4_000_000, 2, device="cuda")
    arguments = _basis(random, 64), 0.01, np.full(64, 0.2)
    wanted, _ = kernels.transform_rows(table[rows[-1000:]].cpu(), torch.arange(1000), *arguments)
    kernels.transform_rows(table, rows[:10], *arguments, are_checked=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    allows = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.cuda.set_sync_debug_mode("error")
        numbers, is_exact = kernels.transform_rows(table, rows, *arguments, are_checked=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.backends.cuda.matmul.allow_tf32 = allows
    assert torch.cuda.max_memory_allocated() - before - numbers.nbytes < 256 << 20
    assert not is_exact.any()
    assert int((numbers[-1000:].cpu() != wanted).sum()) <= 64


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

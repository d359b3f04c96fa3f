"""Compiled code that encodes and decodes rows in one pass, on the device that holds the table.

The functions of this module choose the device. The kernels of all devices write the same bytes; the tests compare them
with a reference in plain PyTorch. Schemes say what to compute and know nothing about devices.

- ``search_plan``: how the range of a row is searched, as numbers that compiled code can read.
- ``cpu/``: kernels for CPUs, compiled by numba.
- ``gpu/``: kernels for GPUs, in Triton.

Words of this package:

- *fused row*: the codes of a row, lowest bits first, then scale and bias in fp16, as in FBGEMM.
- *closed range*: a range that encoding finds again after decoding, so that repeated saves change nothing.
- *lane*: one of the 16 elements of a vector on a CPU, or of the 32 of a warp on a GPU. Each holds another row.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.kernels import cpu
from torchrec_cnr.kernels.search_plan import SCALE_AND_BIAS_BYTES, SearchPlan

# Triton comes with torch for CUDA, and is not needed elsewhere.
_gpu: ModuleType | None = import_module("torchrec_cnr.kernels.gpu.fused_rows") if find_spec("triton") else None

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_Decoder = Callable[[Tensor, Tensor, int, int, Tensor, Tensor], None]


def encode_rows(
    table: Tensor, rows: Tensor, bits: int, plan: SearchPlan, row_bytes: int, are_checked: bool = False
) -> tuple[Tensor, Tensor]:
    """Encode rows of a table as fused rows: codes, lowest bits first, then scale and bias in fp16.

    Args:
        table: [num_rows, num_cols] of fp32, fp16 or bf16, the elements of a row side by side.
        rows: int64 [n], numbers of the rows, on the table's device.
        bits: 2, 3, 4 or 8.
        plan: How scale and bias are searched.
        row_bytes: Of an encoded row.
        are_checked: Whether the rows are known to be there: to look where they lie on a device is to wait for it.

    Returns:
        uint8 [n, row_bytes], and bool [n]: rows that codes cannot represent, whose bytes are zeros.

    Raises:
        ConfigurationError: The table is of another dtype or layout, or has no such rows, or no columns.
    """
    _check_encodable(table, rows, are_checked)
    if table.is_cuda and _gpu is not None:
        codes, is_exact = _gpu.encode_rows(table, rows, bits, plan, row_bytes)
        return codes, is_exact
    return cpu.encode_rows(*_on_host(table, rows), bits, plan, row_bytes)


def decode_rows(codes: Tensor, positions: Tensor, bits: int, first_col: int, target: Tensor, rows: Tensor) -> None:
    """Decode fused rows into rows of a target.

    Args:
        codes: uint8 [n, row_bytes], on the target's device.
        positions: int64 [k], which of them.
        bits: 2, 3, 4 or 8.
        first_col: The encoded column that is the target's first.
        target: [num_rows, num_cols] of fp32, fp16 or bf16, the elements of a row side by side. Written.
        rows: int64 [k], the rows of the target that they go to.

    Raises:
        ConfigurationError: The target is of another dtype or layout, or there are no such rows or columns.
    """
    _check(target, rows)
    code_bytes = codes.shape[1] - SCALE_AND_BIAS_BYTES
    _check_codes(codes, positions, (first_col + target.shape[1]) * bits <= 8 * code_bytes)
    if target.is_cuda and _gpu is not None:
        _gpu.decode_rows(codes, positions, bits, first_col, target, rows)
    else:
        _decode_on_host(cpu.decode_rows, codes, positions, bits, first_col, target, rows)


def warm_up(table: Tensor, bits: int, plan: SearchPlan, row_bytes: int) -> None:
    """Compile now what encodes rows of a table, and encodes and decodes samples of them, if it lies on a GPU.

    Triton compiles for seconds where it is first called. Kernels for CPUs are loaded from a cache of their own.

    Args:
        table: [num_rows, num_cols], at least one of both; its values do not matter.
        bits: As for ``encode_rows``, and so are those below.
        plan: How scale and bias are searched.
        row_bytes: Of an encoded row.
    """
    if table.is_cuda and _gpu is not None:
        _gpu.warm_up(table, bits, plan, row_bytes)


def encode_clusters(table: Tensor, rows: Tensor, bits: int, row_bytes: int) -> tuple[Tensor, Tensor]:
    """Encode rows of a table by k-means: codes, lowest bits first, then the codebook in fp16, in increasing order.

    Arguments and results are those of ``encode_rows``. There is no kernel for GPUs: their rows are clustered on the
    host.
    """
    _check_encodable(table, rows)
    return cpu.encode_clusters(*_on_host(table, rows), bits, row_bytes)


def decode_clusters(codes: Tensor, positions: Tensor, bits: int, first_col: int, target: Tensor, rows: Tensor) -> None:
    """Decode rows of k-means into rows of a target; the arguments are those of ``decode_rows``."""
    _check(target, rows)
    code_bytes = codes.shape[1] - 2 * (1 << bits)
    _check_codes(codes, positions, (first_col + target.shape[1]) * bits <= 8 * code_bytes)
    _decode_on_host(cpu.decode_clusters, codes, positions, bits, first_col, target, rows)


def _check(table: Tensor, rows: Tensor, are_checked: bool = False) -> None:
    """Compiled code checks nothing: whatever it is told to read and write must be there."""
    if table.dim() != 2 or table.dtype not in _DTYPES:
        raise ConfigurationError(f"a table must be two-dimensional fp32, fp16 or bf16 (got {_described(table)})")
    num_rows, num_cols = table.shape
    if (num_cols > 1 and table.stride(1) != 1) or (num_rows > 1 and table.stride(0) < num_cols):
        raise ConfigurationError(
            f"the elements of a row must lie side by side, and rows apart (got {_described(table)})"
        )
    if not are_checked:
        check_numbers(rows, num_rows)


def _check_encodable(table: Tensor, rows: Tensor, are_checked: bool = False) -> None:
    _check(table, rows, are_checked)
    if table.shape[1] == 0:
        raise ConfigurationError(f"a table without columns has nothing to encode (got {_described(table)})")


def _check_codes(codes: Tensor, positions: Tensor, has_columns: bool) -> None:
    if codes.dtype is not torch.uint8 or not has_columns:
        raise ConfigurationError(f"codes are not of rows with so many columns (got {_described(codes)})")
    check_numbers(positions, len(codes))


def check_numbers(rows: Tensor, num_rows: int) -> None:
    """Refuse numbers that are not of rows of a table. Waits for the device that they lie on.

    Raises:
        ConfigurationError: They are not.
    """
    if rows.dtype is not torch.int64 or rows.dim() != 1:
        raise ConfigurationError(f"numbers of rows must be one-dimensional int64 (got {_described(rows)})")
    if rows.device.type == "cpu":
        is_there = len(rows) == 0 or rows.numpy().view(np.uint64).max() < num_rows  # without a sign none is negative
    else:
        is_there = bool(((rows >= 0) & (rows < num_rows)).all())
    if not is_there:
        raise ConfigurationError(f"rows {int(rows.min())} to {int(rows.max())} are asked for, of {num_rows}")


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"


def _on_host(table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    if table.device.type == "cpu":
        return table, rows
    return table.index_select(0, rows).cpu(), torch.arange(len(rows), device="cpu")


def _decode_on_host(
    decode: _Decoder, codes: Tensor, positions: Tensor, bits: int, first_col: int, target: Tensor, rows: Tensor
) -> None:
    if target.device.type == "cpu":
        decode(codes, positions, bits, first_col, target, rows)
        return
    values = torch.empty(len(rows), target.shape[1], dtype=target.dtype, device="cpu")
    decode(codes.cpu(), positions.cpu(), bits, first_col, values, torch.arange(len(rows), device="cpu"))
    target.index_copy_(0, rows, values.to(target.device))

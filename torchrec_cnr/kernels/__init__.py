"""Compiled code that encodes and decodes rows in one pass, on the device that holds the table.

The functions of this module choose the device. The kernels of all devices write the same bytes, except where
``transform_rows`` says. The tests compare them with a reference in plain PyTorch. Schemes define what to compute, and
know nothing about devices.

- ``search_plan``: ``SearchPlan``, the search for the range of a row as numbers that compiled code can read.
- ``cpu/``: kernels for CPUs, compiled by numba.
- ``gpu/``: kernels for GPUs, in Triton.

Terms of this package:

- *fused row*: the codes of a row, lowest bits first, then scale and bias in fp16, as in FBGEMM.
- *closed range*: a range that encoding the decoded values finds again, so that repeated saves change nothing.
- *lane*: one of the 16 elements of a vector on a CPU, or of the 32 threads of a warp on a GPU. Each has its own row.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.kernels import cpu
from torchrec_cnr.kernels.cpu.row_transform import MOST
from torchrec_cnr.kernels.gpu import row_transform
from torchrec_cnr.kernels.search_plan import SCALE_AND_BIAS_BYTES, SearchPlan

# Triton is installed with torch for CUDA, and is not needed elsewhere.
_gpu: ModuleType | None = import_module("torchrec_cnr.kernels.gpu.fused_rows") if find_spec("triton") else None
_gpu_marks: ModuleType | None = import_module("torchrec_cnr.kernels.gpu.mark_rows") if find_spec("triton") else None

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_Decoder = Callable[[Tensor, Tensor, int, int, Tensor, Tensor], None]


def encode_rows(
    table: Tensor, rows: Tensor, bits: int, plan: SearchPlan, row_bytes: int, are_checked: bool = False
) -> tuple[Tensor, Tensor]:
    """Encode rows of a table as fused rows: codes, lowest bits first, then scale and bias in fp16.

    Args:
        table: [num_rows, num_cols] of fp32, fp16 or bf16; the elements of a row are contiguous.
        rows: The numbers of the rows, int64 [n], on the table's device.
        bits: Bits per code: 2, 3, 4 or 8.
        plan: How to search scale and bias.
        row_bytes: Bytes per encoded row.
        are_checked: Whether the caller has checked the row numbers. Checking them here waits for their device.

    Returns:
        The encoded rows, uint8 [n, row_bytes], and a mask, bool [n], of the rows that codes cannot represent. The bytes
        of these are zeros.

    Raises:
        ConfigurationError: The table has another dtype or layout, lacks one of the rows, or has no columns.
    """
    _check_encodable(table, rows, are_checked)
    if table.is_cuda and _gpu is not None:
        codes, is_exact = _gpu.encode_rows(table, rows, bits, plan, row_bytes)
        return codes, is_exact
    return cpu.encode_rows(*_on_host(table, rows), bits, plan, row_bytes)


def decode_rows(
    codes: Tensor,
    positions: Tensor,
    bits: int,
    first_col: int,
    target: Tensor,
    rows: Tensor,
    are_checked: bool = False,
) -> None:
    """Decode fused rows into rows of a target.

    Args:
        codes: The fused rows, uint8 [n, row_bytes], on the target's device.
        positions: The positions in ``codes`` of the rows to decode, int64 [k].
        bits: Bits per code: 2, 3, 4 or 8.
        first_col: The encoded column that becomes the first column of ``target``.
        target: The tensor to write to, [num_rows, num_cols] of fp32, fp16 or bf16; the elements of a row are
            contiguous.
        rows: The rows of ``target`` to write to, int64 [k].
        are_checked: Whether the caller has checked positions and row numbers; see ``encode_rows``.

    Raises:
        ConfigurationError: The target has another dtype or layout, or a row or column does not exist.
    """
    _check(target, rows, are_checked)
    code_bytes = codes.shape[1] - SCALE_AND_BIAS_BYTES
    _check_codes(codes, positions, (first_col + target.shape[1]) * bits <= 8 * code_bytes, are_checked)
    if target.is_cuda and _gpu is not None:
        _gpu.decode_rows(codes, positions, bits, first_col, target, rows)
    else:
        _decode_on_host(cpu.decode_rows, codes, positions, bits, first_col, target, rows)


def warm_up(table: Tensor, bits: int, plan: SearchPlan, row_bytes: int) -> None:
    """Compile the kernels that encode rows of a table, and that encode and decode samples of them, if it is on a GPU.

    Otherwise Triton compiles a kernel at its first call, which takes seconds. Kernels for CPUs are cached on disk.

    Args:
        table: [num_rows, num_cols], at least one of both; its values do not matter.
        bits: Bits per code.
        plan: How to search scale and bias.
        row_bytes: Bytes per encoded row.
    """
    if table.is_cuda and _gpu is not None:
        _gpu.warm_up(table, bits, plan, row_bytes)


def marks_at_once(device: torch.device) -> bool:
    """Return whether ``mark_rows`` can mark rows of tables on a device."""
    return device.type == "cuda" and _gpu_marks is not None


def mark_rows(
    ids: Tensor, first_ids: Tensor, num_bags: int, first_rows: Tensor, end_rows: Tensor, marked: Tensor
) -> None:
    """Mark the rows that all features of a kernel look up, on a GPU; see ``gpu.mark_rows``."""
    if _gpu_marks is None:
        raise ConfigurationError("rows are marked on a GPU by Triton, which is not installed: pip install triton")
    _gpu_marks.mark_rows(ids, first_ids, num_bags, first_rows, end_rows, marked)


def encode_clusters(table: Tensor, rows: Tensor, bits: int, row_bytes: int) -> tuple[Tensor, Tensor]:
    """Encode rows of a table by k-means: codes, lowest bits first, then the codebook in fp16, in increasing order.

    Arguments and results are those of ``encode_rows``. There is no kernel for GPUs: rows of a table on a GPU are
    clustered on the host.
    """
    _check_encodable(table, rows)
    return cpu.encode_clusters(*_on_host(table, rows), bits, row_bytes)


def decode_clusters(codes: Tensor, positions: Tensor, bits: int, first_col: int, target: Tensor, rows: Tensor) -> None:
    """Decode rows of k-means codes into rows of a target; the arguments are those of ``decode_rows``."""
    _check(target, rows)
    code_bytes = codes.shape[1] - 2 * (1 << bits)
    _check_codes(codes, positions, (first_col + target.shape[1]) * bits <= 8 * code_bytes)
    _decode_on_host(cpu.decode_clusters, codes, positions, bits, first_col, target, rows)


def transform_rows(
    table: Tensor, rows: Tensor, basis: cpu.Floats, step: float, dead_zone: cpu.Floats, are_checked: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the components of rows in an orthonormal basis, as multiples of a step.

    A GPU adds in another order and precision than a CPU. So it may round a component to the other of its two neighbours
    if this is within 1e-3 steps of the middle between them, or within the precision of fp32.

    Args:
        table: [num_rows, num_cols] of fp32, fp16 or bf16; the elements of a row are contiguous.
        rows: The numbers of the rows, int64 [n], on the table's device.
        basis: float64 [num_cols, num_cols], whose rows are the components; or [0, 0] for the columns themselves.
        step: The step, above 0.
        dead_zone: float64 [num_cols], by how many steps each component is moved towards zero before it is rounded to
            the nearest multiple; at least 0 and below a half.
        are_checked: Whether the caller has checked the row numbers; see ``encode_rows``.

    Returns:
        The components, int16 [n, num_cols], and a mask, bool [n], of the rows that they cannot represent: with NaN,
        infinity, more than 32,767 steps, or values so large that restored ones might be infinite in the table's dtype.
        The components of these are zeros. Both are on the table's device.

    Raises:
        ConfigurationError: As for ``encode_rows``, or the basis is one of rows with other columns.
    """
    most_value = _most_value(table, rows, basis, step, dead_zone, are_checked)
    transform = cpu.transform_rows if table.device.type == "cpu" else row_transform.transform_rows
    return transform(table, rows, basis, step, dead_zone, most_value)


def rows_transformer(
    table: Tensor,
    rows: Tensor,
    basis: cpu.Floats,
    step: float,
    dead_zone: cpu.Floats,
    is_exact: npt.NDArray[np.bool_],
) -> Callable[[int, int, cpu.Numbers], None]:
    """Return a function that computes the components of some of the rows of a table in host memory.

    It runs in the thread that calls it, and may be called in several at once.

    Args:
        table, rows, basis, step, dead_zone: As for ``transform_rows``.
        is_exact: bool [n], in which the function writes which rows components cannot represent.

    Returns:
        A function of two positions in ``rows`` and of int16 [stop - start, num_cols], to which it writes the components
        of the rows from one to the other.

    Raises:
        ConfigurationError: As for ``transform_rows``.
    """
    most_value = _most_value(table, rows, basis, step, dead_zone)
    return cpu.rows_transformer(table, rows, basis, step, dead_zone, most_value, is_exact)


def _most_value(
    table: Tensor, rows: Tensor, basis: cpu.Floats, step: float, dead_zone: cpu.Floats, are_checked: bool = False
) -> float:
    """Check what rows are transformed by, and return the largest value that components can represent."""
    _check_encodable(table, rows, are_checked)
    num_cols = table.shape[1]
    if basis.shape not in ((0, 0), (num_cols, num_cols)) or dead_zone.shape != (num_cols,):
        raise ConfigurationError(f"not a basis of rows of {num_cols} columns (got {basis.shape}, {dead_zone.shape})")
    most_error = step * num_cols**0.5 * (0.5 + float(dead_zone.max()))
    return float(min(MOST * step, torch.finfo(table.dtype).max - most_error))


def restore_rows(
    numbers: Tensor, positions: Tensor, basis: cpu.Floats, step: float, first_col: int, target: Tensor, rows: Tensor
) -> None:
    """Compute rows from their components.

    Args:
        numbers: The components, int16 [n, num_cols], on the target's device.
        positions: The positions of the rows to compute, int64 [k].
        basis, step: As for ``transform_rows``.
        first_col: The column that becomes the first column of ``target``.
        target: The tensor to write to, [num_rows, num_cols] of fp32, fp16 or bf16; the elements of a row are
            contiguous.
        rows: The rows of ``target`` to write to, int64 [k].

    Raises:
        ConfigurationError: The target has another dtype or layout, or a row or column does not exist.
    """
    _check(target, rows)
    if numbers.dtype is not torch.int16 or first_col + target.shape[1] > numbers.shape[1]:
        raise ConfigurationError(f"these are not components of rows with so many columns (got {_described(numbers)})")
    check_numbers(positions, len(numbers))
    if target.device.type == "cpu":
        cpu.restore_rows(numbers, positions, basis, step, first_col, target, rows)
        return
    values = torch.empty(len(rows), target.shape[1], dtype=target.dtype, device="cpu")
    cpu.restore_rows(numbers.cpu(), positions.cpu(), basis, step, first_col, values, all_numbers(len(rows)))
    target.index_copy_(0, rows, values.to(target.device))


def all_numbers(num_rows: int) -> Tensor:
    """Return the numbers of rows, int64 [num_rows], in host memory."""
    return torch.from_numpy(np.arange(num_rows))


def _check(table: Tensor, rows: Tensor, are_checked: bool = False) -> None:
    """Check a table and its rows before they are passed to compiled code, which has no bounds checks."""
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


def _check_codes(codes: Tensor, positions: Tensor, has_columns: bool, are_checked: bool = False) -> None:
    if codes.dtype is not torch.uint8 or not has_columns:
        raise ConfigurationError(f"codes are not of rows with so many columns (got {_described(codes)})")
    if not are_checked:
        check_numbers(positions, len(codes))


def check_numbers(rows: Tensor, num_rows: int) -> None:
    """Check that these are numbers of rows of a table. This waits for the device of ``rows``.

    Raises:
        ConfigurationError: A number is not that of a row, or the tensor is not one-dimensional int64.
    """
    if rows.dtype is not torch.int64 or rows.dim() != 1:
        raise ConfigurationError(f"numbers of rows must be one-dimensional int64 (got {_described(rows)})")
    if rows.device.type == "cpu":
        is_in_range = len(rows) == 0 or rows.numpy().view(np.uint64).max() < num_rows  # as uint64, negatives are large
    else:
        is_in_range = bool(((rows >= 0) & (rows < num_rows)).all())
    if not is_in_range:
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

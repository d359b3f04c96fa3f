"""Fused rows on GPUs, in Triton, with the same bytes as ``cpu.fused_rows``, which describes the layout.

Encoding reads rows by their numbers directly from the table. During a search, each lane of a warp has one row; when
rows are first read and finally written, several lanes process one row. Decoding writes directly into the target's rows.
Apart from its results, encoding allocates only the tiles of the warps that run at a time, for tables of any size.
"""

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_cnr.kernels import search_plan
from torchrec_cnr.kernels.gpu.range_search import LANES, DevicePlan, code_of, find_range, inverse_of, narrowed, widened
from torchrec_cnr.kernels.search_plan import SearchPlan

_SCALE_AND_BIAS_BYTES = tl.constexpr(search_plan.SCALE_AND_BIAS_BYTES)
_READ_COLS = tl.constexpr(8)  # columns of its rows that a warp reads at a time
_PUT_BYTES = tl.constexpr(8)  # bytes of its encoded rows that a warp writes at a time
_DECODED_COLS = tl.constexpr(64)  # columns of its rows that a program decodes at a time
_WARPS_PER_CORE = 16  # enough to hide latencies, and few enough for their tiles to remain in the cache
_TILES_BYTES = 1 << 26  # the most memory for tiles, unless one tile for each core takes more
_NO_FUSION = {"enable_fp_fusion": False, "num_stages": 1}  # one stage, so that no load overtakes a store to a tile


@triton.jit
def _read_rows(starts, num_cols, tile, keep: tl.constexpr):
    """Return the least and the greatest value of each of 32 rows, and the rows without NaN; if ``keep``, fill the tile.

    The results do not depend on the order of the columns, so several lanes can read a row.
    """
    low, high = tl.full([LANES], float("inf"), tl.float32), tl.full([LANES], float("-inf"), tl.float32)
    num_nans = tl.zeros([LANES], tl.int32)
    for first_column in range(0, num_cols, _READ_COLS):
        columns = first_column + tl.arange(0, _READ_COLS)[None, :]
        is_in_row = columns < num_cols
        elements = tl.load(starts[:, None] + columns, mask=is_in_row, other=0)
        if keep:
            tl.store(tile[:, None] + columns * LANES, elements, mask=is_in_row)
        x = widened(elements)
        least = tl.min(tl.where(is_in_row, x, float("inf")), 1)
        greatest = tl.max(tl.where(is_in_row, x, float("-inf")), 1)
        low, high = tl.where(least < low, least, low), tl.where(greatest > high, greatest, high)
        num_nans += tl.sum((x != x).to(tl.int32), 1)
    return low, high, num_nans == 0


@triton.jit
def _bits_of(x):
    """Return the bits of an fp16 value, as a non-negative int32."""
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _put_rows(starts, num_cols, targets, has_row, row_bytes, scale, bias, is_right, bits: tl.constexpr):
    """Write codes, scale and bias of 32 rows, byte by byte; zeros for rows that these cannot represent."""
    inverse = inverse_of(scale)
    top = tl.zeros_like(scale) + ((1 << bits) - 1)
    scale_and_bias = tl.where(is_right, _bits_of(scale) | (_bits_of(bias) << 16), 0)
    code_bytes = row_bytes - _SCALE_AND_BIAS_BYTES
    for first_byte in range(0, row_bytes, _PUT_BYTES):
        byte = first_byte + tl.arange(0, _PUT_BYTES)[None, :]
        column = byte * 8 // bits  # the first column whose code overlaps the byte; the code may begin before it
        value = tl.zeros([LANES, _PUT_BYTES], tl.int32)
        for _ in tl.static_range(8 // bits if 8 % bits == 0 else 8 // bits + 2):
            has_code = is_right[:, None] & (column < num_cols)
            x = widened(tl.load(starts[:, None] + column, mask=column < num_cols, other=0))
            code = tl.where(has_code, code_of(x, inverse[:, None], bias[:, None], top[:, None]), 0.0)
            value |= code.to(tl.int32) << (column * bits - byte * 8 + bits)
            column += 1
        scale_or_bias_byte = scale_and_bias[:, None] >> (((byte - code_bytes) & 3) * 8)
        value = tl.where(byte < code_bytes, value >> bits, scale_or_bias_byte)
        tl.store(targets[:, None] + byte, value.to(tl.uint8), mask=has_row[:, None] & (byte < row_bytes))


# Blocks of row numbers begin at any address: specializing on their alignment would compile the kernel twice.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows"])
def _encode(
    table,
    row_stride,
    rows,
    num_rows,
    num_cols,
    tiles,
    plan,
    codes,
    row_bytes,
    is_exact,
    bits: tl.constexpr,
    method: tl.constexpr,
    kept: tl.constexpr,
    searches: tl.constexpr,
):
    """Encode rows of a table, 32 at a time.

    Args:
        table: The table.
        row_stride: Elements from the beginning of a row to that of the next.
        rows: The numbers of the rows, int64 [num_rows].
        num_rows: Number of rows.
        num_cols: Elements per row.
        tiles: Working memory, [num_programs, num_cols, 32] of the table's dtype.
        plan: A ``DevicePlan``.
        codes: The encoded rows, uint8 [num_rows, row_bytes], written.
        row_bytes: Bytes of a row's codes, scale and bias.
        is_exact: 1 for rows that must be stored exactly, uint8 [num_rows], written.
        bits: Bits per code: 2, 3, 4 or 8.
        method: The ``method`` of the ``SearchPlan``.
        kept: The ``kept`` of the ``SearchPlan``.
        searches: Whether the method reads rows more than once.
    """
    lanes = tl.arange(0, LANES)
    top = tl.full([LANES], (1 << bits) - 1, tl.float32)
    tile = tiles + tl.program_id(0).to(tl.int64) * num_cols * LANES + lanes
    for block in range(tl.program_id(0), tl.cdiv(num_rows, LANES), tl.num_programs(0)):
        positions = tl.full([LANES], LANES, tl.int64) * block + lanes
        has_row = positions < num_rows
        # Lanes without a row repeat the last one.
        starts = table + tl.load(rows + tl.minimum(positions, num_rows - 1)) * row_stride
        if searches:
            tl.debug_barrier()  # wait until all lanes have read the previous rows of the tile
        low, high, is_number = _read_rows(starts, num_cols, tile, searches)
        if searches:
            tl.debug_barrier()  # wait for the other lanes, which wrote values that this lane reads
        scale, bias, is_right = find_range(tile, num_cols, low, high, is_number, top, plan, method, kept)
        _put_rows(starts, num_cols, codes + positions * row_bytes, has_row, row_bytes, scale, bias, is_right, bits)
        tl.store(is_exact + positions, tl.where(is_right, 0, 1).to(tl.uint8), mask=has_row)


@triton.jit
def _half_at(codes, offset, has_row):
    """Return fp16 values at any byte addresses, as float32."""
    low_byte = tl.load(codes + offset, mask=has_row, other=0).to(tl.int16)
    high_byte = tl.load(codes + offset + 1, mask=has_row, other=0).to(tl.int16)
    return (low_byte | (high_byte << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "first_col"])
def _decode(
    codes,
    code_stride,
    row_bytes,
    positions,
    num_rows,
    first_col,
    target,
    row_stride,
    rows,
    num_cols,
    bits: tl.constexpr,
):
    """Decode 32 rows into a target.

    Args:
        codes: The encoded rows, uint8.
        code_stride: Bytes from the beginning of an encoded row to that of the next.
        row_bytes: Bytes of a row's codes, scale and bias.
        positions: The positions of the rows to decode, int64 [num_rows].
        num_rows: Number of rows to decode.
        first_col: The first column to decode.
        target: The target, written.
        row_stride: Elements from the beginning of a row of the target to that of the next.
        rows: The rows of the target to write to, int64 [num_rows].
        num_cols: Number of columns to decode.
        bits: Bits per code: 2, 3, 4 or 8.
    """
    numbers = tl.full([LANES], LANES, tl.int64) * tl.program_id(0) + tl.arange(0, LANES)
    has_row = numbers < num_rows
    start = codes + tl.load(positions + numbers, mask=has_row, other=0) * code_stride
    scale_offset = row_bytes - _SCALE_AND_BIAS_BYTES
    scale, bias = _half_at(start, scale_offset, has_row)[:, None], _half_at(start, scale_offset + 2, has_row)[:, None]
    target_rows = target + tl.load(rows + numbers, mask=has_row, other=0) * row_stride
    for first_column in range(0, num_cols, _DECODED_COLS):
        column = first_column + tl.arange(0, _DECODED_COLS)[None, :]
        is_element = has_row[:, None] & (column < num_cols)
        bit = (first_col + column) * bits
        addresses = start[:, None] + bit // 8
        code = tl.load(addresses, mask=is_element, other=0).to(tl.int32)
        if 8 % bits != 0:
            code |= tl.load(addresses + 1, mask=is_element, other=0).to(tl.int32) << 8  # a code may span two bytes
        code = (code >> (bit % 8)) & ((1 << bits) - 1)
        values = scale * code.to(tl.float32) + bias
        tl.store(target_rows[:, None] + column, narrowed(values, target.dtype.element_ty), mask=is_element)


def encode_rows(table: Tensor, rows: Tensor, bits: int, plan: SearchPlan, row_bytes: int) -> tuple[Tensor, Tensor]:
    """Encode rows of a table; see ``kernels.encode_rows``."""
    num_rows, num_cols = len(rows), table.shape[1]
    codes = torch.empty((num_rows, row_bytes), dtype=torch.uint8, device=table.device)
    is_exact = torch.empty(num_rows, dtype=torch.bool, device=table.device)
    if num_rows == 0:
        return codes, is_exact
    elements = _elements(table)
    searches = plan.method != search_plan.COVERING
    num_programs = triton.cdiv(num_rows, LANES.value)
    if searches:
        num_programs = min(num_programs, _num_tiles(table.device, num_cols * LANES.value * table.itemsize))
    tiles = elements.new_empty(num_programs * num_cols * LANES.value if searches else 0)
    cuts = _cuts_on(table.device, plan.cuts.tobytes())
    device_plan = DevicePlan(cuts, len(cuts), plan.num_bins, plan.num_steps, plan.rounds, plan.polish)
    with torch.cuda.device_of(table):
        _encode[(num_programs,)](
            elements,
            table.stride(0),
            rows.contiguous(),
            num_rows,
            num_cols,
            tiles,
            device_plan,
            codes,
            row_bytes,
            is_exact.view(torch.uint8),
            bits=bits,
            method=plan.method,
            kept=plan.kept,
            searches=searches,
            num_warps=1,
            **_NO_FUSION,
        )
    return codes, is_exact


def decode_rows(codes: Tensor, positions: Tensor, bits: int, first_col: int, target: Tensor, rows: Tensor) -> None:
    """Decode rows into a target; see ``kernels.decode_rows``."""
    num_rows, num_cols = len(positions), target.shape[1]
    if num_rows == 0:
        return
    with torch.cuda.device_of(target):
        _decode[(triton.cdiv(num_rows, LANES.value),)](
            codes,
            codes.stride(0),
            codes.shape[1],
            positions.contiguous(),
            num_rows,
            first_col,
            _elements(target),
            target.stride(0),
            rows.contiguous(),
            num_cols,
            bits=bits,
            num_warps=4,
            **_NO_FUSION,
        )


def warm_up(table: Tensor, bits: int, plan: SearchPlan, row_bytes: int) -> None:
    """Compile the kernels as ``kernels.warm_up`` does, by encoding and decoding one row.

    Triton compiles for properties of the arguments, such as whether addresses and strides are multiples of 16. These
    may differ between a table and a sample of it, so both are encoded.
    """
    first_row = torch.zeros(1, dtype=torch.int64, device=table.device)
    sample = table.detach().index_select(0, first_row)
    encode_rows(table, first_row, bits, plan, row_bytes)
    codes, _ = encode_rows(sample, first_row, bits, plan, row_bytes)
    decode_rows(codes, first_row, bits, 0, sample, first_row)


@lru_cache(maxsize=256)
def _cuts_on(device: torch.device, cuts: bytes) -> Tensor:
    """Return the cuts of a plan on a device, float32; cached, because even a small copy waits for the device."""
    return torch.from_numpy(np.frombuffer(cuts, np.float32).copy()).to(device)


def _elements(table: Tensor) -> Tensor:
    """Return a table as kernels accept it, without copying; bf16 becomes the int16 of its bits."""
    return table.detach().view(torch.int16) if table.dtype is torch.bfloat16 else table.detach()


def _num_tiles(device: torch.device, tile_bytes: int) -> int:
    """Return the number of warps that run at a time, each with its own tile."""
    if device.type != "cuda":
        return 1  # Triton's interpreter runs programs one after another
    num_cores = torch.cuda.get_device_properties(device).multi_processor_count
    return max(num_cores, min(num_cores * _WARPS_PER_CORE, _TILES_BYTES // tile_bytes))

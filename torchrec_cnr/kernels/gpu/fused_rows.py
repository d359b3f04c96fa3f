"""Fused rows on GPUs: ``cpu.fused_rows`` in Triton, which says what a row looks like, and the same bytes.

Encoding reads rows by their numbers straight from the table: one row in each of a warp's lanes while their ranges are
searched, several lanes to a row while it is read first and put last. Decoding writes straight into the target's rows.
Beside what it returns, encoding allocates only the tiles of the warps that run at a time, however large the table is.
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
_READ_COLS = tl.constexpr(8)  # of a warp's rows at a time
_PUT_BYTES = tl.constexpr(8)  # of a warp's encoded rows at a time
_DECODED_COLS = tl.constexpr(64)  # of a program's rows at a time
_WARPS_PER_CORE = 16  # enough to hide what each waits for, and few enough for their tiles to stay in the cache
_TILES_BYTES = 1 << 26  # of memory at most, unless one tile for each core takes more
_NO_FUSION = {"enable_fp_fusion": False, "num_stages": 1}  # nor loads that overtake the stores of a tile


@triton.jit
def _read_rows(starts, num_cols, tile, keep: tl.constexpr):
    """Least and greatest value of each of 32 rows, and the rows without NaN; keeps the rows in the tile if asked to.

    Neither depends on the order of the columns: many lanes read a row.
    """
    low, high = tl.full([LANES], float("inf"), tl.float32), tl.full([LANES], float("-inf"), tl.float32)
    num_nans = tl.zeros([LANES], tl.int32)
    for first in range(0, num_cols, _READ_COLS):
        columns = first + tl.arange(0, _READ_COLS)[None, :]
        is_there = columns < num_cols
        elements = tl.load(starts[:, None] + columns, mask=is_there, other=0)
        if keep:
            tl.store(tile[:, None] + columns * LANES, elements, mask=is_there)
        x = widened(elements)
        least = tl.min(tl.where(is_there, x, float("inf")), 1)
        greatest = tl.max(tl.where(is_there, x, float("-inf")), 1)
        low, high = tl.where(least < low, least, low), tl.where(greatest > high, greatest, high)
        num_nans += tl.sum((x != x).to(tl.int32), 1)
    return low, high, num_nans == 0


@triton.jit
def _bits_of(x):
    """The bits of an fp16 value, as int32 from 0."""
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _put_rows(starts, num_cols, to, is_there, row_bytes, scale, bias, is_right, bits: tl.constexpr):
    """Codes, scale and bias of 32 rows, byte by byte; zeros for rows that these cannot represent."""
    inverse = inverse_of(scale)
    top = tl.zeros_like(scale) + ((1 << bits) - 1)
    scale_and_bias = tl.where(is_right, _bits_of(scale) | (_bits_of(bias) << 16), 0)
    code_bytes = row_bytes - _SCALE_AND_BIAS_BYTES
    for first in range(0, row_bytes, _PUT_BYTES):
        byte = first + tl.arange(0, _PUT_BYTES)[None, :]
        column = byte * 8 // bits  # the first of those whose codes lie in the byte: it may begin before
        value = tl.zeros([LANES, _PUT_BYTES], tl.int32)
        for _ in tl.static_range(8 // bits if 8 % bits == 0 else 8 // bits + 2):
            has_code = is_right[:, None] & (column < num_cols)
            x = widened(tl.load(starts[:, None] + column, mask=column < num_cols, other=0))
            code = tl.where(has_code, code_of(x, inverse[:, None], bias[:, None], top[:, None]), 0.0)
            value |= code.to(tl.int32) << (column * bits - byte * 8 + bits)
            column += 1
        end = scale_and_bias[:, None] >> (((byte - code_bytes) & 3) * 8)
        value = tl.where(byte < code_bytes, value >> bits, end)
        tl.store(to[:, None] + byte, value.to(tl.uint8), mask=is_there[:, None] & (byte < row_bytes))


# Blocks of row numbers begin anywhere in those of a table: an alignment of their own would have them compiled twice.
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
        row_stride: Elements between the beginnings of two rows.
        rows: int64 [num_rows], the rows' numbers.
        num_rows: How many.
        num_cols: Elements of a row.
        tiles: [num_programs, num_cols, 32] of the table's dtype, to work in.
        plan: A ``DevicePlan``.
        codes: uint8 [num_rows, row_bytes], written.
        row_bytes: Bytes of a row's codes, scale and bias.
        is_exact: uint8 [num_rows], written: 1 for rows that are to be stored exactly.
        bits: 2, 3, 4 or 8.
        method: Of the ``SearchPlan``.
        kept: Of the ``SearchPlan``.
        searches: Whether the method reads rows more than once.
    """
    lanes = tl.arange(0, LANES)
    top = tl.full([LANES], (1 << bits) - 1, tl.float32)
    tile = tiles + tl.program_id(0).to(tl.int64) * num_cols * LANES + lanes
    for block in range(tl.program_id(0), tl.cdiv(num_rows, LANES), tl.num_programs(0)):
        positions = tl.full([LANES], LANES, tl.int64) * block + lanes
        is_there = positions < num_rows
        # Lanes without a row do the last one over again.
        starts = table + tl.load(rows + tl.minimum(positions, num_rows - 1)) * row_stride
        if searches:
            tl.debug_barrier()  # until nothing reads the tile's last rows any more
        low, high, is_number = _read_rows(starts, num_cols, tile, searches)
        if searches:
            tl.debug_barrier()  # other lanes wrote what a lane is going to read
        scale, bias, is_right = find_range(tile, num_cols, low, high, is_number, top, plan, method, kept)
        _put_rows(starts, num_cols, codes + positions * row_bytes, is_there, row_bytes, scale, bias, is_right, bits)
        tl.store(is_exact + positions, tl.where(is_right, 0, 1).to(tl.uint8), mask=is_there)


@triton.jit
def _half_at(codes, at, is_there):
    """fp16 values wherever they begin, as float32."""
    low_byte = tl.load(codes + at, mask=is_there, other=0).to(tl.int16)
    high_byte = tl.load(codes + at + 1, mask=is_there, other=0).to(tl.int16)
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
        codes: uint8, the encoded rows.
        code_stride: Bytes between the beginnings of two of them.
        row_bytes: Bytes of a row's codes, scale and bias.
        positions: int64 [num_rows], the rows to decode.
        num_rows: How many.
        first_col: The first column to decode.
        target: The target, written.
        row_stride: Elements between the beginnings of two of its rows.
        rows: int64 [num_rows], where they go.
        num_cols: Columns to decode.
        bits: 2, 3, 4 or 8.
    """
    numbers = tl.full([LANES], LANES, tl.int64) * tl.program_id(0) + tl.arange(0, LANES)
    is_there = numbers < num_rows
    start = codes + tl.load(positions + numbers, mask=is_there, other=0) * code_stride
    end = row_bytes - _SCALE_AND_BIAS_BYTES
    scale, bias = _half_at(start, end, is_there)[:, None], _half_at(start, end + 2, is_there)[:, None]
    to = target + tl.load(rows + numbers, mask=is_there, other=0) * row_stride
    for first in range(0, num_cols, _DECODED_COLS):
        column = first + tl.arange(0, _DECODED_COLS)[None, :]
        is_element = is_there[:, None] & (column < num_cols)
        bit = (first_col + column) * bits
        at = start[:, None] + bit // 8
        code = tl.load(at, mask=is_element, other=0).to(tl.int32)
        if 8 % bits != 0:
            code |= tl.load(at + 1, mask=is_element, other=0).to(tl.int32) << 8  # a code may lie across two bytes
        code = (code >> (bit % 8)) & ((1 << bits) - 1)
        values = scale * code.to(tl.float32) + bias
        tl.store(to[:, None] + column, narrowed(values, target.dtype.element_ty), mask=is_element)


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
    """Compile what ``kernels.warm_up`` names, by one row: Triton compiles for the arguments that it is called with.

    Whether addresses and strides are multiples of 16 is among these; a sample begins anew, where a table need not.
    """
    first = torch.zeros(1, dtype=torch.int64, device=table.device)
    sample = table.detach().index_select(0, first)
    encode_rows(table, first, bits, plan, row_bytes)
    codes, _ = encode_rows(sample, first, bits, plan, row_bytes)
    decode_rows(codes, first, bits, 0, sample, first)


@lru_cache(maxsize=256)
def _cuts_on(device: torch.device, cuts: bytes) -> Tensor:
    """The cuts of a plan, float32; kept, as a copy of a few bytes waits for the device as any other does."""
    return torch.from_numpy(np.frombuffer(cuts, np.float32).copy()).to(device)


def _elements(table: Tensor) -> Tensor:
    """A table as kernels take it: bf16 as its bits. Shared, not copied."""
    return table.detach().view(torch.int16) if table.dtype is torch.bfloat16 else table.detach()


def _num_tiles(device: torch.device, tile_bytes: int) -> int:
    """How many warps run at a time, each with a tile of its own."""
    if device.type != "cuda":
        return 1  # Triton's interpreter runs one after another
    num_cores = torch.cuda.get_device_properties(device).multi_processor_count
    return max(num_cores, min(num_cores * _WARPS_PER_CORE, _TILES_BYTES // tile_bytes))

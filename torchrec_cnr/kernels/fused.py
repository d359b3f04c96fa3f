"""Fused rows, compiled for CPUs: the codes of a row, lowest bits first, then its scale and bias in fp16.

With 2, 4 and 8 bits these are FBGEMM's fused row-wise layout (``FloatToFusedNBitRowwiseQuantizedSBHalf``), whose codes
fill pairs of bytes; with 3 bits, which FBGEMM does not have, eight codes take three bytes. Encoding reads rows by their
numbers straight from the table; decoding writes them straight into the target's rows. Nothing is allocated here.
"""

import numpy as np
from numba import njit

from torchrec_cnr.kernels.compiling import Kernel, named
from torchrec_cnr.kernels.lanes import exact_times_plus, halves, spread, where
from torchrec_cnr.kernels.llvm import LANES
from torchrec_cnr.kernels.memory import (
    CACHE_LINE_BYTES,
    code_at,
    half_at,
    load_tile,
    prefetch_row,
    put_element,
    put_words,
    store,
    unpacked_2,
    unpacked_3,
    unpacked_4,
    widened_bytes,
)
from torchrec_cnr.kernels.packing import put_codes
from torchrec_cnr.kernels.plans import SCALE_AND_BIAS_BYTES
from torchrec_cnr.kernels.search import find_range


@Kernel
def encode(table, row_stride, rows, num_cols, bits, plan, row_bytes, codes, is_exact, scratch):
    """Encode rows of a table.

    Args:
        table: The flat table; see ``memory``.
        row_stride: Elements between the beginnings of two rows.
        rows: int64 [n], the rows' numbers.
        num_cols: Elements of a row.
        bits: 2, 3, 4 or 8.
        plan: A ``SearchPlan``.
        row_bytes: Bytes of a row's codes, scale and bias.
        codes: uint8 [n * row_bytes], written.
        is_exact: bool [n], written: rows that are to be stored exactly. Their codes are zeros.
        scratch: A ``Scratch`` for such rows and such a plan.
    """
    offsets, places, exact = scratch.offsets, scratch.places, scratch.exact
    zero, one, top = spread(0.0), spread(1.0), spread((1 << bits) - 1)
    line_cols = CACHE_LINE_BYTES // table.itemsize
    num_lines = -(-num_cols // line_cols)
    for first in range(0, len(rows), LANES):
        for lane in range(LANES):
            row = min(first + lane, len(rows) - 1)  # lanes without a row do the last one over again
            offsets[lane] = rows[row] * row_stride
            places[lane] = row * row_bytes
            next_row = min(first + LANES + lane, len(rows) - 1)
            prefetch_row(table, rows[next_row] * row_stride, num_lines, line_cols)
        load_tile(table, offsets, num_cols, scratch.tile)
        scale, bias, is_right = find_range(table, num_cols, top, plan, scratch)
        put_codes(scratch.tile, scratch.words, num_cols, bits, codes, places, scale, bias, is_right)
        ends = halves(where(is_right, scale, zero), where(is_right, bias, zero))
        put_words(codes, places, row_bytes - SCALE_AND_BIAS_BYTES, ends)
        store(exact, 0, where(is_right, zero, one))
        for row in range(first, min(first + LANES, len(rows))):
            is_exact[row] = exact[row - first] != np.float32(0.0)


def _decoding_lanes(lanes_at, lane_bytes):
    """A function that decodes whole lanes of rows; without the columns left over, it keeps everything in registers."""

    def decode_lanes(codes, row_bytes, positions, first_byte, target, row_stride, rows, num_cols):
        for number in range(len(positions)):
            at = positions[number] * row_bytes
            end = at + row_bytes - SCALE_AND_BIAS_BYTES
            scale, bias = spread(half_at(codes, end)), spread(half_at(codes, end + 2))
            to = rows[number] * row_stride
            at += first_byte
            for column in range(0, num_cols, LANES):
                # 11 bits of scale times 8 of a code: float32 holds the product.
                store(target, to + column, exact_times_plus(scale, lanes_at(codes, at), bias))
                at += lane_bytes

    return njit(named(decode_lanes, lane_bytes))


_decode_lanes_2 = _decoding_lanes(unpacked_2, 4)
_decode_lanes_3 = _decoding_lanes(unpacked_3, 6)
_decode_lanes_4 = _decoding_lanes(unpacked_4, 8)
_decode_lanes_8 = _decoding_lanes(widened_bytes, 16)


_BLOCK_ROWS = 64  # are decoded in two passes, and stay in the cache between them


@njit
def _decode_rows(codes, row_bytes, positions, bits, first_col, target, row_stride, rows, num_cols):
    """Decode rows: first all whole lanes, then the columns that are left over."""
    whole_cols = num_cols // LANES * LANES if first_col % 8 == 0 else 0
    first_byte = first_col * bits // 8
    if bits == 2:
        _decode_lanes_2(codes, row_bytes, positions, first_byte, target, row_stride, rows, whole_cols)
    elif bits == 3:
        _decode_lanes_3(codes, row_bytes, positions, first_byte, target, row_stride, rows, whole_cols)
    elif bits == 4:
        _decode_lanes_4(codes, row_bytes, positions, first_byte, target, row_stride, rows, whole_cols)
    else:
        _decode_lanes_8(codes, row_bytes, positions, first_byte, target, row_stride, rows, whole_cols)
    if whole_cols < num_cols:
        _decode_columns(codes, row_bytes, positions, bits, first_col, target, row_stride, rows, whole_cols, num_cols)


@njit
def _decode_columns(codes, row_bytes, positions, bits, first_col, target, row_stride, rows, start_col, stop_col):
    """Decode columns of rows one by one."""
    for number in range(len(positions)):
        start = positions[number] * row_bytes
        end = start + row_bytes - SCALE_AND_BIAS_BYTES
        scale, bias = half_at(codes, end), half_at(codes, end + 2)
        to = rows[number] * row_stride
        for column in range(start_col, stop_col):
            code = code_at(codes, start, first_col + column, bits)
            put_element(target, to + column, scale * np.float32(code) + bias)


@Kernel
def decode(codes, row_bytes, positions, bits, first_col, target, row_stride, rows, num_cols):
    """Decode rows into a target.

    Args:
        codes: uint8 [n * row_bytes].
        row_bytes: Bytes of a row's codes, scale and bias.
        positions: int64 [k], the rows to decode.
        bits: 2, 3, 4 or 8.
        first_col: The first column to decode.
        target: The flat target; see ``memory``.
        row_stride: Elements between the beginnings of two of its rows.
        rows: int64 [k], where they go.
        num_cols: Columns to decode.
    """
    for first in range(0, len(positions), _BLOCK_ROWS):
        some, places = positions[first : first + _BLOCK_ROWS], rows[first : first + _BLOCK_ROWS]
        _decode_rows(codes, row_bytes, some, bits, first_col, target, row_stride, places, num_cols)

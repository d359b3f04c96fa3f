"""Fused rows on CPUs: the codes of a row, lowest bits first, then its scale and bias in fp16.

With 2, 4 and 8 bits this is FBGEMM's fused row-wise layout (``FloatToFusedNBitRowwiseQuantizedSBHalf``), whose codes
are padded to an even number of bytes. FBGEMM does not support 3 bits; with 3 bits, eight codes take three bytes.
Encoding reads rows by their numbers directly from the table; decoding writes directly into the target's rows. Sixteen
rows are packed at once, one per lane. Compiled code allocates nothing: each thread passes scratch memory to it.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from torchrec_cnr.kernels.cpu.compiling import Kernel, named
from torchrec_cnr.kernels.cpu.lanes import LANES, exact_times_plus, halves, shifted, spread, where, whole
from torchrec_cnr.kernels.cpu.memory import (
    CACHE_LINE_BYTES,
    code_at,
    half_at,
    load,
    load_tile,
    load_words,
    prefetch_row,
    put_4_words,
    put_8_words,
    put_16_words,
    put_element,
    put_words,
    store,
    unpacked_2,
    unpacked_3,
    unpacked_4,
    widened_bytes,
)
from torchrec_cnr.kernels.cpu.range_search import find_range, inverse_of, position_of
from torchrec_cnr.kernels.search_plan import SCALE_AND_BIAS_BYTES, SearchPlan


@njit(inline="always")
def _word_of(tile, start, stop, bits, inverse, bias, top):
    """Return the codes of some columns in one word, the first in its lowest bits."""
    word = whole(spread(0.0))
    for column in range(stop - 1, start - 1, -1):
        word = shifted(word, bits) | whole(position_of(load(tile, column * LANES), inverse, bias, top))
    return word


def _putting_words(bits):
    """Return a function that writes words of codes; ``bits`` is a constant in it, so a word is made without a loop."""
    per_word = 32 // bits

    def put_words_of_codes(tile, words, num_cols, codes, offsets, scale, bias, is_right):
        top, zeros, inverse = spread((1 << bits) - 1), whole(spread(0.0)), inverse_of(scale)
        num_words = 0
        for start in range(0, num_cols, per_word):
            if start + per_word <= num_cols:
                word = zeros
                for number in range(per_word):
                    code = whole(position_of(load(tile, (start + number) * LANES), inverse, bias, top))
                    word = word | shifted(code, number * bits)
            else:
                word = _word_of(tile, start, num_cols, bits, inverse, bias, top)
            store(words, num_words * LANES, where(is_right, word, zeros))
            num_words += 1
            if num_words == LANES or start + per_word >= num_cols:
                _put_rows(codes, offsets, (start // per_word + 1 - num_words) * 4, words, num_words)
                num_words = 0

    return njit(named(put_words_of_codes, bits))


_put_words_2, _put_words_4, _put_words_8 = _putting_words(2), _putting_words(4), _putting_words(8)


@njit
def put_codes(tile, words, num_cols, bits, codes, offsets, scale, bias, is_right):
    """Write the codes of 16 rows. The last word of a row may overlap its scale and bias, which are written later."""
    if bits == 2:
        _put_words_2(tile, words, num_cols, codes, offsets, scale, bias, is_right)
    elif bits == 4:
        _put_words_4(tile, words, num_cols, codes, offsets, scale, bias, is_right)
    elif bits == 8:
        _put_words_8(tile, words, num_cols, codes, offsets, scale, bias, is_right)
    else:  # eight codes take three bytes
        top, zeros, inverse = spread(7.0), whole(spread(0.0)), inverse_of(scale)
        for start in range(0, num_cols, 8):
            word = _word_of(tile, start, min(start + 8, num_cols), bits, inverse, bias, top)
            put_words(codes, offsets, start // 8 * 3, where(is_right, word, zeros))


@njit
def _put_rows(codes, offsets, first_byte, words, num_words):
    """Write up to 16 consecutive words of each of 16 rows."""
    if num_words == 16:
        put_16_words(codes, offsets, first_byte, words)
    elif num_words == 8:
        put_8_words(codes, offsets, first_byte, words)
    elif num_words == 4:
        put_4_words(codes, offsets, first_byte, words)
    else:
        for number in range(num_words):
            put_words(codes, offsets, first_byte + 4 * number, load_words(words, number * LANES))


@Kernel
def encode(table, row_stride, rows, num_cols, bits, plan, row_bytes, codes, is_exact, scratch):
    """Encode rows of a table.

    Args:
        table: The flat table; see ``memory``.
        row_stride: Elements from the beginning of a row to that of the next.
        rows: The numbers of the rows, int64 [n].
        num_cols: Elements per row.
        bits: Bits per code: 2, 3, 4 or 8.
        plan: A ``SearchPlan``.
        row_bytes: Bytes of a row's codes, scale and bias.
        codes: The encoded rows, uint8 [n * row_bytes], written.
        is_exact: A mask of the rows that must be stored exactly, bool [n], written. Their codes are zeros.
        scratch: A ``Scratch`` for rows of this width and this plan.
    """
    offsets, places, exact = scratch.offsets, scratch.places, scratch.exact
    zero, one, top = spread(0.0), spread(1.0), spread((1 << bits) - 1)
    line_cols = CACHE_LINE_BYTES // table.itemsize
    num_lines = -(-num_cols // line_cols)
    for start in range(0, len(rows), LANES):
        for lane in range(LANES):
            row = min(start + lane, len(rows) - 1)  # lanes without a row repeat the last one
            offsets[lane] = rows[row] * row_stride
            places[lane] = row * row_bytes
            next_row = min(start + LANES + lane, len(rows) - 1)
            prefetch_row(table, rows[next_row] * row_stride, num_lines, line_cols)
        load_tile(table, offsets, num_cols, scratch.tile)
        scale, bias, is_right = find_range(table, num_cols, top, plan, scratch)
        put_codes(scratch.tile, scratch.words, num_cols, bits, codes, places, scale, bias, is_right)
        scale_and_bias = halves(where(is_right, scale, zero), where(is_right, bias, zero))
        put_words(codes, places, row_bytes - SCALE_AND_BIAS_BYTES, scale_and_bias)
        store(exact, 0, where(is_right, zero, one))
        for row in range(start, min(start + LANES, len(rows))):
            is_exact[row] = exact[row - start] != np.float32(0.0)


def _decoding_lanes(lanes_at, lane_bytes):
    """Return a function that decodes columns in whole vectors; without remaining columns, all is in registers."""

    def decode_lanes(codes, row_bytes, positions, first_byte, target, row_stride, rows, num_cols):
        for index in range(len(positions)):
            code_offset = positions[index] * row_bytes
            scale_offset = code_offset + row_bytes - SCALE_AND_BIAS_BYTES
            scale, bias = spread(half_at(codes, scale_offset)), spread(half_at(codes, scale_offset + 2))
            target_offset = rows[index] * row_stride
            code_offset += first_byte
            for column in range(0, num_cols, LANES):
                # The product of 11 bits of scale and 8 bits of a code is exact in float32.
                store(target, target_offset + column, exact_times_plus(scale, lanes_at(codes, code_offset), bias))
                code_offset += lane_bytes

    return njit(named(decode_lanes, lane_bytes))


_decode_lanes_2 = _decoding_lanes(unpacked_2, 4)
_decode_lanes_3 = _decoding_lanes(unpacked_3, 6)
_decode_lanes_4 = _decoding_lanes(unpacked_4, 8)
_decode_lanes_8 = _decoding_lanes(widened_bytes, 16)


_BLOCK_ROWS = 64  # rows that are decoded in two passes, and remain in the cache between them


@njit
def _decode_rows(codes, row_bytes, positions, bits, first_col, target, row_stride, rows, num_cols):
    """Decode rows: first columns in whole vectors, then the remaining columns."""
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
    for index in range(len(positions)):
        start = positions[index] * row_bytes
        scale_offset = start + row_bytes - SCALE_AND_BIAS_BYTES
        scale, bias = half_at(codes, scale_offset), half_at(codes, scale_offset + 2)
        target_offset = rows[index] * row_stride
        for column in range(start_col, stop_col):
            code = code_at(codes, start, first_col + column, bits)
            put_element(target, target_offset + column, scale * np.float32(code) + bias)


@Kernel
def decode(codes, row_bytes, positions, bits, first_col, target, row_stride, rows, num_cols):
    """Decode rows into a target.

    Args:
        codes: The encoded rows, uint8 [n * row_bytes].
        row_bytes: Bytes of a row's codes, scale and bias.
        positions: The positions of the rows to decode, int64 [k].
        bits: Bits per code: 2, 3, 4 or 8.
        first_col: The first column to decode.
        target: The flat target; see ``memory``.
        row_stride: Elements from the beginning of a row of the target to that of the next.
        rows: The rows of the target to write to, int64 [k].
        num_cols: Number of columns to decode.
    """
    for start in range(0, len(positions), _BLOCK_ROWS):
        block_positions, block_rows = positions[start : start + _BLOCK_ROWS], rows[start : start + _BLOCK_ROWS]
        _decode_rows(codes, row_bytes, block_positions, bits, first_col, target, row_stride, block_rows, num_cols)


class Scratch(NamedTuple):
    """The working memory to encode 16 rows at a time.

    Attributes:
        offsets: The positions in the table at which the rows begin, int64 [16].
        places: The positions in the codes at which the rows begin, int64 [16].
        tile: The rows, float32 [16 * num_cols].
        shifted: The rows minus their least values, float32 [16 * num_cols].
        sums: The sums of the shifted values and of their squares, float32 [32].
        kept: Error, scale and bias (16 values each) of each kept range, float32 [48 * plan.kept].
        words: Up to 16 words of codes of each row, int32 [256].
        exact: Not 0 for rows that codes cannot represent, float32 [16].
    """

    offsets: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    tile: npt.NDArray[np.float32]
    shifted: npt.NDArray[np.float32]
    sums: npt.NDArray[np.float32]
    kept: npt.NDArray[np.float32]
    words: npt.NDArray[np.int32]
    exact: npt.NDArray[np.float32]


def scratch_for(num_cols: int, plan: SearchPlan) -> Scratch:
    """Allocate the working memory to encode rows of ``num_cols`` values."""
    return Scratch(
        offsets=np.empty(LANES, np.int64),
        places=np.empty(LANES, np.int64),
        tile=aligned(LANES * num_cols),
        shifted=aligned(LANES * num_cols),
        sums=aligned(2 * LANES),
        kept=aligned(3 * LANES * plan.kept),
        words=aligned(LANES * LANES).view(np.int32),
        exact=aligned(LANES),
    )


def aligned(size: int) -> npt.NDArray[Any]:
    """Allocate float32 [size] aligned to vectors, because loads that cross cache lines take twice as long."""
    memory = np.zeros(size + LANES, np.float32)
    num_skipped = -(memory.ctypes.data // 4) % LANES
    return memory[num_skipped : num_skipped + size]

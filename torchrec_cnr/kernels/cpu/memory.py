"""Loads and stores of lanes and single values, in tables and codes.

Tables are passed as flat arrays of ``float32``, or of the bits of their elements: fp16 as ``int16`` and bf16 as
``uint16``, because numba does not support these two on CPUs. Codes are flat arrays of bytes; numbers in them are not
aligned.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from torchrec_cnr.kernels.cpu.lanes import (
    BIT,
    BYTE,
    DOUBLE,
    DOUBLES,
    FLOAT,
    FLOATS,
    HALF,
    INT,
    INTS,
    LANES,
    LONG,
    element_of,
    narrowed,
    pointer_to,
    spread_scalar,
    transposed,
    vector,
    widened,
)

CACHE_LINE_BYTES = 64


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """Return ``array[index : index + 16]`` of float32 or float64."""
    kind, element = (DOUBLES, DOUBLE) if array.dtype is types.float64 else (FLOATS, FLOAT)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, vector(element), sig.args[0], *args)
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    return kind(array, index), emit


@intrinsic
def load_words(typing: Any, array: Any, index: Any) -> Any:
    """Return ``array[index : index + 16]`` of int32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(pointer_to(context, builder, vector(INT), sig.args[0], *args), align=4)

    return INTS(array, index), emit


@intrinsic
def store(typing: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Set ``array[index : index + 16] = lanes``; the array is float32, float64 or int32, or a table."""
    dtype = array.dtype

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        values = narrowed(builder, dtype, args[2])
        pointer = pointer_to(context, builder, values.type, sig.args[0], *args[:2])
        builder.store(values, pointer, align=dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, index, lanes), emit


@intrinsic
def element(typing: Any, table: Any, index: Any) -> Any:
    """Return ``table[index]`` as float32."""
    dtype = table.dtype

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return widened(
            builder, dtype, builder.load(pointer_to(context, builder, element_of(dtype), sig.args[0], *args))
        )

    return types.float32(table, index), emit


def _prefetching(locality: int) -> Any:
    """Return a function that prefetches ``table[index]`` into a cache: locality 3 is the first level, 2 the second."""

    @intrinsic
    def prefetch(typing: Any, table: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            byte_pointer = BYTE.as_pointer()
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), (byte_pointer, INT, INT, INT)), "llvm.prefetch.p0"
            )
            for_reading, keep, data = (ir.Constant(INT, number) for number in (0, locality, 1))
            builder.call(function, (pointer_to(context, builder, BYTE, sig.args[0], *args), for_reading, keep, data))
            return context.get_dummy_value()

        return types.void(table, index), emit

    return prefetch


prefetch, prefetch_far = _prefetching(3), _prefetching(2)  # for data that is read soon, or later


@intrinsic
def put_element(typing: Any, table: Any, index: Any, value: Any) -> Any:
    """Set ``table[index] = value``, rounded to the table's dtype."""
    dtype = table.dtype

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        scalar = context.cast(builder, args[2], sig.args[2], types.float32)
        bits = builder.extract_element(narrowed(builder, dtype, spread_scalar(builder, scalar)), ir.Constant(INT, 0))
        builder.store(bits, pointer_to(context, builder, bits.type, sig.args[0], *args[:2]))
        return context.get_dummy_value()

    return types.void(table, index, value), emit


@intrinsic
def put_words(typing: Any, codes: Any, offsets: Any, at: Any, words: Any) -> Any:
    """Set ``codes[offsets[r] + at : offsets[r] + at + 4] = words[r]`` for every lane r, an int32 into bytes."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        codes, offsets, at, words = args
        for lane in range(LANES):
            pointer = _place(context, builder, sig, codes, offsets, at, lane, INT)
            builder.store(builder.extract_element(words, ir.Constant(INT, lane)), pointer, align=1)
        return context.get_dummy_value()

    return types.void(codes, offsets, types.int64, INTS), emit


def _place(context: Any, builder: Any, sig: Any, codes: Any, offsets: Any, at: Any, lane: int, element: Any) -> Any:
    """Return the address of ``codes[offsets[lane] + at]``, as a pointer to ``element``."""
    offset = pointer_to(context, builder, LONG, sig.args[1], offsets, ir.Constant(LONG, lane))
    return pointer_to(context, builder, element, sig.args[0], codes, builder.add(builder.load(offset), at))


def _putting_rows(num_words: int) -> Any:
    """Return a function like ``put_words`` for ``num_words`` consecutive words, which are transposed first."""

    @intrinsic
    def put_rows(typing: Any, codes: Any, offsets: Any, at: Any, words: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            codes, offsets, at, words = args
            undefined = ir.Constant(vector(INT), ir.Undefined)
            vectors = [undefined] * LANES
            for number in range(num_words):
                index = ir.Constant(LONG, number * LANES)
                word = pointer_to(context, builder, vector(INT), sig.args[3], words, index)
                vectors[number] = builder.load(word, align=4)
            first_lanes = ir.Constant(ir.VectorType(INT, num_words), list(range(num_words)))
            for lane, row in enumerate(transposed(builder, vectors)):
                row_words = builder.shuffle_vector(row, undefined, first_lanes)
                pointer = _place(context, builder, sig, codes, offsets, at, lane, row_words.type)
                builder.store(row_words, pointer, align=1)
            return context.get_dummy_value()

        return types.void(codes, offsets, types.int64, words), emit

    return put_rows


put_4_words, put_8_words, put_16_words = _putting_rows(4), _putting_rows(8), _putting_rows(16)


@intrinsic
def half_at(typing: Any, codes: Any, index: Any) -> Any:
    """Return ``codes[index : index + 2]``, an fp16 value, as float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fpext(builder.load(pointer_to(context, builder, HALF, sig.args[0], *args), align=1), FLOAT)

    return types.float32(codes, index), emit


def _unpacking(num_bits: int) -> Any:
    """Return a function that unpacks the 16 codes of ``num_bits`` bits, fewer than 8, that begin at ``codes[index]``.

    With 3 bits it reads one byte too many, which is safe, because the scale of the row follows its codes.
    """
    per_word = LANES if num_bits == 2 else LANES // 2
    shifts = ir.Constant(vector(INT), [lane % per_word * num_bits for lane in range(LANES)])
    mask = ir.Constant(vector(INT), [(1 << num_bits) - 1] * LANES)
    is_first_half = ir.Constant(vector(BIT), [lane < LANES // 2 for lane in range(LANES)])

    @intrinsic
    def unpacked(typing: Any, codes: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            codes, index = args

            def word(byte_index: Any) -> Any:
                pointer = pointer_to(context, builder, INT, sig.args[0], codes, byte_index)
                return spread_scalar(builder, builder.load(pointer, align=1))

            words = word(index)
            if per_word < LANES:
                words = builder.select(is_first_half, words, word(builder.add(index, ir.Constant(LONG, num_bits))))
            lanes = builder.and_(builder.lshr(words, shifts), mask)
            return builder.sitofp(lanes, vector(FLOAT))

        return FLOATS(codes, types.int64), emit

    return unpacked


unpacked_2, unpacked_3, unpacked_4 = _unpacking(2), _unpacking(3), _unpacking(4)


@intrinsic
def widened_bytes(typing: Any, codes: Any, index: Any) -> Any:
    """Return ``codes[index : index + 16]``, which are codes of 8 bits, as float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = builder.load(pointer_to(context, builder, vector(BYTE), sig.args[0], *args), align=1)
        return builder.uitofp(lanes, vector(FLOAT))

    return FLOATS(codes, index), emit


@intrinsic
def _load_square(typing: Any, table: Any, offsets: Any, column: Any, tile: Any) -> Any:
    """Load 16 columns of 16 rows, transposed: ``tile[16 * (column + c) + r] = table[offsets[r] + column + c]``."""
    dtype = table.dtype

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        table, offsets, column, tile = args
        rows = []
        for lane in range(LANES):
            offset_pointer = pointer_to(context, builder, LONG, sig.args[1], offsets, ir.Constant(LONG, lane))
            start = builder.add(builder.load(offset_pointer), column)
            row = pointer_to(context, builder, vector(element_of(dtype)), sig.args[0], table, start)
            rows.append(widened(builder, dtype, builder.load(row, align=dtype.bitwidth // 8)))
        first_index = builder.mul(column, ir.Constant(LONG, LANES))
        for number, lanes in enumerate(transposed(builder, rows)):
            index = builder.add(first_index, ir.Constant(LONG, number * LANES))
            builder.store(lanes, pointer_to(context, builder, vector(FLOAT), sig.args[3], tile, index), align=4)
        return context.get_dummy_value()

    return types.void(table, offsets, types.int64, tile), emit


@njit(inline="always")
def prefetch_row(table, offset, num_lines, line_cols):
    """Prefetch a row into the cache, as ``num_lines`` cache lines of ``line_cols`` elements."""
    for line in range(num_lines):
        prefetch(table, offset + line * line_cols)


@njit(inline="always")
def load_tile(table, offsets, num_cols, tile):
    """Load 16 rows of a table, one per lane: column c is in ``tile[16 * c : 16 * c + 16]``, as float32.

    Args:
        table: The flat table.
        offsets: The positions in the table at which the rows begin, int64 [16].
        num_cols: Number of columns.
        tile: The tile, float32 [16 * num_cols], written.
    """
    whole_cols = num_cols // LANES * LANES
    for column in range(0, whole_cols, LANES):
        _load_square(table, offsets, column, tile)
    for column in range(whole_cols, num_cols):
        for lane in range(LANES):
            tile[column * LANES + lane] = element(table, offsets[lane] + column)


@njit
def code_at(codes, start, column, num_bits):
    """Return a code of the row that begins at ``codes[start]``. This also reads the next byte: a code may span two."""
    bit = column * num_bits
    first_byte = start + bit // 8
    two_bytes = np.int64(codes[first_byte]) | np.int64(codes[first_byte + 1]) << 8
    return (two_bytes >> (bit % 8)) & ((1 << num_bits) - 1)

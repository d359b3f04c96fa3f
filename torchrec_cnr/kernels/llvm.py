"""What the lanes are made of: LLVM instructions on vectors, as functions that emit them."""

from typing import Any

from llvmlite import ir
from numba import types

LANES = 16

BIT, BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT, HALF, DOUBLE = ir.FloatType(), ir.HalfType(), ir.DoubleType()


def vector(element: Any) -> Any:
    return ir.VectorType(element, LANES)


def spread_scalar(builder: Any, scalar: Any) -> Any:
    """A vector with ``scalar`` in every lane."""
    undefined = ir.Constant(vector(scalar.type), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(vector(INT), [0] * LANES))


def pointer_to(context: Any, builder: Any, element: Any, array_type: Any, array: Any, index: Any) -> Any:
    """The address of ``array[index]``, as a pointer to ``element``."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), element.as_pointer())


def widened(builder: Any, dtype: Any, bits: Any) -> Any:
    """Elements of a table, scalar or lanes, as float32."""
    lanes = isinstance(bits.type, ir.VectorType)
    shaped = vector if lanes else lambda element: element
    if dtype is types.int16:
        return builder.fpext(builder.bitcast(bits, shaped(HALF)), shaped(FLOAT))
    if dtype is types.uint16:
        wide = builder.zext(bits, shaped(INT))
        sixteen = ir.Constant(INT, 16)
        return builder.bitcast(builder.shl(wide, spread_scalar(builder, sixteen) if lanes else sixteen), shaped(FLOAT))
    return bits


def narrowed(builder: Any, dtype: Any, values: Any) -> Any:
    """float32 lanes, rounded to nearest even, as elements of a table."""
    if dtype is types.int16:
        return builder.bitcast(builder.fptrunc(values, vector(HALF)), vector(SHORT))
    if dtype is types.uint16:

        def every(number: int) -> Any:
            return ir.Constant(vector(INT), [number] * LANES)

        bits = builder.bitcast(values, vector(INT))
        odd = builder.and_(builder.lshr(bits, every(16)), every(1))
        rounded = builder.add(bits, builder.add(odd, every(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", values, values)  # which rounding could carry into a zero
        kept = builder.select(is_nan, builder.or_(bits, every(0x400000)), rounded)
        return builder.trunc(builder.lshr(kept, every(16)), vector(SHORT))
    return values


def element_of(dtype: Any) -> Any:
    return FLOAT if dtype is types.float32 else SHORT


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16, transposed by exchanging blocks of 1, 2, 4 and 8."""
    step = 1
    while step < LANES:
        low = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
        high = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
        exchanged = list(rows)
        for number in range(LANES):
            if not number & step:
                pair = rows[number], rows[number + step]
                exchanged[number] = builder.shuffle_vector(*pair, ir.Constant(vector(INT), low))
                exchanged[number + step] = builder.shuffle_vector(*pair, ir.Constant(vector(INT), high))
        rows, step = exchanged, 2 * step
    return rows

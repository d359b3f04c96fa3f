"""Vectors of 16 values for numba, with one lane for each of 16 rows, made of LLVM instructions.

Compilers vectorise the loop over the columns of a row, and every pass then ends with slow sums across the vector. With
one row per lane there are no such sums. A search processes 16 rows at once, and its state remains in registers. Every
row is summed from its first column to its last, in the same order on any machine. This made a pass over a row seven
times faster.

Each function emits one or two LLVM instructions, which LLVM splits if the vectors of a machine are narrower. None of
them lets the machine decide whether to round a product, unless this makes no difference. So results are bit-identical
on all machines.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 16

BIT, BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT, HALF, DOUBLE = ir.FloatType(), ir.HalfType(), ir.DoubleType()


def vector(element: Any) -> Any:
    return ir.VectorType(element, LANES)


def spread_scalar(builder: Any, scalar: Any) -> Any:
    """Return a vector with ``scalar`` in every lane."""
    undefined = ir.Constant(vector(scalar.type), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(vector(INT), [0] * LANES))


def pointer_to(context: Any, builder: Any, element: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Return the address of ``array[index]``, as a pointer to ``element``."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), element.as_pointer())


def widened(builder: Any, dtype: Any, bits: Any) -> Any:
    """Convert elements of a table, a scalar or lanes, to float32."""
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
    """Convert float32 lanes to elements of a table, rounded to nearest even."""
    if dtype is types.int16:
        return builder.bitcast(builder.fptrunc(values, vector(HALF)), vector(SHORT))
    if dtype is types.uint16:

        def every(number: int) -> Any:
            return ir.Constant(vector(INT), [number] * LANES)

        bits = builder.bitcast(values, vector(INT))
        odd = builder.and_(builder.lshr(bits, every(16)), every(1))
        rounded = builder.add(bits, builder.add(odd, every(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", values, values)  # rounding could turn the bits of a NaN into a zero
        kept_bits = builder.select(is_nan, builder.or_(bits, every(0x400000)), rounded)
        return builder.trunc(builder.lshr(kept_bits, every(16)), vector(SHORT))
    return values


def element_of(dtype: Any) -> Any:
    return FLOAT if dtype is types.float32 else SHORT


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 16 vectors of 16 lanes, by exchanging blocks of 1, 2, 4 and 8."""
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


class LanesType(types.Type):
    """The numba type of 16 lanes of one kind: float32, float64, int32 or bool."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        super().__init__(f"Lanes({kind})")


FLOATS, DOUBLES = LanesType(types.float32), LanesType(types.float64)
INTS, MASK = LanesType(types.int32), LanesType(types.boolean)
_ELEMENTS = {FLOATS: FLOAT, DOUBLES: DOUBLE, INTS: INT, MASK: BIT}


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes_type: LanesType) -> None:
        super().__init__(manager, lanes_type, vector(_ELEMENTS[lanes_type]))


def _operators() -> None:
    """Define Python's operators for lanes."""

    def comparison(sign: str) -> Callable[..., Any]:
        return lambda builder, x, y: builder.fcmp_ordered(sign, x, y)

    floats: dict[Any, Callable[..., Any]] = {
        operator.add: lambda builder, x, y: builder.fadd(x, y),
        operator.sub: lambda builder, x, y: builder.fsub(x, y),
        operator.mul: lambda builder, x, y: builder.fmul(x, y),
        operator.truediv: lambda builder, x, y: builder.fdiv(x, y),
    }
    signs = {operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "=="}
    bits: dict[Any, Callable[..., Any]] = {
        operator.and_: lambda builder, x, y: builder.and_(x, y),
        operator.or_: lambda builder, x, y: builder.or_(x, y),
    }
    cases: list[tuple[Any, LanesType, LanesType, Callable[..., Any]]] = []
    cases += [(function, kind, kind, emit) for function, emit in floats.items() for kind in (FLOATS, DOUBLES)]
    cases += [
        (function, kind, MASK, comparison(sign)) for function, sign in signs.items() for kind in (FLOATS, DOUBLES)
    ]
    cases += [(function, kind, kind, emit) for function, emit in bits.items() for kind in (INTS, MASK)]
    signatures: dict[Any, list[Any]] = {}
    for function, operand, result, emit in cases:
        signatures.setdefault(function, []).append(signature(result, operand, operand))
        lower_builtin(function, operand, operand)(
            lambda context, builder, sig, args, emit=emit: emit(builder, *args)  # bind emit of this iteration
        )
    for function, function_signatures in signatures.items():
        infer_global(function)(type(f"Lanes_{function.__name__}", (ConcreteTemplate,), {"cases": function_signatures}))


_operators()


@intrinsic
def spread(typing: Any, value: Any) -> Any:
    """Return a number in every lane, as float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return spread_scalar(builder, context.cast(builder, args[0], sig.args[0], types.float32))

    return FLOATS(value), emit


@intrinsic
def spread_double(typing: Any, value: Any) -> Any:
    """Return a number in every lane, as float64."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return spread_scalar(builder, context.cast(builder, args[0], sig.args[0], types.float64))

    return DOUBLES(value), emit


@intrinsic
def doubles(typing: Any, values: Any) -> Any:
    """Convert float32 lanes to float64."""
    return DOUBLES(FLOATS), lambda context, builder, sig, args: builder.fpext(args[0], vector(DOUBLE))


@intrinsic
def floats(typing: Any, values: Any) -> Any:
    """Round float64 lanes to float32."""
    return FLOATS(DOUBLES), lambda context, builder, sig, args: builder.fptrunc(args[0], vector(FLOAT))


@intrinsic
def whole(typing: Any, values: Any) -> Any:
    """Round to the nearest whole number, halves to even, as int32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector(INT), (vector(FLOAT),)), f"llvm.lrint.v{LANES}i32.v{LANES}f32"
        )
        return builder.call(function, args)

    return INTS(FLOATS), emit


@intrinsic
def shifted(typing: Any, codes: Any, num_bits: Any) -> Any:
    """Shift int32 lanes to the left."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.shl(args[0], spread_scalar(builder, context.cast(builder, args[1], sig.args[1], types.int32)))

    return INTS(INTS, num_bits), emit


@intrinsic
def where(typing: Any, mask: Any, x: Any, y: Any) -> Any:
    """Return ``x`` in the lanes of the mask, and ``y`` in the others."""
    return x(MASK, x, x), lambda context, builder, sig, args: builder.select(*args)


@intrinsic
def exact_times_plus(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return ``x * y + z`` if the lanes hold the product exactly, so that fusing the operations changes nothing."""
    lanes, name = (vector(DOUBLE), "f64") if x == DOUBLES else (vector(FLOAT), "f32")

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(lanes, (lanes, lanes, lanes)), f"llvm.fmuladd.v{LANES}{name}"
        )
        return builder.call(function, args)

    return x(x, x, x), emit


@intrinsic
def lesser(typing: Any, x: Any, y: Any) -> Any:
    """Return the lesser of two; ``y`` where either is NaN."""
    return FLOATS(FLOATS, FLOATS), lambda context, builder, sig, args: builder.select(
        builder.fcmp_ordered("<", *args), *args
    )


@intrinsic
def greater(typing: Any, x: Any, y: Any) -> Any:
    """Return the greater of two; ``y`` where either is NaN."""
    return FLOATS(FLOATS, FLOATS), lambda context, builder, sig, args: builder.select(
        builder.fcmp_ordered(">", *args), *args
    )


@intrinsic
def rounded(typing: Any, x: Any) -> Any:
    """Round to the nearest whole number, halves to even."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = vector(FLOAT)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(lanes, (lanes,)), f"llvm.rint.v{LANES}f32"
        )
        return builder.call(function, args)

    return FLOATS(FLOATS), emit


def _of_all_lanes(name: str, summary: str) -> Any:
    """Return a function that reduces lanes without NaN to one number, with ``summary`` as its docstring."""

    @intrinsic
    def reduced(typing: Any, x: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(FLOAT, (vector(FLOAT),)), f"llvm.vector.reduce.{name}.v{LANES}f32"
            )
            return builder.call(function, args)

        return types.float32(FLOATS), emit

    reduced.__doc__ = summary
    return reduced


least_lane = _of_all_lanes("fmin", "Return the least of all lanes.")
greatest_lane = _of_all_lanes("fmax", "Return the greatest of all lanes.")


@intrinsic
def to_half(typing: Any, x: Any) -> Any:
    """Round to the nearest fp16 value."""
    return FLOATS(FLOATS), lambda context, builder, sig, args: builder.fpext(
        builder.fptrunc(args[0], vector(HALF)), vector(FLOAT)
    )


@intrinsic
def half_below(typing: Any, x: Any) -> Any:
    """Return the next fp16 value below an fp16 value."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def every(number: int) -> Any:
            return ir.Constant(vector(SHORT), [number] * LANES)

        bits = builder.bitcast(builder.fptrunc(args[0], vector(HALF)), vector(SHORT))
        is_negative = builder.icmp_signed("<", bits, every(0))
        below = builder.select(is_negative, builder.add(bits, every(1)), builder.sub(bits, every(1)))
        below = builder.select(builder.icmp_signed("==", bits, every(0)), every(-0x7FFF), below)
        return builder.fpext(builder.bitcast(below, vector(HALF)), vector(FLOAT))

    return FLOATS(FLOATS), emit


@intrinsic
def as_in(typing: Any, table: Any, x: Any) -> Any:
    """Round to the nearest value of the table's dtype."""
    dtype = table.dtype
    return FLOATS(table, FLOATS), lambda context, builder, sig, args: widened(
        builder, dtype, narrowed(builder, dtype, args[1])
    )


@intrinsic
def any_lane(typing: Any, mask: Any) -> Any:
    """Return whether the mask is true in any lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))

    return types.boolean(MASK), emit


@intrinsic
def every_lane(typing: Any, mask: Any) -> Any:
    """Return whether the mask is true in every lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], ir.IntType(LANES))
        return builder.icmp_unsigned("==", bits, ir.Constant(ir.IntType(LANES), (1 << LANES) - 1))

    return types.boolean(MASK), emit


@intrinsic
def halves(typing: Any, low: Any, high: Any) -> Any:
    """Return two fp16 values in one int32, the first in its lower half."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        low, high = (
            builder.zext(builder.bitcast(builder.fptrunc(value, vector(HALF)), vector(SHORT)), vector(INT))
            for value in args
        )
        return builder.or_(low, builder.shl(high, ir.Constant(vector(INT), [16] * LANES)))

    return INTS(FLOATS, FLOATS), emit

"""The search for the range of a row on GPUs: ``cpu.range_search`` in Triton; each of a warp's 32 lanes has a row.

Names, order and arithmetic are those of ``cpu.range_search`` and ``cpu.lanes``, and the results are bit-identical.
Every row is summed from its first column to its last, every function rounds as in IEEE 754, and kernels are compiled
without fused multiply-add.

A warp searches rows in a *tile*, a transposed copy of them in global memory. In each pass of a search, its lanes read
adjacent elements of one column. Tiles are small enough to remain in the cache. Tables of bf16 are passed as the int16
of their bits, because Triton's interpreter, in which the tests run, does not round to bf16 correctly.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchrec_cnr.kernels import search_plan

LANES = tl.constexpr(32)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds a number to a whole one, halves to even


@triton.jit
def widened(x):
    """Convert elements of a table to float32."""
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505  # the branch is chosen when this is compiled
        return x.to(tl.float32)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """Convert float32 to elements of a table, rounded to nearest even."""
    if dtype == tl.int16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = bits + ((bits >> 16) & 1) + 0x7FFF
        # All bits of a GPU's NaN are set: rounding it would overflow into the sign and result in zero.
        return (tl.where(x == x, rounded, bits | 0x400000) >> 16).to(tl.int16)
    else:  # noqa: RET505  # the branch is chosen when this is compiled
        return x.to(dtype)


@triton.jit
def to_half(x):
    """Round to the nearest fp16 value."""
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def half_below(x):
    """Return the next fp16 value below an fp16 value."""
    bits = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    below = tl.where(bits < 0, bits + 1, bits - 1)
    below = tl.where(bits == 0, -0x7FFF, below)
    return below.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def rounded(x):
    """Round numbers from 0 to 255 to the nearest whole number, halves to even."""
    return (x + _ROUNDER) - _ROUNDER


_CLOSING_ROUNDS = tl.constexpr(search_plan.CLOSING_ROUNDS)
_GREEDY, _LEAST_SQUARES, _MIRRORED = (
    tl.constexpr(method) for method in (search_plan.GREEDY, search_plan.LEAST_SQUARES, search_plan.MIRRORED)
)
_NOWHERE = tl.constexpr(float("inf"))
_MAX_HALF = tl.constexpr(65504.0)


class DevicePlan(NamedTuple):
    """The values of a ``SearchPlan`` that a kernel reads at run time; others are constants when it is compiled.

    Attributes:
        cuts: The plan's cuts, float32 [num_cuts] on the device.
        num_cuts: Number of cuts.
        num_bins: The attribute of the plan, as are those below.
    """

    cuts: Any
    num_cuts: int
    num_bins: int
    num_steps: int
    rounds: int
    polish: int


@triton.jit
def _half_floor(x):
    """Return the greatest fp16 value that is not greater than ``x``."""
    half = to_half(x)
    return tl.where(half > x, half_below(half), half)


@triton.jit
def _half_above(x):
    """Return the next fp16 value above an fp16 value."""
    return 0.0 - half_below(0.0 - x)


@triton.jit
def _column(tile, column):
    """Return a column of the rows in a tile."""
    return widened(tl.load(tile + column * LANES))


@triton.jit
def inverse_of(scale):
    """Return 1 / scale, for multiplying instead of dividing; 0 for a scale of 0, with which every code is 0."""
    return tl.where(scale > 0.0, tl.div_rn(1.0, scale), 0.0)


@triton.jit
def _bounded(position, top):
    """Limit a position to 0 up to the greatest code, which NaN becomes, too."""
    position = tl.where(position < top, position, top)
    return tl.where(position > 0.0, position, 0.0)


@triton.jit
def code_of(x, scale_inverse, bias, top):
    """Return the nearest code."""
    return rounded(_bounded((x - bias) * scale_inverse, top))


@triton.jit
def _value_of(tile, code, scale, bias):
    """Return the value that a reader decodes."""
    return widened(narrowed(scale * code + bias, tile.dtype.element_ty))


@triton.jit
def _covering(tile, low, high, top):
    """Return the smallest range in fp16 that covers ``low`` to ``high``."""
    bias = _half_floor(low) + 0.0  # no negative zero
    scale = to_half(tl.div_rn(high - bias, top))
    reaches = _value_of(tile, top, scale, bias) >= high
    return tl.where(reaches, scale, _half_above(scale)), bias


@triton.jit
def _closed(tile, scale, bias, low, high, top):
    """Return the range of the decoded least and greatest value, after some rounds, and whether it is closed."""
    is_closed = scale != scale
    for _ in range(_CLOSING_ROUNDS):
        inverse = inverse_of(scale)
        decoded_low = _value_of(tile, code_of(low, inverse, bias, top), scale, bias)
        decoded_high = _value_of(tile, code_of(high, inverse, bias, top), scale, bias)
        next_scale, next_bias = _covering(tile, decoded_low, decoded_high, top)
        is_closed = (next_scale == scale) & (next_bias == bias)
        scale, bias = next_scale, next_bias
    return scale, bias, is_closed


@triton.jit
def _holds(tile, scale, bias, low, high, top):
    """Return whether the least and the greatest value are decoded with an error of at most half a step."""
    inverse = inverse_of(scale)
    low_error = tl.abs(low - _value_of(tile, code_of(low, inverse, bias, top), scale, bias))
    high_error = tl.abs(high - _value_of(tile, code_of(high, inverse, bias, top), scale, bias))
    error = tl.where(low_error > high_error, low_error, high_error)
    return error + error <= scale


@triton.jit
def _error(tile, num_cols, scale, bias, top):
    """Return the sum of the squared errors of the decoded values."""
    inverse = inverse_of(scale)
    error = tl.zeros_like(scale)
    for column in tl.range(num_cols, loop_unroll_factor=4):
        x = _column(tile, column)
        difference = x - _value_of(tile, code_of(x, inverse, bias, top), scale, bias)
        error = error + difference * difference
    return error


@triton.jit
def _better(tile, num_cols, scale, bias, low, high, top, best_error, best_scale, best_bias):
    """Return the better of the best range so far and another one, which is first rounded and closed."""
    scale, bias, is_closed = _closed(tile, to_half(scale), to_half(bias), low, high, top)
    error = _error(tile, num_cols, scale, bias, top)
    is_better = is_closed & (scale > 0.0) & (error < best_error)
    return (
        tl.where(is_better, error, best_error),
        tl.where(is_better, scale, best_scale),
        tl.where(is_better, bias, best_bias),
    )


@triton.jit
def _mirrored(tile, num_cols, low, high, top):
    """Return the symmetric range with the least error; see ``cpu.range_search``."""
    magnitude = tl.where(high > 0.0 - low, high, 0.0 - low)
    exact_scale = tl.div_rn(magnitude + magnitude, top)
    scale = half_below(half_below(half_below(0.0 - _half_floor(0.0 - exact_scale))))
    best_error, best_scale, best_bias = tl.full(low.shape, _NOWHERE, tl.float32), tl.zeros_like(low), tl.zeros_like(low)
    for number in range(7):
        bias = 0.0 - to_half(scale * top * 0.5)
        error = _error(tile, num_cols, scale, bias, top)
        is_near = (number >= 2) & (number <= 4)
        is_better = (scale >= 0.0) & (error < best_error) & ((error == 0.0) | is_near)
        best_error = tl.where(is_better, error, best_error)
        best_scale, best_bias = tl.where(is_better, scale, best_scale), tl.where(is_better, bias, best_bias)
        scale = _half_above(scale)
    is_right = (best_scale <= exact_scale + exact_scale) & (best_error < _NOWHERE)
    return best_scale, best_bias, is_right & ((high > low) | (best_error == 0.0))


@triton.jit
def _greedy(tile, num_cols, low, high, top, num_bins, num_steps, best_error, best_scale, best_bias):
    """Run Check-N-Run's greedy search: cut one bin off the side with the smaller error, and keep the best range."""
    step = tl.div_rn(high - low, tl.zeros_like(low) + num_bins)
    left, right = low, high
    for _ in range(num_steps):
        left_bias, right_bias = to_half(left + step), to_half(left)
        left_scale = to_half(tl.div_rn(right - left_bias, top))
        right_scale = to_half(tl.div_rn(right - step - right_bias, top))
        left_error = _error(tile, num_cols, left_scale, left_bias, top)
        right_error = _error(tile, num_cols, right_scale, right_bias, top)
        cut_left = left_error < right_error
        left, right = tl.where(cut_left, left + step, left), tl.where(cut_left, right, right - step)
        scale, bias = tl.where(cut_left, left_scale, right_scale), tl.where(cut_left, left_bias, right_bias)
        improves = tl.where(cut_left, left_error, right_error) < best_error
        if tl.max(improves.to(tl.int32), 0) > 0:
            scale = tl.where(improves, scale, 0.0)  # _better refuses a scale of 0
            best_error, best_scale, best_bias = _better(
                tile, num_cols, scale, bias, low, high, top, best_error, best_scale, best_bias
            )
    return best_scale, best_bias


@triton.jit
def _regressed(tile, num_cols, scale, offset, low, top, total, total_squares):
    """Run one round of least squares: find the nearest codes, then the scale and offset that fit them best.

    It uses the values minus the least value of their row, ``low``; ``offset`` is the bias minus ``low``. Return the new
    scale and offset, and their squared error before they are rounded.
    """
    count = tl.zeros_like(scale) + num_cols
    inverse = inverse_of(scale)
    shift = 0.0 - offset * inverse
    codes, squares, products = tl.zeros_like(scale), tl.zeros_like(scale), tl.zeros_like(scale)
    for column in tl.range(num_cols, loop_unroll_factor=4):
        x = _column(tile, column) - low
        code = rounded(_bounded(x * inverse + shift, top))
        codes = codes + code
        squares = squares + code * code
        products = products + code * x
    spread_of_codes = count * squares - codes * codes
    covariance = count * products - codes * total
    is_fitted = (spread_of_codes > 0.0) & (covariance > 0.0)
    slope = tl.div_rn(covariance, spread_of_codes)
    error = total_squares - tl.div_rn(total * total, count) - tl.div_rn(covariance * slope, count)
    scale = tl.where(is_fitted, slope, scale)
    return scale, tl.div_rn(total - scale * codes, count), tl.where(is_fitted, error, _NOWHERE)


@triton.jit
def _exchanged(is_better, new_values, old_values):
    """Return two values, exchanged where the new one is better: first the better one, then the other."""
    return tl.where(is_better, new_values, old_values), tl.where(is_better, old_values, new_values)


@triton.jit
def _replaced(values, index: tl.constexpr, value):
    """Return a tuple with another value at one index."""
    return values[:index] + (value,) + values[index + 1 :]  # noqa: RUF005  # Triton cannot unpack


@triton.jit
def _least_squares(tile, num_cols, low, high, top, plan, kept: tl.constexpr, best_error, best_scale, best_bias):
    """Run alternating least squares from every pair of cuts, and refine the best ranges further."""
    total, total_squares = tl.zeros_like(low), tl.zeros_like(low)
    for column in tl.range(num_cols, loop_unroll_factor=4):
        x = _column(tile, column) - low
        total, total_squares = total + x, total_squares + x * x
    width = high - low
    errors = (tl.full(low.shape, _NOWHERE, tl.float32),) * kept
    scales, offsets = (tl.div_rn(width, top),) * kept, (tl.zeros_like(low),) * kept
    for start in range(plan.num_cuts * plan.num_cuts):
        cut_below, cut_above = tl.load(plan.cuts + start // plan.num_cuts), tl.load(plan.cuts + start % plan.num_cuts)
        scale, offset = tl.div_rn(width * (1.0 - cut_below - cut_above), top), width * cut_below
        error = tl.zeros_like(low)
        for _ in range(plan.rounds):
            scale, offset, error = _regressed(tile, num_cols, scale, offset, low, top, total, total_squares)
        for number in tl.static_range(kept):
            is_better = error < errors[number]
            kept_error, error = _exchanged(is_better, error, errors[number])
            kept_scale, scale = _exchanged(is_better, scale, scales[number])
            kept_offset, offset = _exchanged(is_better, offset, offsets[number])
            errors = _replaced(errors, number, kept_error)
            scales = _replaced(scales, number, kept_scale)
            offsets = _replaced(offsets, number, kept_offset)
    for number in tl.static_range(kept):
        scale, offset = scales[number], offsets[number]
        for _ in range(plan.polish):
            scale, offset, _error_left = _regressed(tile, num_cols, scale, offset, low, top, total, total_squares)
        best_error, best_scale, best_bias = _better(
            tile, num_cols, scale, offset + low, low, high, top, best_error, best_scale, best_bias
        )
    return best_scale, best_bias


@triton.jit
def find_range(tile, num_cols, low, high, is_number, top, plan, method: tl.constexpr, kept: tl.constexpr):
    """Find the range of each of 32 rows.

    Args:
        tile: Pointers [32] to the first values of the rows in their tile, which have the table's dtype.
        num_cols: Number of columns.
        low: The least value of each row.
        high: The greatest value of each row.
        is_number: A mask of the rows without NaN.
        top: The greatest code, as float32.
        plan: A ``DevicePlan``.
        method: The ``method`` of the ``SearchPlan``.
        kept: The ``kept`` of the ``SearchPlan``.

    Returns:
        Scale, bias, and a mask of the rows that they can represent; see ``cpu.range_search``.
    """
    if method == _MIRRORED:
        scale, bias, is_right = _mirrored(tile, num_cols, low, high, top)
        is_right = is_right & _holds(tile, scale, bias, low, high, top)
    else:
        scale, bias = _covering(tile, low, high, top)
        scale, bias, is_closed = _closed(tile, scale, bias, low, high, top)
        width = high - low
        is_right = is_closed & (scale * top <= width + width) & (scale <= _MAX_HALF)
        is_right = is_right & _holds(tile, scale, bias, low, high, top)
    if method == _GREEDY:
        best_error = _error(tile, num_cols, scale, bias, top)
        scale, bias = _greedy(tile, num_cols, low, high, top, plan.num_bins, plan.num_steps, best_error, scale, bias)
    if method == _LEAST_SQUARES:
        best_error = _error(tile, num_cols, scale, bias, top)
        scale, bias = _least_squares(tile, num_cols, low, high, top, plan, kept, best_error, scale, bias)
    return scale, bias, is_right & is_number

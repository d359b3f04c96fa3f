"""The search for the range of a row: from 16 rows in lanes to the scale and bias of each, as they will be stored.

A *range* is a pair of fp16 values, scale and bias; a code q represents the value ``bias + scale * q``, rounded to the
table's dtype. Every candidate is first rounded to fp16, and then compared by the error of the decoded values.

Every chosen range is *closed*: encoding the decoded values finds the same range again. The range from the least to the
greatest value is always the first candidate. A decoded row has no error with it, so it keeps this range. Repeated saves
and restores therefore change nothing. See docs/concepts/quantization.md.

These functions are compiled by numba. Their results are bit-identical to those of the reference in the tests.
"""

import numpy as np
from numba import njit

from torchrec_cnr.kernels.cpu.lanes import (
    LANES,
    any_lane,
    as_in,
    every_lane,
    greater,
    half_below,
    lesser,
    rounded,
    spread,
    to_half,
    where,
)
from torchrec_cnr.kernels.cpu.memory import load, store
from torchrec_cnr.kernels.search_plan import CLOSING_ROUNDS, GREEDY, LEAST_SQUARES, MIRRORED

_NOWHERE = np.float32(np.inf)
_MAX_HALF, _LEAST_NORMAL_HALF = np.float32(65504.0), np.float32(2.0**-14)


@njit(inline="always")
def _half_floor(x):
    """Return the greatest fp16 value that is not greater than ``x``."""
    half = to_half(x)
    return where(half > x, half_below(half), half)


@njit(inline="always")
def _half_above(x):
    """Return the next fp16 value above an fp16 value."""
    zero = spread(0.0)
    return zero - half_below(zero - x)


@njit(inline="always")
def inverse_of(scale):
    """Return 1 / scale, for multiplying instead of dividing; 0 for a scale of 0, with which every code is 0."""
    return where(scale > spread(0.0), spread(1.0) / scale, spread(0.0))


@njit(inline="always")
def position_of(x, inverse, bias, top):
    """Return the unrounded code of a value, from 0 to the greatest code."""
    return greater(lesser((x - bias) * inverse, top), spread(0.0))


@njit(inline="always")
def code_of(x, inverse, bias, top):
    """Return the nearest code."""
    return rounded(position_of(x, inverse, bias, top))


@njit(inline="always")
def value_of(table, code, scale, bias):
    """Return the value that a reader decodes."""
    return as_in(table, scale * code + bias)


@njit(inline="always")
def _covering(table, low, high, top):
    """Return the smallest range in fp16 that covers ``low`` to ``high``."""
    bias = _half_floor(low) + spread(0.0)  # no negative zero
    scale = to_half((high - bias) / top)
    reaches = value_of(table, top, scale, bias) >= high
    return where(reaches, scale, _half_above(scale)), bias


@njit(inline="always")
def _closed(table, scale, bias, low, high, top):
    """Return the range of the decoded least and greatest value, after some rounds, and whether it is closed."""
    is_closed = scale < spread(0.0)
    for _ in range(CLOSING_ROUNDS):
        inverse = inverse_of(scale)
        decoded_low = value_of(table, code_of(low, inverse, bias, top), scale, bias)
        decoded_high = value_of(table, code_of(high, inverse, bias, top), scale, bias)
        next_scale, next_bias = _covering(table, decoded_low, decoded_high, top)
        is_closed = (next_scale == scale) & (next_bias == bias)
        scale, bias = next_scale, next_bias
        if every_lane(is_closed):
            break
    return scale, bias, is_closed


@njit(inline="always")
def _error(table, tile, num_cols, scale, bias, top):
    """Return the sum of the squared errors of the decoded values."""
    inverse = inverse_of(scale)
    error = spread(0.0)
    for column in range(num_cols):
        x = load(tile, column * LANES)
        difference = x - value_of(table, code_of(x, inverse, bias, top), scale, bias)
        error = error + difference * difference
    return error


@njit
def _holds(table, scale, bias, low, high, top):
    """Return whether the least and the greatest value are decoded with an error of at most half a step."""
    inverse, zero = inverse_of(scale), spread(0.0)
    low_error = low - value_of(table, code_of(low, inverse, bias, top), scale, bias)
    high_error = high - value_of(table, code_of(high, inverse, bias, top), scale, bias)
    error = greater(greater(low_error, zero - low_error), greater(high_error, zero - high_error))
    return error + error <= scale


@njit
def _is_plain(scale, bias, low, high, top):
    """Return whether the covering range is certainly closed and holds both ends within half a step, without a trial.

    The least value gets the first code, because it is within half a step of the bias. The greatest value gets the last
    code: fp16 rounds a normal scale by less than 2**-10 of it, so the error of all steps together is less than half a
    step. For a bias of this size, the rounding of the sums is too small to change the scale that is found again.
    """
    zero = spread(0.0)
    distance, size = low - bias, greater(bias, zero - bias)
    is_near = (distance + distance < scale) & (size <= scale * top * spread(256.0))
    return is_near & (scale >= spread(_LEAST_NORMAL_HALF)) & (scale * top <= (high - low) + (high - low))


@njit
def _better(table, tile, num_cols, scale, bias, low, high, top, best_error, best_scale, best_bias):
    """Return the better of the best range so far and another one, which is first rounded and closed."""
    scale, bias, is_closed = _closed(table, to_half(scale), to_half(bias), low, high, top)
    error = _error(table, tile, num_cols, scale, bias, top)
    is_better = is_closed & (scale > spread(0.0)) & (error < best_error)
    return where(is_better, error, best_error), where(is_better, scale, best_scale), where(is_better, bias, best_bias)


@njit
def _mirrored(table, tile, num_cols, low, high, top):
    """Return the symmetric range with the least error, of the three whose scales are next to the exact scale.

    The exact scale of a decoded row may differ from its stored one by some units in the last place. So seven scales are
    tried; the outer four are accepted only if their error is zero.
    """
    zero = spread(0.0)
    magnitude = greater(high, zero - low)
    exact_scale = (magnitude + magnitude) / top
    scale = half_below(half_below(half_below(zero - _half_floor(zero - exact_scale))))
    best_error, best_scale, best_bias = spread(_NOWHERE), zero, zero
    for number in range(7):
        bias = zero - to_half(scale * top * spread(0.5))
        error = _error(table, tile, num_cols, scale, bias, top)
        is_near = spread(1.0 if 2 <= number <= 4 else 0.0) > zero
        is_better = (scale >= zero) & (error < best_error) & ((error == zero) | is_near)
        best_error = where(is_better, error, best_error)
        best_scale, best_bias = where(is_better, scale, best_scale), where(is_better, bias, best_bias)
        scale = _half_above(scale)
    is_right = (best_scale <= exact_scale + exact_scale) & (best_error < spread(_NOWHERE))
    return best_scale, best_bias, is_right & ((high > low) | (best_error == zero))


@njit
def _greedy(table, tile, num_cols, low, high, top, num_bins, num_steps, best_error, best_scale, best_bias):
    """Run Check-N-Run's greedy search: cut one bin off the side with the smaller error, and keep the best range."""
    step = (high - low) / spread(num_bins)
    left, right = low, high
    for _ in range(num_steps):
        left_bias, right_bias = to_half(left + step), to_half(left)
        left_scale, right_scale = to_half((right - left_bias) / top), to_half((right - step - right_bias) / top)
        left_error = _error(table, tile, num_cols, left_scale, left_bias, top)
        right_error = _error(table, tile, num_cols, right_scale, right_bias, top)
        cut_left = left_error < right_error
        left, right = where(cut_left, left + step, left), where(cut_left, right, right - step)
        scale, bias = where(cut_left, left_scale, right_scale), where(cut_left, left_bias, right_bias)
        improves = lesser(left_error, right_error) < best_error
        if any_lane(improves):
            scale = where(improves, scale, spread(0.0))  # _better refuses a scale of 0
            best_range = _better(table, tile, num_cols, scale, bias, low, high, top, best_error, best_scale, best_bias)
            best_error, best_scale, best_bias = best_range
    return best_scale, best_bias


@njit
def _regressed(tile, num_cols, scale, offset, top, sums):
    """Run one round of least squares: find the nearest codes, then the scale and offset that fit them best.

    ``tile`` holds the values minus the least value of their row, and ``offset`` is the bias minus this value. Return
    the new scale and offset, and their squared error before they are rounded.
    """
    zero, count = spread(0.0), spread(num_cols)
    inverse = inverse_of(scale)
    shift = zero - offset * inverse
    codes, squares, products = zero, zero, zero
    for column in range(num_cols):
        x = load(tile, column * LANES)
        code = rounded(greater(lesser(x * inverse + shift, top), zero))
        codes = codes + code
        squares = squares + code * code
        products = products + code * x
    total, total_squares = load(sums, 0), load(sums, LANES)
    spread_of_codes = count * squares - codes * codes
    covariance = count * products - codes * total
    is_fitted = (spread_of_codes > zero) & (covariance > zero)
    slope = covariance / spread_of_codes
    error = total_squares - total * total / count - covariance * slope / count
    scale = where(is_fitted, slope, scale)
    return scale, (total - scale * codes) / count, where(is_fitted, error, spread(_NOWHERE))


@njit
def _least_squares(tile, num_cols, low, high, top, plan, scratch):
    """Run alternating least squares from every pair of cuts, and write the best ranges, refined, to ``kept``."""
    zero = spread(0.0)
    shifted, sums, kept = scratch.shifted, scratch.sums, scratch.kept
    total, total_squares = zero, zero
    for column in range(num_cols):
        x = load(tile, column * LANES) - low
        store(shifted, column * LANES, x)
        total, total_squares = total + x, total_squares + x * x
    store(sums, 0, total)
    store(sums, LANES, total_squares)
    width = high - low
    for number in range(plan.kept):
        store(kept, 3 * LANES * number, spread(_NOWHERE))
        store(kept, 3 * LANES * number + LANES, width / top)
        store(kept, 3 * LANES * number + 2 * LANES, zero)
    for cut_below in plan.cuts:
        for cut_above in plan.cuts:
            scale, offset = width * spread(np.float32(1.0) - cut_below - cut_above) / top, width * spread(cut_below)
            error = zero
            for _ in range(plan.rounds):
                scale, offset, error = _regressed(shifted, num_cols, scale, offset, top, sums)
            for slot in range(0, 3 * LANES * plan.kept, 3 * LANES):
                old_error, old_scale, old_offset = (
                    load(kept, slot),
                    load(kept, slot + LANES),
                    load(kept, slot + 2 * LANES),
                )
                is_better = error < old_error
                store(kept, slot, where(is_better, error, old_error))
                store(kept, slot + LANES, where(is_better, scale, old_scale))
                store(kept, slot + 2 * LANES, where(is_better, offset, old_offset))
                error = where(is_better, old_error, error)
                scale, offset = where(is_better, old_scale, scale), where(is_better, old_offset, offset)
    for slot in range(0, 3 * LANES * plan.kept, 3 * LANES):
        scale, offset = load(kept, slot + LANES), load(kept, slot + 2 * LANES)
        for _ in range(plan.polish):
            scale, offset, _error_left = _regressed(shifted, num_cols, scale, offset, top, sums)
        store(kept, slot + LANES, scale)
        store(kept, slot + 2 * LANES, offset + low)


@njit(inline="always")
def _ends(tile, num_cols):
    """Return the least and the greatest value of each row, and a mask of the rows without NaN.

    A sum is NaN if a value is. (It is also NaN if sums overflow to both sides, but then no range fits the values.)
    """
    low = high = total = load(tile, 0)
    whole_cols = 1 + (num_cols - 1) // 4 * 4
    for column in range(1, whole_cols, 4):  # four at once, because each comparison waits for the one before
        a, b = load(tile, column * LANES), load(tile, (column + 1) * LANES)
        c, d = load(tile, (column + 2) * LANES), load(tile, (column + 3) * LANES)
        low = lesser(lesser(lesser(a, b), lesser(c, d)), low)
        high = greater(greater(greater(a, b), greater(c, d)), high)
        total = total + ((a + b) + (c + d))
    for column in range(whole_cols, num_cols):
        x = load(tile, column * LANES)
        low, high, total = lesser(x, low), greater(x, high), total + x
    return low, high, total == total


@njit
def find_range(table, num_cols, top, plan, scratch):
    """Find the range of each of 16 rows.

    Args:
        table: The flat table, of which only the dtype is used.
        num_cols: Number of columns.
        top: The greatest code.
        plan: The ``SearchPlan``.
        scratch: The working memory; its ``tile`` holds the rows (see ``load_tile``).

    Returns:
        Scale, bias, and a mask of the rows that they can represent. For these rows, fp16 holds the range without making
        it more than twice as wide. The least and the greatest value are decoded within half a step, and the values of
        a row of equal values exactly.
    """
    tile = scratch.tile
    low, high, is_number = _ends(tile, num_cols)
    if plan.method == MIRRORED:
        scale, bias, is_right = _mirrored(table, tile, num_cols, low, high, top)
        return scale, bias, is_right & is_number & _holds(table, scale, bias, low, high, top)
    scale, bias = _covering(table, low, high, top)
    is_right = is_number & (scale <= spread(_MAX_HALF))
    if table.itemsize != 4 or not every_lane(_is_plain(scale, bias, low, high, top)):
        scale, bias, is_closed = _closed(table, scale, bias, low, high, top)
        width = high - low
        is_right = is_right & is_closed & (scale * top <= width + width) & (scale <= spread(_MAX_HALF))
        is_right = is_right & _holds(table, scale, bias, low, high, top)
    if plan.method == GREEDY:
        best_error = _error(table, tile, num_cols, scale, bias, top)
        scale, bias = _greedy(
            table, tile, num_cols, low, high, top, plan.num_bins, plan.num_steps, best_error, scale, bias
        )
    if plan.method == LEAST_SQUARES:
        best_error = _error(table, tile, num_cols, scale, bias, top)
        _least_squares(tile, num_cols, low, high, top, plan, scratch)
        kept = scratch.kept
        for slot in range(0, 3 * LANES * plan.kept, 3 * LANES):
            kept_range = load(kept, slot + LANES), load(kept, slot + 2 * LANES)
            best_error, scale, bias = _better(
                table, tile, num_cols, *kept_range, low, high, top, best_error, scale, bias
            )
    return scale, bias, is_right

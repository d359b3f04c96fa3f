"""Rows as whole multiples of a step in an orthonormal basis, and back.

Encoding sums in float32, and decoding in float64 with exact products. All sums go from the first term to the last. So
numbers and decoded rows are bit-identical on all machines.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from torchrec_cnr.kernels.cpu.compiling import Kernel
from torchrec_cnr.kernels.cpu.lanes import LANES, exact_times_plus, floats, rounded, spread, spread_double, where, whole
from torchrec_cnr.kernels.cpu.memory import CACHE_LINE_BYTES, element, load, prefetch_far, put_element, store

MOST = 32767  # the largest multiple of a step

_ROWS_AHEAD = 32  # rows are prefetched while this many before them are transformed


class PaddedBasis(NamedTuple):
    """A basis as the kernels take it.

    Attributes:
        values: float32 or float64 [num_rows * width + 16], with zeros between and behind the rows; or empty for no
            basis.
        width: The elements from the beginning of a row to that of the next, a multiple of 16.
    """

    values: npt.NDArray[np.floating]
    width: int

    @classmethod
    def of(cls, rows: npt.NDArray[np.floating]) -> "PaddedBasis":
        """Copy a basis, [num_rows, num_cols] of float32 or float64; [0, 0] for no basis."""
        num_rows, num_cols = rows.shape
        width = -(-num_cols // LANES) * LANES
        values = np.zeros(num_rows * width + LANES if num_rows else 0, rows.dtype)
        values[: num_rows * width].reshape(num_rows, width)[:, :num_cols] = rows
        return cls(values, width)


@njit
def _round_lanes(components, inverse_step, dead_zone, place, steps, start):
    """Write components of a row in steps, rounded to the nearest whole numbers after they were moved towards zero."""
    scaled = components * spread(inverse_step)
    zone = load(dead_zone, place)
    moved = scaled - where(scaled < spread(0.0), spread(0.0) - zone, zone)
    store(steps, start + place, whole(rounded(moved)))


@njit
def _components_of_four(values, width, num_cols, basis, inverse_step, dead_zone, steps):
    """Compute the components of four rows, because all need the same elements of the basis."""
    for place in range(0, num_cols, LANES):
        sums_0, sums_1, sums_2, sums_3 = spread(0.0), spread(0.0), spread(0.0), spread(0.0)
        for column in range(num_cols):
            lanes = load(basis, column * width + place)
            sums_0 = sums_0 + spread(values[column]) * lanes
            sums_1 = sums_1 + spread(values[width + column]) * lanes
            sums_2 = sums_2 + spread(values[2 * width + column]) * lanes
            sums_3 = sums_3 + spread(values[3 * width + column]) * lanes
        _round_lanes(sums_0, inverse_step, dead_zone, place, steps, 0)
        _round_lanes(sums_1, inverse_step, dead_zone, place, steps, width)
        _round_lanes(sums_2, inverse_step, dead_zone, place, steps, 2 * width)
        _round_lanes(sums_3, inverse_step, dead_zone, place, steps, 3 * width)


@njit
def _put_steps(values, steps, most_value, numbers):
    """Write the components of a row as int16; return whether all are in range."""
    is_right = True
    for column in range(len(numbers)):
        is_right &= (abs(values[column]) <= most_value) & (steps[column] >= -MOST) & (steps[column] <= MOST)
    if is_right:
        for column in range(len(numbers)):
            numbers[column] = np.int16(steps[column])
    else:
        numbers[:] = np.int16(0)
    return is_right


@Kernel
def forward(
    table, row_stride, rows, num_cols, basis, inverse_step, dead_zone, most_value, values, steps, numbers, is_exact
):
    """Compute the components of rows in units of the step, rounded to whole numbers, halves to even.

    Args:
        table: The flat table; see ``memory``.
        row_stride: Elements from the beginning of a row to that of the next.
        rows: The numbers of the rows, int64 [n].
        num_cols: Values in a row.
        basis: A ``PaddedBasis`` of float32 whose row c has column c of each component, or an empty one for the columns
            themselves.
        inverse_step: 1 / step, float32.
        dead_zone: float32 [width], by how many steps each component is moved towards zero before it is rounded, from 0
            to less than a half.
        most_value: The largest absolute value of a row that is not exact, float32.
        values: float32 [4 * width], working memory, with zeros.
        steps: int32 [4 * width], working memory.
        numbers: int16 [n * num_cols], written; zeros for exact rows.
        is_exact: bool [n], written: the rows with a value that is NaN or above ``most_value``, or with a component of
            more than `MOST` steps.
    """
    width, line_cols = len(values) // 4, CACHE_LINE_BYTES // table.itemsize
    for first in range(0, len(rows), 4):
        for lane in range(4):
            ahead = rows[min(first + lane + _ROWS_AHEAD, len(rows) - 1)] * row_stride
            for column in range(0, num_cols, line_cols):
                prefetch_far(table, ahead + column)
            start = rows[min(first + lane, len(rows) - 1)] * row_stride
            for column in range(num_cols):
                values[lane * width + column] = element(table, start + column)
        if len(basis.values):
            _components_of_four(values, width, num_cols, basis.values, inverse_step, dead_zone, steps)
        else:
            for lane in range(4):
                for place in range(0, num_cols, LANES):
                    own_values = load(values, lane * width + place)
                    _round_lanes(own_values, inverse_step, dead_zone, place, steps, lane * width)
        for lane in range(min(4, len(rows) - first)):
            start, row = lane * width, first + lane
            own_numbers = numbers[row * num_cols : (row + 1) * num_cols]
            is_exact[row] = not _put_steps(values[start:], steps[start:], most_value, own_numbers)


@njit
def _restore_lanes(numbers, start, used, num_used, basis, width, column, step, target, place):
    """Compute 16 columns of a row."""
    sums = spread_double(0.0)
    for number in range(num_used):
        component = used[number]
        lanes = load(basis, component * width + column)
        sums = exact_times_plus(spread_double(numbers[start + component]), lanes, sums)
    store(target, place, floats(sums * spread_double(step)))


@njit
def _restore_many_lanes(numbers, start, used, num_used, basis, width, column, step, target, place):
    """Compute 64 columns of a row: sums that wait for no other, so that a processor can compute several at once."""
    sums_0, sums_1 = spread_double(0.0), spread_double(0.0)
    sums_2, sums_3 = spread_double(0.0), spread_double(0.0)
    for number in range(num_used):
        component = used[number]
        first = component * width + column
        factor = spread_double(numbers[start + component])
        sums_0 = exact_times_plus(factor, load(basis, first), sums_0)
        sums_1 = exact_times_plus(factor, load(basis, first + LANES), sums_1)
        sums_2 = exact_times_plus(factor, load(basis, first + 2 * LANES), sums_2)
        sums_3 = exact_times_plus(factor, load(basis, first + 3 * LANES), sums_3)
    store(target, place, floats(sums_0 * spread_double(step)))
    store(target, place + LANES, floats(sums_1 * spread_double(step)))
    store(target, place + 2 * LANES, floats(sums_2 * spread_double(step)))
    store(target, place + 3 * LANES, floats(sums_3 * spread_double(step)))


@Kernel
def inverse(numbers, num_cols, positions, basis, step, used, first_col, target, row_stride, rows, num_wanted):
    """Compute columns of rows from their components, and write them to rows of a target.

    Args:
        numbers: int16 [n * num_cols].
        num_cols: Values in a row.
        positions: int64 [k], the positions of the rows in ``numbers``.
        basis: A ``PaddedBasis`` of float64, of values of float32, whose row k is component k; or an empty one.
        step: float64.
        used: int64 [num_cols], working memory.
        first_col: The first column to compute.
        target: The flat target; see ``memory``.
        row_stride: Elements from the beginning of a row of the target to that of the next.
        rows: int64 [k], the rows of the target to write to.
        num_wanted: Number of columns to compute.
    """
    has_basis = len(basis.values) > 0
    many_cols = num_wanted // (4 * LANES) * (4 * LANES) if has_basis else 0
    whole_cols = num_wanted // LANES * LANES if has_basis else 0
    for index in range(len(positions)):
        start, place = positions[index] * num_cols, rows[index] * row_stride
        num_used = 0
        if has_basis:
            for component in range(num_cols):
                used[num_used] = component
                num_used += numbers[start + component] != 0
        components = (numbers, start, used, num_used, basis.values, basis.width)
        for column in range(0, many_cols, 4 * LANES):
            _restore_many_lanes(*components, first_col + column, step, target, place + column)
        for column in range(many_cols, whole_cols, LANES):
            _restore_lanes(*components, first_col + column, step, target, place + column)
        for column in range(whole_cols, num_wanted):
            value = np.float64(0.0) if has_basis else np.float64(numbers[start + first_col + column])
            for number in range(num_used):
                component = used[number]
                value += numbers[start + component] * basis.values[component * basis.width + first_col + column]
            put_element(target, place + column, np.float32(value * step))

"""Rows as whole multiples of a step in an orthonormal basis, and back.

All sums are of float64, from the first term to the last, and the products of decoding are exact. So decoded rows are
bit-identical on all machines.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from torchrec_cnr.kernels.cpu.compiling import Kernel
from torchrec_cnr.kernels.cpu.lanes import LANES, floats, rounded, spread_double, whole
from torchrec_cnr.kernels.cpu.memory import element, load, put_element, store

MOST = 32767  # the largest multiple of a step


class PaddedBasis(NamedTuple):
    """A basis as the kernels take it.

    Attributes:
        values: float64 [num_rows * width + 16], with zeros between and behind the rows; or empty for no basis.
        width: The elements from the beginning of a row to that of the next, a multiple of 16.
    """

    values: npt.NDArray[np.float64]
    width: int

    @classmethod
    def of(cls, rows: npt.NDArray[np.float64]) -> "PaddedBasis":
        """Copy a basis, float64 [num_rows, num_cols]; [0, 0] for no basis."""
        num_rows, num_cols = rows.shape
        width = -(-num_cols // LANES) * LANES
        values = np.zeros(num_rows * width + LANES if num_rows else 0)
        values[: num_rows * width].reshape(num_rows, width)[:, :num_cols] = rows
        return cls(values, width)


@njit
def _round_lanes(sums, inverse_step, place, steps):
    store(steps, place, whole(rounded(floats(sums * spread_double(inverse_step)))))


@njit
def _components_of_two(values, other_values, num_cols, basis, width, inverse_step, steps, other_steps):
    """Compute the components of two rows, because both need the same elements of the basis."""
    for place in range(0, num_cols, LANES):
        sums, other_sums = spread_double(0.0), spread_double(0.0)
        for column in range(num_cols):
            lanes = load(basis, column * width + place)
            sums = sums + spread_double(values[column]) * lanes
            other_sums = other_sums + spread_double(other_values[column]) * lanes
        _round_lanes(sums, inverse_step, place, steps)
        _round_lanes(other_sums, inverse_step, place, other_steps)


@njit
def _put_steps(values, steps, num_cols, most_value, numbers, start):
    """Write the components of a row as int16; return whether all are in range."""
    is_right = True
    for column in range(num_cols):
        is_right = is_right and abs(values[column]) <= most_value and abs(steps[column]) <= MOST
    for column in range(num_cols):
        numbers[start + column] = np.int16(steps[column]) if is_right else np.int16(0)
    return is_right


@Kernel
def forward(table, row_stride, rows, num_cols, basis, inverse_step, values, steps, numbers, is_exact):
    """Compute the components of rows in units of the step, rounded to the nearest whole numbers, halves to even.

    Args:
        table: The flat table; see ``memory``.
        row_stride: Elements from the beginning of a row to that of the next.
        rows: The numbers of the rows, int64 [n].
        num_cols: Values in a row.
        basis: A ``PaddedBasis`` whose row c has column c of each component, or an empty one for the columns themselves.
        inverse_step: 1 / step, float64.
        values: float64 [2 * width], working memory.
        steps: int32 [2 * width], working memory.
        numbers: int16 [n * num_cols], written; zeros for exact rows.
        is_exact: bool [n], written: the rows with a value that is NaN or infinite, or so large that a component may be
            more than `MOST` steps.
    """
    width = len(values) // 2
    most_value = np.float64(MOST) / inverse_step
    two_values, two_steps = (values[:width], values[width:]), (steps[:width], steps[width:])
    for first in range(0, len(rows), 2):
        second = min(first + 1, len(rows) - 1)
        for column in range(num_cols):
            two_values[0][column] = element(table, rows[first] * row_stride + column)
            two_values[1][column] = element(table, rows[second] * row_stride + column)
        if len(basis.values):
            _components_of_two(
                two_values[0],
                two_values[1],
                num_cols,
                basis.values,
                basis.width,
                inverse_step,
                two_steps[0],
                two_steps[1],
            )
        else:
            for place in range(0, num_cols, LANES):
                _round_lanes(load(two_values[0], place), inverse_step, place, two_steps[0])
                _round_lanes(load(two_values[1], place), inverse_step, place, two_steps[1])
        is_exact[first] = not _put_steps(two_values[0], two_steps[0], num_cols, most_value, numbers, first * num_cols)
        is_exact[second] = not _put_steps(
            two_values[second - first], two_steps[second - first], num_cols, most_value, numbers, second * num_cols
        )


@Kernel
def inverse(numbers, num_cols, positions, basis, step, used, first_col, target, row_stride, rows, num_wanted):
    """Compute columns of rows from their components, and write them to rows of a target.

    Args:
        numbers: int16 [n * num_cols].
        num_cols: Values in a row.
        positions: int64 [k], the positions of the rows in ``numbers``.
        basis: A ``PaddedBasis`` whose row k is component k; or an empty one.
        step: float64.
        used: int64 [num_cols], working memory.
        first_col: The first column to compute.
        target: The flat target; see ``memory``.
        row_stride: Elements from the beginning of a row of the target to that of the next.
        rows: int64 [k], the rows of the target to write to.
        num_wanted: Number of columns to compute.
    """
    whole_cols = num_wanted // LANES * LANES if len(basis.values) else 0
    for index in range(len(positions)):
        start, place = positions[index] * num_cols, rows[index] * row_stride
        num_used = 0
        if len(basis.values):
            for component in range(num_cols):
                used[num_used] = component
                num_used += numbers[start + component] != 0
        for column in range(0, whole_cols, LANES):
            sums = spread_double(0.0)
            for number in range(num_used):
                component = used[number]
                lanes = load(basis.values, component * basis.width + first_col + column)
                sums = sums + spread_double(numbers[start + component]) * lanes
            store(target, place + column, floats(sums * spread_double(step)))
        for column in range(whole_cols, num_wanted):
            value = np.float64(0.0) if len(basis.values) else np.float64(numbers[start + first_col + column])
            for number in range(num_used):
                component = used[number]
                value += numbers[start + component] * basis.values[component * basis.width + first_col + column]
            put_element(target, place + column, np.float32(value * step))

"""K-means of a row, compiled for CPUs: codes, lowest bits first, then a codebook of fp16 values in increasing order.

Values on a line have one best clustering, and dynamic programming finds it: the best k clusters of the first i values
end with a cluster that begins no earlier than it does for the first i - 1 (Wang and Song, "Ckmeans.1d.dp", The R
Journal 3(2), 2011; halving the range of candidates at each value as in its later versions). So there are no starts to
choose, nothing is random, and no other clustering has a smaller error, before the codebook is rounded to fp16.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from torchrec_cnr.kernels.compiling import Kernel
from torchrec_cnr.kernels.lanes import halves, to_half
from torchrec_cnr.kernels.llvm import LANES
from torchrec_cnr.kernels.memory import code_at, element, half_at, load, put_element, put_words, store
from torchrec_cnr.kernels.scratch import aligned

_GAPS = (701, 301, 132, 57, 23, 10, 4, 1)  # of a shell sort: M. Ciura, FCT 2001


class Scratch(NamedTuple):
    """What clustering a row needs.

    Attributes:
        values: float32 [num_cols], the row.
        ordered: float32 [num_cols], the row, sorted.
        sums: float64 [num_cols + 1], of the sorted values before each one.
        squares: float64 [num_cols + 1], of their squares.
        shares: float64 [num_cols + 1], 1 / n for each n.
        costs: float64 [num_clusters, num_cols], see ``_fill_layer``.
        begins: int64 [num_clusters, num_cols], likewise.
        stack: int64 [64, 4], ranges that are still to be filled.
        codebook: float32 [num_clusters].
        middles: float32 [num_clusters - 1], between the values of the codebook.
        evens: float32 [16], every other value of a part of the codebook.
        odds: float32 [16], the others.
        offsets: int64 [16], where they go.
    """

    values: npt.NDArray[np.float32]
    ordered: npt.NDArray[np.float32]
    sums: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]
    shares: npt.NDArray[np.float64]
    costs: npt.NDArray[np.float64]
    begins: npt.NDArray[np.int64]
    stack: npt.NDArray[np.int64]
    codebook: npt.NDArray[np.float32]
    middles: npt.NDArray[np.float32]
    evens: npt.NDArray[np.float32]
    odds: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.int64]


def scratch_for(num_cols: int, num_clusters: int) -> Scratch:
    """Memory to cluster rows of ``num_cols`` values in."""
    with np.errstate(divide="ignore"):
        shares = 1.0 / np.arange(num_cols + 1)
    return Scratch(
        values=np.empty(num_cols, np.float32),
        ordered=np.empty(num_cols, np.float32),
        sums=np.zeros(num_cols + 1),
        squares=np.zeros(num_cols + 1),
        shares=shares,
        costs=np.empty((num_clusters, num_cols)),
        begins=np.empty((num_clusters, num_cols), np.int64),
        stack=np.empty((64, 4), np.int64),
        codebook=np.empty(num_clusters, np.float32),
        middles=np.empty(num_clusters - 1, np.float32),
        evens=aligned(LANES),
        odds=aligned(LANES),
        offsets=np.empty(LANES, np.int64),
    )


@njit
def _sort(values):
    """Sort values in place, in increasing order."""
    for gap in _GAPS:
        for index in range(gap, len(values)):
            value, at = values[index], index
            while at >= gap and values[at - gap] > value:
                values[at] = values[at - gap]
                at -= gap
            values[at] = value


@njit
def _cost(sums, squares, shares, first, last):
    """Squared error of the values from ``first`` to ``last``, as one cluster; ``shares[n]`` is 1 / n."""
    total = sums[last + 1] - sums[first]
    return squares[last + 1] - squares[first] - total * total * shares[last - first + 1]


@njit
def _fill_layer(previous, current, begins, layer, bounds, sums, squares, shares, stack):
    """One cluster more: ``current[i]`` is the least cost of values 0 to i, ``begins[i]`` where their last one begins.

    For every i between the bounds. The value in the middle is done first, and bounds where those on both sides of it
    have to look.
    """
    stack[0] = bounds[0], bounds[1], layer, bounds[1]
    depth = 1
    while depth:
        depth -= 1
        low, high, earliest, latest = stack[depth]
        middle = (low + high) // 2
        best, best_begin = np.inf, earliest
        for begin in range(earliest, min(latest, middle) + 1):
            cost = previous[begin - 1] + _cost(sums, squares, shares, begin, middle)
            if cost < best:
                best, best_begin = cost, begin
        current[middle], begins[middle] = best, best_begin
        if low < middle:
            stack[depth] = low, middle - 1, earliest, best_begin
            depth += 1
        if middle < high:
            stack[depth] = middle + 1, high, best_begin, latest
            depth += 1


@njit
def _different(ordered, codebook):
    """Write the different ones of sorted values, the last one into what is left over; whether there is room for all."""
    at = 0
    codebook[0] = ordered[0]
    for index in range(1, len(ordered)):
        if ordered[index] != ordered[index - 1]:
            at += 1
            if at == len(codebook):
                return False
            codebook[at] = ordered[index]
    codebook[at + 1 :] = codebook[at]
    return True


@njit
def _best_means(scratch):
    """Write the means of the best clusters of the sorted values into the codebook, in increasing order."""
    ordered, codebook, stack = scratch.ordered, scratch.codebook, scratch.stack
    sums, squares, shares = scratch.sums, scratch.squares, scratch.shares
    costs, begins = scratch.costs, scratch.begins
    num_values, num_clusters = len(ordered), len(codebook)
    middle = np.float64(ordered[num_values // 2])  # sums about it lose less
    for index in range(num_values):
        value = np.float64(ordered[index]) - middle
        sums[index + 1], squares[index + 1] = sums[index] + value, squares[index] + value * value
    for index in range(num_values):
        costs[0, index] = _cost(sums, squares, shares, 0, index)
    last = num_values - 1
    for layer in range(1, num_clusters):
        # Each cluster still to come needs a value, and of the last layer only the last value counts.
        bounds = layer if layer < num_clusters - 1 else last, last - (num_clusters - 1 - layer)
        _fill_layer(costs[layer - 1], costs[layer], begins[layer], layer, bounds, sums, squares, shares, stack)
    for layer in range(num_clusters - 1, -1, -1):
        first = begins[layer, last] if layer else 0
        codebook[layer] = middle + (sums[last + 1] - sums[first]) * shares[last - first + 1]
        last = first - 1


@njit
def _rounded_is_right(codebook, low, high, lanes):
    """Round a codebook to fp16; whether that moved no value by more than half a step of evenly spaced codes."""
    limit = (high - low) / (2 * (len(codebook) - 1))
    is_right = True
    for start in range(0, len(codebook), LANES):
        for lane in range(LANES):
            lanes[lane] = codebook[min(start + lane, len(codebook) - 1)]
        store(lanes, 0, to_half(load(lanes, 0)))
        for index in range(start, min(start + LANES, len(codebook))):
            is_right &= abs(lanes[index - start] - codebook[index]) <= limit
            codebook[index] = lanes[index - start]
    return is_right


@Kernel
def encode(table, row_stride, rows, num_cols, bits, row_bytes, codes, is_exact, scratch):
    """Encode rows of a table; the arguments are those of ``fused.encode``."""
    num_clusters = 1 << bits
    values, ordered, codebook, middles = scratch.values, scratch.ordered, scratch.codebook, scratch.middles
    evens, odds, offsets = scratch.evens, scratch.odds, scratch.offsets
    for number in range(len(rows)):
        start, end = number * row_bytes, (number + 1) * row_bytes
        codes[start:end] = 0
        is_finite = True
        for column in range(num_cols):
            values[column] = ordered[column] = element(table, rows[number] * row_stride + column)
            is_finite &= np.isfinite(values[column])
        is_exact[number] = not is_finite
        if not is_finite:
            continue
        _sort(ordered)
        if not _different(ordered, codebook):
            _best_means(scratch)
        is_exact[number] = not _rounded_is_right(codebook, np.float64(ordered[0]), np.float64(ordered[-1]), evens)
        if is_exact[number]:
            continue
        for index in range(num_clusters - 1):
            middles[index] = (codebook[index] + codebook[index + 1]) / np.float32(2.0)
        for column in range(num_cols):
            code = 0
            for index in range(num_clusters - 1):
                code += values[column] > middles[index]
            word = code << (column * bits % 8)
            codes[start + column * bits // 8] |= word & 255
            codes[start + column * bits // 8 + 1] |= word >> 8
        for first in range(0, num_clusters, 2 * LANES):
            for lane in range(LANES):
                index = 2 * min(first // 2 + lane, num_clusters // 2 - 1)
                evens[lane], odds[lane] = codebook[index], codebook[index + 1]
                offsets[lane] = end - 2 * (num_clusters - index)
            put_words(codes, offsets, 0, halves(load(evens, 0), load(odds, 0)))


@Kernel
def decode(codes, row_bytes, positions, bits, first_col, target, row_stride, rows, num_cols):
    """Decode rows into a target; the arguments are those of ``fused.decode``."""
    for number in range(len(positions)):
        start = positions[number] * row_bytes
        codebook = start + row_bytes - 2 * (1 << bits)
        to = rows[number] * row_stride
        for column in range(num_cols):
            code = code_at(codes, start, first_col + column, bits)
            put_element(target, to + column, half_at(codes, codebook + 2 * code))

"""K-means of rows on CPUs: codes, lowest bits first, then a codebook of fp16 values in increasing order.

Sixteen rows are clustered at once, one per lane. For one-dimensional values, dynamic programming finds the optimal
clustering. Consider the last of the best k clusters of the first i values. It begins no earlier than the last cluster
for the first i - 1 values, and no earlier than the last of k - 1 clusters (Wang and Song, "Ckmeans.1d.dp", The R
Journal 3(2), 2011). So there are no starting points, nothing is random, and no other clustering has a smaller error.
Sums are float64, so that close values are still distinguished if another value is far away.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from torchrec_cnr.kernels.cpu.compiling import Kernel
from torchrec_cnr.kernels.cpu.fused_rows import aligned, put_codes
from torchrec_cnr.kernels.cpu.lanes import (
    LANES,
    doubles,
    every_lane,
    greater,
    greatest_lane,
    halves,
    least_lane,
    lesser,
    spread,
    spread_double,
    to_half,
    where,
)
from torchrec_cnr.kernels.cpu.memory import code_at, half_at, load, load_tile, put_element, put_words, store


class ClusterScratch(NamedTuple):
    """The working memory to cluster 16 rows. Arrays without a shape below have 16 lanes for each of their numbers.

    Attributes:
        offsets: The positions in the table at which the rows begin, int64 [16].
        places: The positions in the codes at which the rows begin, int64 [16].
        tile: The num_cols values of a row, and later their codes, float32.
        ordered: The num_cols values, sorted, float32.
        sums: num_cols + 1 sums of the sorted values before each one, each minus the middle value, float64.
        squares: num_cols + 1 sums of the squares of these differences, float64.
        shares: 1 / (n + 1) for each n, float64 [num_cols + 1].
        costs: num_cols least squared errors of the values up to each one, float64.
        begins: The beginning of the last cluster, for each number of clusters and for the values up to each one:
            num_clusters * num_cols values, float32, exact below 2**24 columns.
        codebook: The num_clusters means, float32.
        middles: The num_clusters - 1 midpoints between the means, float32.
        flags: One value, not 0 for rows that need no clustering, and later for rows to be stored exactly, float32.
        words: Up to 16 words of codes of each row, int32 [256].
    """

    offsets: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    tile: npt.NDArray[np.float32]
    ordered: npt.NDArray[np.float32]
    sums: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]
    shares: npt.NDArray[np.float64]
    costs: npt.NDArray[np.float64]
    begins: npt.NDArray[np.float32]
    codebook: npt.NDArray[np.float32]
    middles: npt.NDArray[np.float32]
    flags: npt.NDArray[np.float32]
    words: npt.NDArray[np.int32]


def cluster_scratch_for(num_cols: int, num_clusters: int) -> ClusterScratch:
    """Allocate the working memory to cluster rows of ``num_cols`` values."""
    row, row_of_doubles = LANES * num_cols, 2 * LANES * (num_cols + 1)
    return ClusterScratch(
        offsets=np.empty(LANES, np.int64),
        places=np.empty(LANES, np.int64),
        tile=aligned(row),
        ordered=aligned(row),
        sums=aligned(row_of_doubles).view(np.float64),
        squares=aligned(row_of_doubles).view(np.float64),
        shares=1.0 / np.arange(1, num_cols + 2),
        costs=aligned(row_of_doubles).view(np.float64),
        begins=aligned(num_clusters * row),
        codebook=aligned(LANES * num_clusters),
        middles=aligned(LANES * (num_clusters - 1)),
        flags=aligned(LANES),
        words=aligned(LANES * LANES).view(np.int32),
    )


@njit
def sort(ordered, num_values):
    """Sort each row, with the same comparisons (Knuth, The Art of Computer Programming 3, 5.2.2, algorithm M)."""
    top = 1
    while 2 * top < num_values:
        top *= 2
    bit = top
    while bit > 0:
        step, expected_bit, distance = top, 0, bit
        while distance > 0:
            for index in range(num_values - distance):
                if index & bit == expected_bit:
                    offset, other_offset = index * LANES, (index + distance) * LANES
                    x, y = load(ordered, offset), load(ordered, other_offset)
                    store(ordered, offset, lesser(x, y))
                    store(ordered, other_offset, greater(x, y))
            distance, step, expected_bit = step - bit if step != bit else 0, step // 2, bit
        bit //= 2


@njit
def _add_up(ordered, num_values, sums, squares):
    """Sum the values before each one, and their squares. Subtracting the middle value first reduces rounding errors."""
    middle = doubles(load(ordered, num_values // 2 * LANES))
    total, total_squares = spread_double(0.0), spread_double(0.0)
    for index in range(num_values):
        store(sums, index * LANES, total)
        store(squares, index * LANES, total_squares)
        value = doubles(load(ordered, index * LANES)) - middle
        total, total_squares = total + value, total_squares + value * value
    store(sums, num_values * LANES, total)
    store(squares, num_values * LANES, total_squares)


@njit
def _add_cluster(layer, first, last, num_values, scratch):
    """Compute ``costs`` and ``begins`` for one cluster more, for the values up to each one from ``first`` to ``last``.

    The values are processed from the last to the first: the beginning of a value's cluster is the upper bound for the
    values before it. The layer before gives the lower bound. (It has one value less, so its index is one less.) Each
    row has its own bounds, so its result does not depend on the rows in the other lanes.
    """
    sums, squares, shares, costs, begins = scratch.sums, scratch.squares, scratch.shares, scratch.costs, scratch.begins
    is_skipped = load(scratch.flags, 0) > spread(0.0)
    latest = spread(last)
    for index in range(last, first - 1, -1):
        earliest = greater(load(begins, ((layer - 1) * num_values + index - 1) * LANES), spread(layer))
        total, total_squares = load(sums, (index + 1) * LANES), load(squares, (index + 1) * LANES)
        latest = greater(lesser(latest, spread(index)), earliest)
        best_cost, best_begin = spread_double(np.inf), earliest
        start = int(least_lane(where(is_skipped, spread(last), earliest)))
        stop = int(greatest_lane(where(is_skipped, spread(0.0), latest)))
        for begin in range(start, stop + 1):
            begin_lanes, offset = spread(begin), begin * LANES
            cluster_sum = total - load(sums, offset)
            error = (total_squares - load(squares, offset)) - cluster_sum * cluster_sum * spread_double(
                shares[index - begin]
            )
            cost = load(costs, offset - LANES) + error
            is_better = (cost < best_cost) & (begin_lanes >= earliest) & (begin_lanes <= latest)
            best_cost, best_begin = where(is_better, cost, best_cost), where(is_better, begin_lanes, best_begin)
        store(costs, index * LANES, best_cost)
        store(begins, (layer * num_values + index) * LANES, best_begin)
        latest = best_begin


@njit
def best_means(num_values, num_clusters, scratch):
    """Write the means of the best clusters of the sorted values into the codebook, in increasing order."""
    ordered, codebook, begins = scratch.ordered, scratch.codebook, scratch.begins
    sums, squares, shares, costs = scratch.sums, scratch.squares, scratch.shares, scratch.costs
    _add_up(ordered, num_values, sums, squares)
    for index in range(num_values):
        total = load(sums, (index + 1) * LANES)
        cost = load(squares, (index + 1) * LANES) - total * total * spread_double(shares[index])
        store(costs, index * LANES, cost)
        store(begins, index * LANES, spread(0.0))
    for layer in range(1, num_clusters):
        # Each further cluster needs at least one value, and only the last value of the last layer is used.
        last = num_values - num_clusters + layer
        _add_cluster(layer, layer if layer < num_clusters - 1 else last, last, num_values, scratch)
    for lane in range(LANES):
        middle, last = np.float64(ordered[num_values // 2 * LANES + lane]), num_values - 1
        for layer in range(num_clusters - 1, -1, -1):
            first = int(begins[(layer * num_values + last) * LANES + lane])
            cluster_sum = sums[(last + 1) * LANES + lane] - sums[first * LANES + lane]
            codebook[layer * LANES + lane] = middle + cluster_sum * shares[last - first]
            last = first - 1


@njit
def _are_few(ordered, num_values, num_clusters):
    """Return a mask of the rows that have at most as many different values as there are clusters."""
    zero, one = spread(0.0), spread(1.0)
    num_different = one
    for index in range(1, num_values):
        differs = load(ordered, index * LANES) > load(ordered, (index - 1) * LANES)
        num_different = num_different + where(differs, one, zero)
    return num_different <= spread(num_clusters)


@njit
def _write_different(ordered, num_values, num_clusters, lane, codebook):
    """Write the different values of a row into its codebook, and fill the rest with the last one."""
    offset = lane
    codebook[offset] = ordered[lane]
    for index in range(LANES + lane, num_values * LANES, LANES):
        if ordered[index] > ordered[index - LANES]:
            offset += LANES
            codebook[offset] = ordered[index]
    for rest_offset in range(offset + LANES, num_clusters * LANES, LANES):
        codebook[rest_offset] = codebook[offset]


@njit
def _rounded_is_right(codebook, num_clusters, low, high):
    """Round the codebook to fp16, and return a mask of the rows in which no mean moved too far.

    The limit is half a step of uniform codes over the range of the row.
    """
    half, zero = spread(0.5), spread(0.0)
    limit = (high * half - low * half) / spread(num_clusters - 1)
    is_right = low == low
    for offset in range(0, num_clusters * LANES, LANES):
        mean = load(codebook, offset)
        rounded_mean = to_half(mean)
        is_right = is_right & (greater(rounded_mean - mean, mean - rounded_mean) <= limit)
        store(codebook, offset, rounded_mean + zero)
    return is_right


@njit
def _code(tile, num_cols, num_clusters, codebook, middles):
    """Replace each value by the index of the nearest value of the codebook."""
    half, zero, one = spread(0.5), spread(0.0), spread(1.0)
    for offset in range(0, (num_clusters - 1) * LANES, LANES):
        store(middles, offset, (load(codebook, offset) + load(codebook, offset + LANES)) * half)
    for column in range(0, num_cols * LANES, LANES):
        x, code = load(tile, column), zero
        for offset in range(0, (num_clusters - 1) * LANES, LANES):
            code = code + where(x > load(middles, offset), one, zero)
        store(tile, column, code)


@njit
def _cluster(num_cols, num_clusters, scratch):
    """Write the codebooks of 16 rows, replace the values by codes, and return a mask of the rows so represented."""
    tile, ordered, codebook, flags = scratch.tile, scratch.ordered, scratch.codebook, scratch.flags
    zero, one = spread(0.0), spread(1.0)
    zero_if_finite = zero
    for column in range(0, num_cols * LANES, LANES):
        x = load(tile, column)
        store(ordered, column, x)
        zero_if_finite = zero_if_finite + (x - x)
    is_finite = zero_if_finite == zero
    sort(ordered, num_cols)
    are_few = _are_few(ordered, num_cols, num_clusters)
    store(flags, 0, where(is_finite, where(are_few, one, zero), one))
    if not every_lane(load(flags, 0) > zero):
        best_means(num_cols, num_clusters, scratch)
    store(flags, 0, where(are_few, one, zero))
    for lane in range(LANES):
        if flags[lane] != np.float32(0.0):
            _write_different(ordered, num_cols, num_clusters, lane, codebook)
    low, high = load(ordered, 0), load(ordered, (num_cols - 1) * LANES)
    is_right = is_finite & _rounded_is_right(codebook, num_clusters, low, high)
    _code(tile, num_cols, num_clusters, codebook, scratch.middles)
    return is_right


@Kernel
def encode(table, row_stride, rows, num_cols, bits, row_bytes, codes, is_exact, scratch):
    """Encode rows of a table as ``fused_rows.encode`` does, but without a plan; ``scratch`` is a ``ClusterScratch``."""
    num_clusters = 1 << bits
    offsets, places, codebook, flags = scratch.offsets, scratch.places, scratch.codebook, scratch.flags
    zero, one = spread(0.0), spread(1.0)
    for start in range(0, len(rows), LANES):
        for lane in range(LANES):
            row = min(start + lane, len(rows) - 1)  # lanes without a row repeat the last one
            offsets[lane] = rows[row] * row_stride
            places[lane] = row * row_bytes
        load_tile(table, offsets, num_cols, scratch.tile)
        is_right = _cluster(num_cols, num_clusters, scratch)
        put_codes(scratch.tile, scratch.words, num_cols, bits, codes, places, one, zero, is_right)
        for index in range(0, num_clusters, 2):
            pair = load(codebook, index * LANES), load(codebook, (index + 1) * LANES)
            word = halves(where(is_right, pair[0], zero), where(is_right, pair[1], zero))
            put_words(codes, places, row_bytes - 2 * (num_clusters - index), word)
        store(flags, 0, where(is_right, zero, one))
        for row in range(start, min(start + LANES, len(rows))):
            is_exact[row] = flags[row - start] != np.float32(0.0)


@Kernel
def decode(codes, row_bytes, positions, bits, first_col, target, row_stride, rows, num_cols):
    """Decode rows into a target; the arguments are those of ``fused_rows.decode``."""
    for index in range(len(positions)):
        start = positions[index] * row_bytes
        codebook_offset = start + row_bytes - 2 * (1 << bits)
        target_offset = rows[index] * row_stride
        for column in range(num_cols):
            code = code_at(codes, start, first_col + column, bits)
            put_element(target, target_offset + column, half_at(codes, codebook_offset + 2 * code))

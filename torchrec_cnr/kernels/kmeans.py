"""K-means of rows, compiled for CPUs: codes, lowest bits first, then a codebook of fp16 values in increasing order."""

import numpy as np
from numba import njit

from torchrec_cnr.kernels.clustering import best_means, sort
from torchrec_cnr.kernels.compiling import Kernel
from torchrec_cnr.kernels.lanes import every_lane, greater, halves, spread, to_half, where
from torchrec_cnr.kernels.llvm import LANES
from torchrec_cnr.kernels.memory import code_at, half_at, load, load_tile, put_element, put_words, store
from torchrec_cnr.kernels.packing import put_codes


@njit
def _are_few(ordered, num_values, num_clusters):
    """A mask of the rows that have no more different values than there are clusters."""
    zero, one = spread(0.0), spread(1.0)
    different = one
    for index in range(1, num_values):
        differs = load(ordered, index * LANES) > load(ordered, (index - 1) * LANES)
        different = different + where(differs, one, zero)
    return different <= spread(num_clusters)


@njit
def _write_different(ordered, num_values, num_clusters, lane, codebook):
    """Write the different values of a row into its codebook, the last one into what is left over."""
    at = lane
    codebook[at] = ordered[lane]
    for index in range(LANES + lane, num_values * LANES, LANES):
        if ordered[index] > ordered[index - LANES]:
            at += LANES
            codebook[at] = ordered[index]
    for rest in range(at + LANES, num_clusters * LANES, LANES):
        codebook[rest] = codebook[at]


@njit
def _rounded_is_right(codebook, num_clusters, low, high):
    """Round the codebook to fp16; a mask of rows of which no mean moved by more than half a step of even codes."""
    half, zero = spread(0.5), spread(0.0)
    limit = (high * half - low * half) / spread(num_clusters - 1)
    is_right = low == low
    for at in range(0, num_clusters * LANES, LANES):
        mean = load(codebook, at)
        held = to_half(mean)
        is_right = is_right & (greater(held - mean, mean - held) <= limit)
        store(codebook, at, held + zero)
    return is_right


@njit
def _code(tile, num_cols, num_clusters, codebook, middles):
    """Replace each value by the number of the nearest one in the codebook."""
    half, zero, one = spread(0.5), spread(0.0), spread(1.0)
    for at in range(0, (num_clusters - 1) * LANES, LANES):
        store(middles, at, (load(codebook, at) + load(codebook, at + LANES)) * half)
    for column in range(0, num_cols * LANES, LANES):
        x, code = load(tile, column), zero
        for at in range(0, (num_clusters - 1) * LANES, LANES):
            code = code + where(x > load(middles, at), one, zero)
        store(tile, column, code)


@njit
def _cluster(num_cols, num_clusters, scratch):
    """Write 16 rows' codebooks, and codes over their values; returns a mask of those that this can represent."""
    tile, ordered, codebook, flags = scratch.tile, scratch.ordered, scratch.codebook, scratch.flags
    zero, one = spread(0.0), spread(1.0)
    nothing = zero
    for column in range(0, num_cols * LANES, LANES):
        x = load(tile, column)
        store(ordered, column, x)
        nothing = nothing + (x - x)
    is_finite = nothing == zero
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
    """Encode rows of a table; see ``fused.encode``, but there is no plan, and ``scratch`` is a ``ClusterScratch``."""
    num_clusters = 1 << bits
    offsets, places, codebook, flags = scratch.offsets, scratch.places, scratch.codebook, scratch.flags
    zero, one = spread(0.0), spread(1.0)
    for first in range(0, len(rows), LANES):
        for lane in range(LANES):
            row = min(first + lane, len(rows) - 1)  # lanes without a row do the last one over again
            offsets[lane] = rows[row] * row_stride
            places[lane] = row * row_bytes
        load_tile(table, offsets, num_cols, scratch.tile)
        is_right = _cluster(num_cols, num_clusters, scratch)
        put_codes(scratch.tile, scratch.words, num_cols, bits, codes, places, one, zero, is_right)
        for index in range(0, num_clusters, 2):
            pair = load(codebook, index * LANES), load(codebook, (index + 1) * LANES)
            ends = halves(where(is_right, pair[0], zero), where(is_right, pair[1], zero))
            put_words(codes, places, row_bytes - 2 * (num_clusters - index), ends)
        store(flags, 0, where(is_right, zero, one))
        for row in range(first, min(first + LANES, len(rows))):
            is_exact[row] = flags[row - first] != np.float32(0.0)


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

"""Movement: how far apart the rows of a tensor are in two checkpoints, computed in bounded memory.

Distances are relative: |b - a| / |a|, with Euclidean norms in fp64. For the median, they are counted in bins, by the
first 20 bits of their fp32 values. The width of a bin is 1/2048 of its values, and 4 MiB of counters are enough for any
number of rows.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CUT_BITS = 12
_NUM_BINS = 1 << (31 - _CUT_BITS)  # distances have no sign
_FARTHEST = float(np.finfo(np.float32).max)  # greater distances count as this one
_BLOCK_ELEMENTS = 1 << 20  # of rows that are in memory as fp64 at the same time


@dataclass(frozen=True)
class Movement:
    """The distances that the differing rows of a tensor moved, relative to their norms in the first checkpoint.

    Attributes:
        num_measured: The number of rows that have a distance.
        mean: The mean of the distances; None if there are none.
        median: The median of the distances, with a relative error of at most 1/2048; None if there are none.
        max: The largest distance; None if there are none.
        num_from_zero: The number of rows whose norm was 0. They have no relative distance.
        num_not_finite: The number of rows with NaN or infinity in either checkpoint. They have no distance.
    """

    num_measured: int
    mean: float | None
    median: float | None
    max: float | None
    num_from_zero: int
    num_not_finite: int


class MovementMeter:
    """Computes the movement of rows, which are added block by block.

    Attributes:
        num_differing: The number of rows so far that differ.
    """

    def __init__(self) -> None:
        self.num_differing = 0
        self._counts = np.zeros(_NUM_BINS, dtype=np.int64)
        self._sum = 0.0
        self._min, self._max = math.inf, 0.0
        self._num_from_zero = self._num_not_finite = 0

    def add(self, before: Tensor, after: Tensor) -> None:
        """Add rows of both checkpoints, [n, ...] of the same dtype. Rows with the same bits are skipped."""
        before, after = _as_rows(before), _as_rows(after)
        block_rows = max(1, _BLOCK_ELEMENTS // max(1, before.shape[1]))
        for rows_before, rows_after in zip(before.split(block_rows), after.split(block_rows), strict=True):
            differs = (rows_before.view(torch.uint8) != rows_after.view(torch.uint8)).any(1)
            if bool(differs.any()):
                self.num_differing += int(differs.sum())
                self._add_differing(rows_before[differs].double(), rows_after[differs].double())

    def _add_differing(self, before: Tensor, after: Tensor) -> None:
        norms, distances = before.norm(dim=1), (after - before).norm(dim=1)
        is_finite = norms.isfinite() & distances.isfinite()
        is_zero = is_finite & (norms == 0)
        self._num_not_finite += int((~is_finite).sum())
        self._num_from_zero += int(is_zero.sum())
        relative = (distances / norms)[is_finite & ~is_zero].clamp(max=_FARTHEST).numpy()
        if len(relative):
            self._sum += float(relative.sum())
            self._min, self._max = min(self._min, float(relative.min())), max(self._max, float(relative.max()))
            bits = relative.astype(np.float32).view(np.uint32)
            self._counts += np.bincount(bits >> _CUT_BITS, minlength=_NUM_BINS)

    def movement(self) -> Movement:
        """Return the movement of the rows so far."""
        num_measured = int(self._counts.sum())
        unmeasured = self._num_from_zero, self._num_not_finite
        if num_measured == 0:
            return Movement(0, None, None, None, *unmeasured)
        return Movement(num_measured, self._sum / num_measured, self._median(num_measured), self._max, *unmeasured)

    def _median(self, num_measured: int) -> float:
        """Return the mean of the two middle distances, each rounded to the middle of its bin."""
        cumulative_counts = np.cumsum(self._counts)
        bins = np.searchsorted(cumulative_counts, [(num_measured - 1) // 2, num_measured // 2], side="right")
        middles = ((bins.astype(np.uint32) << _CUT_BITS) | (1 << (_CUT_BITS - 1))).view(np.float32)
        return min(max(float(middles.mean(dtype=np.float64)), self._min), self._max)


def _as_rows(values: Tensor) -> Tensor:
    """Return values as a contiguous tensor [n, num_cols]."""
    return values.reshape(len(values) if values.dim() else 1, math.prod(values.shape[1:])).contiguous()

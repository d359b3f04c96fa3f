"""Memory that kernels work in: a thread makes it and hands it to them, because compiled code allocates nothing."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchrec_cnr.kernels.llvm import LANES
from torchrec_cnr.kernels.plans import SearchPlan


class Scratch(NamedTuple):
    """What encoding 16 rows at a time needs.

    Attributes:
        offsets: int64 [16], where the rows begin in the table.
        places: int64 [16], where they begin in the codes.
        tile: float32 [16 * num_cols], the rows.
        shifted: float32 [16 * num_cols], the rows less their least values.
        sums: float32 [32], of these and of their squares.
        kept: float32 [48 * plan.kept], three times 16 for each range that goes on: error, scale and bias.
        words: int32 [256], up to 16 words of codes of each row.
        exact: float32 [16], not 0 for rows that codes cannot represent.
    """

    offsets: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    tile: npt.NDArray[np.float32]
    shifted: npt.NDArray[np.float32]
    sums: npt.NDArray[np.float32]
    kept: npt.NDArray[np.float32]
    words: npt.NDArray[np.int32]
    exact: npt.NDArray[np.float32]


def scratch_for(num_cols: int, plan: SearchPlan) -> Scratch:
    """Memory to encode rows of ``num_cols`` values in."""
    return Scratch(
        offsets=np.empty(LANES, np.int64),
        places=np.empty(LANES, np.int64),
        tile=aligned(LANES * num_cols),
        shifted=aligned(LANES * num_cols),
        sums=aligned(2 * LANES),
        kept=aligned(3 * LANES * plan.kept),
        words=aligned(LANES * LANES).view(np.int32),
        exact=aligned(LANES),
    )


def aligned(size: int) -> npt.NDArray[Any]:
    """float32 [size], on a boundary of lanes: loads that cross cache lines take twice as long."""
    memory = np.zeros(size + LANES, np.float32)
    skip = -(memory.ctypes.data // 4) % LANES
    return memory[skip : skip + size]

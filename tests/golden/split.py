"""Tables for ``write`` whose blobs are split, one of each scheme that does that, and one of a scheme that does not.

Codes cannot represent the first row of one table, so the block that it lies in is not split.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.quantization import (
    AdaptiveAsymmetric,
    Asymmetric,
    HalfPrecision,
    KMeans,
    LeastSquares,
    NoQuantization,
    Scheme,
    Symmetric,
)

PREFIX = "split."
NUM_ROWS, NUM_COLS = 96, 5
SPOILED = "split.asymmetric4"  # the table with a row that codes cannot represent
NEVER = "split.none"  # its rows are too wide to be tails, and have none
SCHEMES: Mapping[str, Scheme] = {
    NEVER: NoQuantization(),
    "split.half": HalfPrecision(torch.bfloat16),
    "split.symmetric3": Symmetric(3),
    "split.asymmetric8": Asymmetric(8),
    SPOILED: Asymmetric(4),
    "split.adaptive2": AdaptiveAsymmetric(2, LeastSquares((0.0,))),
    "split.entropy_coded3": Symmetric(3, entropy_coded=True),
    "split.entropy_coded4": Asymmetric(4, entropy_coded=True),
    "split.entropy_coded8": AdaptiveAsymmetric(8, LeastSquares((0.0,)), entropy_coded=True),
    "split.kmeans2": KMeans(2),
    "split.kmeans3": KMeans(3),
}
TABLES = tuple(SCHEMES)


def tables_of(step: int) -> dict[str, Tensor]:
    """Small values, and in step-1 one NaN."""
    numbers = (torch.arange(NUM_ROWS * NUM_COLS, dtype=torch.int64) * 73 + step * 29) % 127 - 63
    values = (numbers.double() / 512).float().reshape(NUM_ROWS, NUM_COLS)
    tables = {fqn: values.clone() for fqn in TABLES}
    if step == 1:
        tables[SPOILED][0, 3] = float("nan")
    return tables


def shards_of(step: int) -> Iterator[tuple[int, str, Box, list[int] | None]]:
    """Rank, FQN, place and stored rows of each shard."""
    for fqn in TABLES:
        yield 0, fqn, Box((0, 0), (NUM_ROWS, NUM_COLS)), None if step == 1 else list(range(step - 2, NUM_ROWS, step))

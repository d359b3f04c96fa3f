"""Tables of every quantization scheme, for ``write``: one of each dtype that is quantized.

In step-1 they are sharded so finely that each has two rows under every scheme. They have 11 columns, which fill no
whole number of bytes in 2, 3 or 4 bits. In two shards of three, codes cannot represent the second row.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.quantization import (
    AdaptiveAsymmetric,
    Asymmetric,
    GreedySearch,
    HalfPrecision,
    KMeans,
    LeastSquares,
    Scheme,
    Symmetric,
)

TABLES = {
    f"model.ebc.embedding_bags.{name}.weight": dtype
    for name, dtype in (("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16))
}
# Those that no other tensor has.
SCHEMES: Sequence[Scheme] = (
    HalfPrecision(torch.float16),
    HalfPrecision(torch.bfloat16),
    *(Symmetric(bits) for bits in (2, 3, 4, 8)),
    Asymmetric(3),
    AdaptiveAsymmetric(2, LeastSquares((0.0, 0.05, 0.00001), rounds=2, kept=3, polish=0)),
    AdaptiveAsymmetric(3, LeastSquares((0.0,))),
    AdaptiveAsymmetric(4, GreedySearch()),
    AdaptiveAsymmetric(8, GreedySearch(num_bins=200, ratio=0.16)),
    *(KMeans(bits) for bits in (2, 3, 4, 8)),
)
NUM_ROWS, NUM_COLS = 2 * len(SCHEMES), 11
CUT = 13  # between the two shards of step-2
SCHEME_OF: Mapping[tuple[int, str, tuple[int, ...]], Scheme] = {  # by step, FQN and offsets
    **{(1, fqn, (2 * number, 0)): scheme for fqn in TABLES for number, scheme in enumerate(SCHEMES)},
    **{(2, fqn, (0, 0)): KMeans(2) for fqn in TABLES},
    **{(2, fqn, (CUT, 0)): Asymmetric(3) for fqn in TABLES},
    **{(3, fqn, (0, 0)): AdaptiveAsymmetric(3, LeastSquares((0.0,))) for fqn in TABLES},
}


def tables_of(step: int) -> dict[str, Tensor]:
    """Values between -8 and 8, most of them near zero; some rows with NaN, infinity, or one value that is not fp16."""
    numbers = (torch.arange(NUM_ROWS * NUM_COLS, dtype=torch.int64) * 73 + step * 290) % 127 - 63
    cubes = (numbers.double() / 32).pow(3).reshape(NUM_ROWS, NUM_COLS)
    if step == 1:
        cubes[1::6, 4] = float("nan")
        cubes[3::6] = 0.1
        cubes[9, 0] = float("-inf")
    if step == 2:
        cubes[4, 10] = float("nan")
    return {fqn: cubes.to(dtype) for fqn, dtype in TABLES.items()}


def shards_of(step: int) -> Iterator[tuple[int, str, Box, list[int] | None]]:
    """Rank, FQN, place and stored rows of each shard."""
    for fqn in TABLES:
        if step == 1:
            for number in range(len(SCHEMES)):
                yield number % 2, fqn, Box((2 * number, 0), (2, NUM_COLS)), None
        elif step == 2:
            yield 0, fqn, Box((0, 0), (CUT, NUM_COLS)), [1, 4, 12]
            yield 1, fqn, Box((CUT, 0), (NUM_ROWS - CUT, NUM_COLS)), [0, 9]
        else:
            yield 0, fqn, Box((0, 0), (NUM_ROWS, NUM_COLS)), [0, 4, 20]

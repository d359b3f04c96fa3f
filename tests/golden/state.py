"""The state that ``write`` saves: values come from arithmetic on integers, so that they never change.

A random generator's numbers may change with its version.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.golden import mixed, split
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.quantization import Asymmetric, NoQuantization, Scheme

T0, T2, T4, T8 = (f"model.ebc.embedding_bags.t{bits}.weight" for bits in (0, 2, 4, 8))
TABLES = (T0, T2, T4, T8, *mixed.TABLES, *split.TABLES)
EXP_AVG, MOMENTUM = "optimizer.t0.exp_avg", "optimizer.t8.momentum1"
SCHEMES: Mapping[str, Scheme] = {
    T2: Asymmetric(2),
    T4: Asymmetric(4),
    T8: Asymmetric(8),
    "dense.kernel": Asymmetric(8),
    **split.SCHEMES,
}
EXACT = NoQuantization()
# Shards whose ranks decided otherwise, by step, FQN and offsets.
OTHER_SCHEMES: Mapping[tuple[int, str, tuple[int, ...]], Scheme] = {
    (1, T8, (0, 4)): Asymmetric(2),
    (2, T2, (4, 0)): EXACT,
    (2, T8, (5, 0)): Asymmetric(4),
    (3, T2, (0, 0)): Asymmetric(4),
    **mixed.SCHEME_OF,
}


def values_of(size: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values between -2 and 2 that every floating dtype holds exactly."""
    numbers = (torch.arange(int(np.prod(size)), dtype=torch.int64) * 73 + seed * 29) % 127 - 63
    return (numbers.double() / 32).to(dtype).reshape(size)


def scheme_of(step: int, fqn: str, box: Box) -> Scheme:
    """The scheme of one shard."""
    return OTHER_SCHEMES.get((step, fqn, box.offsets), SCHEMES.get(fqn, EXACT))


def dense_of(step: int) -> dict[str, Tensor]:
    """What is no table: stored whole by each checkpoint."""
    return {
        "dense.bias": values_of((3,), step, torch.float64),
        "dense.cube": values_of((2, 2, 3), step + 1, torch.float16),
        "dense.kernel": values_of((3, 3), step + 2, torch.float16),
        "dense.layers.0": values_of((2,), step + 3, torch.bfloat16),
        "dense.mask": torch.tensor([True, False, step == 1]),
        "dense.none": torch.zeros(0, 4),
        "step": torch.tensor(step * 1_000_000_007, dtype=torch.int64),
        "tiny.i8": torch.tensor([-128, 127, step], dtype=torch.int8),
        "tiny.i16": torch.tensor([-(2**15), step], dtype=torch.int16),
        "tiny.i32": torch.tensor([-(2**31), step], dtype=torch.int32),
        "tiny.u8": torch.tensor([255, step], dtype=torch.uint8),
    }


def objects_of(step: int) -> dict[str, Any]:
    """What is no tensor."""
    return {"epoch": step, "reader.state": {"files": ["day_0", "day_1"], "offset": 10 * step}}


def paths_of(fqns: Iterable[str]) -> dict[str, tuple[str | int, ...]]:
    """Where each item lies in a nested state dict: one level down, and a list of layers."""
    paths: dict[str, tuple[str | int, ...]] = {}
    for fqn in fqns:
        first, _, rest = fqn.partition(".")
        paths[fqn] = (first, rest) if rest else (first,)
    return paths | {"dense.layers.0": ("dense", "layers", 0)}

"""Tables of quantized checkpoints, and how close their values are."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Floats = npt.NDArray[np.float64]

BITS = [8, 4, 2]
# Half a unit in the last place of a value close to 1, which rounding to the dtype may add.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def bounds(values: Tensor, bits: int) -> Floats:
    """How far each element may be off: [num_rows, num_cols]."""
    rows = values.double().numpy()
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    num_steps = 2**bits - 1
    scale = (high - low) / num_steps
    of_scale = num_steps * _half_spacing(scale)
    per_row = (scale / 2 + of_scale + _half_spacing(low)) * (1 + 1e-3)
    return np.asarray(per_row + ROUNDING[values.dtype] * np.abs(rows) + 2.0**-25)


def _half_spacing(values: Floats) -> Floats:
    """Half the distance between neighbours of fp16 about these values."""
    return np.asarray(
        np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(values), 2.0**-14))) * 2.0**-10, 2.0**-24) / 2
    )


def assert_close(got: Tensor, saved: Tensor, bits: int) -> None:
    """Every element is within its bound, and the table is of the same dtype."""
    assert got.dtype is saved.dtype
    error = np.abs(got.double().numpy() - saved.double().numpy())
    excess = error - bounds(saved, bits)
    worst = np.unravel_index(excess.argmax(), excess.shape)
    assert excess[worst] <= 0, f"element {worst} of row {saved[worst[0]]}: off by {error[worst]}"


class Table(nn.Module):
    """One table of given values."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag.from_pretrained(values.clone(), freeze=False, mode="sum")

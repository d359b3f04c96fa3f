"""Rows as whole multiples of a step in an orthonormal basis, in operations of PyTorch, on any device.

All sums are of float64, which no setting of PyTorch computes with fewer bits, as it may do with fp32. A CPU sums in
fp32. So a component may get the other of two whole numbers if it is next to the middle between them.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_cnr.kernels.cpu.row_transform import MOST

_BLOCK_BYTES = 64 << 20  # of rows as float64; working memory is three times as much
_Floats = npt.NDArray[np.float64]


def transform_rows(
    table: Tensor, rows: Tensor, basis: _Floats, step: float, dead_zone: _Floats, most_value: float
) -> tuple[Tensor, Tensor]:
    """Transform rows of a table without waiting for its device; see ``kernels.transform_rows``."""
    num_rows, num_cols, device = len(rows), table.shape[1], table.device
    numbers = torch.empty(num_rows, num_cols, dtype=torch.int16, device=device)
    is_exact = torch.empty(num_rows, dtype=torch.bool, device=device)
    on_device, zones = _uploaded(basis, device) if len(basis) else None, _uploaded(dead_zone, device)
    most, block_rows = float(np.float32(most_value)), max(1, _BLOCK_BYTES // (8 * num_cols))
    for start in range(0, num_rows, block_rows):
        block = slice(start, start + block_rows)
        values = table.index_select(0, rows[block]).double()
        # The largest absolute value of a row is NaN if one of its values is. All comparisons with NaN are false.
        is_right = torch.linalg.vector_norm(values, float("inf"), dim=1) <= most
        steps = (values if on_device is None else values @ on_device.T).mul_(1 / step)
        steps.sub_(torch.copysign(zones, steps)).round_()
        is_right &= torch.linalg.vector_norm(steps, float("inf"), dim=1) <= MOST
        numbers[block] = steps.masked_fill_(~is_right[:, None], 0.0)
        torch.logical_not(is_right, out=is_exact[block])
    return numbers, is_exact


def _uploaded(array: _Floats, device: torch.device) -> Tensor:
    """Copy an array to a device. From pinned memory, the host does not wait for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

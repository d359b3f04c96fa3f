"""Choosing: the scheme of a shard, by a sample of the rows that are to be stored."""

import math

import torch
from torch import Tensor

from torchrec_cnr.quantization import NoQuantization, Quantization, Scheme, exact_row_bytes
from torchrec_cnr.storage.pack_writer import BLOCK_BYTES
from torchrec_cnr.tracking.modified_rows import RowMask

SAMPLE_ROWS = 512  # of a shard; the errors of different schemes on them differ by more than chance

_GOLDEN_RATIO = (5**0.5 - 1) / 2


def sampled_rows(values: Tensor, rows: RowMask | Tensor | None) -> Tensor:
    """Some of the rows that are to be stored, always the same ones.

    Args:
        values: [num_rows, ...], the shard.
        rows: Those to be stored, as a mask or as numbers, int64 [k] on the shard's device; None for all.

    Returns:
        [n, num_cols], n being ``SAMPLE_ROWS`` or less.
    """
    num_cols = math.prod(values.shape[1:])
    most = min(SAMPLE_ROWS, max(1, BLOCK_BYTES // max(1, num_cols * values.element_size())))
    numbers = _spread(len(rows) if isinstance(rows, Tensor) else len(values))
    if isinstance(rows, Tensor):
        numbers = rows.index_select(0, numbers[:most].to(rows.device))
    elif rows is not None:
        numbers = numbers[rows.mask[numbers.to(rows.mask.device)].cpu()]
        if len(numbers) < SAMPLE_ROWS // 8:  # a hundredth of a percent is stored, or less
            numbers = next(rows.blocks(SAMPLE_ROWS), numbers)
    found = values.index_select(0, numbers[:most].to(values.device))
    return found.reshape(len(found), num_cols)


def _spread(num_rows: int) -> Tensor:
    """Numbers of rows, all or many of them: multiples of the golden ratio have no period that rows could share."""
    if num_rows <= SAMPLE_ROWS:
        return torch.arange(num_rows)
    return ((torch.arange(64 * SAMPLE_ROWS, dtype=torch.float64) * _GOLDEN_RATIO).frac() * num_rows).long()


def chosen_scheme(rule: Quantization, sample: Tensor, num_restores: int) -> Scheme:
    """What a rule chooses, unless codes and exact rows take more room than values.

    Args:
        rule: Of the shard's tensor; supports its dtype.
        sample: [n, num_cols], some of the rows that are to be stored.
        num_restores: Restores that the state has been through.
    """
    scheme = rule.choose(lambda: sample, num_restores)
    num_cols, itemsize = sample.shape[1], sample.dtype.itemsize
    exact_share = len(scheme.encode(sample).exact) / max(1, len(sample))
    row_bytes = scheme.row_bytes(num_cols, sample.dtype) + exact_share * exact_row_bytes(num_cols, itemsize)
    return scheme if row_bytes < num_cols * itemsize else NoQuantization()

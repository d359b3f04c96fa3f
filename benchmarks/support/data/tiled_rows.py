"""Large tables of trained rows: the rows that a model has trained on clicks, repeated, with a little noise."""

from functools import cache

import torch
from torch import Tensor

from benchmarks.runners.quantization.transforms import trained_tables
from benchmarks.support.data.click_model import Head
from benchmarks.support.data.clicks import BATCH_CLICKS, read_clicks
from benchmarks.support.jobs.policy_runs import RunTable

NUM_CLICKS, NUM_QUICK_CLICKS = 300 * BATCH_CLICKS, 12 * BATCH_CLICKS
NOISE = 1e-3  # its norm, of that of the row


def trained_table(head: Head, name: str, is_quick: bool) -> RunTable:
    """Train a model, and return the rows of a table that it has modified; ``name`` is ``readers`` or ``articles``."""
    return next(table for table in _trained(head, is_quick) if table.name == name)


@cache
def _trained(head: Head, is_quick: bool) -> list[RunTable]:
    return trained_tables(read_clicks(NUM_QUICK_CLICKS if is_quick else NUM_CLICKS), head)


def tiled(rows: Tensor, num_rows: int) -> Tensor:
    """Repeat rows until there are enough, each time with other noise, so that no two rows are equal.

    Args:
        rows: float32 [n, num_cols].
        num_rows: Number of rows to return.

    Returns:
        float32 [num_rows, num_cols].
    """
    generator = torch.Generator().manual_seed(0)
    table = torch.empty(num_rows, rows.shape[1])
    scales = NOISE * rows.norm(dim=1, keepdim=True) / rows.shape[1] ** 0.5
    for part in table.split(len(rows)):  # in parts, because a copy of the noise of all rows takes as much memory again
        part.normal_(generator=generator).mul_(scales[: len(part)]).add_(rows[: len(part)])
    return table

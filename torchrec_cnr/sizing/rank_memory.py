"""The memory of a rank for the tracker and for saves, beyond the model itself. Ranks share the rows evenly."""

from dataclasses import dataclass

import torch

from torchrec_cnr.policies import separates_heat
from torchrec_cnr.saving.staged_values import SLACK, has_kernel
from torchrec_cnr.saving.staging import STAGING_BYTES
from torchrec_cnr.sizing.inputs import DTYPE, Sizing
from torchrec_cnr.storage.pack_writer import BLOCK_BYTES, BUFFER_BYTES, PACK_BYTES
from torchrec_cnr.tracking.modified_rows import MAX_HEAT, RowBits

_THREAD_COUNT = 2  # a manager's default
_NUMBER_BYTES = 8  # of a row number in memory
# Masks of the modified rows that a save without staging holds, of one byte per row: a mask and its digest; or the
# masks of all heats, their union, and the rows with the heat that is being compared.
_NUM_MASKS = 2
_NUM_MASKS_BY_HEAT = MAX_HEAT + 1 + 2


@dataclass(frozen=True)
class RankMemory:
    """The bytes of memory of one rank. Those of the tracker are on the device of the tables, the others on the host.

    Attributes:
        tracker_row_bytes: The bytes of the tracker per row.
        tracker: The bytes of the tracker.
        staging_baseline: The bytes that an asynchronous save of a baseline stages.
        staging_delta: The bytes that an asynchronous save of the largest delta stages, with row numbers.
        staging_limit: The default of ``staging_bytes``, which limits what is staged. Training waits until the rest is
            written.
        save_buffers: The bytes of the buffers in which any save encodes and writes.
        peak_save: The highest use of a save that training waits for.
        peak_async_save: The highest use of an asynchronous save.
    """

    tracker_row_bytes: float
    tracker: int
    staging_baseline: int
    staging_delta: int
    staging_limit: int
    save_buffers: int
    peak_save: int
    peak_async_save: int


def rank_memory(sizing: Sizing, largest_share: float) -> RankMemory:
    """Return the memory of one rank.

    Args:
        sizing: The model.
        largest_share: The share of the rows that the largest delta contains; 0 if there are no deltas.
    """
    has_heat = separates_heat(sizing.policy)
    row_bytes = _tracker_row_bytes(sizing.is_on_gpu, has_heat)
    staged_bytes = _staged_bytes(sizing)
    baseline = _buffer_bytes(staged_bytes)
    num_modified = largest_share * sizing.rank_rows
    # On a GPU, the numbers are in the staging buffer, too.
    delta = (
        _buffer_bytes(largest_share * staged_bytes) + (SLACK if sizing.is_on_gpu else 1) * _NUMBER_BYTES * num_modified
    )
    buffers = BUFFER_BYTES + _THREAD_COUNT * PACK_BYTES + 2 * BLOCK_BYTES
    num_masks = 0 if largest_share == 0 else _NUM_MASKS_BY_HEAT if has_heat else _NUM_MASKS
    return RankMemory(
        tracker_row_bytes=row_bytes,
        tracker=round(row_bytes * sizing.rank_rows),
        staging_baseline=round(baseline),
        staging_delta=round(delta),
        staging_limit=STAGING_BYTES,
        save_buffers=buffers,
        peak_save=buffers + num_masks * sizing.rank_rows,
        peak_async_save=buffers + round(max(baseline, delta)),
    )


def _tracker_row_bytes(is_on_gpu: bool, has_heat: bool) -> float:
    """Return the bytes per row of ``ModifiedRows``: the marks, two sets, and the heat if the policy uses it."""
    num_rows = 64  # a set on the host has words of 64 rows
    rows = RowBits.none_of(num_rows, torch.device("meta" if is_on_gpu else "cpu"))
    return torch.bool.itemsize + 2 * rows.held.nbytes / num_rows + has_heat * torch.int8.itemsize


def _staged_bytes(sizing: Sizing) -> float:
    """Return the bytes that a save of all rows of a rank stages: values, or codes if the tables are on a GPU."""
    state_bytes = 0 if sizing.state is None else DTYPE.itemsize
    num_bytes = 0
    for table in sizing.tables:
        scheme = sizing.scheme_of(table)
        is_coded = sizing.is_on_gpu and has_kernel(scheme) and table.row_bytes is None  # GPUs have no transforms
        row_bytes = scheme.row_bytes(table.num_cols, DTYPE) if is_coded else table.num_cols * DTYPE.itemsize
        num_bytes += table.num_rows * (row_bytes + state_bytes)
    return num_bytes / sizing.num_ranks


def _buffer_bytes(num_bytes: float) -> float:
    """Return the size of the staging buffer for this many bytes of rows."""
    return SLACK * min(num_bytes, STAGING_BYTES)

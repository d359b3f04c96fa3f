"""Marks of the rows that lookups read on GPUs, in Triton: one launch for all tables of a kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_IDS = tl.constexpr(1024)  # ids that a program reads at a time
_MAX_PROGRAMS = 64  # for each feature


@triton.jit(do_not_specialize=["num_bags"], do_not_specialize_on_alignment=["ids", "first_ids"])
def _mark(ids, first_ids, num_bags, first_rows, end_rows, marked):
    """Mark the rows of one feature's ids; ids that are no row of its table are left out.

    Args:
        ids: int [num_ids], the ids of all features, one feature after another.
        first_ids: int, where the ids of bags begin; ``num_bags`` of them for each feature, and one more.
        num_bags: Bags of each feature.
        first_rows: int64 [num_features], where the marks of each feature's table begin.
        end_rows: int64 [num_features], where they end.
        marked: The marks, uint8, written.
    """
    feature = tl.program_id(0).to(tl.int64)
    start = tl.load(first_ids + feature * num_bags).to(tl.int64)
    stop = tl.load(first_ids + (feature + 1) * num_bags).to(tl.int64)
    first_row, end_row = tl.load(first_rows + feature), tl.load(end_rows + feature)
    for first in range(start + tl.program_id(1) * _BLOCK_IDS, stop, tl.num_programs(1) * _BLOCK_IDS):
        positions = first + tl.arange(0, _BLOCK_IDS)
        row_ids = tl.load(ids + positions, mask=positions < stop, other=-1).to(tl.int64)
        rows = first_row + row_ids
        tl.store(marked + rows, 1, mask=(row_ids >= 0) & (rows < end_row))


def mark_rows(
    ids: Tensor, first_ids: Tensor, num_bags: int, first_rows: Tensor, end_rows: Tensor, marked: Tensor
) -> None:
    """Mark the rows of all features, without waiting for the device.

    Args:
        ids: int [num_ids], the ids of all features, one feature after another.
        first_ids: int [num_features * num_bags + 1], where the ids of each bag begin, and where the last ones end.
        num_bags: Bags of each feature.
        first_rows: int64 [num_features], where the marks of each feature's table begin.
        end_rows: int64 [num_features], where they end.
        marked: bool [num_rows], the marks of all tables, written.
    """
    num_features = len(first_rows)
    if len(ids) == 0 or num_features == 0:
        return
    num_programs = min(_MAX_PROGRAMS, triton.cdiv(len(ids), num_features * _BLOCK_IDS.value))
    with torch.cuda.device_of(ids):
        _mark[(num_features, num_programs)](
            ids, first_ids, num_bags, first_rows, end_rows, marked.view(torch.uint8), num_warps=4
        )

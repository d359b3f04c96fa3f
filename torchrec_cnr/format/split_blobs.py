"""Tails: what rows have behind their codes, such as scale and bias, as byte planes in a frame.

Scales of one table are alike, and so is its optimizer state: their upper bytes tell little. A blob whose rows have
tails is *split*: first the heads of all rows, then one frame of their tails. Why codes are not packed, and how much is
saved, is in docs/design/006-split-blobs.md.

A blob is split only where that makes it smaller, and holds no exact rows then. So its size tells whether it is. Rows
that are all alike, such as state of a table before its first step, stay as they are: what is a thousandth of its rows
would let a small file ask for any amount of memory.
"""

import numpy as np
import numpy.typing as npt

from torchrec_cnr.format.row_sets import MAX_CODED_ROWS
from torchrec_cnr.format.zstd_frames import compressed, decompressed

Bytes = npt.NDArray[np.uint8]

_MAX_RATIO = 64  # of rows and a blob: a reader makes room by what manifests say, and no more than a file warrants


def split(rows: Bytes, tail_bytes: int) -> Bytes | None:
    """A blob of rows, split; None if that is not smaller.

    Args:
        rows: uint8 [n, row_bytes].
        tail_bytes: Of each row; 0 for none.
    """
    if not tail_bytes or not len(rows):
        return None
    num_rows, head_bytes = len(rows), rows.shape[1] - tail_bytes
    planes = [column.tobytes() for column in rows[:, head_bytes:].T]
    frame = np.frombuffer(compressed(*planes), dtype=np.uint8)
    if not may_be_split(num_rows * head_bytes + len(frame), num_rows, rows.shape[1], tail_bytes):
        return None
    data = np.empty(num_rows * head_bytes + len(frame), dtype=np.uint8)
    data[: num_rows * head_bytes].reshape(num_rows, head_bytes)[:] = rows[:, :head_bytes]
    data[num_rows * head_bytes :] = frame
    return data


def join(data: Bytes, num_rows: int, row_bytes: int, tail_bytes: int, where: str) -> Bytes:
    """The rows of a blob, whether it is split or not, and what lies behind them.

    Args:
        data: The blob.
        num_rows: How many rows are in it; of a split one, what manifests allow.
        row_bytes: Of each, with its tail.
        tail_bytes: Of each.
        where: Names the blob in errors.

    Returns:
        uint8 [num_rows * row_bytes + ...].

    Raises:
        DamagedError: The tails of a split blob are not one frame of so many.
    """
    if len(data) >= num_rows * row_bytes:
        return data
    head_bytes = row_bytes - tail_bytes
    rows = np.empty((num_rows, row_bytes), dtype=np.uint8)
    rows[:, :head_bytes] = data[: num_rows * head_bytes].reshape(num_rows, head_bytes)
    frame = data[num_rows * head_bytes :].data
    planes = decompressed(frame, num_rows * tail_bytes, f"{where}: tails")
    rows[:, head_bytes:] = np.frombuffer(planes, dtype=np.uint8).reshape(tail_bytes, num_rows).T
    return rows.reshape(-1)


def may_be_split(num_bytes: int, num_rows: int, row_bytes: int, tail_bytes: int) -> bool:
    """Whether a blob of this size is one of so many rows, split."""
    most = num_rows * row_bytes
    is_between = most - num_rows * tail_bytes < num_bytes < most
    return is_between and num_bytes * _MAX_RATIO >= most and num_rows <= MAX_CODED_ROWS

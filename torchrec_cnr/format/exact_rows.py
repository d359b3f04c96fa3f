"""Exact rows: those that codes cannot represent. Their positions and values are stored after the codes of a blob."""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

_POSITION = np.dtype("<u4")


def exact_row_bytes(num_cols: int, itemsize: int) -> int:
    """Return the bytes of one exact row: its position in the block and its values."""
    return _POSITION.itemsize + num_cols * itemsize


def with_exact_rows(codes: Bytes, positions: Positions, values: Bytes) -> Bytes:
    """Return the bytes of a blob.

    Args:
        codes: Codes of all rows, in order, of any shape.
        positions: int64 [k], increasing: rows of the block that the codes do not represent.
        values: Values of these rows, as bytes of any shape.
    """
    return np.concatenate((codes.reshape(-1), positions.astype(_POSITION).view(np.uint8), values.reshape(-1)))


def exact_rows(data: Bytes, num_cols: int, itemsize: int) -> tuple[Positions, Bytes]:
    """Return positions, int64 [k], and values, uint8 [k, num_cols * itemsize], unchecked.

    Args:
        data: What a blob has after its codes.
        num_cols: Values in a row.
        itemsize: Bytes of a value.
    """
    num_exact = len(data) // exact_row_bytes(num_cols, itemsize)
    num_bytes = num_exact * _POSITION.itemsize
    positions = data[:num_bytes].copy().view(_POSITION).astype(np.int64)
    return positions, data[num_bytes:].reshape(num_exact, num_cols * itemsize)

"""The bytes of a blob of transformed rows: its numbers, entropy-coded in strips of rows, and then its exact rows.

A strip has up to 4,096 rows and can be decoded by itself, so that several threads share the work. The blob begins with
the number of words and the four states of each strip. The words of all strips follow, and then the exact rows as in any
other blob. docs/reference/format.md specifies each byte.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.kernels import cpu
from torchrec_cnr.kernels.cpu import Numbers
from torchrec_cnr.kernels.cpu.compiling import in_parallel
from torchrec_cnr.kernels.cpu.symbol_coder import NUM_STATES, most_words
from torchrec_cnr.quantization.row_transform import RowTransform
from torchrec_cnr.quantization.symbol_tables import symbol_tables

STRIP_ROWS = 4096
MAX_VALUES = 1 << 24  # of a packed blob; bounds the memory that a small file can demand
_STRIP = np.dtype([("num_words", "<u4"), ("states", "<u4", (NUM_STATES,))])


def num_strips(num_rows: int) -> int:
    """Return the number of strips of a blob."""
    return -(-num_rows // STRIP_ROWS)


def least_bytes(num_rows: int) -> int:
    """Return the bytes of the smallest blob of this many rows, without exact ones."""
    return num_strips(num_rows) * _STRIP.itemsize


def most_bytes(num_rows: int, num_cols: int) -> int:
    """Return the bytes of the largest blob of this many rows, without exact ones."""
    return least_bytes(num_rows) + 2 * most_words(num_rows, num_cols)


def fits_packed_rows(num_bytes: int, num_rows: int, num_cols: int) -> bool:
    """Return whether a blob of this size, without exact rows, may be of this many packed rows."""
    is_bounded = num_cols > 0 and num_rows * num_cols <= MAX_VALUES
    is_between = is_bounded and least_bytes(num_rows) <= num_bytes <= most_bytes(num_rows, num_cols)
    return is_between and num_bytes % 2 == 0


def pack_rows(numbers: Numbers, transform: RowTransform) -> npt.NDArray[np.uint8]:
    """Return the bytes of rows of numbers, int16 [n, num_cols], without exact rows."""
    return pack_strips(len(numbers), lambda start, stop: numbers[start:stop], transform)


def pack_strips(
    num_rows: int, numbers_of: Callable[[int, int], Numbers], transform: RowTransform
) -> npt.NDArray[np.uint8]:
    """Return the bytes of rows whose numbers are computed strip by strip, without exact rows.

    Args:
        num_rows: Number of rows.
        numbers_of: Returns the numbers of the rows from one position to another, int16 [stop - start, num_cols]. It is
            called in the thread that encodes these, so that they are still in the cache of its core.
        transform: The transform that made the numbers.
    """
    bounds = _bounds(num_rows)
    strips = np.empty(len(bounds), _STRIP)
    words: list[npt.NDArray[np.uint16]] = [np.empty(0, np.uint16)] * len(bounds)

    def encode(first: int, stop: int) -> None:
        for strip in range(first, stop):
            states, words[strip] = cpu.encode_numbers(
                numbers_of(*bounds[strip]),
                transform.first_class,
                transform.choices,
                transform.class_tables,
                symbol_tables(),
            )
            strips[strip] = len(words[strip]), states

    in_parallel(encode, len(bounds), chunk_rows=1)
    return np.concatenate([strips.view(np.uint8), *(each.astype("<u2", copy=False).view(np.uint8) for each in words)])


def unpack_rows(
    data: npt.NDArray[np.uint8],
    num_rows: int,
    exact_bytes: int,
    transform: RowTransform,
    where: str,
    wanted: npt.NDArray[np.int64] | None = None,
) -> tuple[Numbers, npt.NDArray[np.uint8]]:
    """Return the numbers of a blob, int16 [num_rows, num_cols], and the bytes of its exact rows.

    Args:
        data: The bytes of the blob.
        num_rows: Number of rows; the manifest parser has checked that they have at most ``MAX_VALUES`` values.
        exact_bytes: The bytes of its exact rows, by the manifest.
        transform: The transform of its shard.
        where: The name of the blob, for errors.
        wanted: The positions of the wanted rows. Strips without them are not decoded, and their numbers are undefined.
            None for all rows.

    Raises:
        DamagedError: The bytes are not rows that this transform packs, and so many bytes after them.
    """
    bounds = _bounds(num_rows)
    head_bytes = least_bytes(num_rows)
    strips = data[:head_bytes].view(_STRIP) if len(data) >= head_bytes else np.empty(0, _STRIP)
    ends = head_bytes + 2 * np.cumsum([0, *strips["num_words"].tolist()])
    if len(strips) != len(bounds) or ends[-1] + exact_bytes != len(data):
        raise DamagedError(
            f"{where}: corrupt: {ends[-1]} bytes of words and {exact_bytes} of exact rows expected, got {len(data)}; "
            "use another checkpoint"
        )
    numbers = np.empty((num_rows, transform.num_cols), np.int16)
    chosen = range(len(bounds)) if wanted is None else np.unique(wanted // STRIP_ROWS).tolist()
    are_right = np.zeros(len(chosen), np.bool_)

    def decode(first: int, stop: int) -> None:
        for index, strip in enumerate(chosen[first:stop], first):
            start, end = bounds[strip]
            words = data[ends[strip] : ends[strip + 1]].copy().view("<u2").astype(np.uint16, copy=False)
            are_right[index] = cpu.decode_numbers(
                words,
                strips["states"][strip],
                transform.choices,
                transform.class_tables,
                symbol_tables(),
                numbers[start:end],
            )

    in_parallel(decode, len(chosen), chunk_rows=1)
    if not are_right.all():
        raise DamagedError(f"{where}: corrupt: its words are not those of {num_rows} rows; use another checkpoint")
    return numbers, data[ends[-1] :]


def unpack_bytes(
    data: npt.NDArray[np.uint8],
    num_rows: int,
    exact_bytes: int,
    transform: RowTransform,
    where: str,
    wanted: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.uint8]:
    """Return the numbers of a blob as bytes, and after them its exact rows; see :func:`unpack_rows`."""
    numbers, rest = unpack_rows(data, num_rows, exact_bytes, transform, where, wanted)
    flat = numbers.reshape(-1).view(np.uint8)
    return np.concatenate((flat, rest)) if len(rest) else flat


def _bounds(num_rows: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, num_rows, STRIP_ROWS), num_rows])) if num_rows else []

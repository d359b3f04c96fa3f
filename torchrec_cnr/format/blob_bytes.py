"""The bytes of a blob: rows of codes, whose tails may be split off and compressed, and exact rows.

The tail of a row is the bytes after its codes, such as scale and bias. The scales of one table are similar, and so is
its optimizer state, so their upper bytes contain little information. Tails are therefore compressed as byte planes (all
first bytes, then all second bytes, and so on). Each plane has its own entropy code, and all are in one Zstandard frame
that states its size. docs/design/006-split-blobs.md tells how much this saves. All of a row is its tail if its codes
are to be compressed as well: see docs/design/014-entropy-coded-codes.md.

A blob is split only if that makes it smaller. A split blob has no exact rows, so the size of a blob shows whether it is
split. Rows that are all equal, such as optimizer state before the first step, are not split: they would shrink to a
thousandth, and if readers accepted such ratios, a small file could demand any amount of memory.
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import zstandard

from torchrec_cnr.errors import DamagedError

_LEVEL = 1
_PIECE_BYTES = 1 << 10
_MAX_WHOLE_BYTES = 16 << 20  # frames with more content are decompressed in pieces
_STREAM_BYTES = 256  # compressed bytes per piece of such a frame: four of them can expand to 128 KiB
_MAX_WINDOW_BYTES = 8 << 20  # of a frame with more content: the window that RFC 8878 recommends all readers to support


def compressed(*planes: bytes) -> bytes:
    """Compress planes, one after the other, into one frame."""
    num_bytes = sum(map(len, planes))
    frame = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compressobj(size=num_bytes)
    parts = []
    for plane in planes[:-1]:
        parts += [frame.compress(plane), frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join((*parts, frame.compress(planes[-1]), frame.flush()))


def decompressed(data: bytes | memoryview, num_bytes: int, what: str, max_window_bytes: float = math.inf) -> bytes:
    """Decompress a frame, after checking its size, before memory is allocated.

    Args:
        data: One frame.
        num_bytes: The expected size of the result.
        what: The content and its place, for errors.
        max_window_bytes: The largest window that the frame may need.

    Raises:
        DamagedError: ``data`` is not a frame, or its content is not as large as expected or as it states.
    """
    try:
        declared = zstandard.frame_content_size(data)
        if declared != num_bytes:
            raise DamagedError(f"{what} decompress to {declared} bytes, expected {num_bytes}; use another checkpoint")
        if zstandard.get_frame_parameters(data).window_size > max_window_bytes:
            raise zstandard.ZstdError(f"a frame that needs a window of more than {max_window_bytes} bytes")
        if num_bytes:
            return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        frame = zstandard.ZstdDecompressor().decompressobj()  # decompress() above does not check an empty frame
        content = any(
            frame.decompress(data[start : start + _PIECE_BYTES]) for start in range(0, len(data), _PIECE_BYTES)
        )
        if content or not frame.eof or frame.unused_data or data[:4] != zstandard.FRAME_HEADER:
            raise zstandard.ZstdError("not exactly one empty frame")
        return b""
    except zstandard.ZstdError as error:
        raise DamagedError(f"{what} do not decompress ({error}); use another checkpoint") from error


class Unpacked:
    """A compressed frame whose content can be read in pieces, several times, in bounded memory.

    Thus the content can be checked before memory is allocated for the result: a frame of a few KB may contain 128 MiB.

    Args:
        data: One frame.
        num_bytes: The expected size of the content.
        what: The content and its place, for errors.

    Raises:
        DamagedError: As for :func:`decompressed`, here or when the pieces are read.
    """

    def __init__(self, data: bytes | memoryview, num_bytes: int, what: str) -> None:
        self._data = data
        self._num_bytes = num_bytes
        self._what = what
        self._whole = decompressed(data, num_bytes, what) if num_bytes <= _MAX_WHOLE_BYTES else None

    def pieces(self, most_bytes: int) -> Iterator[tuple[int, "Bytes"]]:
        """Yield pieces of at most ``most_bytes`` bytes, in order, each with the position of its first byte."""
        position = 0
        for chunk in (self._whole,) if self._whole is not None else self._streamed():
            array = np.frombuffer(chunk, dtype=np.uint8)
            for start in range(0, len(array), most_bytes):
                piece = array[start : start + most_bytes]
                yield position, piece
                position += len(piece)

    def _streamed(self) -> Iterator[bytes]:
        num_left = self._num_bytes
        try:
            if (declared := zstandard.frame_content_size(self._data)) != self._num_bytes:
                raise zstandard.ZstdError(f"{declared} bytes, expected {self._num_bytes}")
            frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
            for start in range(0, len(self._data), _STREAM_BYTES):
                chunk = frame.decompress(self._data[start : start + _STREAM_BYTES])
                num_left -= len(chunk)
                yield chunk
                if frame.eof and (frame.unused_data or start + _STREAM_BYTES < len(self._data)):
                    raise zstandard.ZstdError("bytes after the frame")
            if num_left or not frame.eof:
                raise zstandard.ZstdError("not one complete frame")
        except zstandard.ZstdError as error:
            raise DamagedError(f"{self._what} do not decompress ({error}); use another checkpoint") from error


MAX_CODED_ROWS = 1 << 24  # per block; writers limit blocks by bytes, to far fewer rows


Bytes = npt.NDArray[np.uint8]

_MAX_RATIO = 64  # most bytes of rows per byte of a split blob; bounds the memory that a small file can demand
_MIN_SAVED = 128  # a split must save at least 1/128 of the tails; a blob that is only a bit short is a truncated one
_MIN_FRAME = 10  # bytes of the smallest frame with content
# In a longer tail, all bytes but the last, scale and bias, are codes. In a block of few rows these share an entropy
# code: codes of their own would take more bytes than they save.
_MAX_SHORT_TAIL, _NUM_LAST, _MIN_ROWS = 16, 4, 2048


def split(codes: Bytes, tail_bytes: int) -> Bytes | None:
    """Return the bytes of rows as a split blob, or None if that is not smaller.

    Args:
        codes: The encoded rows, uint8 [n, row_bytes].
        tail_bytes: Bytes of each row's tail; 0 if rows have none.
    """
    if not tail_bytes or not len(codes):
        return None
    num_rows, head_bytes = len(codes), codes.shape[1] - tail_bytes
    num_joined = tail_bytes - _NUM_LAST if tail_bytes > _MAX_SHORT_TAIL and num_rows < _MIN_ROWS else 0
    joined = [codes[:, head_bytes : head_bytes + num_joined].T.tobytes()] if num_joined else []
    planes = joined + [column.tobytes() for column in codes[:, head_bytes + num_joined :].T]
    frame = np.frombuffer(compressed(*planes), dtype=np.uint8)
    if not may_be_split(num_rows * head_bytes + len(frame), num_rows, codes.shape[1], tail_bytes):
        return None
    data = np.empty(num_rows * head_bytes + len(frame), dtype=np.uint8)
    data[: num_rows * head_bytes].reshape(num_rows, head_bytes)[:] = codes[:, :head_bytes]
    data[num_rows * head_bytes :] = frame
    return data


def join(data: Bytes, num_rows: int, row_bytes: int, tail_bytes: int, where: str) -> Bytes:
    """Return the rows of a blob, split or not, and the bytes after them.

    Args:
        data: The bytes of the blob.
        num_rows: Number of rows. For a split blob, the manifest parser must have checked it with ``may_be_split``.
        row_bytes: Bytes of each row, with its tail.
        tail_bytes: Bytes of each row's tail.
        where: The name of the blob, for errors.

    Returns:
        uint8 [num_rows * row_bytes + ...].

    Raises:
        DamagedError: The tails of a split blob are not one frame of the expected size.
    """
    if len(data) >= num_rows * row_bytes:
        return data
    head_bytes = row_bytes - tail_bytes
    rows = np.empty((num_rows, row_bytes), dtype=np.uint8)
    rows[:, :head_bytes] = data[: num_rows * head_bytes].reshape(num_rows, head_bytes)
    frame = data[num_rows * head_bytes :].data
    num_bytes = num_rows * tail_bytes
    max_window_bytes = _MAX_WINDOW_BYTES if num_bytes > _MAX_WHOLE_BYTES else math.inf
    planes = decompressed(frame, num_bytes, f"{where}: tails", max_window_bytes)
    rows[:, head_bytes:] = np.frombuffer(planes, dtype=np.uint8).reshape(tail_bytes, num_rows).T
    return rows.reshape(-1)


def may_be_split(num_bytes: int, num_rows: int, row_bytes: int, tail_bytes: int) -> bool:
    """Return whether a blob of this size may be a split blob of ``num_rows`` rows."""
    most, tails = num_rows * row_bytes, num_rows * tail_bytes
    is_between = most - tails + _MIN_FRAME <= num_bytes <= most - -(-tails // _MIN_SAVED)
    return is_between and num_bytes * _MAX_RATIO >= most and num_rows <= MAX_CODED_ROWS


Positions = npt.NDArray[np.int64]

_POSITION = np.dtype("<u4")


def exact_row_bytes(num_cols: int, itemsize: int) -> int:
    """Return the bytes of one exact row: its position in the block and its values."""
    return _POSITION.itemsize + num_cols * itemsize


def with_exact_rows(codes: Bytes, positions: Positions, values: Bytes) -> Bytes:
    """Return the bytes of a blob.

    Args:
        codes: Codes of all rows, in order, uint8 of any shape.
        positions: The positions of the exact rows in the block, int64 [k], increasing.
        values: Values of the exact rows, uint8 of any shape.
    """
    return np.concatenate((codes.reshape(-1), positions.astype(_POSITION).view(np.uint8), values.reshape(-1)))


def exact_rows(data: Bytes, num_cols: int, itemsize: int) -> tuple[Positions, Bytes]:
    """Return the positions, int64 [k], and the values, uint8 [k, num_cols * itemsize], of the exact rows, unchecked.

    Args:
        data: The bytes of a blob after its codes.
        num_cols: Values per row.
        itemsize: Bytes per value.
    """
    num_exact = len(data) // exact_row_bytes(num_cols, itemsize)
    num_bytes = num_exact * _POSITION.itemsize
    positions = data[:num_bytes].copy().view(_POSITION).astype(np.int64)
    return positions, data[num_bytes:].reshape(num_exact, num_cols * itemsize)

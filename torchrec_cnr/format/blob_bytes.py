"""The bytes of a blob: rows of codes, whose tails may be split off and compressed, and the rows that codes cannot hold.

A row's tail is what follows its codes, such as scale and bias. Scales of one table are alike, and so is its optimizer
state: their upper bytes tell little. So tails are compressed as byte planes (all first bytes, then all second bytes,
and so on), each plane with a code of its own, in one Zstandard frame that states its size. Why codes are not
compressed, and how much is saved, is in docs/design/006-split-blobs.md.

A blob is split only where that makes it smaller, and then holds no exact rows, so its size tells whether it is. Rows
that are all alike, such as state of a table before its first step, are not split: a thousandth of their size would let
a small file ask for any amount of memory.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import zstandard

from torchrec_cnr.errors import DamagedError

_LEVEL = 1
_PIECE_BYTES = 1 << 10
_MAX_WHOLE_BYTES = 16 << 20  # that a frame is unpacked to at once; larger ones are gone through in pieces
_STREAM_BYTES = 256  # of such a frame at a time: four bytes can stand for 128 KiB
_MAX_WINDOW_BYTES = 8 << 20  # of such a frame: what RFC 8878 wants every reader to take


def compressed(*planes: bytes) -> bytes:
    """One frame of planes, one behind the other."""
    num_bytes = sum(map(len, planes))
    frame = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compressobj(size=num_bytes)
    parts = []
    for plane in planes[:-1]:
        parts += [frame.compress(plane), frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join((*parts, frame.compress(planes[-1]), frame.flush()))


def decompressed(data: bytes | memoryview, num_bytes: int, what: str) -> bytes:
    """The bytes of a frame, whose size is checked before anything is allocated.

    Args:
        data: One frame.
        num_bytes: The size expected.
        what: Names what is packed, and where, in errors.

    Raises:
        DamagedError: It is no frame, or has another size than expected, or than it states.
    """
    try:
        declared = zstandard.frame_content_size(data)
        if declared != num_bytes:
            raise DamagedError(f"{what} unpack to {declared} bytes, expected {num_bytes}; use another checkpoint")
        if num_bytes:
            return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        frame = zstandard.ZstdDecompressor().decompressobj()  # the above does not look at a frame of nothing
        content = any(
            frame.decompress(data[start : start + _PIECE_BYTES]) for start in range(0, len(data), _PIECE_BYTES)
        )
        if content or not frame.eof or frame.unused_data:
            raise zstandard.ZstdError("not one frame of nothing")
        return b""
    except zstandard.ZstdError as error:
        raise DamagedError(f"{what} do not decompress ({error}); use another checkpoint") from error


class Unpacked:
    """The bytes of a frame, in pieces, as often as they are gone through; never more of them in memory than a bound.

    So what is made of them can be checked before room is made for it: a frame of a few KB can be one of 128 MiB.

    Args:
        data: One frame.
        num_bytes: The size expected.
        what: Names what is packed, and where, in errors.

    Raises:
        DamagedError: As :func:`decompressed`, here or while the pieces are taken.
    """

    def __init__(self, data: bytes | memoryview, num_bytes: int, what: str) -> None:
        self._data = data
        self._num_bytes = num_bytes
        self._what = what
        self._whole = decompressed(data, num_bytes, what) if num_bytes <= _MAX_WHOLE_BYTES else None

    def pieces(self, most_bytes: int) -> Iterator[tuple[int, "Bytes"]]:
        """Pieces of at most so many bytes, in their order, each with the place of its first byte."""
        place = 0
        for part in (self._whole,) if self._whole is not None else self._streamed():
            array = np.frombuffer(part, dtype=np.uint8)
            for start in range(0, len(array), most_bytes):
                piece = array[start : start + most_bytes]
                yield place, piece
                place += len(piece)

    def _streamed(self) -> Iterator[bytes]:
        left = self._num_bytes
        try:
            if (declared := zstandard.frame_content_size(self._data)) != self._num_bytes:
                raise zstandard.ZstdError(f"{declared} bytes, expected {self._num_bytes}")
            frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
            for start in range(0, len(self._data), _STREAM_BYTES):
                part = frame.decompress(self._data[start : start + _STREAM_BYTES])
                left -= len(part)
                yield part
                if frame.eof and (frame.unused_data or start + _STREAM_BYTES < len(self._data)):
                    raise zstandard.ZstdError("bytes behind the frame")
            if left or not frame.eof:
                raise zstandard.ZstdError("not one whole frame")
        except zstandard.ZstdError as error:
            raise DamagedError(f"{self._what} do not decompress ({error}); use another checkpoint") from error


MAX_CODED_ROWS = 1 << 24  # in a block; blocks are cut by bytes, long before


Bytes = npt.NDArray[np.uint8]

_MAX_RATIO = 64  # of rows and a blob: a reader makes room by what manifests say, and no more than a file warrants
_MIN_SAVED = 128  # a split saves a 128th of the tails: a blob that lacks less is one that was cut
_MIN_FRAME = 10  # bytes of a frame that holds something


def split(codes: Bytes, tail_bytes: int) -> Bytes | None:
    """A blob of rows, split; None if that is not smaller.

    Args:
        codes: uint8 [n, row_bytes].
        tail_bytes: Of each row; 0 for none.
    """
    if not tail_bytes or not len(codes):
        return None
    num_rows, head_bytes = len(codes), codes.shape[1] - tail_bytes
    planes = [column.tobytes() for column in codes[:, head_bytes:].T]
    frame = np.frombuffer(compressed(*planes), dtype=np.uint8)
    if not may_be_split(num_rows * head_bytes + len(frame), num_rows, codes.shape[1], tail_bytes):
        return None
    data = np.empty(num_rows * head_bytes + len(frame), dtype=np.uint8)
    data[: num_rows * head_bytes].reshape(num_rows, head_bytes)[:] = codes[:, :head_bytes]
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

"""Row sets, which are the stored rows of a shard in blocks, and the coding of their numbers.

A delta contains only the modified rows of a shard, so it has to store their numbers. The set is divided into blocks of
consecutive members. Each block is coded separately, relative to its first row, in the smaller of two codings:

    bitmap   one bit per row from the first to the last member, least significant bit first
    gaps     the distance of each member to the one before, minus one, as byte planes (all lowest bytes, then all
             second bytes, ...)

Both are compressed with zstd. For random rows of density p from .001 to .9, the size is within 25 % of the entropy of
H(p)/p bits per row. At usual densities, around p = .26, it is within a few percent.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NewType

import numpy as np
import numpy.typing as npt

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format.blob_bytes import Bytes, Unpacked, compressed

RowNumbers = npt.NDArray[np.int64]
Coding = Literal["bitmap", "gaps"]

_PIECE_BYTES = 128 << 10  # bytes of a code that are processed at a time
MAX_ROWS_PER_MEMBER = 64  # most bits of a bitmap per member; for sparser rows, gaps are always smaller


@dataclass(frozen=True)
class CodedRows:
    """A coded block of a row set.

    Attributes:
        coding: The coding of ``data``.
        first: The smallest member.
        span: The largest member - the smallest member + 1.
        data: The compressed code.
    """

    coding: Coding
    first: int
    span: int
    data: bytes


def encode_row_numbers(rows: RowNumbers) -> CodedRows:
    """Encode one block of row numbers.

    Args:
        rows: The numbers, int64 [N], N >= 1, strictly increasing, not negative.
    """
    first, span = int(rows[0]), int(rows[-1] - rows[0]) + 1
    gaps = np.diff(rows) - 1
    width = _gap_width(span)
    planes = np.ascontiguousarray(gaps.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T)
    best = CodedRows("gaps", first, span, compressed(planes.tobytes()))
    if span <= MAX_ROWS_PER_MEMBER * len(rows):
        mask = np.zeros(span, dtype=np.bool_)
        mask[rows - first] = True
        bitmap = compressed(np.packbits(mask, bitorder="little").tobytes())
        if len(bitmap) < len(best.data):
            best = CodedRows("bitmap", first, span, bitmap)
    return best


def decode_row_numbers(coded: CodedRows, num_rows: int, where: str) -> RowNumbers:
    """Decode one block of row numbers, and check that it has exactly ``num_rows`` members over its span.

    This is checked before memory for the rows is allocated, so the code of a hostile file takes only a few MiB.

    Args:
        coded: The coded block.
        num_rows: The expected number of members.
        where: The name of the block, for errors.

    Returns:
        int64 [num_rows], strictly increasing, from ``coded.first`` to ``coded.first + coded.span - 1``.

    Raises:
        DamagedError: The code has another number of rows, or another span.
    """
    is_bitmap = coded.coding == "bitmap"
    num_bytes = (coded.span + 7) // 8 if is_bitmap else _gap_width(coded.span) * (num_rows - 1)
    code = Unpacked(coded.data, num_bytes, f"{where}: row numbers")
    if not (_is_bitmap_of if is_bitmap else _are_gaps_of)(code, num_rows, coded.span):
        raise DamagedError(
            f"{where}: its row numbers are not {num_rows} strictly increasing numbers over a span of {coded.span}; "
            "use another checkpoint"
        )
    return (_rows_of_bitmap if is_bitmap else _rows_of_gaps)(code, num_rows, coded.first)


def _is_bitmap_of(code: Unpacked, num_rows: int, span: int) -> bool:
    """Return whether ``num_rows`` bits are set, including the first and the last of the span, and none after it."""
    num_set, first_bit, last_byte = 0, 0, 0
    for position, piece in code.pieces(_PIECE_BYTES):
        num_set += int(np.bitwise_count(piece).sum(dtype=np.int64))
        first_bit = int(piece[0]) & 1 if position == 0 else first_bit
        last_byte = int(piece[-1])
    return num_set == num_rows and first_bit == 1 and last_byte >> ((span - 1) % 8) == 1


def _rows_of_bitmap(code: Unpacked, num_rows: int, first: int) -> RowNumbers:
    rows = np.empty(num_rows, dtype=np.int64)
    num_filled = 0
    for position, piece in code.pieces(_PIECE_BYTES):
        mask = np.unpackbits(piece, bitorder="little").view(np.bool_)  # flatnonzero is several times faster on bools
        members = np.flatnonzero(mask)
        np.add(members, first + 8 * position, out=rows[num_filled : num_filled + len(members)])
        num_filled += len(members)
    return rows


def _are_gaps_of(code: Unpacked, num_rows: int, span: int) -> bool:
    """Return whether the gaps add up to the rows of the span that are not members; then no row number overflows."""
    total = sum(int(gap_bytes.sum(dtype=np.int64)) << shift for _, gap_bytes, shift in _of_planes(code, num_rows))
    return total == span - num_rows


def _rows_of_gaps(code: Unpacked, num_rows: int, first: int) -> RowNumbers:
    rows = np.ones(num_rows, dtype=np.int64)
    rows[0] = first
    for start, gap_bytes, shift in _of_planes(code, num_rows):
        rows[1 + start : 1 + start + len(gap_bytes)] += gap_bytes.astype(np.int64) << shift
    return np.cumsum(rows, out=rows)


def _of_planes(code: Unpacked, num_rows: int) -> Iterator[tuple[int, Bytes, int]]:
    """Yield pieces of planes: the number of the first gap, one byte of each consecutive gap, and its shift in bits."""
    num_gaps = num_rows - 1
    for position, piece in code.pieces(_PIECE_BYTES):
        num_taken = 0
        while num_taken < len(piece):
            plane, start = divmod(position + num_taken, num_gaps)
            gap_bytes = piece[num_taken : num_taken + num_gaps - start]
            yield start, gap_bytes, 8 * plane
            num_taken += len(gap_bytes)


def _gap_width(span: int) -> int:
    """Return the bytes that the largest possible gap within ``span`` needs."""
    return max(1, (max(span - 2, 0).bit_length() + 7) // 8)


@dataclass(frozen=True)
class Blob:
    """A range of bytes in a pack.

    Attributes:
        pack: Index into the manifest's packs.
        offset: Position of the first byte in the file.
        num_bytes: Number of bytes.
        crc32c: CRC-32C of the bytes.
    """

    pack: int
    offset: int
    num_bytes: int
    crc32c: int

    def in_pack(self, pack: int) -> "Blob":
        """Return this blob with another index of its pack."""
        return Blob(pack, self.offset, self.num_bytes, self.crc32c)


# The number of a blob among the blobs of a pack writer, whose pack may not be written yet.
UnplacedBlob = NewType("UnplacedBlob", int)


@dataclass(frozen=True)
class RowBlock:
    """The numbers of the rows of a block.

    Attributes:
        coding: ``all`` for consecutive rows, otherwise the coding of ``blob``; see ``CodedRows``.
        first: The smallest row number.
        span: The largest row number - the smallest + 1.
        num_rows: The number of rows.
        blob: The code of the row numbers; None for consecutive rows.
    """

    coding: Coding | Literal["all"]
    first: int
    span: int
    num_rows: int
    blob: Blob | None


@dataclass(frozen=True)
class UnplacedRowBlock:
    """A row block whose code was given to a pack writer. It has the attributes of :class:`RowBlock`."""

    coding: Coding | Literal["all"]
    first: int
    span: int
    num_rows: int
    blob: UnplacedBlob | None

    def placed(self, place: Callable[[UnplacedBlob], Blob]) -> RowBlock:
        """Return the row block, with the blob that ``place`` returns for its code."""
        blob = None if self.blob is None else place(self.blob)
        return RowBlock(self.coding, self.first, self.span, self.num_rows, blob)


@dataclass(frozen=True)
class RowSet:
    """The stored rows of one shard, shared by a table and the optimizer state of its rows.

    Attributes:
        blocks: The blocks of rows, in increasing order, numbered within the shard's box.
    """

    blocks: tuple[RowBlock, ...]

    def __hash__(self) -> int:
        """Hash only a few fields of the first block: there are many row sets, and most of them differ in these."""
        if not self.blocks:
            return 0
        first_block = self.blocks[0]
        location = None if first_block.blob is None else (first_block.blob.pack, first_block.blob.offset)
        return hash((len(self.blocks), first_block.num_rows, location))

    @classmethod
    def all(cls, num_rows: int, block_rows: int) -> "RowSet":
        """Return the set of all rows from 0 to ``num_rows - 1``, in blocks of ``block_rows`` rows."""
        starts = range(0, num_rows, block_rows)
        sizes = (min(block_rows, num_rows - start) for start in starts)
        return cls(tuple(RowBlock("all", start, size, size, None) for start, size in zip(starts, sizes, strict=True)))

    @cached_property
    def num_rows(self) -> int:
        """The number of rows."""
        return sum(block.num_rows for block in self.blocks)

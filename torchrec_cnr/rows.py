"""Boxes, and the coding of sets of row numbers.

A delta holds the rows of a box that were modified, so it has to say which. The set is cut into blocks of consecutive
members; each block is coded by itself, relative to its first row, in whichever of these is smallest:

    bitmap   one bit a row from the first to the last member, least significant bit first
    gaps     the distance of each member to the one before, minus one, as byte planes (all lowest bytes, then all
             second bytes, ...)

Both are compressed with zstd. At random rows of density .001 to .9 this stays within a quarter of the entropy H(p)/p
bits a row, and within a few per cent where deltas usually are, around p = .26.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.frames import compressed, decompressed

Rows = npt.NDArray[np.int64]
Coding = Literal["bitmap", "gaps"]

MOST_DIVIDED = 8  # dimensions of a tensor that its boxes divide
MOST_CODED_ROWS = 1 << 24  # in a block; blocks are cut by bytes, long before
MOST_ROWS_PER_MEMBER = 64  # in a bitmap; in a sparser one gaps are always smaller


@dataclass(frozen=True)
class Box:
    """Where a shard lies in its tensor.

    Attributes:
        offsets: First index in each dimension.
        sizes: Number of indices in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, size: tuple[int, ...]) -> "Box":
        """The box of a tensor that is not sharded."""
        return cls((0,) * len(size), tuple(size))

    @property
    def first_row(self) -> int:
        """First index of the first dimension; 0 for a scalar."""
        return self.offsets[0] if self.offsets else 0

    @property
    def num_rows(self) -> int:
        """Size of the first dimension; a scalar counts as one row."""
        return self.sizes[0] if self.sizes else 1

    @property
    def num_cols(self) -> int:
        """Number of elements in a row."""
        return math.prod(self.sizes[1:])

    def intersect(self, other: "Box") -> "Box | None":
        """The common part of both, in the tensor's own indices, or None."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(starts, sizes)

    def slices(self, origin: "Box") -> tuple[slice, ...]:
        """This box as an index into a tensor that holds ``origin``."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offsets, origin.offsets, self.sizes, strict=True)
        )


def fills(size: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether ``boxes`` cover a tensor of ``size`` exactly: inside it, without a hole or an overlap.

    How often each element is covered is a function of its index, and a function is told by its differences along all
    dimensions. Those of a box are 1 and -1 at its corners, and 0 elsewhere. So the corners of all boxes must add up to
    those of the tensor: that takes time in proportion to the boxes, however they lie. Boxes that divide more than
    ``MOST_DIVIDED`` dimensions have too many corners, and do not count as covering anything.
    """
    if _are_stacked(size, boxes):
        return True
    if not all(lies_within(size, box) for box in boxes):
        return False
    boxes = [box for box in boxes if 0 not in box.sizes]
    if 0 in size:
        return True
    divided = [number for number, length in enumerate(size) if any(box.sizes[number] != length for box in boxes)]
    if len(divided) > MOST_DIVIDED:
        return False
    differences: Counter[tuple[int, ...]] = Counter()
    for box, sign in [(Box.whole(size), -1), *((box, 1) for box in boxes)]:
        ends = [((box.offsets[n], 1), (box.offsets[n] + box.sizes[n], -1)) for n in divided]
        for corner in itertools.product(*ends):
            differences[tuple(index for index, _ in corner)] += sign * math.prod(step for _, step in corner)
    return not any(differences.values())


def _are_stacked(size: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether boxes in this order lie one behind the other along the first dimension, as tables are sharded by rows."""
    end, rest, origin = 0, size[1:], (0,) * (len(size) - 1)
    for box in boxes:
        if not box.offsets or box.offsets[0] != end or box.sizes[1:] != rest or box.offsets[1:] != origin:
            return False
        end += box.sizes[0]
    return bool(size) and end == size[0]


def lies_within(size: tuple[int, ...], box: Box) -> bool:
    """Whether a box has the dimensions of a tensor of ``size``, and does not reach out of it."""
    return len(box.offsets) == len(size) and all(
        first + length <= whole for first, length, whole in zip(box.offsets, box.sizes, size, strict=True)
    )


@dataclass(frozen=True)
class CodedRows:
    """One block of a row set as it is stored.

    Attributes:
        coding: How ``data`` is to be read.
        first: The smallest member.
        span: Last member - first member + 1.
        data: The compressed code.
    """

    coding: Coding
    first: int
    span: int
    data: bytes


def encode_rows(rows: Rows) -> CodedRows:
    """Code one block of row numbers.

    Args:
        rows: int64 [N], N >= 1, strictly increasing, not negative.
    """
    first, span = int(rows[0]), int(rows[-1] - rows[0]) + 1
    gaps = np.diff(rows) - 1
    width = _gap_width(span)
    planes = np.ascontiguousarray(gaps.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T)
    best = CodedRows("gaps", first, span, compressed(planes.tobytes()))
    if span <= MOST_ROWS_PER_MEMBER * len(rows):
        mask = np.zeros(span, dtype=np.bool_)
        mask[rows - first] = True
        bitmap = compressed(np.packbits(mask, bitorder="little").tobytes())
        if len(bitmap) < len(best.data):
            best = CodedRows("bitmap", first, span, bitmap)
    return best


def decode_rows(coded: CodedRows, num_rows: int, where: str) -> Rows:
    """The inverse of :func:`encode_rows`; what does not code exactly ``num_rows`` rows of ``span`` is refused.

    Args:
        num_rows: How many members the block has.
        where: Names the block in errors.

    Returns:
        int64 [num_rows], strictly increasing, from ``coded.first`` to ``coded.first + coded.span - 1``.

    Raises:
        DamagedError: The code is not of this many rows, or not of this span.
    """
    what = f"{where}: row numbers"
    if coded.coding == "bitmap":
        bits = np.frombuffer(decompressed(coded.data, (coded.span + 7) // 8, what), dtype=np.uint8)
        mask = np.unpackbits(bits, bitorder="little").view(np.bool_)  # several times as fast as numbers
        rows = np.flatnonzero(mask).astype(np.int64, copy=False)
    else:
        width = _gap_width(coded.span)
        planes = np.frombuffer(decompressed(coded.data, width * (num_rows - 1), what), dtype=np.uint8)
        wide = np.zeros((num_rows - 1, 8), dtype=np.uint8)
        wide[:, :width] = planes.reshape(width, num_rows - 1).T
        gaps = wide.view("<u8").reshape(-1)
        if gaps.sum(dtype=np.float64) > 2 * coded.span:  # so far off that the exact sum might overflow
            gaps = gaps[:0]
        rows = np.concatenate((np.zeros(1, np.int64), np.cumsum(gaps.astype(np.int64) + 1)))
    if len(rows) != num_rows or rows[0] != 0 or rows[-1] != coded.span - 1 or (np.diff(rows) <= 0).any():
        raise DamagedError(
            f"{where}: its row numbers are not {num_rows} strictly increasing rows over a span of {coded.span}; "
            "use another checkpoint"
        )
    return rows + coded.first


def _gap_width(span: int) -> int:
    """Bytes that the largest gap possible within ``span`` needs."""
    return max(1, (max(span - 2, 0).bit_length() + 7) // 8)

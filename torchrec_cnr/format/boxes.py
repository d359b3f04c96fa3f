"""Boxes, which are the regions of tensors that shards cover."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass

MAX_DIVIDED_DIMS = 8  # the most dimensions along which the boxes of a tensor may divide it


@dataclass(frozen=True)
class Box:
    """A shard region: the part of a tensor that a shard covers.

    Attributes:
        offsets: First index in each dimension.
        sizes: Number of indices in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, size: tuple[int, ...]) -> "Box":
        """Return the box of a whole tensor of ``size``."""
        return cls((0,) * len(size), tuple(size))

    @property
    def first_row(self) -> int:
        """The first index in the first dimension; 0 for a scalar."""
        return self.offsets[0] if self.offsets else 0

    @property
    def num_rows(self) -> int:
        """The size of the first dimension; a scalar counts as one row."""
        return self.sizes[0] if self.sizes else 1

    @property
    def num_cols(self) -> int:
        """The number of elements in a row."""
        return math.prod(self.sizes[1:])

    def intersect(self, other: "Box") -> "Box | None":
        """Return the intersection of both boxes, in indices of the tensor, or None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(starts, sizes)

    def slices(self, origin: "Box") -> tuple[slice, ...]:
        """Return this box as an index into a tensor that contains the values of the box ``origin``."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offsets, origin.offsets, self.sizes, strict=True)
        )


def fills(size: tuple[int, ...], boxes: list[Box]) -> bool:
    """Return whether ``boxes`` cover a tensor of ``size`` exactly: inside it, without a hole or an overlap.

    The number of boxes that cover an element is a function of its index, and the differences of this function along all
    dimensions determine it. The differences of one box are 1 and -1 at its corners, and 0 elsewhere. So the corners of
    all boxes must add up to those of the tensor. This takes time proportional to the number of boxes, for any
    arrangement. Boxes that divide more than ``MAX_DIVIDED_DIMS`` dimensions have too many corners: the result is False.
    """
    if _are_stacked(size, boxes):
        return True
    if not all(lies_within(size, box) for box in boxes):
        return False
    boxes = [box for box in boxes if 0 not in box.sizes]
    if 0 in size:
        return True
    divided_dims = [dim for dim, length in enumerate(size) if any(box.sizes[dim] != length for box in boxes)]
    if len(divided_dims) > MAX_DIVIDED_DIMS:
        return False
    differences: Counter[tuple[int, ...]] = Counter()
    for box, sign in [(Box.whole(size), -1), *((box, 1) for box in boxes)]:
        ends = [((box.offsets[n], 1), (box.offsets[n] + box.sizes[n], -1)) for n in divided_dims]
        for corner in itertools.product(*ends):
            differences[tuple(index for index, _ in corner)] += sign * math.prod(step for _, step in corner)
    return not any(differences.values())


def _are_stacked(size: tuple[int, ...], boxes: list[Box]) -> bool:
    """Return whether the boxes, in this order, divide the tensor by rows, as in row-wise sharding."""
    end, other_sizes, origin = 0, size[1:], (0,) * (len(size) - 1)
    for box in boxes:
        if not box.offsets or box.offsets[0] != end or box.sizes[1:] != other_sizes or box.offsets[1:] != origin:
            return False
        end += box.sizes[0]
    return bool(size) and end == size[0]


def lies_within(size: tuple[int, ...], box: Box) -> bool:
    """Return whether a box has as many dimensions as a tensor of ``size``, and is inside it."""
    return len(box.offsets) == len(size) and all(
        offset + length <= total for offset, length, total in zip(box.offsets, box.sizes, size, strict=True)
    )

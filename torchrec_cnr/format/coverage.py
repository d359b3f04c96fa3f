"""Coverage: which elements of a box are stored, row by row and range of columns by range of columns.

Going from the newest checkpoint to the oldest, a row whose columns are all covered is dead: a load overwrites what it
holds. Going through all of them, a row that is not covered in the end is a hole. Columns are divided where any shard's
box divides them; only the first two dimensions are, which is how tables and the state of their rows are sharded.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from torchrec_cnr.errors import LoadError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.row_sets import RowNumbers

Mask = npt.NDArray[np.bool_]


class Coverage:
    """What of a box is covered; one byte for each row and range of columns.

    Args:
        box: The box, in its tensor's indices.
        boxes: Of all shards that will be asked for or added, where they divide the columns.
        most_rows: Rows that will be added at most. Where the box has more, one of as many and one is a hole, and no
            others are looked at: a size that somebody made up takes no memory.

    Raises:
        LoadError: It does not fit into memory.
    """

    def __init__(self, box: Box, boxes: Iterable[Box], most_rows: int | None = None) -> None:
        if most_rows is not None and most_rows < box.num_rows:
            box = Box(box.offsets, (most_rows + 1, *box.sizes[1:]))
        self._box = box
        start, stop = _columns(box)
        edges = {edge for other in boxes for edge in _columns(other) if start < edge < stop}
        self._edges = np.array(sorted({start, stop} | edges), dtype=np.int64)
        shape = (max(0, len(self._edges) - 1), box.num_rows)
        try:
            self._covered: Mask = np.zeros(shape, dtype=np.bool_)
        except (MemoryError, ValueError) as error:
            raise LoadError(
                f"which of {box.num_rows} rows in {shape[0]} ranges of columns are stored does not fit into memory; "
                "load fewer rows"
            ) from error

    def add(self, box: Box, rows: RowNumbers | slice) -> None:
        """Rows of a shard's box, numbered within it, are stored."""
        ranges, own = self._ranges(box), self._own(box, rows)
        if not isinstance(own, slice):
            own = own[(own >= 0) & (own < self._box.num_rows)]
        for number in range(ranges.start, ranges.stop):
            self._covered[number, own] = True

    def parts(self, box: Box, rows: RowNumbers | slice) -> Mask:
        """bool [k, n]: for each range of a shard's columns, which rows of its box are covered; all must lie in this."""
        covered: Mask = self._covered[self._ranges(box)][:, self._own(box, rows)]
        return covered

    def first_hole(self) -> int | None:
        """The first row of the tensor that is not covered in all columns, or None."""
        whole = self._covered.all(axis=0)
        return None if whole.all() else self._box.first_row + int(np.argmin(whole))

    def _ranges(self, box: Box) -> slice:
        start, stop = _columns(box)
        first, last = np.searchsorted(self._edges, (max(start, self._edges[0]), min(stop, self._edges[-1])))
        return slice(int(first), int(last))

    def _own(self, box: Box, rows: RowNumbers | slice) -> RowNumbers | slice:
        shift = box.first_row - self._box.first_row
        if not isinstance(rows, slice):
            return rows + shift
        return slice(max(0, rows.start + shift), max(0, min(rows.stop + shift, self._box.num_rows)))


def _columns(box: Box) -> tuple[int, int]:
    return (box.offsets[1], box.offsets[1] + box.sizes[1]) if len(box.sizes) > 1 else (0, 1)

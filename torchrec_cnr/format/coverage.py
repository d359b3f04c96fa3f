"""Coverage of a box: a record of which of its elements are stored, for each row and each range of columns.

Callers add the shards of a chain from the newest checkpoint to the oldest. A row whose columns are all covered already
is dead: a load overwrites its values by newer ones. A row that is not covered after all checkpoints is a hole. Columns
are divided where the box of any shard begins or ends. Only the first two dimensions are divided, because tables and
the optimizer state of their rows are sharded in these only.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from torchrec_cnr.errors import LoadError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.row_sets import RowNumbers

Mask = npt.NDArray[np.bool_]


class Coverage:
    """A record of the covered elements of a box, with one byte for each row and range of columns.

    Args:
        box: The box, in indices of the tensor.
        boxes: The boxes of all shards that will be added or queried; their edges divide the columns.
        most_rows: The most rows that will be added, or None. If the box has more rows, only its first ``most_rows + 1``
            are recorded, since one of these must be a hole. So a forged size of a tensor takes no memory.

    Raises:
        LoadError: The record does not fit into memory.
    """

    def __init__(self, box: Box, boxes: Iterable[Box], most_rows: int | None = None) -> None:
        if most_rows is not None and most_rows < box.num_rows:
            box = Box(box.offsets, (most_rows + 1, *box.sizes[1:]))
        self._box = box
        start, stop = _columns(box)
        edges = {edge for other_box in boxes for edge in _columns(other_box) if start < edge < stop}
        self._edges = np.array(sorted({start, stop} | edges), dtype=np.int64)
        shape = (max(0, len(self._edges) - 1), box.num_rows)
        try:
            self._covered: Mask = np.zeros(shape, dtype=np.bool_)
        except (MemoryError, ValueError) as error:
            raise LoadError(
                f"the record of the stored rows does not fit into memory: {box.num_rows} rows in {shape[0]} ranges of "
                "columns, one byte each; load fewer rows"
            ) from error

    def add(self, box: Box, rows: RowNumbers | slice) -> None:
        """Record that rows of a shard are stored; ``rows`` are numbered within its box."""
        ranges, own_rows = self._ranges(box), self._own(box, rows)
        if not isinstance(own_rows, slice):
            own_rows = own_rows[(own_rows >= 0) & (own_rows < self._box.num_rows)]
        for index in range(ranges.start, ranges.stop):
            self._covered[index, own_rows] = True

    def parts(self, box: Box, rows: RowNumbers | slice) -> Mask:
        """Return which rows of a shard are covered in each range of its columns, bool [k, n].

        All rows of the shard must be inside the box of this object.
        """
        covered: Mask = self._covered[self._ranges(box)][:, self._own(box, rows)]
        return covered

    def first_hole(self) -> int | None:
        """Return the first row of the tensor that is not covered in all columns, or None."""
        is_covered = self._covered.all(axis=0)
        return None if is_covered.all() else self._box.first_row + int(np.argmin(is_covered))

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

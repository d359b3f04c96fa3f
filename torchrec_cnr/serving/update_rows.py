"""Staged rows: what the links hold of a table, decoded beside it, and then swapped in.

Blocks are kept as they were stored until all links are read. Then it is known which rows there are, memory is taken for
these only, and each is decoded once, from the newest link that has it, by the very regions that a load decodes with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.quantization.fbgemm_rows import InferenceRow
from torchrec_cnr.reading.blocks import Block, PlacedRows, row_numbers
from torchrec_cnr.reading.regions import LineageTensor, Region


@dataclass(frozen=True, eq=False)
class _KeptRows:
    """Rows of a block that are wanted: ``positions`` in the block, and ``rows`` of the region, both int64 [k]."""

    block: Block
    positions: Tensor
    rows: Tensor


@dataclass(eq=False)
class UpdateRows(Region):
    """The rows of a table's region that some links hold. As a region of a fold, it is written to and finished.

    Attributes:
        saved: The table in the links.
        tensor: The served rows, [num_rows, num_cols] or, of a quantized table, uint8 [num_rows, row_bytes].
        row: How a quantized table keeps a row.
        rows: int64 [k], increasing, once it is finished: which rows are staged.
        values: [k, ...], like ``tensor``: what they will be.
        is_complete: Whether links hold all that is needed of every row; a piece of a quantized row is not enough.
        has_whole_rows: Whether links hold all columns of every row.
    """

    saved: LineageTensor
    tensor: Tensor
    row: InferenceRow | None
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))
    values: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    is_complete: bool = True
    has_whole_rows: bool = True
    _kept: list[_KeptRows] = field(default_factory=list)

    def write(self, block: Block) -> None:
        """Keep the block."""
        common = block.rows.within(self.box) if block.box.intersect(self.box) is not None else None
        if common is not None:
            self._kept.append(_KeptRows(block, row_numbers(common[0]), row_numbers(common[1])))

    def finish(self) -> None:
        """Decode what is the newest of each row."""
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        numbers = torch.cat([own.rows for own in kept]).unique()
        if all(self._columns(own.block) == self._columns() for own in kept):
            kept = _newest_of_each(kept, self.box.num_rows)
            values = self.tensor.new_empty((len(numbers), *self.tensor.shape[1:]))
        else:
            self.has_whole_rows = self._are_covered(kept, numbers)
            self.is_complete = self.row is None or self.has_whole_rows
            values = self.tensor.index_select(0, numbers.to(self.tensor.device))
        if not self.is_complete:
            return
        blocks = [_renumbered(own, torch.searchsorted(numbers, own.rows), len(numbers)) for own in kept]
        box = Box((0, self.box.offsets[1]), (len(values), self.box.sizes[1]))
        for region in self.saved.regions(box, values, self.row):
            for block in blocks:
                region.write(block)
            region.finish()
        self.rows, self.values = numbers.to(self.tensor.device), values

    def swap_in(self) -> None:
        """Overwrite the served rows."""
        if len(self.rows):
            self.tensor.index_copy_(0, self.rows, self.values)

    @property
    def num_rows(self) -> int:
        """How many are staged."""
        return len(self.rows)

    def _columns(self, block: Block | None = None) -> tuple[int, int]:
        """First column and the one behind the last, of the region or of what a block has of it."""
        box = self.box if block is None else block.box.intersect(self.box)
        return (0, 0) if box is None else (box.offsets[1], box.offsets[1] + box.sizes[1])

    def _are_covered(self, kept: Sequence[_KeptRows], numbers: Tensor) -> bool:
        """Whether every row is there with all its columns."""
        pieces = [self._columns(own.block) for own in kept]
        bounds = sorted({*self._columns(), *(bound for piece in pieces for bound in piece)})
        has = torch.zeros(len(numbers), len(bounds) - 1, dtype=torch.bool, device="cpu")
        for own, (start, stop) in zip(kept, pieces, strict=True):
            has[torch.searchsorted(numbers, own.rows), bounds.index(start) : bounds.index(stop)] = True
        return bool(has.all())


def _newest_of_each(kept: Sequence[_KeptRows], num_rows: int) -> list[_KeptRows]:
    """Of blocks in the order in which they overwrite one another, the rows that no later one has."""
    is_taken = torch.zeros(num_rows, dtype=torch.bool, device="cpu")
    newest = []
    for own in reversed(kept):
        is_newest = ~is_taken[own.rows]
        is_taken[own.rows] = True
        newest.append(_KeptRows(own.block, own.positions[is_newest], own.rows[is_newest]))
    return [own for own in reversed(newest) if len(own.rows)]


def _renumbered(kept: _KeptRows, rows: Tensor, num_rows: int) -> Block:
    """The wanted rows of a block as a block of their own, of other row numbers."""
    box = Box((0, *kept.block.box.offsets[1:]), (num_rows, *kept.block.box.sizes[1:]))
    return kept.block.part(kept.positions, PlacedRows(box, 0, len(rows), rows))

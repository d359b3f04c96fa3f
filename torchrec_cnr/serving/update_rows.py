"""Staged rows: the rows of a table in the links, decoded into separate memory, and then swapped in.

Blocks are kept encoded until all links have been read. Then the row numbers are known, and memory is allocated only for
these rows. Each row is decoded once, from the newest link that has it, by the same regions that a load uses.
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
    """Wanted rows of a block: their ``positions`` in the block, and their ``rows`` in the region, both int64 [k]."""

    block: Block
    positions: Tensor
    rows: Tensor


@dataclass(eq=False)
class UpdateRows(Region):
    """A region of a fold that stages the rows of a table that the links contain.

    Attributes:
        saved: The table in the links.
        tensor: The served rows, [num_rows, num_cols]; for a quantized table, uint8 [num_rows, row_bytes].
        row: Layout of a row of a quantized table; None for any other table.
        rows: Numbers of the staged rows, int64 [k], increasing; set by :meth:`finish`.
        values: New values of these rows, [k, ...], in the layout of ``tensor``; set by :meth:`finish`.
        is_complete: Whether the links suffice for every row. A quantized row needs all of its columns.
        has_whole_rows: Whether the links contain all columns of every row.
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
        """Keep the block, encoded, until :meth:`finish`."""
        common = block.rows.within(self.box) if block.box.intersect(self.box) is not None else None
        if common is not None:
            self._kept.append(_KeptRows(block, row_numbers(common[0]), row_numbers(common[1])))

    def finish(self) -> None:
        """Decode the newest version of each row."""
        if not self._kept:
            return
        kept_blocks, self._kept = self._kept, []
        numbers = torch.cat([kept_block.rows for kept_block in kept_blocks]).unique()
        if all(self._columns(kept_block.block) == self._columns() for kept_block in kept_blocks):
            kept_blocks = _newest_of_each(kept_blocks, self.box.num_rows)
            values = self.tensor.new_empty((len(numbers), *self.tensor.shape[1:]))
        else:
            self.has_whole_rows = self._are_covered(kept_blocks, numbers)
            self.is_complete = self.row is None or self.has_whole_rows
            values = self.tensor.index_select(0, numbers.to(self.tensor.device))
        if not self.is_complete:
            return
        blocks = [
            _renumbered(kept_block, torch.searchsorted(numbers, kept_block.rows), len(numbers))
            for kept_block in kept_blocks
        ]
        box = Box((0, *self.box.offsets[1:]), (len(values), *self.box.sizes[1:]))
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
        """Number of staged rows, if it is a table."""
        return len(self.rows) if self.saved.entry.is_table else 0

    def _columns(self, block: Block | None = None) -> tuple[int, int]:
        """Return the first column and the column after the last, of the region or of its intersection with a block."""
        box = self.box if block is None else block.box.intersect(self.box)
        if box is None:
            return 0, 0
        return (box.offsets[1], box.offsets[1] + box.sizes[1]) if len(box.sizes) > 1 else (0, 1)

    def _are_covered(self, kept_blocks: Sequence[_KeptRows], numbers: Tensor) -> bool:
        """Return whether the kept blocks contain every row with all its columns."""
        pieces = [self._columns(kept_block.block) for kept_block in kept_blocks]
        bounds = sorted({*self._columns(), *(bound for piece in pieces for bound in piece)})
        is_covered = torch.zeros(len(numbers), len(bounds) - 1, dtype=torch.bool, device="cpu")
        for kept_block, (start, stop) in zip(kept_blocks, pieces, strict=True):
            is_covered[torch.searchsorted(numbers, kept_block.rows), bounds.index(start) : bounds.index(stop)] = True
        return bool(is_covered.all())


def _newest_of_each(kept_blocks: Sequence[_KeptRows], num_rows: int) -> list[_KeptRows]:
    """Return the rows of each block that no later block has. Blocks are in the order of overwriting."""
    is_taken = torch.zeros(num_rows, dtype=torch.bool, device="cpu")
    newest_blocks = []
    for kept_block in reversed(kept_blocks):
        is_newest = ~is_taken[kept_block.rows]
        is_taken[kept_block.rows] = True
        newest_blocks.append(_KeptRows(kept_block.block, kept_block.positions[is_newest], kept_block.rows[is_newest]))
    return [kept_block for kept_block in reversed(newest_blocks) if len(kept_block.rows)]


def _renumbered(kept_block: _KeptRows, rows: Tensor, num_rows: int) -> Block:
    """Return the wanted rows of a block as a new block with other row numbers."""
    box = Box((0, *kept_block.block.box.offsets[1:]), (num_rows, *kept_block.block.box.sizes[1:]))
    return kept_block.block.part(kept_block.positions, PlacedRows(box, 0, len(rows), rows))

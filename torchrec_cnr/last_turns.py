"""Last turns: when each row of a region is overwritten for the last time, so that it need not be decoded before.

Deltas of one baseline hold many rows over and over. A fold reads them in turns, and what a later turn holds overwrites
what earlier ones do. Row numbers are small and are read first; with them it is known which rows of a turn are left.
"""

from collections.abc import Iterable

import torch

from torchrec_cnr.regions import Block, PlacedRows, Region

_LEAST_COLS = 8  # narrower rows are written as fast as they are looked up
MOST_TURNS = 1 << 15


class LastTurns:
    """Of each row of some regions, the last turn that holds all of its columns; two bytes a row.

    Args:
        regions: The regions, of which those with rows that are wide enough are followed.
    """

    def __init__(self, regions: Iterable[Region]) -> None:
        wide = [region for region in regions if len(region.box.sizes) == 2 and region.box.num_cols >= _LEAST_COLS]
        self._turns = {id(region): torch.zeros(region.box.num_rows, dtype=torch.int16) for region in wide}

    @property
    def num_regions(self) -> int:
        """How many are followed."""
        return len(self._turns)

    def note(self, region: Region, rows: PlacedRows, turn: int) -> None:
        """A turn holds some rows; turns come in order."""
        turns = self._turns.get(id(region))
        found = rows.within(region.box) if turns is not None and _has_all_columns(rows, region) else None
        if turns is not None and found is not None:
            turns[found[1]] = turn

    def left(self, region: Region, block: Block, turn: int) -> Block | None:
        """What no later turn overwrites of a turn's block; None if nothing is left."""
        turns, numbers = self._turns.get(id(region)), block.rows.numbers
        found = block.rows.within(region.box) if turns is not None and numbers is not None else None
        if turns is None or numbers is None or found is None:
            return block
        positions, rows = found
        are_left = (turns[rows] if isinstance(rows, slice) else turns.index_select(0, rows)) <= turn
        if bool(are_left.all()):
            return block
        left = are_left.nonzero().squeeze(1)
        if not len(left):
            return None
        kept = left + positions.start if isinstance(positions, slice) else positions[left]
        return block.part(kept, PlacedRows(block.box, 0, len(kept), numbers.index_select(0, kept)))


def _has_all_columns(rows: PlacedRows, region: Region) -> bool:
    common = rows.box.intersect(region.box)
    return common is not None and common.num_cols == region.box.num_cols

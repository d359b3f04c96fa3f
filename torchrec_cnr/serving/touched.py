"""Touched rows: which rows of a model's tables deltas have overwritten since the baseline that it was folded on.

A delta that stands on that baseline, and not on what is applied, brings a model up to date if it holds all of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrec_cnr.boxes import Box
from torchrec_cnr.regions import Block
from torchrec_cnr.serving.staged_rows import StagedRows
from torchrec_cnr.serving.targets import TargetKey


@dataclass(eq=False)
class TouchedRows:
    """Rows of a table's region that come from deltas. As a region of a fold, it notes which, and takes no values.

    Attributes:
        fqn: The table.
        box: The region, in the table's indices.
        is_touched: bool [num_rows].
    """

    fqn: str
    box: Box
    is_touched: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.is_touched = torch.zeros(self.box.num_rows, dtype=torch.bool)

    def write(self, block: Block) -> None:
        """Note the rows of a delta."""
        found = block.rows.within(self.box) if block.is_delta else None
        if found is not None and block.box.intersect(self.box) is not None:
            self.is_touched[found[1]] = True

    def finish(self) -> None:
        """Nothing is left to do."""


Touched = Mapping[TargetKey, TouchedRows]


def are_overwritten(touched: Touched, staged: Mapping[TargetKey, StagedRows]) -> bool:
    """Whether what is staged overwrites all that was touched, whole rows of it."""
    for key, rows in staged.items():
        if key not in touched or not rows.has_whole_rows:
            return False
        is_left = touched[key].is_touched.clone()
        is_left[rows.rows.cpu()] = False
        if bool(is_left.any()):
            return False
    return True


def touch(touched: Touched, staged: Mapping[TargetKey, StagedRows]) -> None:
    """What was staged is applied now."""
    for key, rows in touched.items():
        if key in staged:
            rows.is_touched[staged[key].rows.cpu()] = True
        else:
            rows.is_touched[:] = True  # all of it was replaced

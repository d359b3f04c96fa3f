"""Tables of inference kernels as targets of a load: found in a state dict by their memory, read from float tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from torchrec_cnr.human_text import count_text
from torchrec_cnr.loading.read_items import InferenceReadItem
from torchrec_cnr.quantization.fbgemm_rows import InferenceRow
from torchrec_cnr.sharding import memory_key


@dataclass(frozen=True, eq=False)
class InferenceTable:
    """A table of an inference kernel.

    Attributes:
        rows: uint8 [num_rows, row_bytes], whole rows, shared with the kernel.
        row: What is in a row.
        views: What state dicts may hold of it: the rows, or the part that has the codes. They share its memory.
    """

    rows: Tensor
    row: InferenceRow
    views: Sequence[Tensor]

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the float table that it stands for."""
        return len(self.rows), self.row.num_cols

    def read_item(self, fqn: str, saved: str) -> InferenceReadItem:
        """The read of all of a float table of the same size, ``saved`` in the checkpoint, into this one."""
        nowhere = torch.Size((0, 0))
        return InferenceReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(fqn),
            dest_offsets=nowhere,
            storage_index=MetadataIndex(saved),
            storage_offsets=nowhere,
            lengths=torch.Size(self.size),
            row=self.row,
        )


class TargetTables:
    """The tables of inference kernels that a load may write to.

    Attributes:
        tables: The tables.
    """

    def __init__(self, tables: Sequence[InferenceTable]) -> None:
        self.tables = tuple(tables)
        self._by_memory = {memory_key(view): table for table in tables for view in table.views}
        self._by_memory.pop(None, None)  # a table without rows has no memory

    def __repr__(self) -> str:
        num_rows = sum(table.size[0] for table in self.tables)
        return f"{type(self).__name__}({count_text(len(self.tables), 'table')}, {count_text(num_rows, 'row')})"

    def find(self, value: Any) -> InferenceTable | None:
        """The table that an item of a state dict shows, whatever its key."""
        if not isinstance(value, Tensor) or value.dtype is not torch.uint8:
            return None
        # TorchRec wraps codes of 2 and 4 bits in a subclass of Tensor, which gives its bytes out this way.
        return self._by_memory.get(memory_key(value.view(torch.uint8)))

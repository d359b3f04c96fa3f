"""Tables of inference kernels as targets of a load: found in a state dict by their memory, read from float tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from torchrec_cnr.errors import StateMismatchError
from torchrec_cnr.handover import InferenceReadItem
from torchrec_cnr.inference_rows import InferenceRow
from torchrec_cnr.shards import dtype_name, memory_key


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


class TargetTables:
    """The tables of inference kernels that a load may write to."""

    def __init__(self, tables: Sequence[InferenceTable]) -> None:
        self._by_memory = {memory_key(view): table for table in tables for view in table.views}
        self._by_memory.pop(None, None)  # a table without rows has no memory

    def find(self, value: Any) -> InferenceTable | None:
        """The table that an item of a state dict shows, whatever its key."""
        if not isinstance(value, Tensor) or value.dtype is not torch.uint8:
            return None
        # TorchRec wraps codes of 2 and 4 bits in a subclass of Tensor, which gives its bytes out this way.
        return self._by_memory.get(memory_key(value.view(torch.uint8)))

    def read_item(self, fqn: str, value: Tensor, saved: TensorStorageMetadata, url: str) -> InferenceReadItem:
        """The read of a float table into a quantized one.

        Args:
            fqn: Its name in checkpoint and state dict.
            value: The state dict's tensor.
            saved: The checkpoint's.
            url: The checkpoint.

        Raises:
            StateMismatchError: The tensor is no table known here, or of another size.
        """
        table = self.find(value)
        size, dtype = list(saved.size), str(saved.properties.dtype).removeprefix("torch.")
        if table is None:
            raise StateMismatchError(
                f"{fqn!r} is {dtype} {size} in {url}, and {dtype_name(value)} {list(value.shape)} in the state dict, "
                "which is no table of a model known to the planner: for a quantized TorchRec model, pass "
                "CNRLoadPlanner(inference=InferenceTables(model)) and load into model.state_dict() itself, not a copy"
            )
        if table.size != tuple(size):
            raise StateMismatchError(
                f"table {fqn!r} has size {size} in {url}, and {list(table.size)} in the quantized model; quantize a "
                "model whose tables have the sizes that were trained"
            )
        return InferenceReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(fqn),
            dest_offsets=torch.Size((0, 0)),
            storage_index=MetadataIndex(fqn),
            storage_offsets=torch.Size((0, 0)),
            lengths=saved.size,
            row=table.row,
        )

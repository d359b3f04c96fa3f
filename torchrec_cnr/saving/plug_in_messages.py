"""What planner and writer hand to one another through DCP.

DCP passes its own objects between the plug-ins, which do not know one another. These are those objects, with what we
need beside them; all of them survive pickling, because plans and results travel between ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.progress import SavePhases
from torchrec_cnr.saving.decision import Decision
from torchrec_cnr.saving.sinks import Captured, RowDestination
from torchrec_cnr.saving.staged_values import StagedCodes, StagedValue
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.modified_rows import RowList, SelectedRows


@dataclass(kw_only=True)
class CNRStorageMeta(StorageMeta):
    """What the writer tells the planner: where this save goes, and its rows. ``save_id`` is set."""

    store: Store
    destination: RowDestination


@dataclass
class SaveMetadata(Metadata):
    """The planner's metadata, with its decision for ``StorageWriter.finish``.

    All ranks get it from ``dcp.save``, and from the future of ``dcp.async_save``, with what the save took on each rank.
    """

    decision: Decision | None = None
    phases: tuple[SavePhases, ...] = ()


@dataclass(frozen=True, eq=False)
class StagedTensor:
    """What stands for a tensor of any kind in a state dict that was staged.

    Attributes:
        cut: Number of the cut that it is of.
        write_items: What DCP's plan says of it.
        is_replicated: Whether several ranks may hold one and the same shard of it.
        shards: Its local shards, by their offsets; those that a cut's items hold are not among them.
    """

    cut: int
    write_items: tuple[WriteItem, ...]
    is_replicated: bool
    shards: Mapping[tuple[int, ...], StagedValue]

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        """DCP's protocol for what is no tensor."""
        return list(self.write_items)

    def tensor(self, offsets: tuple[int, ...]) -> Tensor:
        """A shard."""
        shard = self.shards[offsets]
        return shard if isinstance(shard, Tensor) else shard.tensor()


@dataclass(frozen=True, eq=False)
class ShardData:
    """What the planner resolves a tracked shard to: its values, and which of them are to be stored.

    Attributes:
        values: [num_rows, ...], the whole shard, shared with the model; or, where ``rows`` are lists, copies of these.
            Where there are codes, none: on the meta device.
        rows: The rows to store, by their heat, or None for all. Items with one and the same object share their row
            numbers.
        group: A number that a table's shard and the optimizer state of its rows have in common, if it is tracked.
        codes: What the values were encoded as, if that is all that was staged.
        captured: What the sink must know besides.
        is_table: Whether it is a table, rather than its optimizer state.
        table: For row-wise optimizer state, the FQN of its table.
        table_box: And the box of the table's shard.
        num_restores: Restores from a checkpoint that the state has been through.
    """

    values: Tensor
    rows: tuple[SelectedRows, ...] | None
    is_table: bool
    table: str | None = None
    table_box: Box | None = None
    num_restores: int = 0
    group: int | None = None
    codes: StagedCodes | None = None
    captured: Captured | None = None

    @property
    def has_rows_only(self) -> bool:
        """Whether the values are those of the rows to store, and no others."""
        return self.rows is not None and all(isinstance(part, RowList) for part in self.rows)

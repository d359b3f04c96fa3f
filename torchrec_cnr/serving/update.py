"""Updates: checkpoints are merged, as a load merges a lineage, into memory beside the model; the model is not touched.

A tensor that the checkpoints hold whole gets a second copy; of any other, only the rows that they hold are kept.
Touched rows are those that deltas have overwritten since the model's baseline: a delta that is based on that baseline,
and not on what is applied, brings a model up to date if it holds all of these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrec_cnr.format.manifest import TensorEntry
from torchrec_cnr.lineage.checkpoint import Lineage
from torchrec_cnr.reading.blocks import Block
from torchrec_cnr.reading.fold import fold
from torchrec_cnr.reading.plan import CheckpointReads, held, plan_fold
from torchrec_cnr.reading.regions import LineageTensor, Region, turns
from torchrec_cnr.serving.model_tensors import ModelTensor
from torchrec_cnr.serving.update_path import UpdateBase, UpdatePath
from torchrec_cnr.serving.update_rows import UpdateRows
from torchrec_cnr.sharding import ShardKey, wait_for_devices


@dataclass(eq=False)
class TouchedRows(Region):
    """Rows of a table's region that come from deltas. As a region of a fold, it notes which, and takes no values.

    Attributes:
        is_touched: bool [num_rows].
    """

    is_touched: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.is_touched = torch.zeros(self.box.num_rows, dtype=torch.bool, device="cpu")

    def write(self, block: Block) -> None:
        """Note the rows of a delta."""
        common = block.rows.within(self.box) if block.is_delta else None
        if common is not None and block.box.intersect(self.box) is not None:
            self.is_touched[common[1]] = True


Touched = Mapping[ShardKey, TouchedRows]


def are_overwritten(touched: Touched, staged: Mapping[ShardKey, UpdateRows]) -> bool:
    """Whether what is staged overwrites all that was touched, whole rows of it."""
    for key, rows in staged.items():
        if key not in touched or not rows.has_whole_rows:
            return False
        is_left = touched[key].is_touched.clone()
        is_left[rows.rows.cpu()] = False
        if bool(is_left.any()):
            return False
    return True


def touch(touched: Touched, staged: Mapping[ShardKey, UpdateRows]) -> None:
    """What was staged is applied now."""
    for key, rows in touched.items():
        if key in staged:
            rows.is_touched[staged[key].rows.cpu()] = True
        else:
            rows.is_touched[:] = True  # all of it was replaced


@dataclass(frozen=True, eq=False)
class UpdateTensor:
    """A tensor that is replaced as a whole.

    Attributes:
        tensor: The served one.
        values: What it will be; in host memory.
        num_rows: Of a table, its rows here; 0 of any other.
    """

    tensor: Tensor
    values: Tensor
    num_rows: int

    def swap_in(self) -> None:
        """Overwrite the served values."""
        self.tensor.copy_(self.values)


@dataclass(frozen=True, eq=False)
class Update:
    """What is ready to be swapped in.

    Attributes:
        rows: Of tables of which links hold some rows.
        tensors: What is replaced as a whole.
        touched: Rows that were overwritten since the baseline, up to now.
        num_bytes: Bytes of packs that it was read from.
    """

    rows: Mapping[ShardKey, UpdateRows]
    tensors: Sequence[UpdateTensor]
    touched: Touched
    num_bytes: int

    @property
    def parts(self) -> Sequence[UpdateRows | UpdateTensor]:
        """All of it."""
        return *self.rows.values(), *self.tensors

    @property
    def num_rows(self) -> int:
        """Rows of tables."""
        return sum(part.num_rows for part in self.parts)

    def swap_in(self) -> None:
        """Overwrite what is served, while no lookup happens."""
        tensors = [part.tensor for part in self.parts]
        wait_for_devices(tensors)  # lookups that were begun
        with torch.inference_mode():  # also tables that were made in it can be written to
            for part in self.parts:
                part.swap_in()
        wait_for_devices(tensors)


def prepare_update(
    links: UpdatePath, targets: Sequence[ModelTensor], touched: Touched, thread_count: int
) -> Update | None:
    """Read, verify and decode links.

    Args:
        links: What is to be applied.
        targets: What of the model it goes to.
        touched: Rows of the model that were overwritten since the baseline.
        thread_count: Requests in flight at once.

    Returns:
        None if the links alone do not tell what the rows will be, so that the whole lineage must be read.

    Raises:
        DamagedError: Bytes are not what was committed.
        StoreError: A pack cannot be read.
        StateMismatchError: A tensor is of another size or dtype.
    """
    rows: dict[ShardKey, UpdateRows] = {}
    tensors: list[UpdateTensor] = []
    regions: list[Region] = []
    for target in targets:
        saved = LineageTensor(links.lineage, target.fqn)
        if links.is_delta and not _is_whole(links.lineage, target.fqn):
            if not _is_made_of_rows(saved.entry):
                return None
            rows[target.key] = UpdateRows(target.fqn, target.box, saved, target.tensor, target.row)
            regions.append(rows[target.key])
        else:
            tensors.append(_staged_tensor(saved, target))
            regions += saved.regions(target.box, tensors[-1].values, target.row)
    if not links.is_delta:
        entries = links.lineage.newest.manifest.tensors
        rowwise = (target for target in targets if _is_made_of_rows(entries[target.fqn]))
        touched = {target.key: TouchedRows(target.fqn, target.box) for target in rowwise}
        regions += touched.values()
    num_bytes = 0
    for turn in turns(regions):
        plans = plan_fold(links.lineage, turn)
        fold(plans, turn, thread_count, are_complete=not links.is_delta)
        num_bytes += sum(map(_read_bytes, plans))
    is_right = links.ground is not UpdateBase.BASELINE or are_overwritten(touched, rows)
    if not is_right or not all(part.is_complete for part in rows.values()):
        return None
    return Update(rows, tensors, touched, num_bytes)


def _is_whole(lineage: Lineage, fqn: str) -> bool:
    """Whether some link holds all of a tensor."""
    return any(entry.is_whole for _, entry in held(lineage.checkpoints, fqn))


def _is_made_of_rows(entry: TensorEntry) -> bool:
    """Whether a delta may hold some of a tensor's rows, that can be applied by themselves."""
    return entry.table is None and len(entry.size) == 2


def _staged_tensor(saved: LineageTensor, target: ModelTensor) -> UpdateTensor:
    values = torch.empty(target.tensor.shape, dtype=target.tensor.dtype, device="cpu")
    return UpdateTensor(target.tensor, values, len(values) if saved.entry.is_table else 0)


def _read_bytes(plan: CheckpointReads) -> int:
    blobs = [read.blob for read in plan.reads.values()]
    blobs += [block.blob for block in plan.row_blocks.values() if block.blob is not None]
    return sum(blob.num_bytes for blob in blobs)

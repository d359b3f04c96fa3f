"""Updates: merges checkpoints as a load does, but into separate memory, so that the model does not change.

A tensor that the checkpoints contain completely gets a second copy. For any other tensor, only the rows in the
checkpoints are prepared. Touched rows are those that deltas have overwritten since the model's baseline. A delta that
is based on that baseline, and not on the applied checkpoint, can update the model if it contains all touched rows.
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
from torchrec_cnr.reading.transforms import KnownTransforms
from torchrec_cnr.serving.id_map_updates import ServedIdMaps
from torchrec_cnr.serving.model_tensors import ModelTensor
from torchrec_cnr.serving.update_path import UpdateBase, UpdatePath
from torchrec_cnr.serving.update_rows import UpdateRows
from torchrec_cnr.sharding import ShardKey, wait_for_devices


@dataclass(eq=False)
class TouchedRows(Region):
    """A region of a fold that only records which rows of a table come from deltas.

    Attributes:
        is_touched: bool [num_rows], True for rows that come from a delta.
    """

    is_touched: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.is_touched = torch.zeros(self.box.num_rows, dtype=torch.bool, device="cpu")

    def write(self, block: Block) -> None:
        """Record the block's rows if it comes from a delta."""
        common = block.rows.within(self.box) if block.is_delta else None
        if common is not None and block.box.intersect(self.box) is not None:
            self.is_touched[common[1]] = True


Touched = Mapping[ShardKey, TouchedRows]


def are_overwritten(touched: Touched, staged: Mapping[ShardKey, UpdateRows]) -> bool:
    """Return whether the staged rows include all touched rows, with all columns."""
    for key, rows in staged.items():
        if key not in touched or not rows.has_whole_rows:
            return False
        is_left = touched[key].is_touched.clone()
        is_left[rows.rows.cpu()] = False
        if bool(is_left.any()):
            return False
    return True


def touch(touched: Touched, staged: Mapping[ShardKey, UpdateRows]) -> None:
    """Record that the staged rows have been applied."""
    for key, rows in touched.items():
        if key in staged:
            rows.is_touched[staged[key].rows.cpu()] = True
        else:
            rows.is_touched[:] = True  # the whole table was replaced


@dataclass(frozen=True, eq=False)
class UpdateTensor:
    """A tensor that is replaced as a whole.

    Attributes:
        tensor: The served tensor.
        values: Its new values.
        num_rows: Number of rows in this process if it is a table; otherwise 0.
    """

    tensor: Tensor
    values: Tensor
    num_rows: int

    def swap_in(self) -> None:
        """Overwrite the served values."""
        self.tensor.copy_(self.values)


@dataclass(frozen=True, eq=False)
class Update:
    """An update that is ready to be swapped in.

    Attributes:
        rows: The staged rows of tables of which the links contain some rows.
        tensors: The tensors that are replaced as a whole.
        touched: The rows that deltas have overwritten since the baseline, without ``rows``, which are not applied yet.
        num_bytes: Number of bytes of packs that were read for it.
        of_id_maps: Those of ``rows`` that are in ``tensors``, sorted with the rows that the links do not contain.
    """

    rows: Mapping[ShardKey, UpdateRows]
    tensors: Sequence[UpdateTensor]
    touched: Touched
    num_bytes: int
    of_id_maps: frozenset[ShardKey] = frozenset()

    @property
    def parts(self) -> Sequence[UpdateRows | UpdateTensor]:
        """All staged rows and tensors that are swapped in."""
        return *(rows for key, rows in self.rows.items() if key not in self.of_id_maps), *self.tensors

    @property
    def num_rows(self) -> int:
        """Number of staged rows of tables."""
        return sum(part.num_rows for part in self.parts)

    def swap_in(self) -> None:
        """Overwrite the served values. Call this while no lookup runs."""
        tensors = [part.tensor for part in self.parts]
        wait_for_devices(tensors)  # until running lookups have ended
        with torch.inference_mode():  # tables that were created in it can only be written in it
            for part in self.parts:
                part.swap_in()
        wait_for_devices(tensors)


def prepare_update(
    links: UpdatePath,
    targets: Sequence[ModelTensor],
    touched: Touched,
    thread_count: int,
    transforms: KnownTransforms,
) -> Update | None:
    """Read, verify and decode the links of an update path.

    Args:
        links: The path to apply.
        targets: The tensors of the model to update.
        touched: The rows of the model that were overwritten since the baseline.
        thread_count: Number of requests in flight at the same time.
        transforms: The transforms that earlier updates have read; this one adds its own.

    Returns:
        The update; None if the links do not contain all necessary rows, so that the whole lineage must be read.

    Raises:
        DamagedError: Bytes differ from those that were committed.
        StoreError: A pack cannot be read.
        StateMismatchError: A tensor has another size or dtype.
    """
    rows: dict[ShardKey, UpdateRows] = {}
    tensors, regions = list[UpdateTensor](), list[Region]()
    maps = ServedIdMaps.of(targets)
    for target in targets:
        lineage_tensor = LineageTensor(links.lineage, target.fqn)
        if links.is_delta and not _is_whole(links.lineage, target.fqn):
            values = _row_values(lineage_tensor, target, maps)
            if values is None:
                return None
            rows[target.key] = UpdateRows(target.fqn, target.box, lineage_tensor, values, target.row)
            regions.append(rows[target.key])
            if target.key in maps:
                tensors.append(UpdateTensor(target.tensor, values, 0))
        else:
            tensors.append(_staged_tensor(lineage_tensor, target))
            regions += lineage_tensor.regions(target.box, tensors[-1].values, target.row)
        if target.key in maps:
            maps.new[target.key] = tensors[-1].values
    if not links.is_delta:
        entries = links.lineage.newest.manifest.tensors
        rowwise = (target for target in targets if target.key in maps or _is_made_of_rows(entries[target.fqn]))
        touched = {target.key: TouchedRows(target.fqn, target.box) for target in rowwise}
        regions += touched.values()
    num_bytes = 0
    for turn in turns(regions):
        plans = plan_fold(links.lineage, turn)
        fold(plans, turn, thread_count, are_complete=not links.is_delta, transforms=transforms)
        num_bytes += sum(map(_read_bytes, plans))
    is_right = links.ground is not UpdateBase.BASELINE or are_overwritten(touched, rows)
    if not is_right or not all(part.is_complete for part in rows.values()):
        return None
    of_id_maps = frozenset(maps.new.keys() & rows.keys())
    for key in of_id_maps:
        rows[key].swap_in()  # into the copy
    maps.sort()
    return Update(rows, tensors, touched, num_bytes, of_id_maps)


def _row_values(lineage_tensor: LineageTensor, target: ModelTensor, maps: ServedIdMaps) -> Tensor | None:
    """Return the values whose rows the links overwrite; None if rows cannot be applied without the others."""
    if target.key in maps:
        return maps.in_row_order(target.key)
    return target.tensor if _is_made_of_rows(lineage_tensor.entry) else None


def _is_whole(lineage: Lineage, fqn: str) -> bool:
    """Return whether a link contains a whole tensor."""
    return any(entry.is_whole for _, entry in held(lineage.checkpoints, fqn))


def _is_made_of_rows(entry: TensorEntry) -> bool:
    """Return whether a delta can contain some rows of a tensor that can be applied without the others."""
    return entry.table is None and len(entry.size) == 2


def _staged_tensor(lineage_tensor: LineageTensor, target: ModelTensor) -> UpdateTensor:
    values = torch.empty(target.tensor.shape, dtype=target.tensor.dtype, device="cpu")
    return UpdateTensor(target.tensor, values, len(values) if lineage_tensor.entry.is_table else 0)


def _read_bytes(plan: CheckpointReads) -> int:
    blobs = [read.blob for read in plan.reads.values()]
    blobs += [block.blob for block in plan.row_blocks.values() if block.blob is not None]
    return sum(blob.num_bytes for blob in blobs)

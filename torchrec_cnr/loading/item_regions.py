"""Item regions: what a read item of a load plan is as regions of a lineage, whatever is wanted.

The storage reader folds them for ``dcp.load``, and serving for a model that follows a job; so both read alike.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from torchrec_cnr.errors import DamagedError, StateMismatchError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import DTYPES, TensorEntry
from torchrec_cnr.lineage.checkpoint import Lineage
from torchrec_cnr.loading.read_items import InferenceReadItem, LoadMetadata, RowStateReadItem, ValueReadItem
from torchrec_cnr.reading.regions import (
    LargestValueRegion,
    Region,
    RowStateRegion,
    TensorRegion,
    column_bounds,
    inference_regions,
)


def load_metadata(lineage: Lineage) -> LoadMetadata:
    """A lineage as DCP describes it to planners."""
    manifest = lineage.newest.manifest
    entries: dict[str, Any] = {fqn: _tensor_metadata(entry) for fqn, entry in manifest.tensors.items()}
    entries |= {fqn: BytesStorageMetadata() for fqn in manifest.objects}
    return LoadMetadata(entries, planner_data=dict(manifest.paths), lineage=lineage)


def item_regions(lineage: Lineage, item: ReadItem, target: Tensor) -> list[Region]:
    """What is to be folded for a read; nothing if it is the state of no rows, which has no place in a table.

    Args:
        lineage: What is read.
        item: A tensor's.
        target: Where it goes.

    Raises:
        StateMismatchError: The target is of another dtype or size.
    """
    fqn = item.storage_index.fqn
    entry, url = lineage.newest.manifest.tensors[fqn], lineage.newest.store.url
    if isinstance(item, InferenceReadItem):
        return inference_regions(fqn, target, item.row, DTYPES[entry.dtype], lineage.shards(fqn))
    if isinstance(item, ValueReadItem):
        return [LargestValueRegion(fqn, Box.whole(entry.size), DTYPES[entry.dtype], target)]
    if target.dtype is not DTYPES[entry.dtype]:
        raise StateMismatchError(
            f"tensor {fqn!r}: the checkpoint {url} has {entry.dtype}, the state dict has {target.dtype}; "
            "load into a tensor of the saved dtype and convert it afterwards"
        )
    if tuple(target.shape) != tuple(item.lengths):
        raise StateMismatchError(
            f"tensor {fqn!r}: {list(item.lengths)} of {url} are to be loaded into {list(target.shape)}"
        )
    if isinstance(item, RowStateReadItem):
        return [_row_state_region(lineage, fqn, item.table_box, target)]
    if entry.table is not None:
        return [_row_state_region(lineage, fqn, _table_box(entry, item), target)] if len(target) else []
    return [TensorRegion(fqn, item_box(item), target)]


def item_box(item: ReadItem) -> Box:
    """Which part of its tensor a read wants."""
    origin = item.storage_index.offset or (0,) * len(item.lengths)
    offsets = tuple(base + offset for base, offset in zip(origin, item.storage_offsets, strict=True))
    return Box(offsets, tuple(item.lengths))


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(place.box.offsets), torch.Size(place.box.sizes)) for place in entry.places
    ]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.size), chunks)


def _row_state_region(lineage: Lineage, fqn: str, table_box: Box, target: Tensor) -> Region:
    """The state of the rows of a table's box, whether it was saved as row-wise, as [rows] or as [rows, 1]."""
    entry = lineage.newest.manifest.tensors[fqn]
    values = target if target.dim() == 1 else target[:, 0]
    if entry.table is not None:
        return RowStateRegion(fqn, table_box, values, column_bounds(lineage.shards(fqn), table_box))
    (first, _), (num_rows, _) = table_box.offsets, table_box.sizes
    if len(entry.size) == 1:
        return TensorRegion(fqn, Box((first,), (num_rows,)), values)
    return TensorRegion(fqn, Box((first, 0), (num_rows, 1)), values[:, None])


def _table_box(entry: TensorEntry, item: ReadItem) -> Box:
    """The table's box for a read of row-wise state by a planner that knows of no tables: as in the checkpoint."""
    for place in entry.places:
        if place.table_box is not None and place.box.offsets == tuple(item.storage_index.offset or ()):
            (first, column), (_, width) = place.table_box.offsets, place.table_box.sizes
            return Box((first + item.storage_offsets[0], column), (item.lengths[0], width))
    raise DamagedError(f"tensor {item.storage_index.fqn!r}: no shard at {item.storage_index.offset}")

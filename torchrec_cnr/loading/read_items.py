"""Read items: which regions of a checkpoint this rank reads, and into which of its local shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from torchrec_cnr.errors import StateMismatchError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import Manifest
from torchrec_cnr.lineage.checkpoint import Lineage
from torchrec_cnr.loading.fitting import Layout, SavedItem, Wanted
from torchrec_cnr.quantization.fbgemm_rows import InferenceRow
from torchrec_cnr.sharding import LocalShard, dtype_name, local_shards


@dataclass
class LoadMetadata(Metadata):
    """The reader's metadata, with the lineage it was read from."""

    lineage: Lineage | None = None


@dataclass(frozen=True)
class RowStateReadItem(ReadItem):
    """A read of row-wise optimizer state, which the table's boxes place rather than its own.

    The target is [rows] or [rows, 1], and so may be what was saved.

    Attributes:
        table_box: The box of the target's table shard.
    """

    table_box: Box = field(default=Box((), ()))


@dataclass(frozen=True)
class ValueReadItem(ReadItem):
    """A read of the largest value of a tensor, which goes into every element of the target and takes its dtype."""


@dataclass(frozen=True)
class InferenceReadItem(ReadItem):
    """A read of a whole float table into the rows of an inference kernel; lengths are the table's.

    Attributes:
        row: How the kernel keeps a row.
    """

    row: InferenceRow


@runtime_checkable
class RestoredRows(Protocol):
    """A load planner that wants to know which rows the deltas of a lineage held."""

    def restore_rows(self, item: ReadItem, rows: Tensor) -> None:
        """Rows of a table were read from a delta: int64 [k], numbered within the item's target."""
        ...

    def finish_restore(self) -> None:
        """Every item of this rank was read."""
        ...


def wanted_item(fqn: str, value: Any, path: Sequence[str | int]) -> Wanted:
    """An item of a state dict, as the coordinator is told of it; ``path`` leads to it in the nested state dict."""
    name = str(path[-1])
    return Wanted(fqn, name, tuple(value.size()), dtype_name(value)) if isinstance(value, Tensor) else Wanted(fqn, name)


def read_items(
    fqn: str, source: SavedItem, state_dict: Mapping[str, Any], metadata: LoadMetadata, manifest: Manifest
) -> list[ReadItem]:
    """The reads that fill this rank's part of an item.

    Args:
        fqn: The item.
        source: Where it comes from.
        state_dict: This rank's, flattened.
        metadata: Of the checkpoint, as DCP has it.
        manifest: Of the checkpoint.

    Raises:
        StateMismatchError: Row-wise state is not sharded as its table is.
    """
    shards = local_shards(state_dict[fqn])
    if source.layout is Layout.VALUE:
        return [_value_item(fqn, source.fqn, index, shard) for index, shard in enumerate(shards)]
    if source.layout is Layout.ROWS:
        boxes = _table_boxes(fqn, source, shards, state_dict, manifest)
        return [
            _row_state_item(fqn, source.fqn, index, shard, box)
            for index, (shard, box) in enumerate(zip(shards, boxes, strict=True))
            if box.num_rows
        ]
    items = _create_read_items(fqn, metadata.state_dict_metadata[source.fqn], state_dict[fqn])
    return [replace(item, storage_index=replace(item.storage_index, fqn=source.fqn)) for item in items]


def _table_boxes(
    fqn: str, source: SavedItem, shards: Sequence[LocalShard], state_dict: Mapping[str, Any], manifest: Manifest
) -> list[Box]:
    """The box of the table that each shard of its row-wise state belongs to."""
    if source.table is None:
        table = manifest.tensors[source.fqn].table
        num_cols = 1 if table is None else manifest.tensors[table].size[1]
        return [Box((shard.box.offsets[0], 0), (shard.box.num_rows, num_cols)) for shard in shards]
    # The i-th local shard belongs to the i-th local shard of the table; a rank without shards may lack the table.
    boxes = [shard.box for shard in local_shards(state_dict.get(source.table))]
    if [shard.box.num_rows for shard in shards] != [box.num_rows for box in boxes] and shards:
        raise StateMismatchError(f"{fqn!r} is not sharded as its table {source.table!r} is in the state dict")
    return boxes[: len(shards)]


def _row_state_item(fqn: str, saved: str, index: int, shard: LocalShard, table_box: Box) -> ReadItem:
    return RowStateReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(fqn, shard.box.offsets, index),
        dest_offsets=torch.Size((0,) * len(shard.box.sizes)),
        storage_index=MetadataIndex(saved),
        storage_offsets=torch.Size((0,)),
        lengths=torch.Size(shard.box.sizes),
        table_box=table_box,
    )


def _value_item(fqn: str, saved: str, index: int, shard: LocalShard) -> ReadItem:
    nowhere = torch.Size((0,) * len(shard.box.sizes))
    return ValueReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(fqn, shard.box.offsets, index),
        dest_offsets=nowhere,
        storage_index=MetadataIndex(saved),
        storage_offsets=nowhere,
        lengths=torch.Size(shard.box.sizes),
    )

"""Read items: which regions of a checkpoint this rank reads, and into which of its local shards.

A layout defines how what was saved is converted to what is wanted. The coordinator makes one for every item of the
state dicts, and each read item carries it. The layout makes the items of a rank's shards, and then the regions of the
checkpoint to merge for these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from torchrec_cnr.errors import StateMismatchError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import DTYPES, TensorEntry
from torchrec_cnr.human_text import count_text
from torchrec_cnr.lineage.checkpoint import Lineage
from torchrec_cnr.loading.opened_chain import OpenedChain
from torchrec_cnr.loading.row_maps import RowMap
from torchrec_cnr.quantization.fbgemm_rows import InferenceRow
from torchrec_cnr.reading.regions import LineageTensor, MappedRegion, Region, TensorRegion
from torchrec_cnr.sharding import LocalShard, dtype_name, local_shards, memory_key


@dataclass
class LoadMetadata(Metadata):
    """The reader's metadata.

    Attributes:
        chain: The checkpoint chain from which it was read.
        row_maps: The tensors of a warm start's row maps, int64 [rows], by their digests.
    """

    chain: OpenedChain | None = None
    row_maps: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, chain: OpenedChain) -> "LoadMetadata":
        """Return a checkpoint chain as DCP describes it to planners."""
        manifest = chain.newest.manifest
        entries: dict[str, Any] = {fqn: _tensor_metadata(entry) for fqn, entry in manifest.tensors.items()}
        entries |= {fqn: BytesStorageMetadata() for fqn in manifest.objects}
        return cls(entries, planner_data=dict(manifest.paths), chain=chain)


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(place.box.offsets), torch.Size(place.box.sizes)) for place in entry.places
    ]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.size), chunks)


class Layout(Protocol):
    """The conversion of what was saved to what is wanted; a frozen value.

    Attributes:
        converts: Whether the target may have another dtype.
    """

    converts: ClassVar[bool]

    def read_items(
        self, fqn: str, saved_fqn: str, state_dict: Mapping[str, Any], metadata: LoadMetadata
    ) -> list[ReadItem]:
        """Return the reads that fill this rank's part of an item.

        Args:
            fqn: FQN of the item.
            saved_fqn: Its FQN in the checkpoint.
            state_dict: This rank's flattened state dict.
            metadata: DCP's metadata of the checkpoint.

        Raises:
            StateMismatchError: Row-wise state is not sharded as its table is.
        """
        ...

    def regions(self, tensor: LineageTensor, box: Box, target: Tensor) -> list[Region]:
        """Return the regions to merge for a read; none for state of no rows, which has no place in a table.

        Args:
            tensor: The saved tensor.
            box: The wanted region of it.
            target: Memory for the values.
        """
        ...


@dataclass(frozen=True)
class LayoutReadItem(ReadItem):
    """A read into one local shard.

    Attributes:
        layout: The conversion.
        box: The wanted region of the saved tensor, in the layout's indices.
    """

    layout: Layout
    box: Box

    @classmethod
    def of(cls, layout: Layout, box: Box, fqn: str, saved_fqn: str, index: int, shard_box: Box) -> "LayoutReadItem":
        """Return the read that fills all of the ``index``-th local shard of an item, whose region is ``shard_box``."""
        origin = torch.Size((0,) * len(shard_box.sizes))
        return cls(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(fqn, shard_box.offsets, index),
            dest_offsets=origin,
            storage_index=MetadataIndex(saved_fqn),
            storage_offsets=origin,
            lengths=torch.Size(shard_box.sizes),
            layout=layout,
            box=box,
        )


@dataclass(frozen=True)
class SameLayout:
    """The layout for objects, and for tensors of the saved size. The read items are DCP's own."""

    converts: ClassVar[bool] = False

    def read_items(
        self, fqn: str, saved_fqn: str, state_dict: Mapping[str, Any], metadata: LoadMetadata
    ) -> list[ReadItem]:
        """Return a read for each pair of a saved chunk and a local shard that overlap."""
        if isinstance(state_dict[fqn], Tensor) and not local_shards(state_dict[fqn]):
            return []  # DCP has no chunk for a rank outside of a tensor's mesh
        items = _create_read_items(fqn, metadata.state_dict_metadata[saved_fqn], state_dict[fqn])
        return [replace(item, storage_index=replace(item.storage_index, fqn=saved_fqn)) for item in items]

    def regions(self, tensor: LineageTensor, box: Box, target: Tensor) -> list[Region]:
        """Return the regions for the box, in the tensor's own indices."""
        return tensor.regions(box, target)


@dataclass(frozen=True)
class RowsLayout:
    """The layout for state with one value per row, [rows], [rows × column shards] or [rows, 1]. It places rows.

    Attributes:
        table: FQN of the table whose shards determine the rows of the item's shards; None if the item's own regions do.
        num_cols: Without ``table``, the number of columns of the table that the saved state belongs to; 1 if unknown.
        max_rows: The number of saved rows, if the table has more or fewer in the state dict; otherwise None.
    """

    table: str | None = None
    num_cols: int = 1
    max_rows: int | None = None
    converts: ClassVar[bool] = False

    def read_items(
        self, fqn: str, saved_fqn: str, state_dict: Mapping[str, Any], metadata: LoadMetadata
    ) -> list[ReadItem]:
        """Return one read for each local shard that has rows."""
        shards = local_shards(state_dict[fqn])
        items: list[ReadItem] = []
        for index, (shard, table_box) in enumerate(zip(shards, self._boxes(fqn, shards, state_dict), strict=True)):
            num_rows = self._num_saved(table_box)
            if num_rows > 0:
                wanted_box, place = _first_rows(table_box, num_rows), _first_rows(shard.box, num_rows)
                items.append(LayoutReadItem.of(self, wanted_box, fqn, saved_fqn, index, place))
        return items

    def _num_saved(self, table_box: Box) -> int:
        """Return how many of the rows of a shard were saved."""
        most = table_box.num_rows if self.max_rows is None else self.max_rows - table_box.offsets[0]
        return min(table_box.num_rows, most)

    def _boxes(self, fqn: str, shards: Sequence[LocalShard], state_dict: Mapping[str, Any]) -> list[Box]:
        """Return the region of the table that each shard of its row-wise state belongs to."""
        if self.table is None:
            return [Box((shard.box.offsets[0], 0), (shard.box.num_rows, self.num_cols)) for shard in shards]
        return _table_boxes(fqn, self.table, shards, state_dict)

    def regions(self, tensor: LineageTensor, box: Box, target: Tensor) -> list[Region]:
        """Return the region for the box, in the table's indices."""
        return [tensor.rows_region(box, _row_values(target))]


def _row_values(target: Tensor) -> Tensor:
    """Return row-wise state [rows] or [rows, 1] as [rows]."""
    return target if target.dim() == 1 else target[:, 0]


def _table_boxes(fqn: str, table: str, shards: Sequence[LocalShard], state_dict: Mapping[str, Any]) -> list[Box]:
    """Return the regions of a table that the local shards of its row-wise state belong to.

    Raises:
        StateMismatchError: The state is not sharded as its table is.
    """
    # The i-th local shard belongs to the i-th local shard of the table; a rank without shards may lack the table.
    boxes = [shard.box for shard in local_shards(state_dict.get(table))]
    if [shard.box.num_rows for shard in shards] != [box.num_rows for box in boxes] and shards:
        raise StateMismatchError(f"{fqn!r} is not sharded as its table {table!r} is in the state dict")
    return boxes[: len(shards)]


def _first_rows(box: Box, num_rows: int) -> Box:
    return Box(box.offsets, (num_rows, *box.sizes[1:]))


@dataclass(frozen=True)
class MappedLayout:
    """The layout for rows that a row map assigns to others.

    Attributes:
        row_map: The map.
        table: FQN of the table whose shards determine the rows of the item's shards, for row-wise state; None if the
            item's own regions do.
        renumbers: Whether the values are row numbers, to which the map applies as well.
        given: On this rank, the tensor of the map, if a user gave one.
    """

    row_map: RowMap
    table: str | None = None
    renumbers: bool = False
    given: Tensor | None = field(default=None, compare=False, repr=False)
    converts: ClassVar[bool] = False

    def read_items(
        self, fqn: str, saved_fqn: str, state_dict: Mapping[str, Any], metadata: LoadMetadata
    ) -> list[ReadItem]:
        """Return one read for each local shard into which a saved row is loaded."""
        layout = replace(self, given=metadata.row_maps.get(self.row_map.digest))
        shards = local_shards(state_dict[fqn])
        boxes = _table_boxes(fqn, self.table, shards, state_dict) if self.table else [shard.box for shard in shards]
        return [
            LayoutReadItem.of(layout, box, fqn, saved_fqn, index, shard.box)
            for index, (shard, box) in enumerate(zip(shards, boxes, strict=True))
            if (layout.saved_rows(box) >= 0).any()
        ]

    def regions(self, tensor: LineageTensor, box: Box, target: Tensor) -> list[Region]:
        """Return one region for all saved rows of a shard, whose own rows are those of ``box``."""
        inner_box = Box((0, *box.offsets[1:]), box.sizes)
        inner: Region
        if self.table is None:
            inner = TensorRegion(tensor.fqn, inner_box, target)
        else:
            inner = tensor.rows_region(inner_box, _row_values(target))
        return [MappedRegion.of(inner, self.saved_rows(box), box.offsets[0], target if self.renumbers else None)]

    def saved_rows(self, box: Box) -> Tensor:
        """Return the saved rows of a shard's rows, int64 [rows of the box], -1 for none."""
        return self.row_map.saved_rows(range(box.offsets[0], box.offsets[0] + box.num_rows), self.given)


@dataclass(frozen=True)
class ValueLayout:
    """The layout for one value per table, [] or [shards]: the largest value is loaded everywhere."""

    converts: ClassVar[bool] = True

    def read_items(
        self, fqn: str, saved_fqn: str, state_dict: Mapping[str, Any], metadata: LoadMetadata
    ) -> list[ReadItem]:
        """Return one read for each local shard."""
        boxes = [shard.box for shard in local_shards(state_dict[fqn])]
        return [LayoutReadItem.of(self, box, fqn, saved_fqn, index, box) for index, box in enumerate(boxes)]

    def regions(self, tensor: LineageTensor, box: Box, target: Tensor) -> list[Region]:
        """Return one region for all of the tensor."""
        return [tensor.largest_value_region(target)]


@dataclass(frozen=True)
class InferenceLayout:
    """The layout for a float table, whose rows are converted to those of inference kernels.

    Attributes:
        shards: The box of each shard, in the table's indices, and the format of its rows in its kernel.
    """

    shards: tuple[tuple[Box, InferenceRow], ...]
    converts: ClassVar[bool] = True

    def read_items(
        self, fqn: str, saved_fqn: str, state_dict: Mapping[str, Any], metadata: LoadMetadata
    ) -> list[ReadItem]:
        """Return one read for each shard that has rows, of its size in floats."""
        return [
            LayoutReadItem.of(self, box, fqn, saved_fqn, index, box)
            for index, (box, _) in enumerate(self.shards)
            if box.num_rows
        ]

    def regions(self, tensor: LineageTensor, box: Box, target: Tensor) -> list[Region]:
        """Return the regions for the rows of a shard, in windows if checkpoints store them in other pieces."""
        return tensor.regions(box, target, dict(self.shards)[box])


@dataclass(frozen=True)
class SavedItem:
    """The source of an item of a state dict.

    Attributes:
        fqn: Its FQN in the checkpoint.
        layout: The conversion.
    """

    fqn: str
    layout: Layout = SameLayout()

    def under(self, fqns: Mapping[str, str]) -> "SavedItem":
        """Return the source for a state dict in which tables have other names, by saved FQN."""
        layout = self.layout
        if not isinstance(layout, RowsLayout | MappedLayout) or layout.table is None:
            return self
        return replace(self, layout=replace(layout, table=fqns.get(layout.table, layout.table)))


def item_regions(lineage: Lineage, item: ReadItem, target: Tensor) -> list[Region]:
    """Return the regions to merge for a read. The planner may be DCP's, whose items are of tensors as they were saved.

    Args:
        lineage: The checkpoint chain.
        item: Read item of a tensor.
        target: Memory for the values.

    Raises:
        StateMismatchError: The target has another dtype or size.
    """
    tensor, url = LineageTensor(lineage, item.storage_index.fqn), lineage.newest.store.url
    layout, box = (item.layout, item.box) if isinstance(item, LayoutReadItem) else (SameLayout(), _item_box(item))
    if target.dtype is not tensor.dtype and not layout.converts:
        raise StateMismatchError(
            f"tensor {tensor.fqn!r}: the checkpoint {url} has {tensor.entry.dtype}, the state dict has {target.dtype}; "
            "load into a tensor of the saved dtype and convert it afterwards"
        )
    if tuple(target.shape) != tuple(item.lengths) and not layout.converts:
        raise StateMismatchError(
            f"tensor {tensor.fqn!r}: a region of size {list(item.lengths)} of {url} cannot be loaded into a tensor of "
            f"size {list(target.shape)}"
        )
    return layout.regions(tensor, box, target)


def _item_box(item: ReadItem) -> Box:
    """Return the region of its tensor that a read item of DCP's wants."""
    origin = item.storage_index.offset or (0,) * len(item.lengths)
    offsets = tuple(base + offset for base, offset in zip(origin, item.storage_offsets, strict=True))
    return Box(offsets, tuple(item.lengths))


@dataclass(frozen=True, eq=False)
class InferenceShard:
    """A shard of a table, in an inference kernel.

    Attributes:
        box: Its box in the indices of the float table.
        rows: uint8 [num_rows, row_bytes], its rows with their scales and biases, shared with the kernel.
        row: Format of a row.
        views: Tensors that represent the shard in state dicts: the rows, or their part with the codes. They share the
            memory of ``rows``.
    """

    box: Box
    rows: Tensor
    row: InferenceRow
    views: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class InferenceTable:
    """A table of inference kernels.

    Attributes:
        size: Numbers of rows and columns of the corresponding float table.
        shards: Its shards, all in this process; one if it is not sharded.
    """

    size: tuple[int, int]
    shards: tuple[InferenceShard, ...]

    @property
    def layout(self) -> InferenceLayout:
        """The conversion of a float table of the same size to this one."""
        return InferenceLayout(tuple((shard.box, shard.row) for shard in self.shards))


class TargetTables:
    """The tables of inference kernels that a load may write to; it finds them in a state dict by their memory.

    Attributes:
        tables: The tables.
    """

    def __init__(self, tables: Sequence[InferenceTable]) -> None:
        self.tables = tuple(tables)
        self._by_memory = {
            memory_key(view): table for table in tables for shard in table.shards for view in shard.views
        }
        self._by_memory.pop(None, None)  # a table without rows has no memory

    def __repr__(self) -> str:
        num_rows = sum(table.size[0] for table in self.tables)
        return f"{type(self).__name__}({count_text(len(self.tables), 'table')}, {count_text(num_rows, 'row')})"

    def find(self, value: Any) -> InferenceTable | None:
        """Return the table that an item of a state dict represents, whatever its key; None if it is no such table."""
        for shard in local_shards(value):
            if dtype_name(shard.tensor) == "uint8":
                # TorchRec wraps codes of 2 and 4 bits in a subclass of Tensor, and this returns its bytes.
                table = self._by_memory.get(memory_key(shard.tensor.view(torch.uint8)))
                if table is not None:
                    return table
        return None

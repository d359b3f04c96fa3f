"""Regions: the parts of tensors that a load wants. The rows of blocks are written into them.

Quantized rows are decoded directly into the target, without an intermediate block of decoded rows.

Inference kernels keep tables quantized. If possible, such a table takes the codes of a checkpoint's rows unchanged, and
a block with whole rows is written at once. In a checkpoint that was sharded by columns, a row has several pieces with
different scales. Its rows are assembled as floats, and quantized after all checkpoints of the lineage have been read.
Such a table is read in windows of rows, so that the memory for these floats is bounded.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import DTYPES, Shard, TensorEntry
from torchrec_cnr.lineage.checkpoint import Lineage
from torchrec_cnr.quantization import NoQuantization, fused_bits
from torchrec_cnr.quantization.fbgemm_rows import InferenceRow
from torchrec_cnr.reading.blocks import Block, PlacedRows, row_numbers

FLOAT_BYTES = 64 << 20  # bytes of rows that are assembled at a time
_CHUNK_BYTES = 8 << 20  # bytes of assembled rows that are quantized at a time


@dataclass(eq=False)
class Region:
    """A wanted part of a tensor. Subclasses define the target that it is written to.

    Attributes:
        fqn: FQN of the tensor.
        box: The region in the tensor's indices; for row-wise optimizer state, in the indices of its table.
    """

    fqn: str
    box: Box

    def write(self, block: Block) -> None:
        """Overwrite the rows of this region that a block has."""
        raise NotImplementedError

    def finish(self) -> None:
        """Complete the target after all blocks have been written."""


@dataclass(eq=False)
class TensorRegion(Region):
    """A region of a tensor that is addressed by its own indices.

    Attributes:
        target: Tensor of the box's size and the checkpoint's dtype, on any device.
        on_delta_rows: Called with the numbers of rows of the region that came from a delta, int64 [n]; or None.
    """

    target: Tensor
    on_delta_rows: Callable[[Tensor], None] | None = None

    def write(self, block: Block) -> None:
        """Copy or decode the block's rows into the target."""
        common = block.box.intersect(self.box)
        common_rows = block.rows.within(self.box)
        if common is None or common_rows is None:
            return
        positions, rows = common_rows
        target = self.target[(slice(None), *common.slices(self.box)[1:])] if self.target.dim() else self.target[None]
        if isinstance(block.scheme, NoQuantization) or not _has_rows_apart(target):
            put_rows(target, rows, block.values[(slice(None), *common.slices(block.box)[1:])][positions])
        else:
            first_col = common.offsets[1] - block.box.offsets[1]
            block.decode_into(positions, first_col, target, rows)
        if block.is_delta and self.on_delta_rows is not None:
            self.on_delta_rows(row_numbers(rows))


@dataclass(eq=False)
class RowStateRegion(Region):
    """Row-wise optimizer state (one value per row) of a shard of a table.

    Every column shard of a table has its own state, which is a mean over the columns of the shard. So the state is
    merged separately for each range of columns between the shard bounds of the whole lineage. The target's value is the
    mean of its ranges, weighted by their widths. It is exact if all ranges of a row have the same value.

    Attributes:
        target: Tensor [num_rows], which can be a column of a larger tensor.
        bounds: First columns of the ranges, and the end of the last one: [num_ranges + 1].
        ranges: Values of each range, [num_rows, num_ranges].
    """

    target: Tensor
    bounds: Sequence[int]
    ranges: Tensor = field(init=False)

    def __post_init__(self) -> None:
        num_ranges = len(self.bounds) - 1
        self.ranges = self.target[:, None] if num_ranges == 1 else self.target[:, None].repeat(1, num_ranges)

    def write(self, block: Block) -> None:
        """Overwrite the column ranges that the block's shard has."""
        common = block.box.intersect(self.box)
        common_rows = block.rows.within(self.box)
        if common is None or common_rows is None:
            return
        positions, rows = common_rows
        first_range = self.bounds.index(common.offsets[1])
        stop_range = self.bounds.index(common.offsets[1] + common.sizes[1])
        values = block.values[positions].reshape(-1, 1).expand(-1, stop_range - first_range).to(self.ranges.device)
        if isinstance(rows, slice):
            self.ranges[rows, first_range:stop_range] = values
        else:
            self.ranges[:, first_range:stop_range].index_copy_(0, rows.to(self.ranges.device), values)

    def finish(self) -> None:
        """Write the mean over the columns to the target."""
        if len(self.bounds) > 2:
            widths = torch.tensor(self.bounds, dtype=torch.float64, device=self.ranges.device).diff()
            self.target.copy_((self.ranges * widths).sum(1) / widths.sum())
            are_equal = (self.ranges == self.ranges[:, :1]).all(1)  # their mean may be rounded, unlike the value itself
            self.target.copy_(torch.where(are_equal, self.ranges[:, 0], self.target))


@dataclass(eq=False)
class MappedRegion(Region):
    """A region whose rows go to other rows of a target. Rows of the target without a saved row keep their values.

    Attributes:
        target: The region of the target, whose rows begin at 0.
        saved_rows: int64 [n], n >= 1, increasing: saved rows, in the indices of the tensor or table. One saved row can
            be there several times.
        target_rows: int64 [n], the row of the target that each of them is loaded into.
        moved: The target's values, if these are row numbers. They are moved as far as their rows.
        first_row: The number of the target's first row, for ``moved``.
    """

    target: Region
    saved_rows: Tensor
    target_rows: Tensor
    moved: Tensor | None
    first_row: int

    @classmethod
    def of(cls, target: Region, saved_rows: Tensor, first_row: int = 0, moved: Tensor | None = None) -> "MappedRegion":
        """Return the region that fills a target.

        Args:
            target, first_row, moved: See the class.
            saved_rows: int64 [rows of the target]: the saved row of each, or -1; at least one is not -1.
        """
        target_rows = (saved_rows >= 0).nonzero().squeeze(1)
        saved_rows, order = saved_rows[target_rows].sort(stable=True)
        first_saved, num_rows = int(saved_rows[0]), int(saved_rows[-1] - saved_rows[0]) + 1
        box = Box((first_saved, *target.box.offsets[1:]), (num_rows, *target.box.sizes[1:]))
        return cls(target.fqn, box, target, saved_rows, target_rows[order], moved, first_row)

    def write(self, block: Block) -> None:
        """Write those of the block's rows that are loaded, as rows of the target."""
        numbers = block.rows.numbers
        first = block.box.offsets[0] + (block.rows.first if numbers is None else 0)
        num_rows = block.rows.num_rows if numbers is None else int(numbers[-1]) + 1
        bounds = torch.tensor([first, first + num_rows], device="cpu")
        start, stop = torch.searchsorted(self.saved_rows, bounds).tolist()
        positions, target_rows = self.saved_rows[start:stop] - first, self.target_rows[start:stop]
        if numbers is not None:
            wanted, positions = positions, torch.searchsorted(numbers, positions)
            is_there = numbers[positions] == wanted
            positions, target_rows = positions[is_there], target_rows[is_there]
        if len(positions):
            box = Box((0, *block.box.offsets[1:]), (self.target.box.num_rows, *block.box.sizes[1:]))
            self.target.write(block.part(positions, PlacedRows(box, 0, len(positions), target_rows)))

    def finish(self) -> None:
        """Complete the target, and move row numbers."""
        self.target.finish()
        if self.moved is not None:
            distances = self.target_rows + self.first_row - self.saved_rows
            device = self.moved.device
            self.moved.index_add_(0, self.target_rows.to(device), distances.to(self.moved))


@dataclass(eq=False)
class LargestValueRegion(TensorRegion):
    """A region that reduces a whole tensor to its largest value.

    Attributes:
        result: Tensor of any shape, dtype and device, which is filled with the largest value.
    """

    result: Tensor = field(kw_only=True)

    def finish(self) -> None:
        """Fill the result with the largest value."""
        self.result.fill_(self.target.max().item())


@dataclass(eq=False)
class InferenceRegion(Region):
    """Rows of a shard of a table in an inference kernel, if every checkpoint has them with just the shard's columns.

    Attributes:
        target: uint8 [num_rows, row_bytes], in host memory.
        row: Layout of a row in the target.
    """

    target: Tensor
    row: InferenceRow

    def write(self, block: Block) -> None:
        """Copy the codes if the layout allows it; otherwise decode and quantize the rows."""
        common_rows = block.rows.within(self.box)
        if common_rows is None or block.box.intersect(self.box) is None:
            return
        positions, rows = common_rows
        bits = fused_bits(block.scheme)
        if bits is not None and self.row.takes_over(bits):
            inference_rows = self.row.of_codes(block.codes[positions], bits)
            exact_indices, values = block.exact_rows(row_numbers(positions))
            if len(exact_indices):
                inference_rows[exact_indices] = self.row.of_values(values)
        else:
            inference_rows = self.row.of_values(_decoded(block, row_numbers(positions)))
        put_rows(self.target, rows, inference_rows)


@dataclass(eq=False)
class PiecedRegion(InferenceRegion):
    """Rows of a shard of a table in an inference kernel, if some checkpoint has them in other pieces.

    Attributes:
        dtype: The dtype of the table in the checkpoints.
    """

    dtype: torch.dtype
    _floats: TensorRegion | None = None

    @property
    def float_bytes(self) -> int:
        """Bytes of the rows as floats, which the region allocates from its first block until it is finished."""
        return self.box.num_rows * self.box.num_cols * self.dtype.itemsize

    def write(self, block: Block) -> None:
        """Decode the block's rows into the floats."""
        if self._floats is None:
            self._floats = TensorRegion(self.fqn, self.box, torch.empty(self.box.sizes, dtype=self.dtype, device="cpu"))
        self._floats.write(block)

    def finish(self) -> None:
        """Quantize the rows into the target, and free the floats."""
        if self._floats is not None:
            chunk_rows = _rows_in(_CHUNK_BYTES, self.row, self.dtype)
            chunks = self._floats.target.split(chunk_rows)
            for values, target in zip(chunks, self.target.split(chunk_rows), strict=True):
                target.copy_(self.row.of_values(values))
            self._floats = None


def inference_regions(
    fqn: str, box: Box, target: Tensor, row: InferenceRow, dtype: torch.dtype, shards: Iterable[Shard]
) -> list[Region]:
    """Return the regions of a box of a table: one, or windows of rows if any of ``shards`` has other pieces of rows.

    Args:
        fqn: FQN of the table.
        box: The box that the target has, in the table's indices.
        target: uint8 [num_rows, row_bytes], in host memory.
        row: Layout of a row in the target.
        dtype: The dtype of the table in the checkpoints.
        shards: The shards of the table in all checkpoints of the lineage.
    """
    first_row, first_col = box.offsets
    columns = first_col, row.num_cols
    if all(shard.box.intersect(box) is None or _columns_of(shard.box) == columns for shard in shards):
        return [InferenceRegion(fqn, box, target, row)]
    window_rows = _rows_in(FLOAT_BYTES, row, dtype)
    return [
        PiecedRegion(fqn, Box((first_row + skipped, first_col), (len(window), row.num_cols)), window, row, dtype)
        for skipped, window in zip(range(0, len(target), window_rows), target.split(window_rows), strict=True)
    ]


def _columns_of(box: Box) -> tuple[int, int]:
    """Return the first column of a box, and the number of its columns."""
    return box.offsets[1], box.num_cols


def turns(regions: Sequence[Region]) -> list[list[Region]]:
    """Group regions that are read together: in one turn, unless those in pieces would need too many floats."""
    read_together: list[list[Region]] = [[region for region in regions if not isinstance(region, PiecedRegion)]]
    left_bytes = FLOAT_BYTES
    for region in regions:
        if isinstance(region, PiecedRegion):
            if region.float_bytes > left_bytes:
                read_together.append([])
                left_bytes = FLOAT_BYTES
            read_together[-1].append(region)
            left_bytes -= region.float_bytes
    return read_together


@dataclass(frozen=True)
class LineageTensor:
    """A tensor in a lineage. It creates the regions to read any part of the tensor.

    Attributes:
        lineage: A lineage whose newest checkpoint has the tensor.
        fqn: FQN of the tensor.
    """

    lineage: Lineage
    fqn: str

    @property
    def entry(self) -> TensorEntry:
        """The tensor's entry in the newest checkpoint."""
        return self.lineage.newest.manifest.tensors[self.fqn]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return DTYPES[self.entry.dtype]

    def regions(self, box: Box, target: Tensor, row: InferenceRow | None = None) -> list[Region]:
        """Return the regions to fold to read a part of the tensor.

        Args:
            box: The part, in the tensor's own indices.
            target: Tensor that the regions write to, of the part's size and the tensor's dtype.
            row: Layout of a row in the target if it belongs to an inference kernel. The target is then uint8
                [num_rows, row_bytes], in host memory.
        """
        if row is not None:
            return inference_regions(self.fqn, box, target, row, self.dtype, self.lineage.shards(self.fqn))
        if self.entry.table is None:
            return [TensorRegion(self.fqn, box, target)]
        regions: list[Region] = []
        for place in self.entry.places:
            common = place.box.intersect(box)
            if common is not None and place.table_box is not None:
                (first_row, column), (_, width) = place.table_box.offsets, place.table_box.sizes
                origin = (first_row + common.offsets[0] - place.box.offsets[0], column)
                table_box = Box(origin, (common.num_rows, width))
                regions.append(self.rows_region(table_box, target[common.slices(box)]))
        return regions

    def rows_region(self, box: Box, target: Tensor) -> Region:
        """Return the region of a tensor with one value per row, saved as row-wise state, as [rows] or as [rows, 1].

        Args:
            box: The part, in the table's indices.
            target: Tensor [num_rows] that the region writes to.
        """
        if self.entry.table is not None:
            return RowStateRegion(self.fqn, box, target, _column_bounds(self.lineage.shards(self.fqn), box))
        if len(self.entry.size) == 1:
            return TensorRegion(self.fqn, Box(box.offsets[:1], box.sizes[:1]), target)
        return TensorRegion(self.fqn, Box((box.offsets[0], 0), (box.num_rows, 1)), target[:, None])

    def largest_value_region(self, target: Tensor) -> Region:
        """Return the region that fills the target, of any size and dtype, with the tensor's largest value."""
        values = torch.zeros(self.entry.size, dtype=self.dtype, device="cpu")
        return LargestValueRegion(self.fqn, Box.whole(self.entry.size), values, result=target)


def _rows_in(num_bytes: int, row: InferenceRow, dtype: torch.dtype) -> int:
    return max(1, num_bytes // (row.num_cols * dtype.itemsize))


def _decoded(block: Block, positions: Tensor) -> Tensor:
    """Return the values of some rows, [k, num_cols]."""
    values = torch.empty(len(positions), block.box.num_cols, dtype=block.dtype, device="cpu")
    block.decode_into(positions, 0, values, torch.arange(len(positions), device="cpu"))
    return values


def _has_rows_apart(target: Tensor) -> bool:
    """Return whether each row is contiguous, and no two rows share an element."""
    return target.dim() == 2 and target.stride(1) == 1 and (len(target) < 2 or target.stride(0) >= target.shape[1])


def put_rows(target: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    """Copy values to rows of a target, on any device."""
    values = values.to(target.device)
    if isinstance(rows, slice):
        target[rows].copy_(values.reshape(target[rows].shape))
    else:
        target.index_copy_(0, rows.to(target.device), values)


def _column_bounds(shards: Iterable[Shard], box: Box) -> list[int]:
    """Return the columns of ``box`` at which any of the ``shards`` of the row-wise state begins or ends, sorted."""
    start, stop = box.offsets[1], box.offsets[1] + box.sizes[1]
    bounds = {start, stop}
    for shard in shards:
        if shard.table_box is not None:
            edges = (shard.table_box.offsets[1], shard.table_box.offsets[1] + shard.table_box.sizes[1])
            bounds.update(edge for edge in edges if start < edge < stop)
    return sorted(bounds)

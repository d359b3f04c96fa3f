"""Regions: the parts of tensors that a load wants, and how the rows of a block get into them.

Quantized rows are decoded where they belong: no block of decoded rows lies in between.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import Shard
from torchrec_cnr.format.row_sets import RowNumbers
from torchrec_cnr.quantization import NoQuantization, Scheme


@dataclass(frozen=True, eq=False)
class PlacedRows:
    """Which rows of a tensor a blob holds.

    Attributes:
        box: Of its shard; for row-wise optimizer state, of the table's shard.
        first: First row within the box, where the rows are consecutive.
        num_rows: How many there are.
        numbers: int64 [num_rows], row numbers within the box, where they are not.
    """

    box: Box
    first: int
    num_rows: int
    numbers: Tensor | None

    @property
    def index(self) -> RowNumbers | slice:
        """int64 [num_rows], row numbers within the box, or the slice that they are."""
        return slice(self.first, self.first + self.num_rows) if self.numbers is None else self.numbers.numpy()

    def within(self, wanted: Box) -> tuple[Tensor | slice, Tensor | slice] | None:
        """Positions among these, and rows of ``wanted``, of the rows that both have; None if there are none."""
        shift = self.box.offsets[0] - wanted.offsets[0] if self.box.offsets else 0
        if self.numbers is None:
            start = max(0, -self.first - shift)
            stop = min(self.num_rows, wanted.num_rows - self.first - shift)
            into = slice(start + self.first + shift, stop + self.first + shift)
            return (slice(start, stop), into) if start < stop else None
        rows = self.numbers + shift if shift else self.numbers
        if int(rows[0]) >= 0 and int(rows[-1]) < wanted.num_rows:
            return slice(0, len(rows)), rows
        keep = ((rows >= 0) & (rows < wanted.num_rows)).nonzero().squeeze(1)
        return (keep, rows[keep]) if len(keep) else None


@dataclass(frozen=True, eq=False)
class Block:
    """The rows of one blob, still encoded.

    Attributes:
        rows: Which n rows they are.
        codes: uint8 [n, row_bytes].
        scheme: What decodes them.
        dtype: What they are decoded to.
        exact_positions: int64 [k], strictly increasing: rows among the n that codes do not represent.
        exact_values: [k, num_cols], their values.
        row_shape: Sizes of the shard's dimensions but the first.
        is_delta: Whether it comes from a delta.
    """

    rows: PlacedRows
    codes: Tensor
    scheme: Scheme
    dtype: torch.dtype
    exact_positions: Tensor
    exact_values: Tensor
    row_shape: tuple[int, ...]
    is_delta: bool

    @property
    def box(self) -> Box:
        """Of its shard."""
        return self.rows.box

    @property
    def values(self) -> Tensor:
        """All rows decoded, [n, *row_shape]; without quantization a view of the codes."""
        values = self.scheme.decode(self.codes, self.exact_values.shape[1], self.dtype)
        if len(self.exact_positions):
            values[self.exact_positions] = self.exact_values
        return values.view(len(self.codes), *self.row_shape)

    def decode_into(self, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Decode rows straight into rows of a target.

        Args:
            positions: int64 [k], increasing, which rows of the block.
            first_col: The block's column that is the target's first.
            target: [num_rows, num_cols], the elements of a row side by side. Written.
            rows: int64 [k], the rows of the target that they go to.
        """
        device = target.device
        places = rows.to(device)
        self.scheme.decode_into(self.codes.to(device), positions.to(device), first_col, target, places)
        if len(self.exact_positions):
            found, exact = self.exact_rows(positions)
            values = exact[:, first_col : first_col + target.shape[1]]
            target.index_copy_(0, places[found.to(device)], values.to(device))

    def exact_rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some rows codes do not represent, and their values.

        Args:
            positions: int64 [k], k >= 1, increasing, which rows of the block.

        Returns:
            int64 [m], numbers among the k, and [m, num_cols].
        """
        found = torch.searchsorted(positions, self.exact_positions).clamp_(max=len(positions) - 1)
        wanted = positions[found] == self.exact_positions
        return found[wanted], self.exact_values[wanted]

    def part(self, positions: Tensor, rows: PlacedRows) -> "Block":
        """Some of the rows, as a block of their own.

        Args:
            positions: int64 [k], k >= 1, increasing, which rows of the block.
            rows: Where they are.
        """
        exact, values = self.exact_rows(positions)
        codes = self.codes.index_select(0, positions)
        return replace(self, rows=rows, codes=codes, exact_positions=exact, exact_values=values)


class Region(Protocol):
    """A part of a tensor that is wanted, and where its values go."""

    fqn: str
    box: Box

    def write(self, block: Block) -> None:
        """Overwrite the rows that a block holds of this region."""
        ...

    def finish(self) -> None:
        """All blocks were written."""
        ...


@dataclass(eq=False)
class TensorRegion:
    """A region of a tensor whose own boxes place it.

    Attributes:
        fqn: The tensor.
        box: The region, in the tensor's indices.
        target: Tensor of the box's size, of the checkpoint's dtype, on any device.
        on_delta_rows: Told which rows of the region came from deltas.
    """

    fqn: str
    box: Box
    target: Tensor
    on_delta_rows: Callable[[Tensor], None] | None = None

    def write(self, block: Block) -> None:
        """Copy consecutive rows, scatter others."""
        common = block.box.intersect(self.box)
        found = block.rows.within(self.box)
        if common is None or found is None:
            return
        positions, rows = found
        target = self.target[(slice(None), *common.slices(self.box)[1:])] if self.target.dim() else self.target[None]
        if isinstance(block.scheme, NoQuantization) or not _has_rows_apart(target):
            put_rows(target, rows, block.values[(slice(None), *common.slices(block.box)[1:])][positions])
        else:
            first_col = common.offsets[1] - block.box.offsets[1]
            block.decode_into(row_numbers(positions), first_col, target, row_numbers(rows))
        if block.is_delta and self.on_delta_rows is not None:
            self.on_delta_rows(row_numbers(rows))

    def finish(self) -> None:
        """Nothing is left to do."""


@dataclass(eq=False)
class RowStateRegion:
    """Row-wise optimizer state (one value a row) of a shard of a table.

    Every column shard of a table has a state of its own, which stands for the mean over its columns. So the state is
    folded for each range of columns that any shard of the lineage bounds, and the target's value is the mean of the
    ranges in it, weighted by their widths: exact where the target is sharded as the checkpoints were.

    Attributes:
        fqn: The state.
        box: The table shard's box, in the table's indices.
        target: [num_rows], perhaps a column of a larger tensor.
        bounds: Columns at which the ranges begin, and the end of the last: [num_ranges + 1].
    """

    fqn: str
    box: Box
    target: Tensor
    bounds: Sequence[int]
    ranges: Tensor = field(init=False)

    def __post_init__(self) -> None:
        num_ranges = len(self.bounds) - 1
        self.ranges = self.target[:, None] if num_ranges == 1 else self.target.new_zeros(len(self.target), num_ranges)

    def write(self, block: Block) -> None:
        """Overwrite the ranges of columns that the block's shard has."""
        common = block.box.intersect(self.box)
        found = block.rows.within(self.box)
        if common is None or found is None:
            return
        positions, rows = found
        first = self.bounds.index(common.offsets[1])
        last = self.bounds.index(common.offsets[1] + common.sizes[1])
        values = block.values[positions].reshape(-1, 1).expand(-1, last - first).to(self.ranges.device)
        if isinstance(rows, slice):
            self.ranges[rows, first:last] = values
        else:
            self.ranges[:, first:last].index_copy_(0, rows.to(self.ranges.device), values)

    def finish(self) -> None:
        """Take the mean over the columns."""
        if len(self.bounds) > 2:
            widths = torch.tensor(self.bounds, dtype=torch.float64, device=self.ranges.device).diff()
            self.target.copy_((self.ranges * widths).sum(1) / widths.sum())


@dataclass(eq=False)
class LargestValueRegion:
    """A tensor of which only the largest value is wanted.

    Attributes:
        fqn: The tensor.
        box: All of it.
        dtype: Its own.
        target: Tensor of any shape, dtype and device: filled with the value.
    """

    fqn: str
    box: Box
    dtype: torch.dtype
    target: Tensor
    values: TensorRegion = field(init=False)

    def __post_init__(self) -> None:
        self.values = TensorRegion(self.fqn, self.box, torch.zeros(self.box.sizes, dtype=self.dtype))

    def write(self, block: Block) -> None:
        """Keep all values."""
        self.values.write(block)

    def finish(self) -> None:
        """Take the largest."""
        self.target.fill_(self.values.target.max().item())


def _has_rows_apart(target: Tensor) -> bool:
    """Whether the elements of each row lie side by side, and no two rows share any."""
    return target.dim() == 2 and target.stride(1) == 1 and (len(target) < 2 or target.stride(0) >= target.shape[1])


def put_rows(target: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    """Copy values to rows of a target, on any device."""
    values = values.to(target.device)
    if isinstance(rows, slice):
        target[rows].copy_(values.reshape(target[rows].shape))
    else:
        target.index_copy_(0, rows.to(target.device), values)


def row_numbers(rows: Tensor | slice) -> Tensor:
    """int64 [n]: rows one by one."""
    return torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def column_bounds(shards: Iterable[Shard], box: Box) -> list[int]:
    """Where columns of a table's ``box`` are divided by any of the ``shards`` of its row-wise state."""
    start, stop = box.offsets[1], box.offsets[1] + box.sizes[1]
    bounds = {start, stop}
    for shard in shards:
        if shard.table_box is not None:
            edges = (shard.table_box.offsets[1], shard.table_box.offsets[1] + shard.table_box.sizes[1])
            bounds.update(edge for edge in edges if start < edge < stop)
    return sorted(bounds)

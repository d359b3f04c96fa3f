"""Blocks: the rows of one blob, their numbers in the tensor, and their decoding."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format.blob_bytes import Bytes, exact_rows
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import Shard
from torchrec_cnr.format.row_sets import CodedRows, RowBlock, RowNumbers, decode_row_numbers
from torchrec_cnr.quantization import Scheme

_HOST = torch.device("cpu")


def row_numbers(rows: Tensor | slice, device: torch.device = _HOST) -> Tensor:
    """Return row numbers, int64 [n], on a device, from a tensor or a slice."""
    return torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows.to(device)


@dataclass(frozen=True, eq=False)
class PlacedRows:
    """The numbers of the rows in a blob.

    Attributes:
        box: Box of the shard; for row-wise optimizer state, of the table's shard.
        first: First row within the box, if the rows are consecutive.
        num_rows: Number of rows.
        numbers: int64 [num_rows], row numbers within the box; None if the rows are consecutive.
    """

    box: Box
    first: int
    num_rows: int
    numbers: Tensor | None

    @property
    def index(self) -> RowNumbers | slice:
        """Row numbers within the box: int64 [num_rows], or a slice if they are consecutive."""
        return slice(self.first, self.first + self.num_rows) if self.numbers is None else self.numbers.numpy()

    def within(self, region: Box) -> tuple[Tensor | slice, Tensor | slice] | None:
        """Return the common rows with ``region``: their positions in this blob, and their rows in the region.

        Returns:
            Two slices or two int64 tensors [k]; None if there are no common rows.
        """
        shift = self.box.offsets[0] - region.offsets[0] if self.box.offsets else 0
        if self.numbers is None:
            start = max(0, -self.first - shift)
            stop = min(self.num_rows, region.num_rows - self.first - shift)
            into = slice(start + self.first + shift, stop + self.first + shift)
            return (slice(start, stop), into) if start < stop else None
        rows = self.numbers + shift if shift else self.numbers
        if int(rows[0]) >= 0 and int(rows[-1]) < region.num_rows:
            return slice(0, len(rows)), rows
        keep = ((rows >= 0) & (rows < region.num_rows)).nonzero().squeeze(1)
        return (keep, rows[keep]) if len(keep) else None


@dataclass(frozen=True, eq=False)
class Block:
    """The encoded rows of one blob.

    Attributes:
        rows: The numbers of the n rows.
        codes: uint8 [n, row_bytes], the encoded rows.
        scheme: The quantization scheme that decodes them.
        dtype: The dtype of decoded rows.
        exact_positions: int64 [k], strictly increasing: positions of exact rows among the n.
        exact_values: [k, num_cols], the values of the exact rows.
        row_shape: Sizes of the shard's dimensions except the first.
        is_delta: Whether the blob comes from a delta.
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
        """Box of the shard."""
        return self.rows.box

    @property
    def values(self) -> Tensor:
        """All rows, decoded, [n, *row_shape]; without quantization a view of the codes."""
        values = self.scheme.decode(self.codes, self.exact_values.shape[1], self.dtype)
        if len(self.exact_positions):
            values[self.exact_positions] = self.exact_values
        return values.view(len(self.codes), *self.row_shape)

    def decode_into(self, positions: Tensor | slice, first_col: int, target: Tensor, rows: Tensor | slice) -> None:
        """Decode rows directly into a target. Only codes and row numbers are copied to the target's device.

        Args:
            positions: int64 [k], or a slice: positions of the rows in the block.
            first_col: The block's column that becomes the target's first column.
            target: [num_rows, num_cols] with contiguous rows; written to.
            rows: int64 [k], or a slice: the rows of the target to write to.
        """
        device = target.device
        target_rows = row_numbers(rows, device)
        if isinstance(positions, slice):
            codes, code_positions = self.codes[positions].to(device), torch.arange(len(target_rows), device=device)
        else:
            codes, code_positions = self.codes.to(device), positions.to(device)
        self.scheme.decode_into(codes, code_positions, first_col, target, target_rows)
        if len(self.exact_positions):
            indices, exact_values = self.exact_rows(row_numbers(positions))
            values = exact_values[:, first_col : first_col + target.shape[1]]
            target.index_copy_(0, target_rows[indices.to(device)], values.to(device))

    def exact_rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the exact rows among some rows of the block.

        Args:
            positions: int64 [k]: positions of the rows in the block, in any order, and possibly several times.

        Returns:
            The indices of exact rows in ``positions``, int64 [m], and their values, [m, num_cols].
        """
        if not len(self.exact_positions):
            return positions.new_empty(0), self.exact_values
        numbers = torch.searchsorted(self.exact_positions, positions).clamp_(max=len(self.exact_positions) - 1)
        indices = (self.exact_positions[numbers] == positions).nonzero().squeeze(1)
        return indices, self.exact_values[numbers[indices]]

    def part(self, positions: Tensor, placed: PlacedRows) -> "Block":
        """Return some of the rows as a new block.

        Args:
            positions: int64 [k]: positions of the rows in the block, in any order, and possibly several times.
            placed: The numbers of these rows.
        """
        exact_positions, exact_values = self.exact_rows(positions)
        codes = self.codes.index_select(0, positions)
        return replace(self, rows=placed, codes=codes, exact_positions=exact_positions, exact_values=exact_values)


class BlockRowNumbers:
    """The row numbers of blocks, decoded on demand. The last ones are cached for the table's optimizer state.

    Args:
        blocks: Blocks with coded row numbers, by a key that names them in errors.
        codes: The coded row numbers, by the same keys.
        where: Path or URL of the checkpoint, for errors.
    """

    def __init__(self, blocks: Mapping[str, RowBlock], codes: Mapping[str, Bytes], where: str) -> None:
        self._keys = {block: key for key, block in blocks.items()}
        self._codes = codes
        self._where = where
        self._last: tuple[RowBlock | None, RowNumbers] = (None, np.empty(0, dtype=np.int64))

    def of(self, block: RowBlock) -> RowNumbers | None:
        """Return the row numbers of a block, int64 [num_rows]; None if they are consecutive."""
        if block.coding == "all":
            return None
        if self._last[0] != block:
            key = self._keys[block]
            coded = CodedRows(block.coding, block.first, block.span, self._codes[key].tobytes())
            self._last = (block, decode_row_numbers(coded, block.num_rows, f"{self._where}: {key}"))
        return self._last[1]


def parse_block(shard: Shard, dtype: torch.dtype, data: Bytes, placed: PlacedRows, is_delta: bool, where: str) -> Block:
    """Parse the bytes of a shard's blob, after they were joined if they were byte-split.

    Args:
        shard: The shard of the blob.
        dtype: The dtype of the tensor.
        data: The bytes of the blob.
        placed: The numbers of its rows.
        is_delta: Whether the blob comes from a delta.
        where: Name of the blob in errors.

    Raises:
        DamagedError: The bytes are not rows of this dtype.
    """
    num_rows, num_cols = placed.num_rows, shard.box.num_cols
    num_code_bytes = num_rows * shard.scheme.row_bytes(num_cols, dtype)
    codes = torch.from_numpy(data[:num_code_bytes]).view(num_rows, -1)
    if dtype is torch.bool and bool((codes > 1).any()):
        raise DamagedError(f"{where}: corrupt: expected bools, got other bytes; use another checkpoint")
    positions, values = exact_rows(data[num_code_bytes:], num_cols, dtype.itemsize)
    if len(positions) and (positions[-1] >= num_rows or (np.diff(positions) <= 0).any()):
        raise DamagedError(f"{where}: corrupt: positions of exact rows are out of order; use another checkpoint")
    exact_values = torch.from_numpy(values).clone().view(dtype)
    row_shape = shard.box.sizes[1:]
    return Block(placed, codes, shard.scheme, dtype, torch.from_numpy(positions), exact_values, row_shape, is_delta)

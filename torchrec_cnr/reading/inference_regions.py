"""Regions of tables that inference kernels keep quantized: rows of a checkpoint get there with their codes if they can.

A block that has whole rows is written at once. A checkpoint that was sharded by columns has a row in pieces, each with
a scale of its own, so that rows are put together as floats and quantized once all checkpoints of a lineage are read.
Such a table is therefore read in windows of rows, and few enough of them at a time that their floats are bounded.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import Shard
from torchrec_cnr.quantization import fused_bits
from torchrec_cnr.quantization.fbgemm_rows import InferenceRow
from torchrec_cnr.reading.regions import Block, Region, TensorRegion, put_rows, row_numbers

FLOAT_BYTES = 64 << 20  # of rows that are put together at a time
_CHUNK_BYTES = 8 << 20  # of them that are quantized at a time


@dataclass(eq=False)
class InferenceRegion:
    """Rows of a table of which every checkpoint has whole rows.

    Attributes:
        fqn: The table.
        box: The rows, with all columns.
        target: uint8 [num_rows, row_bytes], on the host.
        row: How it keeps a row.
    """

    fqn: str
    box: Box
    target: Tensor
    row: InferenceRow

    def write(self, block: Block) -> None:
        """Take codes over, or decode and quantize."""
        found = block.rows.within(self.box)
        if found is None:
            return
        positions, rows = found
        bits = fused_bits(block.scheme)
        if bits is not None and self.row.takes_over(bits):
            written = self.row.of_codes(block.codes[positions], bits)
            exact, values = block.exact_rows(row_numbers(positions))
            if len(exact):
                written[exact] = self.row.of_values(values)
        else:
            written = self.row.of_values(_decoded(block, row_numbers(positions)))
        put_rows(self.target, rows, written)

    def finish(self) -> None:
        """Nothing is left to do."""


@dataclass(eq=False)
class PiecedRegion:
    """Rows of a table of which some checkpoint has pieces.

    Attributes:
        fqn: The table.
        box: The rows, with all columns.
        target: uint8 [num_rows, row_bytes], on the host.
        row: How it keeps a row.
        dtype: The checkpoints'.
    """

    fqn: str
    box: Box
    target: Tensor
    row: InferenceRow
    dtype: torch.dtype
    _floats: TensorRegion | None = None

    @property
    def float_bytes(self) -> int:
        """Bytes of its rows as floats, which it needs from the first block until it is finished."""
        return self.box.num_rows * self.box.num_cols * self.dtype.itemsize

    def write(self, block: Block) -> None:
        """Decode."""
        if self._floats is None:
            self._floats = TensorRegion(self.fqn, self.box, torch.empty(self.box.sizes, dtype=self.dtype))
        self._floats.write(block)

    def finish(self) -> None:
        """Quantize, and free the floats."""
        if self._floats is not None:
            chunk_rows = _rows_in(_CHUNK_BYTES, self.row, self.dtype)
            chunks = self._floats.target.split(chunk_rows)
            for values, target in zip(chunks, self.target.split(chunk_rows), strict=True):
                target.copy_(self.row.of_values(values))
            self._floats = None


def inference_regions(
    fqn: str, target: Tensor, row: InferenceRow, dtype: torch.dtype, shards: Iterable[Shard]
) -> list[Region]:
    """The regions of a whole table: one, or windows if rows come in pieces.

    Args:
        fqn: The table.
        target: uint8 [num_rows, row_bytes], on the host.
        row: How it keeps a row.
        dtype: The checkpoints'.
        shards: The table's shards in all checkpoints.
    """
    num_rows, whole_rows = len(target), all(shard.box.num_cols == row.num_cols for shard in shards)
    if whole_rows:
        return [InferenceRegion(fqn, Box.whole((num_rows, row.num_cols)), target, row)]
    window_rows = _rows_in(FLOAT_BYTES, row, dtype)
    return [
        PiecedRegion(fqn, Box((first, 0), (len(window), row.num_cols)), window, row, dtype)
        for first, window in zip(range(0, num_rows, window_rows), target.split(window_rows), strict=True)
    ]


def turns(regions: Sequence[Region]) -> list[list[Region]]:
    """Regions that are read together: all in one turn, unless those in pieces need more floats than are allowed."""
    found: list[list[Region]] = [[region for region in regions if not isinstance(region, PiecedRegion)]]
    left_bytes = FLOAT_BYTES
    for region in regions:
        if isinstance(region, PiecedRegion):
            if region.float_bytes > left_bytes:
                found.append([])
                left_bytes = FLOAT_BYTES
            found[-1].append(region)
            left_bytes -= region.float_bytes
    return found


def _rows_in(num_bytes: int, row: InferenceRow, dtype: torch.dtype) -> int:
    return max(1, num_bytes // (row.num_cols * dtype.itemsize))


def _decoded(block: Block, positions: Tensor) -> Tensor:
    """[k, num_cols]: the values of some rows."""
    values = torch.empty(len(positions), block.box.num_cols, dtype=block.dtype)
    block.decode_into(positions, 0, values, torch.arange(len(positions)))
    return values

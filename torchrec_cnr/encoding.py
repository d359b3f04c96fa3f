"""Encoding: the rows of a shard become blobs in packs, block by block.

Items that share a row mask (a table and the optimizer state of its rows) are written together: each block of row
numbers is worked out and coded once, then every item's rows of that block are gathered and encoded. Memory is that of
one block and of the packs in flight, whatever the size of the shard.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr.manifest import Blob, RowBlock, RowSet
from torchrec_cnr.modified import RowMask
from torchrec_cnr.packs import PackWriter
from torchrec_cnr.rows import CodedRows, encode_rows
from torchrec_cnr.schemes import NoQuantization, Scheme
from torchrec_cnr.stores import Bytes

BLOCK_BYTES = 8 << 20  # of values; small enough to stay in cache between gather and encode


@dataclass(frozen=True, eq=False)
class Source:
    """An item to be encoded.

    Attributes:
        name: Unique within the rank; begins the names of its blobs.
        values: The shard, on any device; one without dimensions counts as one row.
        dtype: Name of the values' dtype.
        scheme: How to quantize.
    """

    name: str
    values: Tensor
    dtype: str
    scheme: Scheme

    @property
    def rows(self) -> Tensor:
        """The values, with a first dimension."""
        return self.values if self.values.dim() else self.values[None]


@dataclass(frozen=True)
class EncodedShard:
    """An encoded source.

    Attributes:
        block_rows: Rows in a block.
        blobs: Number of each block's blob; see ``PackWriter.add``.
        num_exact: Rows that the scheme cannot represent, stored exactly.
    """

    block_rows: int
    blobs: tuple[int, ...]
    num_exact: int


@dataclass(frozen=True)
class EncodedRowSet:
    """Coded blocks of row numbers, each with the number of its blob."""

    num_rows: int
    block_rows: int
    blocks: tuple[tuple[CodedRows, int], ...]

    def located(self, blobs: Sequence[Blob]) -> RowSet:
        """The row set as a manifest holds it."""
        blocks = tuple(RowBlock(coded.coding, coded.first, coded.span, blobs[number]) for coded, number in self.blocks)
        return RowSet(self.num_rows, self.block_rows, blocks)


def write_all_rows(packs: PackWriter, source: Source) -> EncodedShard:
    """Encode every row of a shard."""
    block_rows = _block_rows([source])
    blocks = source.rows.split(block_rows) if source.values.numel() else ()
    written = [_write_block(packs, source, number, block) for number, block in enumerate(blocks)]
    return _encoded(block_rows, written)


def write_rows(
    packs: PackWriter, sources: Sequence[Source], rows: RowMask
) -> tuple[EncodedRowSet, Sequence[EncodedShard]]:
    """Encode the rows of a mask, for every source at once."""
    block_rows = _block_rows(sources)
    coded_blocks: list[tuple[CodedRows, int]] = []
    written: list[list[tuple[int, int]]] = [[] for _ in sources]
    buffers = [_gather_buffer(source, block_rows) for source in sources]
    num_rows = 0
    for number, block in enumerate(rows.blocks(block_rows)):
        num_rows += len(block)
        coded = encode_rows(block.cpu().numpy())
        data = np.frombuffer(coded.data, dtype=np.uint8)
        name = f"{sources[0].name}/rows/{number}"
        coded_blocks.append((coded, packs.add(name, "uint8", data.shape, data)))
        for source, buffer, source_blocks in zip(sources, buffers, written, strict=True):
            out = None if buffer is None else buffer[: len(block)]
            values = torch.index_select(source.rows, 0, block.to(source.values.device), out=out)
            source_blocks.append(_write_block(packs, source, number, values))
    shards = [_encoded(block_rows, source_blocks) for source_blocks in written]
    return EncodedRowSet(num_rows, block_rows, tuple(coded_blocks)), shards


def _gather_buffer(source: Source, block_rows: int) -> Tensor | None:
    """One buffer for all blocks where they are encoded at once: gathering each into its own fragments the heap.

    Blocks that are stored as they are need their own, because they wait in a pack.
    """
    if isinstance(source.scheme, NoQuantization):
        return None
    return source.values.new_empty((min(block_rows, len(source.rows)), *source.rows.shape[1:]))


def _encoded(block_rows: int, written: Sequence[tuple[int, int]]) -> EncodedShard:
    return EncodedShard(block_rows, tuple(blob for blob, _ in written), sum(num_exact for _, num_exact in written))


def _block_rows(sources: Sequence[Source]) -> int:
    widest = max(math.prod(source.rows.shape[1:]) * source.values.element_size() for source in sources)
    return max(1, BLOCK_BYTES // max(1, widest))


def _write_block(packs: PackWriter, source: Source, number: int, values: Tensor) -> tuple[int, int]:
    """One blob: the codes of a block, then the rows that they cannot represent, and how many these are."""
    name = f"{source.name}/{number}"
    if isinstance(source.scheme, NoQuantization):
        # Whole blocks on the host stay views of the live tensor: nothing trains before the save returns.
        return packs.add(name, source.dtype, tuple(values.shape), _bytes(values)), 0
    values = values.reshape(len(values), -1)
    encoded = source.scheme.encode(values)
    codes = _bytes(encoded.codes)
    if len(encoded.exact) == 0:
        return packs.add(name, "uint8", tuple(encoded.codes.shape), codes), 0
    positions = encoded.exact.to(torch.int32).cpu().numpy().astype("<u4").view(np.uint8)
    data = np.concatenate((codes, positions, _bytes(values[encoded.exact])))
    return packs.add(name, "uint8", data.shape, data), len(encoded.exact)


def _bytes(tensor: Tensor) -> Bytes:
    """A tensor's elements, in order, as little-endian bytes in host memory."""
    flat = tensor.cpu().contiguous().resolve_neg().reshape(-1)
    array: Bytes = flat.view(torch.uint8).numpy()
    return array

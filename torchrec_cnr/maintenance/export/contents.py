"""The contents of a checkpoint, merged from its whole chain and read a bounded part at a time.

Tensors are divided into chunks of rows, and chunks are combined to batches. Each batch is read in one pass over the
chain. A blob that overlaps two batches is read twice. A batch is as large as eight blocks of a baseline, and its chunks
end at the ends of blocks. So only blobs of deltas, and of shards that begin elsewhere, are read twice.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import DTYPES
from torchrec_cnr.lineage.checkpoint import Lineage, read_objects
from torchrec_cnr.loading.id_maps import sorted_maps
from torchrec_cnr.progress import Progress
from torchrec_cnr.reading.fold import fold
from torchrec_cnr.reading.plan import plan_fold
from torchrec_cnr.reading.regions import LineageTensor, Region, RowStateRegion
from torchrec_cnr.reading.transforms import KnownTransforms
from torchrec_cnr.storage.pack_writer import BLOCK_BYTES

HELD_BYTES = 64 << 20  # of values in a batch, which are in memory at the same time


@dataclass(frozen=True)
class Chunk:
    """Rows of a tensor that are read together.

    Attributes:
        fqn: The FQN of the tensor.
        box: The region of the rows in the tensor (offsets, sizes).
        dtype: The dtype of the tensor.
    """

    fqn: str
    box: Box
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the values."""
        return math.prod(self.box.sizes) * self.dtype.itemsize


class Contents:
    """The tensors and objects of a checkpoint.

    Args:
        lineage: The checkpoint, and all that it is based on.
        thread_count: Number of requests in flight at the same time.
        progress: Called with the number of bytes of tensors that were written, and the total.

    Attributes:
        tensors: Each tensor as one chunk, by FQN.
        paths: The keys and indices that lead to each tensor or object in the nested state dict, by FQN.
        num_bytes: The bytes of all tensors.
    """

    def __init__(self, lineage: Lineage, thread_count: int, progress: Progress | None = None) -> None:
        self._lineage = lineage
        self._thread_count = thread_count
        self._progress = progress
        self._done_bytes = 0
        self._transforms = KnownTransforms()
        manifest = lineage.newest.manifest
        self.tensors = {fqn: Chunk(fqn, Box.whole(e.size), DTYPES[e.dtype]) for fqn, e in manifest.tensors.items()}
        self.paths = {fqn: manifest.paths.get(fqn, (fqn,)) for fqn in (*manifest.tensors, *manifest.objects)}
        self.num_bytes = sum(tensor.num_bytes for tensor in self.tensors.values())
        maps = sorted_maps(manifest.tensors.keys())
        self._ids_of = {fqn: ids_fqn for ids_fqn, members in maps.items() for fqn in members}
        self._order: tuple[str, Tensor] | None = None

    def objects(self) -> dict[str, Any]:
        """Return all objects by FQN."""
        newest = self._lineage.newest
        return dict(read_objects(newest, newest.manifest.objects, self._thread_count))

    def plan_batches(self, fqns: Iterable[str]) -> list[tuple[Chunk, ...]]:
        """Divide tensors into chunks, and combine these to batches, all in order."""
        batches: list[list[Chunk]] = []
        left_bytes = 0
        for fqn in fqns:
            row_bytes = self._held_row_bytes(fqn)
            whole = self.tensors[fqn]
            # An id map is read whole, because it is sorted.
            for chunk in [whole] if fqn in self._ids_of else split_rows(whole, row_bytes):
                held_bytes = chunk.box.num_rows * row_bytes
                if held_bytes > left_bytes or not batches:
                    batches.append([])
                    left_bytes = HELD_BYTES
                batches[-1].append(chunk)
                left_bytes -= held_bytes
        return [tuple(batch) for batch in batches]

    def read_batch(self, batch: Sequence[Chunk]) -> list[Tensor]:
        """Read the values of a batch's chunks. Return them as tensors on the CPU.

        Raises:
            DamagedError: Data is corrupt.
            StoreError: A data file cannot be read.
        """
        return [
            values[self._order_of(self._ids_of[chunk.fqn])] if chunk.fqn in self._ids_of else values
            for chunk, values in zip(batch, self._stored(batch), strict=True)
        ]

    def _stored(self, batch: Sequence[Chunk]) -> list[Tensor]:
        """Read the values of chunks as they are stored."""
        targets = [torch.empty(chunk.box.sizes, dtype=chunk.dtype, device="cpu") for chunk in batch]
        regions: list[Region] = []
        for chunk, target in zip(batch, targets, strict=True):
            regions += LineageTensor(self._lineage, chunk.fqn).regions(chunk.box, target)
        fold(plan_fold(self._lineage, regions), regions, self._thread_count, transforms=self._transforms)
        return targets

    def _order_of(self, ids_fqn: str) -> Tensor:
        """Return the order in which TorchRec has the stored values of an id map, each shard by itself."""
        if self._order is None or self._order[0] != ids_fqn:
            (ids,) = self._stored([self.tensors[ids_fqn]])
            places = self._lineage.newest.manifest.tensors[ids_fqn].places
            bounds = sorted({place.box.first_row for place in places} | {len(ids)})
            orders = [ids[start:stop].argsort(stable=True) + start for start, stop in pairwise(bounds)]
            self._order = ids_fqn, torch.cat([ids[:0], *orders])
        return self._order[1]

    def read(self, fqns: Iterable[str]) -> Iterator[tuple[Chunk, Tensor]]:
        """Yield the chunks of tensors with their values, in order. Each counts as done when the next is requested."""
        for batch in self.plan_batches(fqns):
            for chunk, values in zip(batch, self.read_batch(batch), strict=True):
                yield chunk, values
                self.count(chunk)

    def count(self, chunk: Chunk) -> None:
        """Report a chunk as done to the progress callback."""
        self._done_bytes += chunk.num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self.num_bytes)

    def _held_row_bytes(self, fqn: str) -> int:
        """Return the bytes of memory that a row needs while it is read.

        For row-wise state under changing sharding, this includes a value for each range of columns.
        """
        tensor = self.tensors[fqn]
        itemsize = tensor.dtype.itemsize
        entry = self._lineage.newest.manifest.tensors[fqn]
        row_bytes = tensor.box.num_cols * itemsize
        if entry.table is None:
            return row_bytes
        nowhere = torch.empty(entry.size, dtype=tensor.dtype, device="meta")
        regions = LineageTensor(self._lineage, fqn).regions(tensor.box, nowhere)
        num_ranges = max((len(r.bounds) - 1 for r in regions if isinstance(r, RowStateRegion)), default=1)
        return row_bytes if num_ranges == 1 else row_bytes + num_ranges * (itemsize + 8) + 16  # the mean is of float64


def split_rows(chunk: Chunk, held_row_bytes: int) -> Iterator[Chunk]:
    """Divide a chunk into chunks of at most ``HELD_BYTES``, or of one row if a row is larger.

    Args:
        chunk: Any part of a tensor.
        held_row_bytes: The bytes of memory that a row needs.
    """
    box = chunk.box
    if chunk.num_bytes == 0 or not box.sizes:
        yield chunk
        return
    chunk_rows = max(1, HELD_BYTES // held_row_bytes)
    block_rows = max(1, BLOCK_BYTES // (box.num_cols * chunk.dtype.itemsize))
    if chunk_rows > block_rows:
        chunk_rows -= chunk_rows % block_rows
    for first_row in range(0, box.num_rows, chunk_rows):
        num_rows = min(chunk_rows, box.num_rows - first_row)
        part_box = Box((box.offsets[0] + first_row, *box.offsets[1:]), (num_rows, *box.sizes[1:]))
        yield Chunk(chunk.fqn, part_box, chunk.dtype)


def bytes_of(values: Tensor) -> Bytes:
    """Return the elements of a CPU tensor, in order, as little-endian bytes. If it is contiguous, memory is shared."""
    array: Bytes = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array

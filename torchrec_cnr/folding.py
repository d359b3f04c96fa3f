"""Folding: a lineage is read oldest first, and each checkpoint's rows overwrite those before.

What is wanted is a list of regions of tensors. ``plan_fold`` works out, without I/O, which blobs of which checkpoints
touch them; ``fold`` reads these, verifies them and writes their rows into the targets. Boxes are compared in the
tensor's own indices, so each link may be sharded differently from the others and from the target. A tensor that some
checkpoint holds whole is not read from older ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.lineage import Checkpoint, Lineage
from torchrec_cnr.manifest import DTYPES, Blob, RowSet, Shard, TensorEntry
from torchrec_cnr.packs import plan_spans, read_spans
from torchrec_cnr.regions import Block, Region
from torchrec_cnr.rows import CodedRows, decode_rows
from torchrec_cnr.schemes import exact_row_bytes
from torchrec_cnr.stores import Bytes


@dataclass(frozen=True, eq=False)
class _BlobRead:
    """A blob to read from a checkpoint, and the regions that want rows of it."""

    blob: Blob
    entry: TensorEntry
    shard: Shard
    number: int
    regions: tuple[Region, ...]


@dataclass(frozen=True, eq=False)
class CheckpointReads:
    """What is to be read of one checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        row_blocks: Blocks of row numbers needed: index of a row set, number of the block.
        reads: By a key that names the blob in errors.
    """

    checkpoint: Checkpoint
    row_blocks: frozenset[tuple[int, int]]
    reads: dict[str, _BlobRead]


def plan_fold(lineage: Lineage, regions: Sequence[Region]) -> list[CheckpointReads]:
    """Which blobs to read, of which checkpoints, oldest first.

    Raises:
        DamagedError: A checkpoint lacks a tensor that its child has a delta of.
    """
    plans: list[CheckpointReads] = []
    wanted = list(regions)
    for checkpoint in reversed(lineage.checkpoints):
        reads: dict[str, _BlobRead] = {}
        for region in wanted:
            entry = _continued(checkpoint, lineage.newest, region.fqn)
            for shard in entry.shards:
                _add_reads(reads, region, entry, shard, checkpoint.manifest.row_sets)
        row_blocks = frozenset(
            (read.shard.row_set, read.number) for read in reads.values() if read.shard.row_set is not None
        )
        plans.append(CheckpointReads(checkpoint, row_blocks, reads))
        wanted = [region for region in wanted if not checkpoint.manifest.tensors[region.fqn].is_whole]
        if not wanted:
            break
    return plans[::-1]


def _continued(checkpoint: Checkpoint, newest: Checkpoint, fqn: str) -> TensorEntry:
    """A checkpoint's entry of a tensor, which must be the one that the newest checkpoint has, but for its shards."""
    entry, head = checkpoint.manifest.tensors.get(fqn), newest.manifest.tensors[fqn]
    if entry is None:
        raise DamagedError(f"{checkpoint.store.url}: no tensor {fqn!r}, of which {newest.store.url} holds a delta")
    old = (entry.dtype, entry.is_table, entry.table, _logical_size(checkpoint, entry))
    new = (head.dtype, head.is_table, head.table, _logical_size(newest, head))
    if old != new:
        raise DamagedError(
            f"{checkpoint.store.url}: tensor {fqn!r} is {old}, and {new} in {newest.store.url}, which is a delta of it"
        )
    return entry


def _logical_size(checkpoint: Checkpoint, entry: TensorEntry) -> tuple[int, ...]:
    """Row-wise state is as large as its table's sharding makes it; what counts is the table."""
    return entry.size if entry.table is None else checkpoint.manifest.tensors[entry.table].size


def _add_reads(
    reads: dict[str, _BlobRead], region: Region, entry: TensorEntry, shard: Shard, row_sets: Sequence[RowSet]
) -> None:
    if not shard.blobs:
        return
    place = shard.table_box or shard.box
    common = place.intersect(region.box)
    if common is None:
        return
    first = common.offsets[0] - place.offsets[0] if common.offsets else 0
    for number, blob in enumerate(shard.blobs):
        if shard.row_set is None:
            start, stop = number * shard.block_rows, (number + 1) * shard.block_rows
        else:
            coded = row_sets[shard.row_set].blocks[number]
            start, stop = coded.first, coded.first + coded.span
        if start < first + common.num_rows and stop > first:
            key = f"blob '{region.fqn}' box {list(shard.box.offsets)} block {number}"
            regions = reads[key].regions if key in reads else ()
            reads[key] = _BlobRead(blob, entry, shard, number, (*regions, region))


def fold(plans: Sequence[CheckpointReads], regions: Sequence[Region], thread_count: int) -> None:
    """Execute a plan.

    Raises:
        DamagedError: Bytes are not what was committed; the targets hold a mixture of old and new values.
        StoreError: A pack cannot be read.
    """
    for plan in plans:
        store, manifest = plan.checkpoint.store, plan.checkpoint.manifest
        codes = {
            f"row set {index} block {number}": manifest.row_sets[index].blocks[number].blob
            for index, number in sorted(plan.row_blocks)
        }
        coded = dict(read_spans(store, manifest.packs, plan_spans(list(codes.items())), thread_count))
        rows = _RowNumbers(manifest.row_sets, coded, store.url)
        spans = plan_spans([(key, read.blob) for key, read in plan.reads.items()])
        for key, data in read_spans(store, manifest.packs, spans, thread_count):
            read = plan.reads[key]
            block = _decode(read, data, rows, is_delta=manifest.parent is not None, where=f"{store.url}: {key}")
            for region in read.regions:
                region.write(block)
    for region in regions:
        region.finish()


class _RowNumbers:
    """Row numbers of blocks, decoded when they are needed; the last one is kept for the table's optimizer state."""

    def __init__(self, row_sets: Sequence[RowSet], coded: dict[str, Bytes], where: str) -> None:
        self._row_sets = row_sets
        self._coded = coded
        self._where = where
        self._last: tuple[str, Tensor] | None = None

    def of(self, index: int, number: int) -> Tensor:
        key = f"row set {index} block {number}"
        if self._last is None or self._last[0] != key:
            row_set = self._row_sets[index]
            block = row_set.blocks[number]
            num_rows = min(row_set.block_rows, row_set.num_rows - number * row_set.block_rows)
            coded = CodedRows(block.coding, block.first, block.span, self._coded[key].tobytes())
            self._last = (key, torch.from_numpy(decode_rows(coded, num_rows, f"{self._where}: {key}")))
        return self._last[1]


def _decode(read: _BlobRead, data: Bytes, rows: _RowNumbers, is_delta: bool, where: str) -> Block:
    shard, dtype = read.shard, DTYPES[read.entry.dtype]
    first = read.number * shard.block_rows
    if shard.row_set is None:
        numbers, num_rows = None, min(shard.block_rows, shard.box.num_rows - first)
    else:
        numbers = rows.of(shard.row_set, read.number)
        num_rows = len(numbers)
    num_cols = shard.box.num_cols
    num_code_bytes = num_rows * shard.scheme.row_bytes(num_cols, dtype)
    codes = torch.from_numpy(data[:num_code_bytes]).view(num_rows, -1)
    if dtype is torch.bool and bool((codes > 1).any()):
        raise DamagedError(f"{where}: bytes that are no bools; use another checkpoint")
    positions, exact_values = _exact_rows(torch.from_numpy(data[num_code_bytes:]), num_cols, dtype)
    if len(positions) and (
        int(positions[0]) < 0 or int(positions[-1]) >= num_rows or bool((positions.diff() <= 0).any())
    ):
        raise DamagedError(f"{where}: positions of exactly stored rows are out of order; use another checkpoint")
    place, row_shape = shard.table_box or shard.box, shard.box.sizes[1:]
    return Block(place, first, numbers, codes, shard.scheme, dtype, positions, exact_values, row_shape, is_delta)


def _exact_rows(data: Tensor, num_cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions, int64 [k], and values, [k, num_cols], of the rows that a scheme could not represent."""
    num_exact = len(data) // exact_row_bytes(num_cols, dtype.itemsize)
    positions = data[: 4 * num_exact].clone().view(torch.int32).long()
    return positions, data[4 * num_exact :].clone().view(dtype).view(num_exact, num_cols)

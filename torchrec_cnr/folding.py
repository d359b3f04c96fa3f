"""Folding: a lineage is read oldest first, and each checkpoint's rows overwrite those before.

What is wanted is a list of regions of tensors. ``plan_fold`` works out, without I/O, which blobs of which checkpoints
touch them; ``fold`` reads these, verifies them and writes their rows into the targets. Boxes are compared in the
tensor's own indices, so each link may be sharded differently from the others and from the target. A tensor that some
checkpoint holds whole is not read from older ones. One that was folded out of several checkpoints may be stored in
shards that overlap; a manifest cannot show that these hold every row, so it is seen to while they are read.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr.coverage import Coverage
from torchrec_cnr.errors import DamagedError
from torchrec_cnr.lineage import Checkpoint, Lineage
from torchrec_cnr.manifest import DTYPES, Blob, Manifest, RowBlock, Shard, TensorEntry, name_of
from torchrec_cnr.pack_reader import PackReader
from torchrec_cnr.progress import Count, Progress
from torchrec_cnr.regions import Block, Region
from torchrec_cnr.rows import Box, CodedRows, Rows, decode_rows
from torchrec_cnr.schemes import exact_row_bytes
from torchrec_cnr.stores import Bytes


@dataclass(frozen=True, eq=False)
class _BlobRead:
    """A blob to read from a checkpoint, and the regions that want rows of it; later turns overwrite earlier ones."""

    blob: Blob
    entry: TensorEntry
    shard: Shard
    rows: RowBlock
    regions: tuple[Region, ...]
    turn: int


@dataclass(frozen=True, eq=False)
class CheckpointReads:
    """What is to be read of one checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        row_blocks: Coded blocks of row numbers needed, by a key that names them in errors.
        reads: By a key that names the blob in errors.
    """

    checkpoint: Checkpoint
    row_blocks: dict[str, RowBlock]
    reads: dict[str, _BlobRead]


def plan_fold(lineage: Lineage, regions: Sequence[Region]) -> list[CheckpointReads]:
    """Which blobs to read, of which checkpoints, oldest first.

    Raises:
        DamagedError: A checkpoint lacks a tensor that its child has a delta of.
    """
    reads: dict[int, dict[str, _BlobRead]] = {len(lineage.checkpoints) - 1: {}}
    for region in regions:
        for number, entry in held(lineage.checkpoints, region.fqn):
            _add_reads(reads.setdefault(number, {}), region, entry)
    plans = []
    for number, wanted in sorted(reads.items()):
        checkpoint = lineage.checkpoints[number]
        plans.append(CheckpointReads(checkpoint, _row_blocks(checkpoint.manifest, wanted.values()), wanted))
    return plans


def held(run: Sequence[Checkpoint], fqn: str) -> Iterator[tuple[int, TensorEntry]]:
    """What a tensor of the newest checkpoint is folded out of, newest first.

    That ends with the first checkpoint that holds it whole. A manifest cannot tell that of a tensor that several
    checkpoints were folded into; but if the next older one does not have that tensor, it was new in one of those.

    Args:
        run: Checkpoints of one lineage, oldest first, each the parent of the next.
        fqn: The tensor.

    Yields:
        The number of the checkpoint, and its entry.

    Raises:
        DamagedError: A checkpoint lacks the tensor, or has it otherwise, and its child has a delta of it.
    """
    above: Checkpoint | None = None
    for number in reversed(range(len(run))):
        entry = run[number].manifest.tensors.get(fqn)
        if entry is None or not _is_same(run[number], entry, run[-1], fqn):
            if above is not None and above.is_compacted:
                return
            _refuse(run[number], entry, run[-1], fqn)
        yield number, entry
        if entry.is_whole:
            return
        above = run[number]


def _row_blocks(manifest: Manifest, reads: Iterable[_BlobRead]) -> dict[str, RowBlock]:
    return {manifest.row_block_names[read.rows]: read.rows for read in reads if read.rows.blob is not None}


def _refuse(checkpoint: Checkpoint, entry: TensorEntry | None, newest: Checkpoint, fqn: str) -> NoReturn:
    url, head = checkpoint.store.url, newest.store.url
    if entry is None:
        raise DamagedError(f"{url}: no tensor {fqn!r}, of which {head} holds a delta; use another checkpoint")
    old, new = _nature(checkpoint, entry), _nature(newest, newest.manifest.tensors[fqn])
    raise DamagedError(
        f"{url}: tensor {fqn!r} is {old}, and {new} in {head}, which is a delta of it; use another checkpoint"
    )


def _is_same(checkpoint: Checkpoint, entry: TensorEntry, newest: Checkpoint, fqn: str) -> bool:
    return _nature(checkpoint, entry) == _nature(newest, newest.manifest.tensors[fqn])


def _nature(checkpoint: Checkpoint, entry: TensorEntry) -> tuple[object, ...]:
    """What must not change from a checkpoint to a delta of it."""
    return entry.dtype, entry.is_table, entry.table, _logical_size(checkpoint, entry)


def _logical_size(checkpoint: Checkpoint, entry: TensorEntry) -> tuple[int, ...]:
    """Row-wise state is as large as its table's sharding makes it; what counts is the table."""
    return entry.size if entry.table is None else checkpoint.manifest.tensors[entry.table].size


def _add_reads(reads: dict[str, _BlobRead], region: Region, entry: TensorEntry) -> None:
    for index, shard in enumerate(entry.shards):
        place = shard.table_box or shard.box
        common = place.intersect(region.box) if shard.blobs else None
        if common is None:
            continue
        first = common.offsets[0] - place.offsets[0] if common.offsets else 0
        for number, (blob, rows) in enumerate(zip(shard.blobs, shard.rows.blocks, strict=True)):
            if rows.first < first + common.num_rows and rows.first + rows.span > first:
                key = f"{name_of(region.fqn, entry, index)} block {number}"
                regions = reads[key].regions if key in reads else ()
                reads[key] = _BlobRead(blob, entry, shard, rows, (*regions, region), index if entry.folded else 0)


def fold(
    plans: Sequence[CheckpointReads],
    regions: Sequence[Region],
    thread_count: int,
    *,
    are_complete: bool = True,
    progress: Progress | None = None,
) -> None:
    """Execute a plan.

    Args:
        plans: For each checkpoint, oldest first, what is read of it.
        regions: What it was planned for.
        thread_count: Threads that read.
        are_complete: Whether all rows must be found; not where a delta is looked at by itself.
        progress: Told how many of how many bytes of rows were read.

    Raises:
        DamagedError: Bytes are not what was committed; the targets hold a mixture of old and new values.
        StoreError: A pack cannot be read.
    """
    coverages = _coverages(plans, regions) if are_complete else {}
    count = Count(sum(read.blob.num_bytes for plan in plans for read in plan.reads.values()), progress)
    for plan in plans:
        store, manifest = plan.checkpoint.store, plan.checkpoint.manifest
        packs = PackReader(store, manifest.packs, thread_count)
        coded = ((key, block.blob) for key, block in plan.row_blocks.items() if block.blob is not None)
        rows = RowNumbers(plan.row_blocks, dict(packs.read(coded)), store.url)
        for key, data in packs.read(*_turns(plan.reads)):
            read = plan.reads[key]
            block = _decode(read, data, rows, is_delta=manifest.parent is not None, where=f"{store.url}: {key}")
            for region in read.regions:
                region.write(block)
                if id(region) in coverages:
                    coverages[id(region)].add(block.box, block.numbers)
            count.add(read.blob.num_bytes)
    for region in regions:
        hole = coverages[id(region)].first_hole() if id(region) in coverages else None
        if hole is not None:
            url = plans[0].checkpoint.store.url
            raise DamagedError(f"{url}: tensor '{region.fqn}': row {hole} is nowhere stored; use another checkpoint")
        region.finish()


def _turns(reads: Mapping[str, _BlobRead]) -> list[list[tuple[str, Blob]]]:
    """What may be read in any order, before what overwrites it."""
    turns: list[list[tuple[str, Blob]]] = []
    for key, read in reads.items():
        turns += ([] for _ in range(len(turns), read.turn + 1))
        turns[read.turn].append((key, read.blob))
    return turns


def _coverages(plans: Sequence[CheckpointReads], regions: Sequence[Region]) -> dict[int, Coverage]:
    """What is stored of the regions of tensors that no manifest shows to be whole."""
    oldest: dict[int, TensorEntry] = {}
    boxes: dict[int, list[Box]] = {}
    num_rows: dict[int, int] = {}  # stored, each as often as it is
    for plan in plans:
        for read in plan.reads.values():
            for region in read.regions:
                oldest.setdefault(id(region), read.entry)
                boxes.setdefault(id(region), []).append(read.shard.table_box or read.shard.box)
                num_rows[id(region)] = num_rows.get(id(region), 0) + read.rows.num_rows
    return {
        id(region): Coverage(region.box, boxes.get(id(region), ()), num_rows.get(id(region), 0))
        for region in regions
        if math.prod(region.box.sizes) and not (id(region) in oldest and oldest[id(region)].is_whole)
    }


class RowNumbers:
    """Row numbers of blocks, decoded when they are needed; the last one is kept for the table's optimizer state.

    Args:
        blocks: Coded blocks, by a key that names them in errors.
        codes: Their codes, by the same keys.
        where: The checkpoint, for errors.
    """

    def __init__(self, blocks: Mapping[str, RowBlock], codes: Mapping[str, Bytes], where: str) -> None:
        self._keys = {block: key for key, block in blocks.items()}
        self._codes = codes
        self._where = where
        self._last: tuple[RowBlock | None, Rows] = (None, np.empty(0, dtype=np.int64))

    def of(self, block: RowBlock) -> Rows | None:
        """int64 [num_rows], or None for consecutive rows."""
        if block.coding == "all":
            return None
        if self._last[0] != block:
            key = self._keys[block]
            coded = CodedRows(block.coding, block.first, block.span, self._codes[key].tobytes())
            self._last = (block, decode_rows(coded, block.num_rows, f"{self._where}: {key}"))
        return self._last[1]


def _decode(read: _BlobRead, data: Bytes, rows: RowNumbers, is_delta: bool, where: str) -> Block:
    shard, dtype = read.shard, DTYPES[read.entry.dtype]
    num_rows, num_cols = read.rows.num_rows, shard.box.num_cols
    found = rows.of(read.rows)
    numbers = None if found is None else torch.from_numpy(found)
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
    first = read.rows.first
    return Block(place, first, numbers, codes, shard.scheme, dtype, positions, exact_values, row_shape, is_delta)


def _exact_rows(data: Tensor, num_cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions, int64 [k], and values, [k, num_cols], of the rows that a scheme could not represent."""
    num_exact = len(data) // exact_row_bytes(num_cols, dtype.itemsize)
    positions = data[: 4 * num_exact].clone().view(torch.int32).long()
    return positions, data[4 * num_exact :].clone().view(dtype).view(num_exact, num_cols)

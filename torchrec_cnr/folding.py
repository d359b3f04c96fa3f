"""Folding: a lineage is read oldest first, and each checkpoint's rows overwrite those before.

What is wanted is a list of regions of tensors. ``plan_fold`` works out, without I/O, which blobs of which checkpoints
touch them; ``fold`` reads these, verifies them and writes their rows into the targets. Boxes are compared in the
tensor's own indices, so each link may be sharded differently from the others and from the target. A tensor that some
checkpoint holds whole is not read from older ones. One that was folded out of several checkpoints may be stored in
shards that overlap; a manifest cannot show that these hold every row, so it is seen to while they are read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr.coverage import Coverage
from torchrec_cnr.errors import DamagedError
from torchrec_cnr.lineage import Checkpoint, Lineage
from torchrec_cnr.manifest import DTYPES, Blob, Manifest, RowBlock, Shard, TensorEntry, name_of
from torchrec_cnr.packs import PackReader
from torchrec_cnr.regions import Block, Region
from torchrec_cnr.rows import CodedRows, Rows, decode_rows
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
    plans: list[CheckpointReads] = []
    wanted = list(regions)
    for checkpoint in reversed(lineage.checkpoints):
        reads: dict[str, _BlobRead] = {}
        for region in wanted:
            _add_reads(reads, region, continued(checkpoint, lineage.newest, region.fqn))
        plans.append(CheckpointReads(checkpoint, _row_blocks(checkpoint.manifest, reads.values()), reads))
        wanted = [region for region in wanted if not checkpoint.manifest.tensors[region.fqn].is_whole]
        if not wanted:
            break
    return plans[::-1]


def _row_blocks(manifest: Manifest, reads: Iterable[_BlobRead]) -> dict[str, RowBlock]:
    needed = {read.rows for read in reads if read.rows.blob is not None}
    keys: dict[RowBlock, str] = {}  # row sets may share blocks
    for index, rows in enumerate(manifest.row_sets):
        for number, block in enumerate(rows.blocks):
            if block in needed:
                keys.setdefault(block, f"row set {index} block {number}")
    return {key: block for block, key in keys.items()}


def continued(checkpoint: Checkpoint, newest: Checkpoint, fqn: str) -> TensorEntry:
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


def fold(plans: Sequence[CheckpointReads], regions: Sequence[Region], thread_count: int) -> None:
    """Execute a plan.

    Raises:
        DamagedError: Bytes are not what was committed; the targets hold a mixture of old and new values.
        StoreError: A pack cannot be read.
    """
    coverages = _coverages(plans, regions)
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
    """What is stored of each region whose tensor a baseline has folded; if it is not, it is known to be whole."""
    found: dict[int, Coverage] = {}
    if not plans or plans[0].checkpoint.manifest.parent is not None:  # deltas looked at by themselves
        return found
    for region in regions:
        entries = [plan.checkpoint.manifest.tensors.get(region.fqn) for plan in plans]
        if entries and entries[0] and entries[0].folded is not None:
            shards = (shard for entry in entries if entry for shard in entry.shards if shard.blobs)
            found[id(region)] = Coverage(region.box, (shard.table_box or shard.box for shard in shards))
    return found


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

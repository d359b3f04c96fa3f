"""Plans of a fold: which blobs of which checkpoints touch the regions that are wanted. Worked out without I/O.

Boxes are compared in the tensor's own indices, so each link may be sharded differently from the others and from the
target. A tensor that some checkpoint holds whole is not read from older ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import Manifest, Shard, TensorEntry, name_of
from torchrec_cnr.format.row_sets import Blob, RowBlock
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage
from torchrec_cnr.reading.regions import Region


@dataclass(frozen=True, eq=False)
class BlobRead:
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
        reads: By a key that names the blob in errors.
    """

    checkpoint: Checkpoint
    reads: dict[str, BlobRead]

    @cached_property
    def row_blocks(self) -> dict[str, RowBlock]:
        """Coded blocks of row numbers needed, by a key that names them in errors."""
        names = self.checkpoint.manifest.row_block_names
        return {names[read.rows]: read.rows for read in self.reads.values() if read.rows.blob is not None}

    def turns(self) -> list[dict[str, BlobRead]]:
        """What may be read in any order, before what overwrites it."""
        turns: list[dict[str, BlobRead]] = [{} for _ in range(self.num_turns)]
        for key, read in self.reads.items():
            turns[read.turn][key] = read
        return turns

    @property
    def num_turns(self) -> int:
        """How many."""
        return 1 + max((read.turn for read in self.reads.values()), default=-1)

    def is_in_log(self, blob: Blob) -> bool:
        """Whether a blob lies in a log, which is read from its beginning to its end."""
        return self.checkpoint.manifest.packs[blob.pack].log is not None

    @property
    def early_bytes(self) -> int:
        """What is read, and held, to know which rows there are: of logs all of it."""
        rows = (block.blob.num_bytes for block in self.row_blocks.values() if block.blob is not None)
        return sum(rows) + sum(read.blob.num_bytes for read in self.reads.values() if self.is_in_log(read.blob))


def plan_fold(lineage: Lineage, regions: Sequence[Region]) -> list[CheckpointReads]:
    """Which blobs to read, of which checkpoints, oldest first.

    Raises:
        DamagedError: A checkpoint lacks a tensor that its child has a delta of.
    """
    reads: dict[int, dict[str, BlobRead]] = {len(lineage.checkpoints) - 1: {}}
    for region in regions:
        for number, entry in held(lineage.checkpoints, region.fqn):
            _add_reads(reads.setdefault(number, {}), region, entry)
    return [CheckpointReads(lineage.checkpoints[number], own_reads) for number, own_reads in sorted(reads.items())]


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
        if entry is None or _nature(run[number], fqn) != _nature(run[-1], fqn):
            if above is not None and above.is_compacted:
                return
            _refuse(run[number], entry, run[-1], fqn)
        yield number, entry
        if entry.is_whole:
            return
        above = run[number]


def whole_box(manifest: Manifest, fqn: str) -> Box:
    """All of a tensor, as regions count it; of row-wise optimizer state, all of its table, whatever the sharding."""
    entry = manifest.tensors[fqn]
    return Box.whole(entry.size if entry.table is None else manifest.tensors[entry.table].size)


def _refuse(checkpoint: Checkpoint, entry: TensorEntry | None, newest: Checkpoint, fqn: str) -> NoReturn:
    url, head = checkpoint.store.url, newest.store.url
    if entry is None:
        raise DamagedError(f"{url}: no tensor {fqn!r}, of which {head} holds a delta; use another checkpoint")
    old, new = _nature(checkpoint, fqn), _nature(newest, fqn)
    raise DamagedError(
        f"{url}: tensor {fqn!r} is {old}, and {new} in {head}, which is a delta of it; use another checkpoint"
    )


def _nature(checkpoint: Checkpoint, fqn: str) -> tuple[object, ...]:
    """What must not change of a tensor from a checkpoint to a delta of it."""
    entry = checkpoint.manifest.tensors[fqn]
    return entry.dtype, entry.is_table, entry.table, whole_box(checkpoint.manifest, fqn).sizes


def _add_reads(reads: dict[str, BlobRead], region: Region, entry: TensorEntry) -> None:
    for index, shard in enumerate(entry.shards):
        box = shard.table_box or shard.box
        common = box.intersect(region.box) if shard.blobs else None
        if common is None:
            continue
        first_row = common.offsets[0] - box.offsets[0] if common.offsets else 0
        for number, (blob, rows) in enumerate(zip(shard.blobs, shard.rows.blocks, strict=True)):
            if rows.first < first_row + common.num_rows and rows.first + rows.span > first_row:
                key = f"{name_of(region.fqn, entry, index)} block {number}"
                regions = reads[key].regions if key in reads else ()
                reads[key] = BlobRead(blob, entry, shard, rows, (*regions, region), index if entry.folded else 0)

"""Plans of a fold: computes which blobs of which checkpoints overlap the wanted regions, without I/O.

Boxes are compared in the tensor's own indices. So the checkpoints of a chain and the target may all be sharded
differently. If a checkpoint has all rows of a tensor, the tensor is not read from older checkpoints.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import DTYPES, Manifest, Shard, TensorEntry, name_of
from torchrec_cnr.format.row_sets import Blob, RowBlock
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage
from torchrec_cnr.reading.regions import Region

_SMALL_BYTES = 1 << 20  # of codes in files that are read with the row numbers, in one request instead of two


@dataclass(frozen=True, eq=False)
class BlobRead:
    """A blob to read from a checkpoint, and the regions that need its rows. Later turns overwrite earlier ones.

    Attributes:
        blob: The blob.
        entry: The tensor.
        shard: The shard.
        number: The number of the blob in the shard.
        rows: The row numbers.
        regions: The regions.
        turn: The turn.
    """

    blob: Blob
    entry: TensorEntry
    shard: Shard
    number: int
    rows: RowBlock
    regions: tuple[Region, ...]
    turn: int

    @property
    def exact_bytes(self) -> int:
        """The bytes of the exact rows of a blob with a transform."""
        num_exact = 0 if self.shard.transform is None else self.shard.transform.num_exact[self.number]
        return num_exact * self.shard.exact_row_bytes(DTYPES[self.entry.dtype])


@dataclass(frozen=True, eq=False)
class CheckpointReads:
    """The blobs to read from one checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        reads: The blobs, by a key that names the blob in errors.
    """

    checkpoint: Checkpoint
    reads: dict[str, BlobRead]

    @cached_property
    def row_blocks(self) -> dict[str, RowBlock]:
        """The coded row numbers to read, by a key that names them in errors."""
        names = self.checkpoint.manifest.row_block_names
        return {names[read.rows]: read.rows for read in self.reads.values() if read.rows.blob is not None}

    @cached_property
    def transformed(self) -> dict[str, Shard]:
        """The shards whose rows have a transform, each once, by a key that names one of their blobs in errors."""
        reads = self.reads.items()
        keys = {id(read.shard): (key, read.shard) for key, read in reads if read.shard.transform is not None}
        return dict(keys.values())

    @cached_property
    def transforms(self) -> dict[str, Blob]:
        """The transforms of rows to read, and their bases, by their digests. Other checkpoints may need the same."""
        return {digest: blob for shard in self.transformed.values() for digest, blob in shard.transform_parts.items()}

    def turns(self) -> list[dict[str, BlobRead]]:
        """Return the blobs of each turn. Within a turn, the order of blobs does not matter."""
        turns: list[dict[str, BlobRead]] = [{} for _ in range(self.num_turns)]
        for key, read in self.reads.items():
            turns[read.turn][key] = read
        return turns

    @property
    def num_turns(self) -> int:
        """The number of turns."""
        return 1 + max((read.turn for read in self.reads.values()), default=-1)

    @cached_property
    def early_codes(self) -> dict[str, Blob]:
        """The codes to read together with the row numbers: those in logs, and those in files if they are few.

        A log should be read in order. With small files, requests take longer than bytes.
        """
        packs = self.checkpoint.manifest.packs
        in_logs = {key: read.blob for key, read in self.reads.items() if packs[read.blob.pack].log is not None}
        in_files = {key: read.blob for key, read in self.reads.items() if key not in in_logs}
        are_small = sum(blob.num_bytes for blob in in_files.values()) <= _SMALL_BYTES
        return {**in_logs, **in_files} if are_small else in_logs

    def early_bytes(self, held: Collection[str]) -> int:
        """Return the bytes to read and hold before the rows are known: row numbers, transforms, and early codes.

        Args:
            held: Digests of transforms and bases that are held for other checkpoints, and do not count.
        """
        rows = (block.blob.num_bytes for block in self.row_blocks.values() if block.blob is not None)
        transforms = (blob.num_bytes for digest, blob in self.transforms.items() if digest not in held)
        return sum(rows) + sum(transforms) + sum(blob.num_bytes for blob in self.early_codes.values())


def plan_fold(lineage: Lineage, regions: Sequence[Region]) -> list[CheckpointReads]:
    """Return the blobs to read from each checkpoint, oldest first.

    Raises:
        DamagedError: A checkpoint lacks a tensor of which its child has a delta.
    """
    reads: dict[int, dict[str, BlobRead]] = {len(lineage.checkpoints) - 1: {}}
    for region in regions:
        for index, entry in held(lineage.checkpoints, region.fqn):
            _add_reads(reads.setdefault(index, {}), region, entry)
    return [CheckpointReads(lineage.checkpoints[index], own_reads) for index, own_reads in sorted(reads.items())]


def held(run: Sequence[Checkpoint], fqn: str) -> Iterator[tuple[int, TensorEntry]]:
    """Yield the entries that a tensor of the newest checkpoint is merged from, newest first.

    The last one is that of the first checkpoint that has the whole tensor. For a tensor that was merged from several
    checkpoints, a manifest does not say whether it is whole. But if the next older checkpoint lacks that tensor, one of
    the merged checkpoints contained it as a new tensor, so it is whole.

    Args:
        run: Checkpoints of one lineage, oldest first, each the parent of the next.
        fqn: FQN of the tensor.

    Yields:
        The index of the checkpoint in ``run``, and its entry.

    Raises:
        DamagedError: A checkpoint lacks the tensor, or has another dtype or size, and its child has a delta of it.
    """
    newer_checkpoint: Checkpoint | None = None
    for index in reversed(range(len(run))):
        entry = run[index].manifest.tensors.get(fqn)
        if entry is None or _nature(run[index], fqn) != _nature(run[-1], fqn):
            if newer_checkpoint is not None and newer_checkpoint.is_compacted:
                return
            _refuse(run[index], entry, run[-1], fqn)
        yield index, entry
        if entry.is_whole:
            return
        newer_checkpoint = run[index]


def whole_box(manifest: Manifest, fqn: str) -> Box:
    """Return the box of a whole tensor; for row-wise optimizer state, the box of its whole table."""
    entry = manifest.tensors[fqn]
    return Box.whole(entry.size if entry.table is None else manifest.tensors[entry.table].size)


def _refuse(checkpoint: Checkpoint, entry: TensorEntry | None, newest: Checkpoint, fqn: str) -> NoReturn:
    url, head = checkpoint.store.url, newest.store.url
    if entry is None:
        raise DamagedError(f"{url}: tensor {fqn!r} is missing, but {head} has a delta of it; use another checkpoint")
    old_nature, new_nature = _nature(checkpoint, fqn), _nature(newest, fqn)
    raise DamagedError(
        f"{url}: tensor {fqn!r} is {old_nature}, but {new_nature} in {head}, which has a delta of it; "
        "use another checkpoint"
    )


def _nature(checkpoint: Checkpoint, fqn: str) -> tuple[object, ...]:
    """Return the properties of a tensor that must be the same in a checkpoint and in a delta of it."""
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
                turn = index if entry.folded else 0
                reads[key] = BlobRead(blob, entry, shard, number, rows, (*regions, region), turn)

"""Merging: a lineage is read oldest first, and each checkpoint's rows overwrite those before.

The caller asks for a list of regions of tensors. ``plan_fold`` computes which blobs of which checkpoints touch them;
``fold`` reads these, verifies them and writes their rows into the targets.

Deltas of one baseline hold many rows over and over. Row numbers are small, so they are read first, of as many
checkpoints as memory allows; ``LatestWriter`` then knows for each row which checkpoint writes it last, and only that
one is decoded. A tensor that was merged from several checkpoints may be stored in shards that overlap; a manifest
cannot show that these hold every row, so ``fold`` checks it while it reads.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

import torch

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format.blob_bytes import Bytes, join
from torchrec_cnr.format.coverage import Coverage
from torchrec_cnr.format.manifest import DTYPES
from torchrec_cnr.progress import Count, Progress
from torchrec_cnr.reading.blocks import Block, BlockRowNumbers, PlacedRows, parse_block
from torchrec_cnr.reading.plan import BlobRead, CheckpointReads
from torchrec_cnr.reading.regions import Region
from torchrec_cnr.storage.pack_reader import PackReader

MAX_TURNS = 1 << 15
_MIN_COLS = 8  # narrower rows are written as fast as they are looked up
_EARLY_BYTES = 256 << 20  # read before the first row is written: row numbers, and the records of logs


class CheckpointRows:
    """The rows that a fold reads of one checkpoint: first which they are, and then their codes.

    Args:
        plan: What is read.
        first_turn: The number of its first turn, among those of all checkpoints.
        thread_count: Threads that read.
        holds_logs: Whether codes that lie in a log are read with the row numbers, and held until they are asked for.
            It is slow to go back in a log.

    Raises:
        DamagedError: Bytes are not what was committed.
        StoreError: A pack cannot be read.
    """

    def __init__(self, plan: CheckpointReads, first_turn: int, thread_count: int, *, holds_logs: bool) -> None:
        store, manifest = plan.checkpoint.store, plan.checkpoint.manifest
        self.plan = plan
        self._first_turn = first_turn
        self._packs = PackReader(store, manifest.packs, thread_count)
        early_blobs = [(key, block.blob) for key, block in plan.row_blocks.items() if block.blob is not None]
        if holds_logs:
            early_blobs += [(key, read.blob) for key, read in plan.reads.items() if plan.is_in_log(read.blob)]
        self._held = dict(self._packs.read(early_blobs))
        codes = {key: self._held.pop(key) for key in plan.row_blocks}
        self._numbers = BlockRowNumbers(plan.row_blocks, codes, store.url)

    def placed(self) -> Iterator[tuple[int, BlobRead, PlacedRows]]:
        """Which rows they are, turn by turn, with the turn's number."""
        for number, turn in enumerate(self.plan.turns(), self._first_turn):
            for read in turn.values():
                yield number, read, self._placed(read)

    def blocks(self) -> Iterator[tuple[int, BlobRead, Block]]:
        """The rows themselves; once only, for what is held of them is let go.

        Raises:
            DamagedError, StoreError: As the constructor.
        """
        turns, is_delta = self.plan.turns(), self.plan.checkpoint.manifest.parent is not None
        left_blobs = [[(key, read.blob) for key, read in turn.items() if key not in self._held] for turn in turns]
        with closing(self._packs.read(*left_blobs, prepare=self._joined)) as blobs_read:
            for number, (turn, left) in enumerate(zip(turns, left_blobs, strict=True), self._first_turn):
                held = [(key, self._joined(key, self._held.pop(key))) for key in turn if key in self._held]
                for key, data in itertools.chain(held, itertools.islice(blobs_read, len(left))):
                    yield number, turn[key], self._block(key, data, is_delta)

    def _joined(self, key: str, data: Bytes) -> Bytes:
        """A blob's rows, also if it is split; of files, in the threads that read, which have time for it."""
        read = self.plan.reads[key]
        num_cols, dtype = read.shard.box.num_cols, DTYPES[read.entry.dtype]
        row_bytes = read.shard.scheme.row_bytes(num_cols, dtype)
        tail_bytes = read.shard.scheme.tail_bytes(num_cols, dtype)
        return join(data, read.rows.num_rows, row_bytes, tail_bytes, self._where(key))

    def _block(self, key: str, data: Bytes, is_delta: bool) -> Block:
        read = self.plan.reads[key]
        dtype = DTYPES[read.entry.dtype]
        return parse_block(read.shard, dtype, data, self._placed(read), is_delta, self._where(key))

    def _where(self, key: str) -> str:
        return f"{self.plan.checkpoint.store.url}: {key}"

    def _placed(self, read: BlobRead) -> PlacedRows:
        row_numbers = self._numbers.of(read.rows)
        numbers = None if row_numbers is None else torch.from_numpy(row_numbers)
        return PlacedRows(read.shard.table_box or read.shard.box, read.rows.first, read.rows.num_rows, numbers)


class LatestWriter:
    """Of each row of some regions, the last turn that holds all of its columns; two bytes a row.

    Args:
        checkpoints: Followed are regions with wide rows of tables of which several of these hold some.
    """

    def __init__(self, checkpoints: Sequence[CheckpointRows]) -> None:
        regions: dict[int, Region] = {}
        times: Counter[int] = Counter()
        for checkpoint in checkpoints:
            reads = [read for read in checkpoint.plan.reads.values() if read.rows.blob and read.entry.table is None]
            own_regions = {id(region): region for read in reads for region in read.regions}
            regions |= own_regions
            times.update(own_regions.keys())
        boxes = {number: region.box for number, region in regions.items() if times[number] > 1}
        wide = {number: box for number, box in boxes.items() if len(box.sizes) == 2 and box.num_cols >= _MIN_COLS}
        self._turns = {
            number: torch.zeros(box.num_rows, dtype=torch.int16, device="cpu") for number, box in wide.items()
        }
        for checkpoint in checkpoints if self._turns else ():
            for turn, read, rows in checkpoint.placed():
                for region in read.regions:
                    self._note(region, rows, turn)

    def _note(self, region: Region, placed: PlacedRows, turn: int) -> None:
        """A turn holds some rows; turns come in order."""
        turns = self._turns.get(id(region))
        common = placed.within(region.box) if turns is not None and _has_all_columns(placed, region) else None
        if turns is not None and common is not None:
            turns[common[1]] = turn

    def left(self, region: Region, block: Block, turn: int) -> Block | None:
        """What no later turn overwrites of a turn's block; None if nothing is left."""
        turns, numbers = self._turns.get(id(region)), block.rows.numbers
        common = block.rows.within(region.box) if turns is not None and numbers is not None else None
        if turns is None or numbers is None or common is None:
            return block
        positions, rows = common
        are_left = (turns[rows] if isinstance(rows, slice) else turns.index_select(0, rows)) <= turn
        if bool(are_left.all()):
            return block
        left = are_left.nonzero().squeeze(1)
        if not len(left):
            return None
        kept = left + positions.start if isinstance(positions, slice) else positions[left]
        return block.part(kept, PlacedRows(block.box, 0, len(kept), numbers.index_select(0, kept)))


def _has_all_columns(placed: PlacedRows, region: Region) -> bool:
    common = placed.box.intersect(region.box)
    return common is not None and common.num_cols == region.box.num_cols


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
    for window in _windows(plans):
        first_turns = itertools.accumulate((plan.num_turns for plan in window), initial=1)
        checkpoints = [
            CheckpointRows(plan, first_turn, thread_count, holds_logs=len(window) > 1)
            for plan, first_turn in zip(window, first_turns, strict=False)
        ]
        turns = LatestWriter(checkpoints)
        for checkpoint in checkpoints:
            for turn, read, block in checkpoint.blocks():
                for region in read.regions:
                    left = turns.left(region, block, turn)
                    if left is not None:
                        region.write(left)
                    if id(region) in coverages:
                        coverages[id(region)].add(block.box, block.rows.index)
                count.add(read.blob.num_bytes)
    for region in regions:
        hole = coverages[id(region)].first_hole() if id(region) in coverages else None
        if hole is not None:
            url = plans[0].checkpoint.store.url
            raise DamagedError(f"{url}: tensor '{region.fqn}': row {hole} is nowhere stored; use another checkpoint")
        region.finish()


def _windows(plans: Iterable[CheckpointReads]) -> Iterator[list[CheckpointReads]]:
    """Checkpoints of which the row numbers are read before any rows."""
    window: list[CheckpointReads] = []
    num_bytes = num_turns = 0
    for plan in plans:
        is_full = num_bytes + plan.early_bytes > _EARLY_BYTES or num_turns + plan.num_turns >= MAX_TURNS
        if window and is_full:
            yield window
            window, num_bytes, num_turns = [], 0, 0
        window.append(plan)
        num_bytes, num_turns = num_bytes + plan.early_bytes, num_turns + plan.num_turns
    if window:
        yield window


def _coverages(plans: Sequence[CheckpointReads], regions: Sequence[Region]) -> dict[int, Coverage]:
    """What is stored of the regions of tensors that no manifest shows to be whole."""
    reads: dict[int, list[BlobRead]] = defaultdict(list)
    for plan in plans:
        for read in plan.reads.values():
            for region in read.regions:
                reads[id(region)].append(read)
    coverages: dict[int, Coverage] = {}
    for region in regions:
        own = reads[id(region)]
        if math.prod(region.box.sizes) and not (own and own[0].entry.is_whole):
            boxes = [read.shard.table_box or read.shard.box for read in own]
            coverages[id(region)] = Coverage(region.box, boxes, sum(read.rows.num_rows for read in own))
    return coverages

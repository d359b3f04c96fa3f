"""Merging: reads a lineage oldest first, so that each checkpoint's rows overwrite those of older ones.

The caller passes a list of regions of tensors. ``plan_fold`` computes which blobs of which checkpoints overlap them.
``fold`` reads these blobs, verifies them, and writes their rows into the targets.

The deltas of one baseline contain many rows several times. Row numbers are small, so they are read first, for as many
checkpoints as memory allows. ``LatestWriter`` then knows which checkpoint writes each row last, and only that version
is decoded. A tensor that was merged from several checkpoints can be stored in shards that overlap. Its manifest does
not show whether they contain every row, so ``fold`` checks that while it reads.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format.blob_bytes import Bytes, join
from torchrec_cnr.format.coverage import Coverage
from torchrec_cnr.format.manifest import DTYPES
from torchrec_cnr.progress import Count, Progress
from torchrec_cnr.quantization import Transformed
from torchrec_cnr.quantization.packed_rows import unpack_bytes
from torchrec_cnr.reading.blocks import Block, BlockRowNumbers, PlacedRows, parse_block
from torchrec_cnr.reading.plan import BlobRead, CheckpointReads
from torchrec_cnr.reading.regions import Region
from torchrec_cnr.reading.transforms import KnownTransforms
from torchrec_cnr.storage.pack_reader import PackReader

MAX_TURNS = 1 << 15
_MIN_COLS = 8  # for narrower rows, looking up the last turn takes as long as writing the row
_EARLY_BYTES = 256 << 20  # limit of bytes read before the first row is written: row numbers, and records of logs


class CheckpointRows:
    """The rows that a fold reads from one checkpoint: first their numbers, and then their codes.

    Args:
        plan: The blobs to read.
        first_turn: The number of its first turn, counted over all checkpoints.
        thread_count: Number of threads that read.
        transforms: The transforms that are known. Those of these rows are added.
        holds_codes: Whether to read early codes together with the row numbers, and hold them until they are used.
        checks_headers: As for ``PackReader``.

    Raises:
        DamagedError: Bytes differ from those that were committed.
        StoreError: A pack cannot be read.
    """

    def __init__(
        self,
        plan: CheckpointReads,
        first_turn: int,
        thread_count: int,
        transforms: KnownTransforms,
        *,
        holds_codes: bool,
        checks_headers: bool,
    ) -> None:
        store, manifest = plan.checkpoint.store, plan.checkpoint.manifest
        self.plan = plan
        self._first_turn = first_turn
        self._packs = PackReader(store, manifest.packs, thread_count, checks_headers=checks_headers)
        early_blobs = [(key, block.blob) for key, block in plan.row_blocks.items() if block.blob is not None]
        transform_blobs = transforms.missing(plan.transformed)
        early_blobs += transform_blobs.items()
        if holds_codes:
            early_blobs += plan.early_codes.items()
        self._held = dict(self._packs.read(early_blobs))
        transforms.add(plan.transformed, {key: self._held.pop(key) for key in transform_blobs}, store.url)
        self._transforms = transforms
        codes = {key: self._held.pop(key) for key in plan.row_blocks}
        self._numbers = BlockRowNumbers(plan.row_blocks, codes, store.url)

    def placed(self) -> Iterator[tuple[int, BlobRead, PlacedRows]]:
        """Yield the places of the rows, turn by turn, with the number of the turn."""
        for turn_number, turn in enumerate(self.plan.turns(), self._first_turn):
            for read in turn.values():
                yield turn_number, read, self._placed(read)

    def blocks(self) -> Iterator[tuple[int, BlobRead, Block]]:
        """Yield the rows, turn by turn. Call this only once, since it frees the codes that were held.

        Raises:
            DamagedError: Bytes differ from those that were committed.
            StoreError: A pack cannot be read.
        """
        turns, is_delta = self.plan.turns(), self.plan.checkpoint.manifest.parent is not None
        left_blobs = [[(key, read.blob) for key, read in turn.items() if key not in self._held] for turn in turns]
        with closing(self._packs.read(*left_blobs, prepare=self._joined)) as blobs_read:
            for turn_number, (turn, turn_blobs) in enumerate(zip(turns, left_blobs, strict=True), self._first_turn):
                held_blobs = [(key, self._joined(key, self._held.pop(key))) for key in turn if key in self._held]
                for key, data in itertools.chain(held_blobs, itertools.islice(blobs_read, len(turn_blobs))):
                    yield turn_number, turn[key], self._block(key, data, is_delta)

    def _joined(self, key: str, data: Bytes) -> Bytes:
        """Return the codes of a blob, joined if byte-split, or unpacked. For files, the reading threads do this."""
        read = self.plan.reads[key]
        scheme = self._transforms.scheme(read.shard)
        num_cols, dtype = read.shard.box.num_cols, DTYPES[read.entry.dtype]
        if isinstance(scheme, Transformed):
            return unpack_bytes(data, read.rows.num_rows, read.exact_bytes, scheme.known, self._where(key))
        row_bytes = read.shard.scheme.row_bytes(num_cols, dtype)
        tail_bytes = read.shard.scheme.tail_bytes(num_cols, dtype)
        return join(data, read.rows.num_rows, row_bytes, tail_bytes, self._where(key))

    def _block(self, key: str, data: Bytes, is_delta: bool) -> Block:
        read = self.plan.reads[key]
        dtype = DTYPES[read.entry.dtype]
        shard = replace(read.shard, scheme=self._transforms.scheme(read.shard))
        return parse_block(shard, dtype, data, self._placed(read), is_delta, self._where(key))

    def _where(self, key: str) -> str:
        return f"{self.plan.checkpoint.store.url}: {key}"

    def _placed(self, read: BlobRead) -> PlacedRows:
        row_numbers = self._numbers.of(read.rows)
        numbers = None if row_numbers is None else torch.from_numpy(row_numbers)
        return PlacedRows(read.shard.table_box or read.shard.box, read.rows.first, read.rows.num_rows, numbers)


class LatestWriter:
    """The last turn that has all columns of a row, for each row of some regions. It takes two bytes per row.

    Args:
        checkpoints: The checkpoints of a window. Regions of tables with wide rows are tracked, if several of these
            checkpoints have rows of them.
    """

    def __init__(self, checkpoints: Sequence[CheckpointRows]) -> None:
        regions: dict[int, Region] = {}
        checkpoint_counts: Counter[int] = Counter()
        for checkpoint in checkpoints:
            reads = [read for read in checkpoint.plan.reads.values() if read.rows.blob and read.entry.table is None]
            own_regions = {id(region): region for read in reads for region in read.regions}
            regions |= own_regions
            checkpoint_counts.update(own_regions.keys())
        boxes = {region_id: region.box for region_id, region in regions.items() if checkpoint_counts[region_id] > 1}
        wide_boxes = {
            region_id: box for region_id, box in boxes.items() if len(box.sizes) == 2 and box.num_cols >= _MIN_COLS
        }
        self._turns = {
            region_id: torch.zeros(box.num_rows, dtype=torch.int16, device="cpu")
            for region_id, box in wide_boxes.items()
        }
        for checkpoint in checkpoints if self._turns else ():
            for turn, read, rows in checkpoint.placed():
                for region in read.regions:
                    self._note(region, rows, turn)

    def _note(self, region: Region, placed: PlacedRows, turn: int) -> None:
        """Note the rows of a turn. Call this in the order of turns."""
        turns = self._turns.get(id(region))
        common = placed.within(region.box) if turns is not None and _has_all_columns(placed, region) else None
        if turns is not None and common is not None:
            turns[common[1]] = turn

    def left(self, region: Region, block: Block, turn: int) -> Block | None:
        """Return the rows of a turn's block that no later turn overwrites; None if there are none."""
        turns, numbers = self._turns.get(id(region)), block.rows.numbers
        common = block.rows.within(region.box) if turns is not None and numbers is not None else None
        if turns is None or numbers is None or common is None:
            return block
        positions, rows = common
        are_left = (turns[rows] if isinstance(rows, slice) else turns.index_select(0, rows)) <= turn
        if bool(are_left.all()):
            return block
        left_indices = are_left.nonzero().squeeze(1)
        if not len(left_indices):
            return None
        left_positions = left_indices + positions.start if isinstance(positions, slice) else positions[left_indices]
        return block.part(
            left_positions, PlacedRows(block.box, 0, len(left_positions), numbers.index_select(0, left_positions))
        )


def _has_all_columns(placed: PlacedRows, region: Region) -> bool:
    common = placed.box.intersect(region.box)
    return common is not None and common.num_cols == region.box.num_cols


def fold(
    plans: Sequence[CheckpointReads],
    regions: Sequence[Region],
    thread_count: int,
    *,
    are_complete: bool = True,
    checks_headers: bool = True,
    progress: Progress | None = None,
    transforms: KnownTransforms | None = None,
) -> None:
    """Execute a plan.

    Args:
        plans: The blobs to read from each checkpoint, oldest first.
        regions: The regions that were planned for.
        thread_count: Number of threads that read.
        are_complete: Whether all rows must be found. Pass False to read a delta by itself.
        checks_headers: Pass False if few of the rows are read; see ``PackReader``.
        progress: Called with the bytes of rows that were read, and their total.
        transforms: The transforms that earlier folds have read; this one adds its own. None if there are none.

    Raises:
        DamagedError: Bytes differ from those that were committed. The targets contain a mixture of old and new values.
        StoreError: A pack cannot be read.
    """
    coverages = _coverages(plans, regions) if are_complete else {}
    count = Count(sum(read.blob.num_bytes for plan in plans for read in plan.reads.values()), progress)
    transforms = KnownTransforms() if transforms is None else transforms
    for window in _windows(plans):
        transforms.limit(shard for plan in window for shard in plan.transformed.values())
        first_turns = itertools.accumulate((plan.num_turns for plan in window), initial=1)
        make_rows = partial(CheckpointRows, holds_codes=len(window) > 1, checks_headers=checks_headers)
        checkpoints = [
            make_rows(plan, first_turn, thread_count, transforms)
            for plan, first_turn in zip(window, first_turns, strict=False)
        ]
        latest_writer = LatestWriter(checkpoints)
        for checkpoint in checkpoints:
            for turn, read, block in checkpoint.blocks():
                for region in read.regions:
                    left_block = latest_writer.left(region, block, turn)
                    if left_block is not None:
                        region.write(left_block)
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
    """Yield windows: consecutive checkpoints whose row numbers are read together, before any of their rows."""
    window: list[CheckpointReads] = []
    digests: set[str] = set()
    num_bytes = num_turns = 0
    for plan in plans:
        is_full = num_bytes + plan.early_bytes(digests) > _EARLY_BYTES or num_turns + plan.num_turns >= MAX_TURNS
        if window and is_full:
            yield window
            window, digests, num_bytes, num_turns = [], set(), 0, 0
        window.append(plan)
        num_bytes, num_turns = num_bytes + plan.early_bytes(digests), num_turns + plan.num_turns
        digests |= plan.transforms.keys()
    if window:
        yield window


def _coverages(plans: Sequence[CheckpointReads], regions: Sequence[Region]) -> dict[int, Coverage]:
    """Return the coverage of those regions whose tensors are not known to be whole from a manifest."""
    reads: dict[int, list[BlobRead]] = defaultdict(list)
    for plan in plans:
        for read in plan.reads.values():
            for region in read.regions:
                reads[id(region)].append(read)
    coverages: dict[int, Coverage] = {}
    for region in regions:
        region_reads = reads[id(region)]
        if math.prod(region.box.sizes) and not (region_reads and region_reads[0].entry.is_whole):
            boxes = [read.shard.table_box or read.shard.box for read in region_reads]
            coverages[id(region)] = Coverage(region.box, boxes, sum(read.rows.num_rows for read in region_reads))
    return coverages

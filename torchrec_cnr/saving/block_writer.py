"""The writer of row blocks. It encodes the blocks modified since the latest checkpoint, and reuses the stored others.

The writer decides for each block whether to reuse the data file of the latest checkpoint. It does so only if that file
holds exactly what this save would write: the same tensors, in the same shard regions, with as many rows. It writes all
other rows that were modified since the baseline, by a scheme that suits them. Reused rows keep their scheme. If that
has a transform, the manifest names the data file that has it. If no file of the parent or the latest checkpoint has it
any more, the block is written again.

What a save must know of earlier checkpoints is read from committed manifests, and cached by their digests. A save that
failed, on this machine or elsewhere, cannot make it wrong.
"""

import logging
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from cachetools import LRUCache, cached
from torch import Tensor
from torch.profiler import record_function

from torchrec_cnr.errors import CNRError, ConfigurationError, LoadError, SaveError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import CheckpointRef, Manifest, Pack, Shard, moved_block
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowSet
from torchrec_cnr.lineage.checkpoint import committed, read_checkpoint
from torchrec_cnr.lineage.latest import newest_first
from torchrec_cnr.policies import Full, Intermittent, OneShot, Policy, Since
from torchrec_cnr.quantization import Scheme
from torchrec_cnr.quantization.packed_rows import MAX_VALUES, most_bytes
from torchrec_cnr.saving.decision import Decision, StoredPart
from torchrec_cnr.saving.encoding import (
    EncodedRowSet,
    EncodedShard,
    EncodingInput,
    WrittenBlock,
    join_blocks,
    write_block,
)
from torchrec_cnr.saving.row_blocks import (
    BlockKey,
    CommittedBlocks,
    KeptBlock,
    Member,
    TouchedBlocks,
    block_rows_of,
    superseded,
)
from torchrec_cnr.saving.sinks import (
    Captured,
    Kind,
    OpenSink,
    OwnFence,
    PackSettings,
    PackSink,
    PlacedShards,
    Places,
    PlainTopic,
    SinkRecords,
    SourcesOf,
)
from torchrec_cnr.storage.pack_writer import PackWriter
from torchrec_cnr.storage.row_log import BlockTarget, RowLog, root_id
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.modified_rows import ModifiedRows, RowMask, SelectedRows, numbers_of

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 3  # manifests in the cache
_NUM_LOOKED_AT = 8  # newest commit records
_ROW_BYTES = 16  # upper bound for an encoded row number, or for the position of an exact row
_HEADER_BYTES = 1 << 10  # of a data file, for each block of rows
_NO_LIMIT = 1 << 62
_NO_ROWS = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True, eq=False)
class _Block:
    """A block of rows.

    Attributes:
        rows: Its row numbers.
        codes: For each member, the encoded rows.
        num_exact: For each member, how many of the rows are exact; 0 where the manifest need not have the number.
    """

    rows: RowBlock
    codes: tuple[Blob, ...]
    num_exact: tuple[int, ...]


@dataclass(frozen=True)
class Predecessor:
    """The checkpoint that a save is based on.

    Attributes:
        head: Row blocks of the latest checkpoint; None if there is none, or if it is not a delta of the same parent.
        used: Keys of all data files that a load may need before this save is committed, or if it never is.
    """

    head: CommittedBlocks | None
    used: frozenset[str]


@dataclass(frozen=True, eq=False)
class WrittenBlocks:
    """The row blocks of one table's shard and of its optimizer state.

    Attributes:
        kinds: For each member (the table's shard, and its optimizer state) its place, and its scheme in this save.
        new: Row numbers of the blocks that were written.
        codes: For each member, the encoded rows of these blocks.
        kept: Blocks that were reused, each with its position among the reused data files of this rank.
    """

    kinds: tuple[Kind, ...]
    new: EncodedRowSet
    codes: Sequence[EncodedShard]
    kept: tuple[tuple[KeptBlock, int], ...]

    def located(self, places: Places) -> PlacedShards:
        """Return the rows of each member: one shard for each combination of schemes among the blocks."""
        blocks_by_schemes: dict[tuple[Scheme, ...], list[_Block]] = {}
        for schemes, block in (*self._new(places.row_blobs), *self._kept(places.num_packs)):
            blocks_by_schemes.setdefault(schemes, []).append(block)
        shards = [self._part(schemes, blocks, places) for schemes, blocks in blocks_by_schemes.items()] or [
            self._part(self._schemes, [], places)
        ]
        return zip(zip(*shards, strict=True), [encoded.num_exact for encoded in self.codes], strict=True)

    @property
    def _schemes(self) -> tuple[Scheme, ...]:
        return tuple(kind.scheme for kind in self.kinds)

    def _part(self, schemes: tuple[Scheme, ...], blocks: list[_Block], places: Places) -> tuple[Shard, ...]:
        blocks.sort(key=lambda block: block.rows.first)
        rows = RowSet(tuple(block.rows for block in blocks))
        shards = []
        for index, (kind, scheme) in enumerate(zip(self.kinds, schemes, strict=True)):
            own_kind = kind if scheme == kind.scheme else Kind(kind.place, scheme)
            codes = tuple(block.codes[index] for block in blocks)
            shards.append(own_kind.shard(rows, codes, tuple(block.num_exact[index] for block in blocks), places))
        return tuple(shards)

    def _new(self, blobs: Sequence[Blob]) -> Iterator[tuple[tuple[Scheme, ...], _Block]]:
        for index, rows in enumerate(self.new.located(blobs).blocks):
            codes = tuple(blobs[shard.blobs[index]] for shard in self.codes)
            yield self._schemes, _Block(rows, codes, tuple(shard.exact_of_blobs[index] for shard in self.codes))

    def _kept(self, num_packs: int) -> Iterator[tuple[tuple[Scheme, ...], _Block]]:
        for block, index in self.kept:
            moved_blob = partial(_in_pack, num_packs + index)
            blobs, num_exact = zip(*block.blobs, strict=True), zip(*block.num_exact, strict=True)
            for rows, codes, exact_of_codes in zip(block.rows, blobs, num_exact, strict=True):
                codes = tuple(map(moved_blob, codes))
                yield block.schemes, _Block(moved_block(rows, moved_blob), codes, exact_of_codes)


def _in_pack(pack: int, blob: Blob) -> Blob:
    return Blob(pack, blob.offset, blob.num_bytes, blob.crc32c)


class BlockSink(PackSink):
    """Sink for what one rank writes in one save; it takes the rows of deltas block by block.

    Args:
        files: Writes data files to the store.
        row_packs: Writes row blocks. What cannot be divided into blocks, such as a tensor without columns, goes to
            files.
        target: Kafka topic for row blocks.
        before: What the save is based on.
        older: Transforms and bases that data files of the parent and of the latest checkpoint have, by their digests.
    """

    def __init__(
        self,
        files: PackWriter,
        row_packs: PackWriter,
        target: BlockTarget,
        before: Predecessor,
        older: Mapping[str, StoredPart],
    ) -> None:
        super().__init__(files, row_packs, older)
        self._target = target
        self._before = before
        self._kept_packs: list[Pack] = []

    def write(
        self,
        members: Sequence[Member],
        sources_of: SourcesOf,
        rows: Sequence[SelectedRows] | None,
        captured: Captured | None,
    ) -> None:
        """Encode the blocks that changed, and reuse the others."""
        is_empty = 0 in members[0].place.box.sizes or (rows is not None and not any(map(len, rows)))
        if rows is None or not isinstance(captured, TouchedBlocks) or is_empty:
            super().write(members, sources_of, rows, captured)
            return
        (selected_rows,) = rows
        kept_blocks = self._kept(members, selected_rows, captured)
        bounds = [captured.bounds(number) for number in kept_blocks]
        sources = sources_of(_rows_outside(selected_rows, bounds) if bounds else rows)
        with record_function("torchrec_cnr.encode"):
            encoded_rows, encoded = self._write_others(sources, selected_rows, captured, kept_blocks.keys())
        kinds = tuple(
            self._kind(member.place, source, has_rows=len(encoded_rows.blocks) > 0)
            for member, source in zip(members, sources, strict=True)
        )
        for digest in {digest for block in kept_blocks.values() for digest in block.transforms}:
            self._use(digest)
        kept = tuple((block, len(self._kept_packs) + index) for index, block in enumerate(kept_blocks.values()))
        self._kept_packs += [block.pack for block in kept_blocks.values()]
        self._located.append(WrittenBlocks(kinds, encoded_rows, encoded, kept).located)

    def _kept(self, members: Sequence[Member], rows: SelectedRows, touched: TouchedBlocks) -> dict[int, KeptBlock]:
        """Return the blocks that are reused, by their numbers."""
        head, kept_blocks = self._before.head, dict[int, KeptBlock]()
        if head is None:
            return kept_blocks
        for number, is_touched in enumerate(touched.are_touched.tolist()):
            num_rows = 0 if is_touched else len(rows.between(*touched.bounds(number))[0])
            kept_block = head.kept(members, touched.block_rows, number, num_rows) if num_rows else None
            if kept_block is not None and kept_block.transforms <= self.older.keys():
                kept_blocks[number] = kept_block
        return kept_blocks

    def _write_others(
        self, sources: Sequence[EncodingInput], rows: SelectedRows, touched: TouchedBlocks, kept: Collection[int]
    ) -> tuple[EncodedRowSet, Sequence[EncodedShard]]:
        """Encode the blocks that are not reused, each into a data file."""
        most_bytes = _most_bytes(sources, min(touched.block_rows, touched.box.num_rows))
        part_rows, new_blocks = _part_rows(sources), list[WrittenBlock]()
        for number in range(len(touched.are_touched)):
            row_numbers, position = (_NO_ROWS, None) if number in kept else rows.between(*touched.bounds(number))
            for part in row_numbers.split(part_rows):
                if len(part):  # an empty tensor has one part
                    new_blocks.append(write_block(self._rows, sources, number, part, position, heat=0))
                    position = None if position is None else position + len(part)
            if len(row_numbers):
                key = BlockKey.free(self._target.owner, touched, number, self._before.used)
                self._rows.end_pack(self._target.keyed(str(key), most_bytes))
        return join_blocks(new_blocks, len(sources))

    def finish(self) -> SinkRecords:
        """Return the records of this rank; the reused data files follow those that were written."""
        records = super().finish()
        return replace(records, packs=(*records.packs, *self._kept_packs))


def _rows_outside(rows: SelectedRows, bounds: Sequence[tuple[int, int]]) -> Sequence[SelectedRows] | Tensor:
    """Return the rows outside of blocks, as ``choose_scheme`` takes them: of copied rows, their indices in the copy."""
    if isinstance(rows, RowMask):
        mask = rows.mask.clone()
        for start, stop in bounds:
            mask[start:stop] = False
        return (RowMask(mask),)
    is_outside = torch.ones(len(rows), dtype=torch.bool, device="cpu")
    for start, stop in bounds:
        row_numbers, position = rows.between(start, stop)
        first = (position or 0) - rows.first
        is_outside[first : first + len(row_numbers)] = False
    return numbers_of(is_outside) + rows.first


def _part_rows(sources: Sequence[EncodingInput]) -> int:
    """Return how many rows of a block a blob may have: readers refuse larger blobs of transformed rows."""
    return max(1, MAX_VALUES // max(1, *(math.prod(source.rows.shape[1:]) for source in sources)))


def _most_bytes(sources: Sequence[EncodingInput], num_rows: int) -> int:
    """Return the largest number of bytes that this many rows can take, in any encoding.

    The largest encoding has all rows exact: each takes its values besides its codes. Codes are no larger than the
    values, unless they are those of a transform. An earlier job may have used one.
    """
    names_bytes = sum(_HEADER_BYTES + len(source.name.encode()) for source in (sources[0], *sources))
    most = -(-num_rows // _part_rows(sources)) * names_bytes + num_rows * _ROW_BYTES
    for source in sources:
        num_cols = math.prod(source.rows.shape[1:])
        value_bytes = num_rows * num_cols * source.values.element_size()
        most += value_bytes + max(value_bytes, most_bytes(num_rows, num_cols)) + num_rows * _ROW_BYTES
    return most


@dataclass(frozen=True)
class CompactedTopic(PlainTopic):
    """A Kafka topic that keeps only the newest version of each row block.

    Attributes:
        block_bytes: Bytes of values in a row block.
    """

    block_bytes: int
    compared: ClassVar = frozenset({Since.HEAD})  # a block counts as touched since the latest checkpoint

    def refuse_policy(self, policy: Policy) -> None:
        """Refuse a policy that makes deltas of deltas: row blocks hold all rows modified since the baseline."""
        if not isinstance(policy, OneShot | Intermittent | Full):
            raise ConfigurationError(
                f"the policy {type(policy).__name__} makes deltas of deltas, but the topic {self.row_log.topic!r} is "
                "compacted and keeps only the newest rows: use OneShot, Intermittent or Full, or a topic that is not "
                "compacted"
            )

    def capture(self, table: str, box: Box, row_bytes: int, modified: ModifiedRows) -> TouchedBlocks:
        """Return the row blocks that were touched since the latest checkpoint."""
        return TouchedBlocks.of(table, box, block_rows_of(row_bytes, self.block_bytes), modified.select(Since.HEAD))

    def loadable_besides(self, store: Store, head: CheckpointRef | None) -> CheckpointRef | None:
        """Return the newest committed checkpoint of the root, unless it is ``head``. This save is not based on it."""
        root = store.at("..")
        for marker in reversed(self.row_log.markers(root_id(root.url), _NUM_LOOKED_AT)):
            if head is not None and marker.sha256 == head.sha256:
                return None
            checkpoint = committed(root.at(marker.name), marker.save_id)
            if checkpoint is not None and checkpoint.sha256 == marker.sha256:
                return checkpoint.ref
        newest = next(newest_first(root.url, self.row_log), None)
        return None if newest is None or (head is not None and newest.sha256 == head.sha256) else newest.ref

    def prepare(self, store: Store, rank: int, is_coordinator: bool, own_fence: OwnFence | None) -> OpenSink:
        """Fence off earlier producers, unless a newer job has claimed this root: the older job must not disturb it."""
        if own_fence is not None:
            own_fence().check()
        target = self.row_log.target(root_id(store.at("..").url), rank, is_coordinator)
        assert isinstance(target, BlockTarget)  # the topic is compacted
        return partial(_block_sink, store, self.row_log, target)

    def committed(self, store: Store, decision: Decision, manifest: Manifest) -> None:
        """Remove row blocks that no checkpoint needs any more from the topic. If this fails now, they stay there."""
        try:
            refs = [ref for ref in (decision.head, decision.loadable_besides) if ref is not None]
            unneeded_packs = superseded([_committed_blocks(self.row_log, ref) for ref in refs], manifest)
            if unneeded_packs:
                self.row_log.forget(root_id(store.at("..").url), unneeded_packs)
        except CNRError as error:
            logger.warning("topic %r: rows that no checkpoint needs were not removed: %s", self.row_log.topic, error)


def _block_sink(
    store: Store, row_log: RowLog, target: BlockTarget, settings: PackSettings, decision: Decision | None
) -> BlockSink:
    # Without limits, since the sink ends a data file after each block, whatever its size.
    rows = PackWriter(store, f"{settings.prefix}-rows", settings.thread_count, _NO_LIMIT, _NO_LIMIT)
    older = {} if decision is None else decision.transforms
    return BlockSink(settings.writer(store), rows, target, predecessor(row_log, decision), older)


def predecessor(row_log: RowLog, decision: Decision | None) -> Predecessor:
    """Return what a save is based on.

    Raises:
        LoadError, StoreError: A manifest cannot be read.
        SaveError: A manifest is not the one that the coordinator read.
    """
    if decision is None or decision.since is Since.EVER or decision.head is None or decision.parent is None:
        return Predecessor(None, frozenset())
    head = _committed_blocks(row_log, decision.head)
    used_keys = head.keys
    if decision.loadable_besides is not None:
        try:
            used_keys |= _committed_blocks(row_log, decision.loadable_besides).keys
        except LoadError as error:
            logger.warning("a checkpoint cannot be loaded, and its rows may be replaced by this save: %s", error)
    return Predecessor(head if head.parent_sha256 == decision.parent.sha256 else None, used_keys)


@cached(LRUCache(_MAX_REMEMBERED), key=lambda row_log, ref: (ref.sha256, row_log.topic), lock=threading.Lock())
def _committed_blocks(row_log: RowLog, ref: CheckpointRef) -> CommittedBlocks:
    checkpoint = read_checkpoint(Store.open(ref.path, row_log=row_log))
    if checkpoint.sha256 != ref.sha256:
        raise SaveError(f"{ref.path}: the checkpoint was replaced during a save that is based on it; save again")
    return CommittedBlocks(checkpoint.committed, row_log.topic)

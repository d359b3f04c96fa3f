"""Writing row blocks: those that were touched since the head are encoded, the others are taken over from its manifest.

Which packs are taken over is decided block by block, and only where the head holds exactly what this save would write:
the same tensors, in the same boxes, with as many rows. Everything else that was modified since the baseline is written.

Predecessors: what of earlier checkpoints a save to a log of row blocks must know.

All of it is read from committed manifests. What this process remembers of them it remembers by their digests, so that a
save that failed, here or elsewhere, cannot make it wrong.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from torchrec_cnr.errors import CNRError, LoadError, SaveError
from torchrec_cnr.format.manifest import CheckpointRef, Manifest, Pack, Shard
from torchrec_cnr.format.renumbering import moved_block
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowSet
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.policies import Since
from torchrec_cnr.quantization import Scheme
from torchrec_cnr.saving.decision import Decision
from torchrec_cnr.saving.encoding import EncodedRowSet, EncodedShard, EncodingInput, most_block_bytes, write_row_blocks
from torchrec_cnr.saving.row_blocks import BlockKey, CommittedBlocks, KeptBlock, Member, TouchedBlocks, superseded
from torchrec_cnr.storage.pack_writer import PackWriter
from torchrec_cnr.storage.row_log import BlockTarget, PackTarget, RowLog, root_id
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.modified_rows import SelectedRows

_Block = tuple[RowBlock, tuple[Blob, ...]]


@dataclass(frozen=True)
class Predecessor:
    """What a save goes on from.

    Attributes:
        head: Blocks of the head; None if there is none, or it is no delta of the same parent.
        used: Keys of all packs that may be loaded before this save is committed, or if it never is.
    """

    head: CommittedBlocks | None
    used: frozenset[str]


@dataclass(eq=False)
class WrittenBlocks:
    """The row blocks of one table's shard and of its optimizer state.

    Attributes:
        members: These tensors.
        schemes: Of each, now.
        new: The row numbers of those that were written.
        codes: Of each member, the blobs of these.
        kept: Those that were taken over, each with its number among the packs of this rank that were.
    """

    members: tuple[Member, ...]
    schemes: tuple[Scheme, ...]
    new: EncodedRowSet
    codes: Sequence[EncodedShard]
    kept: tuple[tuple[KeptBlock, int], ...]
    _shards: tuple[tuple[Shard, ...], ...] = field(default=(), init=False)

    def shards(self, blobs: Sequence[Blob], num_packs: int) -> tuple[tuple[Shard, ...], ...]:
        """Of each member, its rows: one shard for each choice of schemes among the blocks.

        Args:
            blobs: Those that were written, by number.
            num_packs: How many packs of this rank come before those that were taken over.
        """
        if not self._shards:
            parts: dict[tuple[Scheme, ...], list[_Block]] = {}
            for schemes, block in (*self._new(blobs), *self._kept(num_packs)):
                parts.setdefault(schemes, []).append(block)
            found = [self._part(schemes, blocks) for schemes, blocks in parts.items()] or [self._part(self.schemes, [])]
            self._shards = tuple(zip(*found, strict=True))
        return self._shards

    def _part(self, schemes: tuple[Scheme, ...], blocks: list[_Block]) -> tuple[Shard, ...]:
        blocks.sort(key=lambda block: block[0].first)
        rows = RowSet(tuple(block for block, _ in blocks))
        return tuple(
            Shard(member.place.box, rows, tuple(codes[number] for _, codes in blocks), scheme, member.place.table_box)
            for number, (member, scheme) in enumerate(zip(self.members, schemes, strict=True))
        )

    def _new(self, blobs: Sequence[Blob]) -> Iterator[tuple[tuple[Scheme, ...], _Block]]:
        for number, rows in enumerate(self.new.located(blobs).blocks):
            yield self.schemes, (rows, tuple(blobs[shard.blobs[number]] for shard in self.codes))

    def _kept(self, num_packs: int) -> Iterator[tuple[tuple[Scheme, ...], _Block]]:
        for block, index in self.kept:
            moved = partial(_in_pack, num_packs + index)
            for rows, codes in zip(block.rows, zip(*block.blobs, strict=True), strict=True):
                yield block.schemes, (moved_block(rows, moved), tuple(map(moved, codes)))


def _in_pack(pack: int, blob: Blob) -> Blob:
    return Blob(pack, blob.offset, blob.num_bytes, blob.crc32c)


class BlockWriter:
    """Writes the row blocks of one rank.

    Args:
        packs: Fills packs.
        target: Takes them.
        before: What the save goes on from.

    Attributes:
        kept_packs: Those of the head that were taken over.
    """

    def __init__(self, packs: PackWriter, target: BlockTarget, before: Predecessor) -> None:
        self._packs = packs
        self._target = target
        self._before = before
        self.kept_packs: tuple[Pack, ...] = ()

    def write(
        self, members: Sequence[Member], sources: Sequence[EncodingInput], rows: SelectedRows, touched: TouchedBlocks
    ) -> tuple[WrittenBlocks, Sequence[EncodedShard]]:
        """Encode the blocks that must be, and take over the others.

        Args:
            members: The tensors.
            sources: Their values.
            rows: Those modified since the baseline.
            touched: Where some were modified since the head.

        Returns:
            The blocks, and what of each source was encoded.
        """
        kept: list[tuple[KeptBlock, int]] = []
        new: list[tuple[int, Tensor, int | None]] = []
        for number, is_touched in enumerate(touched.are_touched.tolist()):
            first = number * touched.block_rows
            numbers, place = rows.between(first, first + touched.block_rows)
            found = None if is_touched else self._found(members, touched, number, len(numbers))
            if found is not None:
                kept.append((found, len(self.kept_packs)))
                self.kept_packs += (found.pack,)
            elif len(numbers):
                new.append((number, numbers, place))
        most_bytes = most_block_bytes(sources, min(touched.block_rows, touched.box.num_rows))
        targets = (self._slot(touched, number, most_bytes) for number, _, _ in new)
        blocks = ((*block, target) for block, target in zip(new, targets, strict=True))
        encoded_rows, encoded = write_row_blocks(self._packs, sources, blocks)
        schemes = tuple(source.scheme for source in sources)
        return WrittenBlocks(tuple(members), schemes, encoded_rows, encoded, tuple(kept)), encoded

    def _found(self, members: Sequence[Member], touched: TouchedBlocks, number: int, num_rows: int) -> KeptBlock | None:
        if self._before.head is None or num_rows == 0:
            return None
        return self._before.head.kept(members, touched.block_rows, number, num_rows)

    def _slot(self, touched: TouchedBlocks, number: int, most_bytes: int) -> PackTarget:
        key = BlockKey.free(self._target.owner, touched, number, self._before.used)
        return self._target.keyed(str(key), most_bytes)


logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 3


class _Remembered:
    """Blocks of the manifests that were read or written last, by their digests and their log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, str], CommittedBlocks] = OrderedDict()

    def get(self, key: tuple[str, str]) -> CommittedBlocks | None:
        """What was put under a key, if it was not long ago."""
        with self._lock:
            return self._blocks.get(key)

    def put(self, key: tuple[str, str], blocks: CommittedBlocks) -> None:
        """Remember, and forget what was put first."""
        with self._lock:
            self._blocks[key] = blocks
            while len(self._blocks) > _MAX_REMEMBERED:
                self._blocks.popitem(last=False)


_remembered = _Remembered()


def predecessor(row_log: RowLog, decision: Decision) -> Predecessor:
    """What a save goes on from.

    Args:
        row_log: Where its rows go.
        decision: What it holds.

    Raises:
        LoadError, StoreError: A manifest cannot be read.
        SaveError: It is another than the coordinator read.
    """
    if decision.since is Since.EVER or decision.head is None or decision.parent is None:
        return Predecessor(None, frozenset())
    head = _committed_blocks(row_log, decision.head)
    used = head.keys
    if decision.newest is not None:
        try:
            used |= _committed_blocks(row_log, decision.newest).keys
        except LoadError as error:
            logger.warning("cannot be loaded, and is not kept until this save is committed: %s", error)
    return Predecessor(head if head.parent_sha256 == decision.parent.sha256 else None, used)


def forget_superseded(store: Store, row_log: RowLog, decision: Decision, manifest: Manifest) -> None:
    """Remove what nothing needs any more from the log, after a commit; what is not removed now stays.

    Args:
        store: The checkpoint.
        row_log: Where its rows lie.
        decision: What it holds.
        manifest: What was committed.
    """
    try:
        refs = [ref for ref in (decision.head, decision.newest) if ref is not None]
        gone = superseded([_committed_blocks(row_log, ref) for ref in refs], manifest)
        if gone:
            row_log.forget(root_id(store.at("..").url), gone)
    except CNRError as error:
        logger.warning("rows that nothing needs any more stay in the topic %r: %s", row_log.topic, error)


def _committed_blocks(row_log: RowLog, ref: CheckpointRef) -> CommittedBlocks:
    key = (ref.sha256, row_log.topic)
    found = _remembered.get(key)
    if found is None:
        checkpoint = read_checkpoint(Store.open(ref.path, row_log=row_log))
        if checkpoint.sha256 != ref.sha256:
            raise SaveError(f"{ref.path}: it was replaced while a save went on from it; save again")
        found = CommittedBlocks(checkpoint.committed, row_log.topic)
        _remembered.put(key, found)
    return found

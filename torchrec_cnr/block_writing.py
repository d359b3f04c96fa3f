"""Writing row blocks: those that were touched since the head are encoded, the others are taken over from its manifest.

Which packs are taken over is decided block by block, and only where the head holds exactly what this save would write:
the same tensors, in the same boxes, with as many rows. Everything else that was modified since the baseline is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from torchrec_cnr.encoding import EncodedRowSet, EncodedShard, Source, most_block_bytes, write_row_blocks
from torchrec_cnr.manifest import Pack, Shard
from torchrec_cnr.modified import Rows
from torchrec_cnr.packs import PackWriter
from torchrec_cnr.renumbering import moved_block
from torchrec_cnr.row_blocks import BlockKey, CommittedBlocks, KeptBlock, Member, TouchedBlocks
from torchrec_cnr.row_logs import BlockTarget, PackTarget
from torchrec_cnr.row_sets import Blob, RowBlock, RowSet
from torchrec_cnr.schemes import Scheme

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
        self, members: Sequence[Member], sources: Sequence[Source], rows: Rows, touched: TouchedBlocks
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

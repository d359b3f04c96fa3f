"""Row blocks: what a log keeps that keeps the newest record of each key only.

A row block is a range of rows of a table's shard, always the same. A save writes each block that was touched since the
head as one pack, with all of its rows that were modified since the baseline, and takes the others over from the head's
manifest. So a block's newest pack stands for all of its older ones, and a log may forget these.

It may do so as soon as there is a newer record of the same key, also if the save that wrote that one never commits. So
a block's keys have a slot: a save writes to the first one that no checkpoint uses which may be loaded still, that is,
the head and the newest that was committed. There are two slots therefore, but after a load of what is not the newest.
What a block's keys are, and which of its packs is kept, follows from committed manifests alone: whatever a failed save
has left is overwritten by a later one, and never relied on.

Keys begin with the job and the rank that write them. Ranks have transactional ids of their own, so that of two writers
of one key the later one has shut the earlier one out.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchrec_cnr.format.blob_bytes import MAX_CODED_ROWS
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import Manifest, Pack, Place
from torchrec_cnr.format.row_sets import Blob, RowBlock
from torchrec_cnr.quantization import Scheme
from torchrec_cnr.tracking.modified_rows import RowMask

_KEY = re.compile(r"(?P<block>.*/(?P<block_rows>\d{1,9})x(?P<number>\d{1,18}))/(?P<slot>\d{1,9})", re.DOTALL)

_MAX_NAME = 512  # characters of a key


def block_rows_of(row_bytes: int, block_bytes: int) -> int:
    """How many rows a block has; the same for ever, as long as a shard has these columns."""
    return min(MAX_CODED_ROWS, max(1, block_bytes // max(1, row_bytes)))


@dataclass(frozen=True, eq=False)
class TouchedBlocks:
    """Which row blocks of a table's shard have rows that were modified since the head.

    Attributes:
        table: FQN of the table.
        box: Of its shard.
        block_rows: Rows of each block but the last.
        are_touched: bool [num_blocks], on the host.
    """

    table: str
    box: Box
    block_rows: int
    are_touched: Tensor

    @classmethod
    def of(cls, table: str, box: Box, block_rows: int, rows: RowMask) -> "TouchedBlocks":
        """Those that have members of a mask."""
        num_blocks = math.ceil(box.num_rows / block_rows)
        whole = rows.mask[: box.num_rows // block_rows * block_rows].view(-1, block_rows).any(dim=1)
        rest = rows.mask[len(whole) * block_rows :].any().expand(num_blocks - len(whole))
        return cls(table, box, block_rows, torch.cat((whole, rest)).cpu())

    def digest(self) -> bytes:
        """Tells whether another rank, which has the same shard, has the same blocks."""
        return hashlib.blake2b(self.are_touched.numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class BlockKey:
    """What the keys of the records of one pack begin with.

    Attributes:
        block: The row block.
        slot: Of two packs that are there at a time, which this is.
    """

    block: str
    slot: int

    @classmethod
    def parsed(cls, key: str) -> "BlockKey | None":
        """From what a manifest says; None if that is no such key."""
        found = _KEY.fullmatch(key)
        return None if found is None else cls(found["block"], int(found["slot"]))

    @classmethod
    def free(cls, owner: str, touched: TouchedBlocks, number: int, used: Collection[str]) -> "BlockKey":
        """The first of a block's keys that is not in use."""
        table = touched.table
        if len(table) > _MAX_NAME:
            table = hashlib.sha256(table.encode()).hexdigest()
        place = f"{table}{list(touched.box.offsets)}"
        block = f"{owner}/{place}/{touched.block_rows}x{number}"
        return next(key for slot in itertools.count() if str(key := cls(block, slot)) not in used)

    def __str__(self) -> str:
        return f"{self.block}/{self.slot}"


@dataclass(frozen=True)
class Member:
    """A tensor whose rows are in a block: a table's, or those of its optimizer state."""

    fqn: str
    dtype: str
    place: Place


@dataclass(frozen=True, eq=False)
class KeptBlock:
    """A row block of a committed checkpoint.

    Attributes:
        pack: The pack that holds it, and nothing else.
        rows: Its row numbers, in increasing order.
        blobs: Of each member, for each of ``rows``.
        schemes: Of each member.
    """

    pack: Pack
    rows: tuple[RowBlock, ...]
    blobs: tuple[tuple[Blob, ...], ...]
    schemes: tuple[Scheme, ...]


@dataclass(frozen=True, eq=False)
class _Stored:
    """What a pack holds of one tensor."""

    scheme: Scheme
    rows: list[RowBlock]
    blobs: list[Blob]


class CommittedBlocks:
    """The row blocks of a committed checkpoint.

    Args:
        manifest: That which committed it.
        topic: The log that blocks are taken over in.

    Attributes:
        packs: All of its packs.
        keys: Those of its packs.
        parent_sha256: Of the checkpoint whose rows they overwrite; None if it is a baseline.
    """

    def __init__(self, manifest: Manifest, topic: str) -> None:
        self.parent_sha256 = manifest.parent.sha256 if manifest.parent is not None else None
        logs = [pack.log for pack in manifest.packs if pack.log is not None]
        self.keys = frozenset(log.key for log in logs if log.key is not None)
        self.packs = tuple(
            pack if pack.written_ns is not None else replace(pack, written_ns=manifest.created_ns)
            for pack in manifest.packs
        )
        self._stored: dict[int, dict[Member, _Stored]] = {}
        self._numbers: dict[tuple[frozenset[Member], int, int], list[int]] = {}  # of packs, by block
        self._index(manifest, topic)

    def _index(self, manifest: Manifest, topic: str) -> None:
        for fqn, entry in manifest.tensors.items():
            for shard in entry.shards:
                member = Member(fqn, entry.dtype, shard.place)
                for rows, blob in zip(shard.rows.blocks, shard.blobs, strict=False):
                    if rows.blob is not None and rows.blob.pack == blob.pack:
                        stored = self._stored.setdefault(blob.pack, {})
                        found = stored.setdefault(member, _Stored(shard.scheme, [], []))
                        found.rows.append(rows)
                        found.blobs.append(blob)
        for number, stored in self._stored.items():
            log = self.packs[number].log
            if log is None or log.topic != topic or log.key is None:
                continue
            found_key = _KEY.fullmatch(log.key)
            if found_key is not None:
                which = frozenset(stored), int(found_key["block_rows"]), int(found_key["number"])
                self._numbers.setdefault(which, []).append(number)

    def kept(self, members: Sequence[Member], block_rows: int, number: int, num_rows: int) -> KeptBlock | None:
        """A block that may be taken over as it is; None if this checkpoint does not hold it so.

        Args:
            members: Whose rows it must hold, all of them and no others.
            block_rows: Rows of a block.
            number: Of the block.
            num_rows: How many of its rows were modified since the baseline: it must hold as many.
        """
        packs = self._numbers.get((frozenset(members), block_rows, number), [])
        if len(packs) != 1:
            return None
        stored = [self._stored[packs[0]][member] for member in members]
        rows = tuple(stored[0].rows)
        first, stop = number * block_rows, (number + 1) * block_rows
        is_within = all(first <= block.first and block.first + block.span <= stop for block in rows)
        is_same = all(tuple(other.rows) == rows for other in stored)
        if not (is_within and is_same and sum(block.num_rows for block in rows) == num_rows):
            return None
        blobs = tuple(tuple(other.blobs) for other in stored)
        return KeptBlock(self.packs[packs[0]], rows, blobs, tuple(other.scheme for other in stored))


def superseded(older: Iterable[CommittedBlocks], newest: Manifest) -> list[Pack]:
    """Packs of row blocks that will not be overwritten, although nothing needs them.

    All blocks of the lineage before a new baseline are such, and those of shards that are written by another rank or in
    other boxes now. Of each, both slots are named.

    Args:
        older: Checkpoints before.
        newest: Of the one that was committed.
    """
    used = {str(pack.log.key) for pack in newest.packs if pack.log is not None}
    blocks = {found.block for key in used if (found := BlockKey.parsed(key))}
    gone: dict[str, Pack] = {}
    for checkpoint in older:
        for pack, log in ((pack, pack.log) for pack in checkpoint.packs if pack.log is not None):
            key = BlockKey.parsed(log.key) if log.key is not None else None
            if key is None or key.block in blocks:
                continue
            for slot in range(max(1, key.slot) + 1):
                other = str(replace(key, slot=slot))
                gone.setdefault(other, replace(pack, log=replace(log, key=other)))
    return list(gone.values())

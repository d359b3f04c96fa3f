"""Row blocks: the content of a Kafka topic that keeps only the newest record of each key.

A row block is a fixed range of rows of a table's shard. A save writes each block that was touched since the latest
checkpoint as one data file. The file has all rows of the block that were modified since the baseline. The save takes
the other blocks from the manifest of the latest checkpoint. So the newest data file of a block replaces all older ones,
and the topic may drop these.

The topic may do so as soon as it has a newer record of the same key. The save that wrote the newer record may never
commit. A block's keys have a slot for this reason. A save writes to the first slot that is not used by a checkpoint
that may still be loaded. Those are the latest checkpoint and the newest committed one. There are two slots, therefore,
or three after a load of a checkpoint that is not the newest.

The keys of a block, and which of its data files is kept, follow from committed manifests alone. A later save overwrites
what a failed save has left, and no save relies on it.

Keys begin with the job and the rank that write them. Each rank has its own transactional id. If there are two writers
of one key, the later one has fenced off the earlier one.
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
from torchrec_cnr.quantization import Scheme, Transformed
from torchrec_cnr.tracking.modified_rows import RowMask

_KEY = re.compile(r"(?P<block>.*/(?P<block_rows>\d{1,9})x(?P<number>\d{1,18}))/(?P<slot>\d{1,9})", re.DOTALL)

_MAX_NAME = 512  # characters of a key


def block_rows_of(row_bytes: int, block_bytes: int) -> int:
    """Return the number of rows of a block. It never changes while a shard has the same columns."""
    return min(MAX_CODED_ROWS, max(1, block_bytes // max(1, row_bytes)))


@dataclass(frozen=True, eq=False)
class TouchedBlocks:
    """The row blocks of a table's shard that have rows modified since the latest checkpoint.

    Attributes:
        table: FQN of the table.
        box: Region of its shard.
        block_rows: Rows per block; the last block may have fewer.
        are_touched: bool [num_blocks], on the host.
    """

    table: str
    box: Box
    block_rows: int
    are_touched: Tensor

    @classmethod
    def of(cls, table: str, box: Box, block_rows: int, rows: RowMask) -> "TouchedBlocks":
        """Return the blocks that have rows of a mask."""
        num_blocks = math.ceil(box.num_rows / block_rows)
        whole_blocks = rows.mask[: box.num_rows // block_rows * block_rows].view(-1, block_rows).any(dim=1)
        last_block = rows.mask[len(whole_blocks) * block_rows :].any().expand(num_blocks - len(whole_blocks))
        return cls(table, box, block_rows, torch.cat((whole_blocks, last_block)).cpu())

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first row of a block, and the row after its last one if it is not the last block."""
        return number * self.block_rows, (number + 1) * self.block_rows

    def digest(self) -> bytes:
        """Return a digest that is equal on two ranks if the same blocks of the same shard are touched."""
        return hashlib.blake2b(self.are_touched.numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class BlockKey:
    """The prefix of the keys of the records of one data file.

    Attributes:
        block: The row block.
        slot: Number of the version; two versions of a block can exist at a time.
    """

    block: str
    slot: int

    @classmethod
    def parsed(cls, key: str) -> "BlockKey | None":
        """Parse a key from a manifest; return None if it is not such a key."""
        match = _KEY.fullmatch(key)
        return None if match is None else cls(match["block"], int(match["slot"]))

    @classmethod
    def free(cls, owner: str, touched: TouchedBlocks, number: int, used: Collection[str]) -> "BlockKey":
        """Return the first of a block's keys that is not in use."""
        table = touched.table
        if len(table) > _MAX_NAME:
            table = hashlib.sha256(table.encode()).hexdigest()
        shard_name = f"{table}{list(touched.box.offsets)}"
        block = f"{owner}/{shard_name}/{touched.block_rows}x{number}"
        return next(key for slot in itertools.count() if str(key := cls(block, slot)) not in used)

    def __str__(self) -> str:
        return f"{self.block}/{self.slot}"


@dataclass(frozen=True)
class Member:
    """A tensor whose rows are in a block: a table, or its optimizer state."""

    fqn: str
    dtype: str
    place: Place


@dataclass(frozen=True, eq=False)
class KeptBlock:
    """A row block of a committed checkpoint.

    Attributes:
        pack: The data file that contains only this block.
        rows: Its row numbers, in increasing order.
        blobs: For each member, a blob for each of ``rows``.
        schemes: Quantization scheme of each member.
        num_exact: For each member, the number of exact rows of each blob, if its scheme has a transform; else zeros.
    """

    pack: Pack
    rows: tuple[RowBlock, ...]
    blobs: tuple[tuple[Blob, ...], ...]
    schemes: tuple[Scheme, ...]
    num_exact: tuple[tuple[int, ...], ...]

    @property
    def transforms(self) -> frozenset[str]:
        """The digests of the transforms and bases that its rows need."""
        schemes = (scheme for scheme in self.schemes if isinstance(scheme, Transformed))
        return frozenset(digest for scheme in schemes for digest in scheme.digests)


@dataclass(frozen=True, eq=False)
class _Stored:
    """The rows of one tensor in a data file."""

    scheme: Scheme
    rows: list[RowBlock]
    blobs: list[Blob]
    num_exact: list[int]


class CommittedBlocks:
    """The row blocks of a committed checkpoint.

    Args:
        manifest: The checkpoint's manifest.
        topic: The Kafka topic in which blocks are reused.

    Attributes:
        packs: All data files of the checkpoint.
        keys: The keys of these files.
        parent_sha256: Digest of the parent's manifest; None for a baseline.
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
        self._numbers: dict[tuple[frozenset[Member], int, int], list[int]] = {}  # indices in ``packs``, by block
        self._index(manifest, topic)

    def _index(self, manifest: Manifest, topic: str) -> None:
        for fqn, entry in manifest.tensors.items():
            for shard in entry.shards:
                member = Member(fqn, entry.dtype, shard.place)
                num_exact = [0] * len(shard.blobs) if shard.transform is None else shard.transform.num_exact
                for rows, blob, exact_of_blob in zip(shard.rows.blocks, shard.blobs, num_exact, strict=False):
                    if rows.blob is not None and rows.blob.pack == blob.pack:
                        stored_members = self._stored.setdefault(blob.pack, {})
                        stored_shard = stored_members.setdefault(member, _Stored(shard.scheme, [], [], []))
                        stored_shard.rows.append(rows)
                        stored_shard.blobs.append(blob)
                        stored_shard.num_exact.append(exact_of_blob)
        for pack_index, stored_members in self._stored.items():
            log = self.packs[pack_index].log
            if log is None or log.topic != topic or log.key is None:
                continue
            match = _KEY.fullmatch(log.key)
            if match is not None:
                block_id = frozenset(stored_members), int(match["block_rows"]), int(match["number"])
                self._numbers.setdefault(block_id, []).append(pack_index)

    def kept(self, members: Sequence[Member], block_rows: int, number: int, num_rows: int) -> KeptBlock | None:
        """Return a block that can be reused unchanged; None if this checkpoint does not have it in the same form.

        Args:
            members: The tensors whose rows the block must contain, without others.
            block_rows: Rows per block.
            number: Number of the block.
            num_rows: How many of its rows were modified since the baseline; it must contain this many.
        """
        packs = self._numbers.get((frozenset(members), block_rows, number), [])
        if len(packs) != 1:
            return None
        stored_shards = [self._stored[packs[0]][member] for member in members]
        rows = tuple(stored_shards[0].rows)
        first_row, stop_row = number * block_rows, (number + 1) * block_rows
        is_within = all(first_row <= block.first and block.first + block.span <= stop_row for block in rows)
        is_same = all(tuple(stored_shard.rows) == rows for stored_shard in stored_shards)
        if not (is_within and is_same and sum(block.num_rows for block in rows) == num_rows):
            return None
        return KeptBlock(
            self.packs[packs[0]],
            rows,
            blobs=tuple(tuple(stored_shard.blobs) for stored_shard in stored_shards),
            schemes=tuple(stored_shard.scheme for stored_shard in stored_shards),
            num_exact=tuple(tuple(stored_shard.num_exact) for stored_shard in stored_shards),
        )


def superseded(older: Iterable[CommittedBlocks], newest: Manifest) -> list[Pack]:
    """Return data files of row blocks that no checkpoint needs and no later save overwrites.

    These are all blocks of the chain before a new baseline, and blocks of shards that now have another rank or region.
    Both slots of each are returned.

    Args:
        older: Earlier checkpoints.
        newest: Manifest of the checkpoint that was committed.
    """
    used_keys = {str(pack.log.key) for pack in newest.packs if pack.log is not None}
    blocks = {parsed_key.block for key in used_keys if (parsed_key := BlockKey.parsed(key))}
    superseded_packs: dict[str, Pack] = {}
    for checkpoint in older:
        for pack, log in ((pack, pack.log) for pack in checkpoint.packs if pack.log is not None):
            key = BlockKey.parsed(log.key) if log.key is not None else None
            if key is None or key.block in blocks:
                continue
            for slot in range(max(1, key.slot) + 1):
                other_key = str(replace(key, slot=slot))
                superseded_packs.setdefault(other_key, replace(pack, log=replace(log, key=other_key)))
    return list(superseded_packs.values())

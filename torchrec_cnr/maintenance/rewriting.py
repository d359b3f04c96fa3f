"""Rewriting: the second half of a compaction. Copies what is live in victims, then commits the new manifest.

Rows of different ages go into different files, so that those of young rows, which soon hold dead ones, can be rewritten
alone.
"""

import hashlib
import logging
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from torchrec_cnr.errors import StoreError
from torchrec_cnr.leases import leased
from torchrec_cnr.lineage import Checkpoint, read_checkpoint
from torchrec_cnr.maintenance.compaction import MAX_RATIO, CompactionPlan, plan_compaction
from torchrec_cnr.maintenance.liveness import LiveRows, Piece, live_rows, pieces_of, windows
from torchrec_cnr.maintenance.moving import CACHE_BYTES, BlobCache, CodedBlock, Group
from torchrec_cnr.maintenance.replacing import replace_manifest
from torchrec_cnr.manifest import DTYPES, Blob, Pack, RowBlock, RowSet, Shard, TensorEntry
from torchrec_cnr.packs import PACK_BYTES, PackReader, PackWriter, check_pack_bytes
from torchrec_cnr.renumbering import Renumbering
from torchrec_cnr.rows import Box, encode_rows
from torchrec_cnr.stores import Bytes

logger = logging.getLogger(__name__)

_MAX_WAITING = 6  # of a tensor's blocks that are being filled, counted in full ones

Progress = Callable[[int, int], None]
_Kind = tuple[int, int]  # of rows: their heat, and the logarithm of their age


def compact(
    path: str | os.PathLike[str],
    *,
    since: str | os.PathLike[str] | None = None,
    max_ratio: float = MAX_RATIO,
    max_moved_bytes: int | None = None,
    self_contained: bool = False,
    thread_count: int = 2,
    pack_bytes: int = PACK_BYTES,
    progress: Progress | None = None,
) -> Checkpoint:
    """Fold a lineage, or the newest deltas of it, into one checkpoint; see :func:`plan_compaction`.

    Needs less than 512 MiB of memory. May run anywhere, also while training goes on saving.

    Args:
        pack_bytes: Size of new files, roughly.
        progress: Told how many of how many bytes were copied.

    Returns:
        The checkpoint, with its new manifest.

    Raises:
        CheckpointExistsError: Another compaction of the same checkpoint was faster; nothing was changed.
        ConfigurationError, LoadError, StoreError: As :func:`plan_compaction`.
    """
    newest = read_checkpoint(path)
    with leased(newest.store, "compact"):
        plan = plan_compaction(
            path,
            since=since,
            max_ratio=max_ratio,
            max_moved_bytes=max_moved_bytes,
            self_contained=self_contained,
            thread_count=thread_count,
        )
        return execute(plan, thread_count=thread_count, pack_bytes=pack_bytes, progress=progress)


def execute(
    plan: CompactionPlan,
    *,
    thread_count: int = 2,
    pack_bytes: int = PACK_BYTES,
    progress: Progress | None = None,
) -> Checkpoint:
    """Do what a plan says, if it is of any use; see :func:`compact`."""
    check_pack_bytes(pack_bytes)
    if not plan.is_needed:
        return plan.newest
    save_id = uuid.uuid4().hex[:16]
    rewriter = _Rewriter(plan, save_id, thread_count, pack_bytes, progress)
    try:
        rewriter.copy_blobs()
        tensors = {fqn: rewriter.tensor(fqn, entry) for fqn, entry in plan.flat.tensors.items()}
        objects = {fqn: rewriter.blob(blob) for fqn, blob in plan.flat.objects.items()}
        replace_manifest(plan, save_id, tensors, objects, *rewriter.finish())
    except BaseException:
        rewriter.discard()
        raise
    finally:
        rewriter.close()
    return read_checkpoint(plan.newest.store.url)


@dataclass(eq=False)
class _Moved:
    """A new shard: what it is like, the last shard that it takes rows from, their blobs' sizes, what was written."""

    group: Group
    kind: _Kind
    behind: int = 0
    source_bytes: int = 0
    blocks: list[tuple[RowBlock, Blob]] = field(default_factory=list)

    @property
    def box(self) -> Box:
        """Where it lies; for row-wise optimizer state, in its table."""
        return self.group.shard.table_box or self.group.shard.box

    def ends_within(self, window: Box) -> bool:
        """Whether windows behind this one have no rows of it."""
        return self.box.first_row + self.box.num_rows <= window.first_row + window.num_rows


class _Rewriter:
    """Copies what is live in victims.

    Until its pack is written, a new blob has a pack number behind those of all old packs, and in place of an offset the
    number that the pack writer gave it.
    """

    def __init__(
        self, plan: CompactionPlan, save_id: str, thread_count: int, pack_bytes: int, progress: Progress | None
    ) -> None:
        self._plan = plan
        self._save_id = save_id
        self._progress = progress
        self._moved_bytes = 0
        self._store = plan.newest.store
        self._where = plan.newest.store.url
        self._reader = PackReader(self._store, plan.flat.packs, thread_count)
        self._kind_of = [(use.pack.heat, math.floor(math.log2(plan.age(use) + 1))) for use in plan.uses]
        self._packs = PackWriter(self._store, f"{save_id}-0", thread_count, pack_bytes)
        self._kinds: list[_Kind] = []
        self._row_blocks: dict[tuple[_Kind, bytes], RowBlock] = {}
        self._row_sets: dict[RowSet, RowSet] = {}
        self._copied: dict[Blob, Blob] = {}

    def copy_blobs(self) -> None:
        """Copy what victims hold that stays as it is: tensors that are not folded, objects, row numbers of others."""
        flat, victims = self._plan.flat, self._plan.victims
        wanted = {f"object '{fqn}'": blob for fqn, blob in flat.objects.items()}
        for fqn, entry in flat.tensors.items():
            for piece in pieces_of(fqn, entry):
                if entry.folded is None:
                    wanted[piece.key] = piece.blob
                elif piece.rows.blob is not None and self._stays(piece):
                    wanted[f"rows of {piece.key}"] = piece.rows.blob
        names = {blob: key for key, blob in wanted.items() if blob.pack in victims}
        for key, data in self._reader.read((key, blob) for blob, key in names.items()):
            blob = wanted[key]
            # A copy of its own: what was read is a view of all that was read with it.
            self._copied[blob] = self._add(self._kind_of[blob.pack], key, data.copy())

    def blob(self, blob: Blob) -> Blob:
        """Where a blob that stays as it is will lie."""
        return self._copied.get(blob, blob)

    def _stays(self, piece: Piece) -> bool:
        """Whether the rows of a folded tensor's piece stay where they are."""
        is_live = self._plan.num_live[piece.fqn, piece.shard, piece.number] > 0
        return is_live and piece.blob.pack not in self._plan.victims

    def tensor(self, fqn: str, entry: TensorEntry) -> TensorEntry:
        """A tensor, with new shards for what is moved."""
        if entry.folded is None:
            return Renumbering(self.blob).tensor(entry)
        pieces = pieces_of(fqn, entry)
        taken = self._taken(fqn, entry, [piece for piece in pieces if piece.blob.pack in self._plan.victims])
        new = list({id(shard): shard for shard in taken.values()}.values())
        num_parts = len({shard.box.offsets[1:] for shard in new})  # of a row, in shards of other columns
        for window in windows(self._plan.flat.row_space(entry), num_parts) if new else ():
            self._move_window(fqn, pieces, window, taken)
            for shard in new:
                if shard.ends_within(window):
                    self._write(fqn, shard, shard.group.flush())
        return replace(entry, shards=tuple(self._shards(entry, pieces, new)))

    def _move_window(self, fqn: str, pieces: Sequence[Piece], window: Box, taken: Mapping[int, _Moved]) -> None:
        found: dict[int, tuple[_Moved, list[LiveRows]]] = {}
        for live in live_rows(pieces, window, self._reader, f"{self._where}: tensor {fqn!r}", is_filled=False):
            if len(live.rows) and live.piece.blob.pack in self._plan.victims:
                shard = taken[live.piece.shard]
                found.setdefault(id(shard), (shard, []))[1].append(live)
        for shard, rows in found.values():
            self._write(fqn, shard, shard.group.add(rows))
            self._limit_waiting(fqn, taken)

    def _limit_waiting(self, fqn: str, taken: Mapping[int, _Moved]) -> None:
        """Write the fullest block before it is full where many are being filled."""
        groups = {id(shard.group): shard for shard in taken.values()}
        fullest = max(groups.values(), key=lambda shard: shard.group.fill)
        if sum(shard.group.fill for shard in groups.values()) > _MAX_WAITING:
            self._write(fqn, fullest, fullest.group.flush())

    def _taken(self, fqn: str, entry: TensorEntry, pieces: Sequence[Piece]) -> dict[int, _Moved]:
        """Which new shard takes the rows of each old one, by the old one's index: at any time, each needs a blob."""
        cache = BlobCache(self._reader)
        by_kind: dict[object, _Moved] = {}
        moved: dict[int, _Moved] = {}
        for piece in pieces:
            if piece.shard in moved:
                continue
            shard, kind = entry.shards[piece.shard], self._kind_of[piece.blob.pack]
            is_partial = (fqn, piece.shard) in self._plan.partial
            key = piece.shard if is_partial else (shard.place, shard.scheme, kind)
            if key not in by_kind or by_kind[key].source_bytes + piece.blob.num_bytes > CACHE_BYTES:
                by_kind[key] = _Moved(Group(shard, entry.dtype, self._block_rows(entry, piece), cache), kind)
            moved[piece.shard] = by_kind[key]
            moved[piece.shard].source_bytes += piece.blob.num_bytes
            moved[piece.shard].behind = piece.shard
        return moved

    def _block_rows(self, entry: TensorEntry, piece: Piece) -> int:
        """As many rows as a table's blocks have, so that its state has them too, and row numbers are shared."""
        dtype = entry.dtype if entry.table is None else self._plan.flat.tensors[entry.table].dtype
        return max(1, self._packs.block_bytes // max(1, piece.place.num_cols * DTYPES[dtype].itemsize))

    def _write(self, fqn: str, shard: _Moved, blocks: Iterator[CodedBlock]) -> None:
        for block in blocks:
            name = f"{fqn}{list(shard.group.shard.box.offsets)}/{len(shard.blocks)}"
            rows = self._coded_rows(name, shard.kind, block)
            shard.blocks.append((rows, self._add(shard.kind, name, block.data)))

    def _coded_rows(self, name: str, kind: _Kind, block: CodedBlock) -> RowBlock:
        first, span, num_rows = int(block.rows[0]), int(block.rows[-1] - block.rows[0]) + 1, len(block)
        if span == num_rows:
            return RowBlock("all", first, span, num_rows, None)
        key = (kind, hashlib.sha256(block.rows.tobytes()).digest())
        if key not in self._row_blocks:
            coded = encode_rows(block.rows)
            blob = self._add(kind, f"{name}/rows", np.frombuffer(coded.data, dtype=np.uint8))
            self._row_blocks[key] = RowBlock(coded.coding, first, span, num_rows, blob)
        return self._row_blocks[key]

    def _add(self, kind: _Kind, name: str, data: Bytes) -> Blob:
        self._moved_bytes += data.nbytes
        if self._progress is not None:
            self._progress(self._moved_bytes, max(self._moved_bytes, self._plan.moved_bytes))
        self._kinds.append(kind)
        return Blob(len(self._plan.flat.packs), self._packs.add(name, "uint8", data.shape, data, *kind), data.nbytes, 0)

    def _shards(self, entry: TensorEntry, pieces: Sequence[Piece], moved: Sequence[_Moved]) -> Iterator[Shard]:
        """Old shards without what is dead or was moved, and each new one behind the last that it took rows from."""
        stay: dict[int, list[Piece]] = {}
        for piece in pieces:
            if self._stays(piece):
                stay.setdefault(piece.shard, []).append(piece)
        for index, shard in enumerate(entry.shards):
            if index in stay:
                rows = self._row_set([self._rows(piece.rows) for piece in stay[index]])
                yield replace(shard, rows=rows, blobs=tuple(piece.blob for piece in stay[index]))
            for new in moved:
                if new.behind == index and new.blocks:
                    rows = self._row_set([rows for rows, _ in new.blocks])
                    yield replace(new.group.shard, rows=rows, blobs=tuple(blob for _, blob in new.blocks))

    def _rows(self, rows: RowBlock) -> RowBlock:
        return rows if rows.blob is None else replace(rows, blob=self.blob(rows.blob))

    def _row_set(self, blocks: Sequence[RowBlock]) -> RowSet:
        """One object for shards that share all blocks."""
        rows = RowSet(tuple(blocks))
        return self._row_sets.setdefault(rows, rows)

    def finish(self) -> tuple[tuple[Pack, ...], tuple[Blob, ...]]:
        """Write what is left: all new packs and blobs."""
        packs, blobs = self._packs.finish()
        kinds = {blob.pack: kind for blob, kind in zip(blobs, self._kinds, strict=True)}
        newest_ns = dict(sorted(zip(self._kind_of, (use.written_ns for use in self._plan.uses), strict=True)))
        return tuple(replace(pack, written_ns=newest_ns[kinds[n]]) for n, pack in enumerate(packs)), blobs

    def close(self) -> None:
        """Stop the threads."""
        self._packs.close()

    def discard(self) -> None:
        """Remove what was written. What cannot be removed now, pruning removes."""
        self.close()
        try:
            for name in self._store.names():
                if name.startswith(f"{self._save_id}-"):
                    self._store.remove(name)
        except StoreError as error:
            logger.info("files of a compaction that failed stay until the next prune: %s", error)

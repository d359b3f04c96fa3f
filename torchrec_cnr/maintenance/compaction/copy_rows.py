"""Copies from rewritten files into new ones what the new manifest needs: live rows, objects and row numbers.

Codes are copied without decoding, in the order of their row numbers. Rows of one shard region, one scheme and about the
same age are copied into one new shard, block by block.

Memory is bounded, whatever the size of the tables. It contains the row numbers of one window, a few incomplete blocks,
and the blobs from which they are filled. If too many blobs are needed at once, some are read again.
"""

import hashlib
import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from torchrec_cnr.errors import StoreError
from torchrec_cnr.format import blob_bytes
from torchrec_cnr.format.blob_bytes import Bytes, Positions, exact_rows, with_exact_rows
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import DTYPES, Pack, Shard, TensorEntry
from torchrec_cnr.format.row_sets import Blob, RowNumbers, UnplacedBlob, UnplacedRowBlock, encode_row_numbers
from torchrec_cnr.maintenance.compaction.live_rows import LiveRows, Piece, live_rows, pieces_of, windows
from torchrec_cnr.maintenance.compaction.plan import CompactionPlan
from torchrec_cnr.progress import Progress
from torchrec_cnr.quantization import NoQuantization, Scheme, Transformed
from torchrec_cnr.quantization.packed_rows import pack_rows, unpack_bytes
from torchrec_cnr.reading.transforms import KnownTransforms
from torchrec_cnr.storage.pack_reader import PackReader
from torchrec_cnr.storage.pack_writer import PackWriter

logger = logging.getLogger(__name__)

CACHE_BYTES = 96 << 20  # of blobs from which rows are copied
_MAX_WAITING = 6  # the total size of a tensor's incomplete blocks, in multiples of a full one

RowGroupKey = tuple[int, int]  # the heat of rows, and the logarithm of their age
RowLayout = tuple[str, tuple[int, ...]]  # dtype and shape


class NewPacks:
    """The new data files of a compaction. Each contains rows of one heat and about the same age.

    So the next compaction can rewrite the files of young rows, which are overwritten soon, without those of old rows.

    Args:
        plan: The plan of the compaction.
        save_id: The id of the compaction, with which the names of its files begin.
        thread_count: Number of files that are written at the same time.
        pack_bytes: The approximate size of a file in bytes.
        progress: Called with the number of bytes that were copied, and the total.
    """

    def __init__(
        self, plan: CompactionPlan, save_id: str, thread_count: int, pack_bytes: int, progress: Progress | None
    ) -> None:
        self._plan = plan
        self._save_id = save_id
        self._progress = progress
        self._store = plan.newest.store
        self._writer = PackWriter(self._store, f"{save_id}-0", thread_count, pack_bytes)
        self._kind_of = [(use.pack.heat, math.floor(math.log2(plan.age(use) + 1))) for use in plan.uses]
        self._kinds: list[RowGroupKey] = []
        self._rows: dict[tuple[RowGroupKey, bytes], UnplacedRowBlock] = {}
        self._num_bytes = 0

    @property
    def block_bytes(self) -> int:
        """Return how many bytes of values a blob should contain."""
        return self._writer.block_bytes

    def kind_of(self, blob: Blob) -> RowGroupKey:
        """Return the heat and age of an old blob's rows."""
        return self._kind_of[blob.pack]

    def add(self, kind: RowGroupKey, name: str, data: Bytes, typed: RowLayout | None = None) -> UnplacedBlob:
        """Add a blob. ``typed`` is the dtype and shape in the file's header, if the blob contains plain values."""
        self._num_bytes += data.nbytes
        if self._progress is not None:
            self._progress(self._num_bytes, max(self._num_bytes, self._plan.moved_bytes))
        self._kinds.append(kind)
        dtype, shape = ("uint8", data.shape) if typed is None else typed
        return self._writer.add(name, dtype, shape, data, *kind)

    def add_rows(self, kind: RowGroupKey, name: str, rows: RowNumbers) -> UnplacedRowBlock:
        """Add row numbers, int64 [n], strictly increasing. If a table and its state have the same, add them once."""
        first, span = int(rows[0]), int(rows[-1] - rows[0]) + 1
        if span == len(rows):
            return UnplacedRowBlock("all", first, span, len(rows), None)
        key = (kind, hashlib.sha256(rows.tobytes()).digest())
        if key not in self._rows:
            coded = encode_row_numbers(rows)
            blob = self.add(kind, name, np.frombuffer(coded.data, dtype=np.uint8))
            self._rows[key] = UnplacedRowBlock(coded.coding, first, span, len(rows), blob)
        return self._rows[key]

    def finish(self) -> tuple[tuple[Pack, ...], tuple[Blob, ...]]:
        """Write the rest. Return all new data files, and the places of all blobs, by number."""
        packs, blobs = self._writer.finish()
        kinds = {blob.pack: kind for blob, kind in zip(blobs, self._kinds, strict=True)}
        newest_ns = dict(sorted(zip(self._kind_of, (use.written_ns for use in self._plan.uses), strict=True)))
        return tuple(replace(pack, written_ns=newest_ns[kinds[n]]) for n, pack in enumerate(packs)), blobs

    def close(self) -> None:
        """End the threads."""
        self._writer.close()

    def discard(self) -> None:
        """Remove the files that were written. If that fails, the next prune removes them."""
        self.close()
        try:
            for name in self._store.names():
                if name.startswith(f"{self._save_id}-"):
                    self._store.remove(name)
        except StoreError as error:
            logger.info("cannot remove files of a failed compaction; the next prune removes them: %s", error)


@dataclass(frozen=True, eq=False)
class CodedBlock:
    """The rows of a block with their codes, as a blob stores them.

    Attributes:
        rows: int64 [n], strictly increasing: the row numbers within the shard region.
        codes: uint8 [n, row_bytes], the codes.
        exact: int64 [k], increasing: the positions of the exact rows, which codes do not represent.
        exact_values: uint8 [k, value_bytes], the values of the exact rows.
    """

    rows: RowNumbers
    codes: Bytes
    exact: Positions
    exact_values: Bytes

    def __len__(self) -> int:
        return len(self.rows)

    def data(self, scheme: Scheme, tail_bytes: int) -> Bytes:
        """Return the bytes of the blob; byte-split, if that pays. ``tail_bytes`` is the size of each row's tail."""
        if isinstance(scheme, Transformed):
            return with_exact_rows(pack_rows(self.codes.view(np.int16), scheme.known), self.exact, self.exact_values)
        divided = None if len(self.exact) else blob_bytes.split(self.codes, tail_bytes)
        if divided is not None:
            return divided
        return with_exact_rows(self.codes, self.exact, self.exact_values)


def concatenated(blocks: Sequence[CodedBlock]) -> CodedBlock:
    """Return one block with the rows of all blocks, in order."""
    starts = np.cumsum([0, *map(len, blocks)])
    return CodedBlock(
        np.concatenate([block.rows for block in blocks]),
        np.concatenate([block.codes for block in blocks]),
        np.concatenate([block.exact + start for block, start in zip(blocks, starts[:-1], strict=True)]),
        np.concatenate([block.exact_values for block in blocks]),
    )


class BlobCache:
    """A cache of verified blobs.

    Each use reads its blobs once, and the next use reads most of them again. So if the cache is full, blobs of earlier
    uses are evicted, oldest first, but none that the current use has added. Otherwise, the next use would find none.

    Args:
        reader: The reader of the data files.
        max_bytes: The size of the cache in bytes.
    """

    def __init__(self, reader: PackReader, max_bytes: int = CACHE_BYTES) -> None:
        self._reader = reader
        self._max_bytes = max_bytes
        self._kept: dict[int, Bytes] = {}

    def blobs(self, pieces: Sequence[Piece], next_row: int) -> Iterator[tuple[Piece, Bytes]]:
        """Yield each piece and its bytes, in any order. Cache those that may have rows from ``next_row`` on."""
        cached = [(piece, self._kept.pop(id(piece))) for piece in pieces if id(piece) in self._kept]
        other_ids = deque(self._kept)
        missing = {piece.key: piece for piece in pieces if all(piece is not cached_piece for cached_piece, _ in cached)}
        read_blobs = self._reader.read((key, piece.blob) for key, piece in missing.items())
        for piece, data in chain(cached, ((missing[key], data) for key, data in read_blobs)):
            yield piece, data
            if piece.rows.first + piece.rows.span > next_row:
                self._keep(piece, data, other_ids)

    def _keep(self, piece: Piece, data: Bytes, other_ids: deque[int]) -> None:
        free_bytes = self._max_bytes - sum(blob.nbytes for blob in self._kept.values())
        while other_ids and free_bytes < data.nbytes:
            free_bytes += self._kept.pop(other_ids.popleft()).nbytes
        if free_bytes >= data.nbytes:
            # A copy, because the data is a view of a larger read, which would remain in memory.
            self._kept[id(piece)] = data if data.base is None else data.copy()


@dataclass(eq=False)
class NewShard:
    """A new shard, whose rows are being collected and written.

    Attributes:
        source: One of the shards from which its rows are taken. All have the same region, table region and scheme.
        scheme: This scheme, with its transform if it has one.
        kind: The heat and age of its rows.
        dtype: The dtype of the tensor.
        block_rows: The number of rows in a block.
        where: The name of the checkpoint in errors.
        after: The index of the last shard from which rows are taken. The new shard follows it.
        source_bytes: The bytes of the blobs from which rows are taken.
        waiting: The rows that do not fill a block yet.
        blocks: The blocks that were written: their rows, the blob of their codes, and the number of exact rows.
    """

    source: Shard
    scheme: Scheme
    kind: RowGroupKey
    dtype: str
    block_rows: int
    where: str
    after: int = 0
    source_bytes: int = 0
    waiting: list[CodedBlock] = field(default_factory=list)
    blocks: list[tuple[UnplacedRowBlock, UnplacedBlob, int]] = field(default_factory=list)

    @property
    def box(self) -> Box:
        """Return the shard region in the tensor; for row-wise optimizer state, in the table."""
        return self.source.table_box or self.source.box

    def ends_within(self, window: Box) -> bool:
        """Return whether later windows contain no rows of this shard."""
        return self.box.first_row + self.box.num_rows <= window.first_row + window.num_rows

    @property
    def tail_bytes(self) -> int:
        """Return the size of a row's tail in bytes."""
        return self.source.scheme.tail_bytes(self.source.box.num_cols, DTYPES[self.dtype])

    @property
    def num_waiting(self) -> int:
        """Return the number of rows that do not fill a block yet."""
        return sum(map(len, self.waiting))

    @property
    def fill(self) -> float:
        """Return these rows as a share of a full block."""
        return self.num_waiting / self.block_rows

    def add(self, found: Sequence[LiveRows], cache: BlobCache) -> Iterator[CodedBlock]:
        """Add the rows of a window, which follow those of the previous window. Yield each block that is full."""
        rows = np.concatenate([live.rows for live in found])
        order = np.argsort(rows, kind="stable")
        rows, start = rows[order], 0
        while start < len(rows):
            stop = min(len(rows), start + self.block_rows - self.num_waiting)
            self.waiting.append(self._gathered(found, rows[start:stop], cache))
            start = stop
            if self.num_waiting == self.block_rows:
                yield from self.flush()

    def flush(self) -> Iterator[CodedBlock]:
        """Yield the remaining rows as a block, if there are any."""
        if self.waiting:
            block, self.waiting = concatenated(self.waiting), []
            yield block

    def _gathered(self, live_parts: Sequence[LiveRows], rows: RowNumbers, cache: BlobCache) -> CodedBlock:
        """Return a block of some rows, strictly increasing, with the codes from all pieces that contain them."""
        num_cols, itemsize = self.source.box.num_cols, DTYPES[self.dtype].itemsize
        row_bytes = self.source.scheme.row_bytes(num_cols, DTYPES[self.dtype])
        codes = np.empty((len(rows), row_bytes), dtype=np.uint8)
        parts_by_piece = {
            id(live.piece): part for live in live_parts if (part := _between(live, rows[0], rows[-1])) is not None
        }
        exact_positions: list[Positions] = [np.empty(0, dtype=np.int64)]
        values = [np.empty((0, num_cols * itemsize), dtype=np.uint8)]
        for piece, data in cache.blobs([part.piece for part in parts_by_piece.values()], int(rows[-1]) + 1):
            part = parts_by_piece[id(piece)]
            block_positions = np.searchsorted(rows, part.rows)
            num_code_bytes = piece.rows.num_rows * row_bytes
            data = self._codes(data, piece, row_bytes, part.positions)
            _copy_rows(data[:num_code_bytes].reshape(-1, row_bytes), part.positions, codes, block_positions)
            own_positions, own_values = exact_rows(data[num_code_bytes:], num_cols, itemsize)
            if len(own_positions):
                is_chosen = np.isin(own_positions, part.positions)
                exact_positions.append(block_positions[np.searchsorted(part.positions, own_positions[is_chosen])])
                values.append(own_values[is_chosen])
        order = np.argsort(positions := np.concatenate(exact_positions))
        return CodedBlock(rows, codes, positions[order], np.concatenate(values)[order])

    def _codes(self, data: Bytes, piece: Piece, row_bytes: int, positions: Positions) -> Bytes:
        """Return the codes of a blob, of at least the rows at some positions, and its exact rows."""
        where = f"{self.where}: {piece.key}"
        if isinstance(self.scheme, Transformed):
            exact_bytes = piece.num_exact * self.source.exact_row_bytes(DTYPES[self.dtype])
            return unpack_bytes(data, piece.rows.num_rows, exact_bytes, self.scheme.known, where, positions)
        return blob_bytes.join(data, piece.rows.num_rows, row_bytes, self.tail_bytes, where)


@dataclass(frozen=True, eq=False)
class Copied:
    """The blocks that a compaction has copied.

    Attributes:
        blobs: The copy of each old blob that was copied as a whole.
        shards: The new shards of merged tensors, by FQN.
    """

    blobs: Mapping[Blob, UnplacedBlob]
    shards: Mapping[str, Sequence[NewShard]]


class Copying:
    """Copies into new data files all that the new manifest needs from rewritten files."""

    def __init__(self, plan: CompactionPlan, packs: NewPacks, reader: PackReader) -> None:
        self._plan = plan
        self._packs = packs
        self._reader = reader
        self._where = plan.newest.store.url
        self._transforms = KnownTransforms()

    def run(self) -> Copied:
        """Copy whole blobs, and the live rows of merged tensors."""
        blobs = self._copy_blobs()
        folded = {fqn: entry for fqn, entry in self._plan.merged.tensors.items() if entry.folded is not None}
        return Copied(blobs, {fqn: self._new_shards(fqn, entry) for fqn, entry in folded.items()})

    def _copy_blobs(self) -> dict[Blob, UnplacedBlob]:
        """Copy whole blobs of rewritten files: objects, tensors that are not merged, row numbers and transforms."""
        blobs_by_key: dict[str, tuple[Blob, RowLayout | None]] = {}
        for fqn, blob in self._plan.merged.objects.items():
            blobs_by_key[f"object '{fqn}'"] = (blob, None)
        for fqn, entry in self._plan.merged.tensors.items():
            for piece in pieces_of(fqn, entry):
                if entry.folded is None:
                    layout = _typed(entry.dtype, entry.shards[piece.shard], piece.rows.num_rows, piece.blob.num_bytes)
                    blobs_by_key[piece.key] = (piece.blob, layout)
                elif piece.rows.blob is not None and self._plan.stays(piece):
                    blobs_by_key[f"rows of {piece.key}"] = (piece.rows.blob, None)
        for blob, name in self._plan.transforms.items():
            blobs_by_key[name] = (blob, None)
        keys = {blob: key for key, (blob, _) in blobs_by_key.items() if blob.pack in self._plan.rewritten}
        copied = {}
        for key, data in self._reader.read((key, blob) for blob, key in keys.items()):
            blob, layout = blobs_by_key[key]
            # A copy, because the data is a view of a larger read, which would remain in memory.
            copied[blob] = self._packs.add(self._packs.kind_of(blob), key, data.copy(), layout)
        return copied

    def _new_shards(self, fqn: str, entry: TensorEntry) -> Sequence[NewShard]:
        """Copy the live rows of a merged tensor from rewritten files into new shards."""
        pieces, cache = pieces_of(fqn, entry), BlobCache(self._reader)
        moved = [index for index, piece in enumerate(pieces) if self._plan.moves(piece)]
        targets = self._taken(fqn, entry, [pieces[index] for index in moved])
        pieces = pieces[min(moved, default=0) :]  # older ones overwrite nothing of these
        new_shards = list(dict.fromkeys(targets.values()))
        num_parts = len({shard.box.offsets[1:] for shard in new_shards})  # of a row, if shards divide the columns
        for window in windows(self._plan.merged.row_space(entry), num_parts) if new_shards else ():
            self._move_window(fqn, pieces, window, targets, cache)
            for shard in new_shards:
                if shard.ends_within(window):
                    self._write(fqn, shard, shard.flush())
        return [shard for shard in new_shards if shard.blocks]

    def _move_window(
        self, fqn: str, pieces: Sequence[Piece], window: Box, targets: Mapping[int, NewShard], cache: BlobCache
    ) -> None:
        live_by_shard: dict[NewShard, list[LiveRows]] = {}
        for live in live_rows(pieces, window, self._reader, f"{self._where}: tensor {fqn!r}", is_filled=False):
            if len(live.rows) and live.piece.blob.pack in self._plan.rewritten:
                live_by_shard.setdefault(targets[live.piece.shard], []).append(live)
        for shard, rows in live_by_shard.items():
            self._write(fqn, shard, shard.add(rows, cache))
            self._limit_waiting(fqn, targets)

    def _limit_waiting(self, fqn: str, targets: Mapping[int, NewShard]) -> None:
        """Write the fullest block early if there are many incomplete blocks, to limit memory."""
        shards = dict.fromkeys(targets.values())
        fullest_shard = max(shards, key=lambda shard: shard.fill)
        if sum(shard.fill for shard in shards) > _MAX_WAITING:
            self._write(fqn, fullest_shard, fullest_shard.flush())

    def _taken(self, fqn: str, entry: TensorEntry, pieces: Sequence[Piece]) -> dict[int, NewShard]:
        """Return the new shard for the rows of each old shard, by the index of the old one.

        A new shard has only so many old ones that a blob of each fits into the cache.
        """
        by_kind: dict[object, NewShard] = {}
        targets: dict[int, NewShard] = {}
        for piece in pieces:
            if piece.shard in targets:
                continue
            shard, kind = entry.shards[piece.shard], self._packs.kind_of(piece.blob)
            is_partial = (fqn, piece.shard) in self._plan.partial
            key = piece.shard if is_partial else (shard.place, shard.scheme, kind)
            if key not in by_kind or by_kind[key].source_bytes + piece.blob.num_bytes > CACHE_BYTES:
                block_rows = self._block_rows(entry, piece)
                by_kind[key] = NewShard(shard, self._scheme(fqn, shard), kind, entry.dtype, block_rows, self._where)
            targets[piece.shard] = by_kind[key]
            targets[piece.shard].source_bytes += piece.blob.num_bytes
            targets[piece.shard].after = piece.shard
        return targets

    def _scheme(self, fqn: str, shard: Shard) -> Scheme:
        """Return the scheme of a shard, with its transform if it has one."""
        shards = {f"tensor '{fqn}' region {list(shard.box.offsets)}": shard}
        self._transforms.add(shards, dict(self._reader.read(self._transforms.missing(shards).items())), self._where)
        return self._transforms.scheme(shard)

    def _block_rows(self, entry: TensorEntry, piece: Piece) -> int:
        """Return the number of rows in a block: the same for a table and its state, so that they share row numbers."""
        dtype = entry.dtype if entry.table is None else self._plan.merged.tensors[entry.table].dtype
        return max(1, self._packs.block_bytes // max(1, piece.place.num_cols * DTYPES[dtype].itemsize))

    def _write(self, fqn: str, shard: NewShard, blocks: Iterator[CodedBlock]) -> None:
        for block in blocks:
            name = f"{fqn}{list(shard.source.box.offsets)}/{len(shard.blocks)}"
            rows = self._packs.add_rows(shard.kind, f"{name}/rows", block.rows)
            data = block.data(shard.scheme, shard.tail_bytes)
            layout = _typed(shard.dtype, shard.source, len(block), data.nbytes)
            shard.blocks.append((rows, self._packs.add(shard.kind, name, data, layout), len(block.exact)))


def _typed(dtype: str, shard: Shard, num_rows: int, num_bytes: int) -> RowLayout | None:
    """Return the dtype and shape of a shard's rows in a data file, if they are plain values and not byte-split."""
    is_plain = num_bytes == num_rows * shard.box.num_cols * DTYPES[dtype].itemsize
    has_values = is_plain and isinstance(shard.scheme, NoQuantization)
    return (dtype, (num_rows, *shard.box.sizes[1:])) if has_values else None


def _between(live: LiveRows, first: int, last: int) -> LiveRows | None:
    start, stop = np.searchsorted(live.rows, (first, last + 1))
    if start == stop:
        return None
    return LiveRows(live.piece, live.positions[start:stop], live.rows[start:stop], live.is_partial)


def _copy_rows(source: Bytes, positions: Positions, target: Bytes, places: Positions) -> None:
    """Copy rows as single elements, which is faster than copying their bytes one by one."""
    row = np.dtype((np.void, source.shape[1]))
    target.view(row)[places, 0] = np.ascontiguousarray(source).view(row)[positions, 0]

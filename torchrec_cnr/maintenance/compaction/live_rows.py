"""The contents of the checkpoints to merge, and which rows of them are live: those that a load still sees.

:func:`merge` lists the tensors and data files of several checkpoints as if one checkpoint had stored all of them. The
shards of a tensor are in the order in which they were stored, so that later ones overwrite earlier ones as before. The
directories of data files are relative to the newest checkpoint's.

:func:`live_rows` finds the rows that no later checkpoint has overwritten. It needs only row numbers, and looks at one
window of rows at a time, newest shard first; no codes are read for it. A row is dead once all its columns were stored
again later. If only some columns of a row were stored again, the row is live. But it must not be moved to a later
shard, where it would overwrite the newer columns.

:func:`survey` and :func:`uses_of` count how much of each data file is live.
"""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.coverage import Coverage
from torchrec_cnr.format.manifest import Pack, Renumbering, Shard, TensorEntry, name_of
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowNumbers
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.reading.blocks import BlockRowNumbers
from torchrec_cnr.reading.plan import held
from torchrec_cnr.storage.pack_reader import PackReader

WINDOW_ROWS = 1 << 21  # rows per window; each needs a byte of memory per range of columns


@dataclass(frozen=True)
class MergedChain:
    """The contents of several checkpoints, as if one checkpoint had stored all of them.

    Attributes:
        packs: All data files; their directories are relative to the newest checkpoint's.
        written_ns: For each data file, when the newest of its rows was first stored, in nanoseconds since 1970.
        tensors: The tensors of the newest checkpoint, with the shards of all checkpoints.
        objects: The objects of the newest checkpoint.
    """

    packs: tuple[Pack, ...]
    written_ns: tuple[int, ...]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Blob]

    def row_space(self, entry: TensorEntry) -> tuple[int, ...]:
        """Return the size that defines a tensor's row numbers: its own, or its table's for row-wise state."""
        return entry.size if entry.table is None else self.tensors[entry.table].size


def merge(run: Sequence[Checkpoint]) -> MergedChain:
    """Merge checkpoints of one lineage, oldest first, each the parent of the next.

    Raises:
        DamagedError: A later checkpoint has a delta of a tensor that an earlier one lacks, or has in another form.
    """
    newest = run[-1]
    numbering = _Numbering(newest)
    renumbered = [Renumbering(partial(numbering.blob, checkpoint)) for checkpoint in run]
    newest_renumbering = renumbered[-1]
    tensors = {}
    for fqn, head in newest.manifest.tensors.items():
        shards: list[Shard] = []
        for index, entry in held(run, fqn):
            shards[:0] = [renumbered[index].shard(shard) for shard in entry.shards if shard.blobs]
        is_folded = not head.is_whole
        tensors[fqn] = (
            replace(head, shards=tuple(shards), folded=head.places) if is_folded else newest_renumbering.tensor(head)
        )
    objects = {fqn: newest_renumbering.blob(blob) for fqn, blob in newest.manifest.objects.items()}
    return MergedChain(tuple(numbering.packs), tuple(numbering.written_ns), tensors, objects)


class _Numbering:
    """The numbers of data files, each once, under the names that the newest checkpoint uses."""

    def __init__(self, newest: Checkpoint) -> None:
        self._newest = newest
        self._numbers: dict[tuple[str, str], int] = {}
        self.packs: list[Pack] = []
        self.written_ns: list[int] = []

    def blob(self, checkpoint: Checkpoint, blob: Blob) -> Blob:
        return blob.in_pack(self._number_of(checkpoint, checkpoint.manifest.packs[blob.pack]))

    def _number_of(self, checkpoint: Checkpoint, pack: Pack) -> int:
        store = checkpoint.store if pack.directory is None else checkpoint.store.at(pack.directory)
        key = ("" if pack.log is not None else store.path, pack.name)
        if key not in self._numbers:
            self._numbers[key] = len(self.packs)
            directory = None
            if pack.log is None and store.path != self._newest.store.path:
                directory = posixpath.relpath(store.path, self._newest.store.path)
            self.packs.append(replace(pack, directory=directory))
            self.written_ns.append(checkpoint.created_ns if pack.written_ns is None else pack.written_ns)
        return self._numbers[key]


@dataclass(frozen=True, eq=False)
class Piece:
    """A blob of rows.

    Attributes:
        shard: The index of its shard in the tensor.
        place: The shard region; for row-wise optimizer state, that of the table.
        rows: The row numbers.
        blob: The codes of the rows.
        key: The name in messages, which is unique.
        num_exact: For a shard with a transform, the number of exact rows; otherwise 0.
    """

    shard: int
    place: Box
    rows: RowBlock
    blob: Blob
    key: str
    num_exact: int = 0


@dataclass(frozen=True, eq=False)
class LiveRows:
    """The live rows of a piece within a window.

    Attributes:
        piece: The piece.
        positions: int64 [n], increasing: the positions of the live rows among the rows of the piece.
        rows: int64 [n], the row numbers, relative to the piece's place.
        is_partial: Whether any of these rows was overwritten in some of its columns.
    """

    piece: Piece
    positions: RowNumbers
    rows: RowNumbers
    is_partial: bool


def pieces_of(fqn: str, entry: TensorEntry) -> list[Piece]:
    """Return all blobs of a tensor, in the order in which they overwrite one another."""
    return [
        Piece(
            index,
            shard.table_box or shard.box,
            rows,
            blob,
            f"{name_of(fqn, entry, index)} block {number}",
            0 if shard.transform is None else shard.transform.num_exact[number],
        )
        for index, shard in enumerate(entry.shards)
        if shard.blobs  # a shard without columns has none
        for number, (rows, blob) in enumerate(zip(shard.rows.blocks, shard.blobs, strict=True))
    ]


def windows(size: tuple[int, ...], num_parts: int = 1) -> Iterator[Box]:
    """Yield the windows of a tensor, which are ranges of its rows.

    Args:
        size: The size of the tensor.
        num_parts: How many numbers are held for each row. The more there are, the fewer rows are in a window.
    """
    tensor_box = Box.whole(size)
    num_rows = max(1, WINDOW_ROWS // num_parts)
    for start in range(0, tensor_box.num_rows, num_rows):
        yield Box((start, *tensor_box.offsets[1:]), (min(num_rows, tensor_box.num_rows - start), *tensor_box.sizes[1:]))


def live_rows(
    pieces: Sequence[Piece], window: Box, reader: PackReader, where: str, is_filled: bool
) -> Iterator[LiveRows]:
    """Yield the live rows of each piece within a window, newest piece first.

    Args:
        pieces: All pieces of a tensor.
        window: A range of its rows; for row-wise optimizer state, of the rows of its table.
        reader: The reader of the data files.
        where: The name of the checkpoint and tensor in errors.
        is_filled: Whether every row must be stored.

    Raises:
        DamagedError: Row numbers are corrupt, or a row is not stored anywhere.
    """
    overlapping = [piece for piece in pieces if _overlaps(piece, window)]
    coverage = Coverage(window, (piece.place for piece in overlapping))
    row_numbers = _row_numbers(overlapping, reader, where)
    for piece in reversed(overlapping):
        rows = row_numbers.of(piece.rows)
        bounds = np.array([0, window.num_rows]) + (window.first_row - piece.place.first_row)
        if rows is None:
            start, stop = np.clip(bounds - piece.rows.first, 0, piece.rows.span)
            own_rows = np.arange(start, stop) + piece.rows.first
        else:
            start, stop = np.searchsorted(rows, bounds)
            own_rows = rows[start:stop]
        covered = coverage.parts(piece.place, own_rows)
        live_indices = np.flatnonzero(~covered.all(axis=0))
        coverage.add(piece.place, own_rows)
        yield LiveRows(piece, start + live_indices, own_rows[live_indices], bool(covered[:, live_indices].any()))
    hole = coverage.first_hole() if is_filled else None
    if hole is not None:
        raise DamagedError(f"{where}: row {hole} is nowhere stored; use another checkpoint")


def _row_numbers(pieces: Sequence[Piece], reader: PackReader, where: str) -> BlockRowNumbers:
    pieces_by_block = {piece.rows: piece for piece in pieces if piece.rows.blob is not None}
    blocks = {f"rows of {piece.key}": piece.rows for piece in pieces_by_block.values()}
    blobs = [(key, block.blob) for key, block in blocks.items() if block.blob is not None]
    return BlockRowNumbers(blocks, dict(reader.read(blobs)), where)


def _overlaps(piece: Piece, window: Box) -> bool:
    first_row = piece.place.first_row + piece.rows.first
    return first_row < window.first_row + window.num_rows and first_row + piece.rows.span > window.first_row


@dataclass(frozen=True)
class PackUse:
    """The share of a data file that is live.

    Attributes:
        pack: The data file.
        live_bytes: The bytes of it that a load still needs.
        written_ns: When the newest of its rows was first stored, in nanoseconds since 1970.
    """

    pack: Pack
    live_bytes: int
    written_ns: int

    @property
    def dead_bytes(self) -> int:
        """Return the bytes that no load needs."""
        return self.pack.num_bytes - self.live_bytes

    @property
    def moved_bytes(self) -> int:
        """Return the bytes to copy if the file is rewritten; 0 if it has no live rows."""
        return self.live_bytes - self.pack.header_bytes


def survey(
    newest: Checkpoint, merged: MergedChain, reader: PackReader, is_filled: bool
) -> tuple[dict[str, int], frozenset[tuple[str, int]]]:
    """Count live rows, window by window: once for a table and its row-wise state, which are stored together.

    Arguments and errors are as for :func:`live_rows`.

    Returns:
        The number of live rows of each piece of the merged tensors, by its key. And the shards, by FQN and index, with
        rows that were overwritten in some of their columns only.
    """
    num_live: dict[str, int] = {}
    partly_dead: set[tuple[str, int]] = set()
    surveyed: dict[object, tuple[dict[int, int], set[int]]] = {}  # of tensors whose rows were stored together
    for fqn, entry in merged.tensors.items():
        if entry.folded is None or 0 in entry.size:
            continue
        pieces, size = pieces_of(fqn, entry), merged.row_space(entry)
        kind = (size, tuple((piece.shard, piece.place, piece.rows) for piece in pieces))
        if kind not in surveyed:
            surveyed[kind] = _survey(pieces, size, reader, f"{newest.store.url}: tensor {fqn!r}", is_filled)
        counts, partly_dead_shards = surveyed[kind]
        num_live |= {piece.key: counts[index] for index, piece in enumerate(pieces)}
        partly_dead |= {(fqn, shard) for shard in partly_dead_shards}
    return num_live, frozenset(partly_dead)


def _survey(
    pieces: Sequence[Piece], size: tuple[int, ...], reader: PackReader, where: str, is_filled: bool
) -> tuple[dict[int, int], set[int]]:
    """Return the number of live rows of each piece of a tensor, and the indices of its partly dead shards."""
    counts, partly_dead_shards = dict.fromkeys(range(len(pieces)), 0), set()
    indices = {piece: index for index, piece in enumerate(pieces)}
    for window in windows(size):
        for live in live_rows(pieces, window, reader, where, is_filled):
            counts[indices[live.piece]] += len(live.rows)
            if live.is_partial:
                partly_dead_shards.add(live.piece.shard)
    return counts, partly_dead_shards


def live_transforms(merged: MergedChain, num_live: Mapping[str, int]) -> dict[Blob, str]:
    """Return the blobs of the transforms that live rows have, each once, with a name for messages."""
    names: dict[Blob, str] = {}
    for fqn, entry in merged.tensors.items():
        if all(shard.transform is None for shard in entry.shards):
            continue
        for piece in pieces_of(fqn, entry):
            if num_live.get(piece.key, piece.rows.num_rows) > 0:
                for number, blob in enumerate(entry.shards[piece.shard].transform_blobs):
                    names.setdefault(blob, f"transform of {piece.key}: {number}")
    return names


def uses_of(merged: MergedChain, num_live: Mapping[str, int]) -> tuple[PackUse, ...]:
    """Return how much of each data file of ``merged`` is live, from the counts of :func:`survey`."""
    live_bytes = [float(pack.header_bytes) for pack in merged.packs]
    for blob in (*merged.objects.values(), *live_transforms(merged, num_live)):
        live_bytes[blob.pack] += blob.num_bytes
    row_shares: dict[RowBlock, float] = {}  # of row numbers: live if a table or its state needs them
    for fqn, entry in merged.tensors.items():
        for piece in pieces_of(fqn, entry):
            share = num_live.get(piece.key, piece.rows.num_rows) / piece.rows.num_rows
            live_bytes[piece.blob.pack] += share * piece.blob.num_bytes
            if piece.rows.blob is not None:
                share_before = row_shares.get(piece.rows, 0.0)
                row_shares[piece.rows] = max(share_before, share)
                live_bytes[piece.rows.blob.pack] += (row_shares[piece.rows] - share_before) * piece.rows.blob.num_bytes
    uses = zip(merged.packs, live_bytes, merged.written_ns, strict=True)
    return tuple(PackUse(pack, round(num_bytes), written_ns) for pack, num_bytes, written_ns in uses)

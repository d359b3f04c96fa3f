"""Liveness: which stored rows a load would still see, and which later ones have overwritten.

Worked out from row numbers alone, window of rows by window, newest shard first; no codes are read for it. A row is dead
once all its columns were stored again later. A row of which only some were is live, but must stay where it is: moved
behind what overwrote the others, it would overwrite them in turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_cnr.boxes import Box
from torchrec_cnr.checkpoint_rows import RowNumbers
from torchrec_cnr.coverage import Coverage
from torchrec_cnr.errors import DamagedError
from torchrec_cnr.manifest import TensorEntry, name_of
from torchrec_cnr.pack_reader import PackReader
from torchrec_cnr.row_sets import Blob, RowBlock
from torchrec_cnr.rows import Rows

WINDOW_ROWS = 1 << 21  # looked at at once: a byte for each range of columns


@dataclass(frozen=True, eq=False)
class Piece:
    """A blob of rows.

    Attributes:
        fqn: The tensor.
        shard: Of the tensor, by its index among its shards.
        number: Of the blob in the shard.
        place: The shard's box; for row-wise optimizer state, the table's.
        rows: Its rows.
        blob: Their codes.
        key: What messages call it.
    """

    fqn: str
    shard: int
    number: int
    place: Box
    rows: RowBlock
    blob: Blob
    key: str


@dataclass(frozen=True, eq=False)
class LiveRows:
    """Some rows of a piece.

    Attributes:
        piece: The piece.
        positions: int64 [n], increasing: which of its rows are live, among those in the window.
        rows: int64 [n], their numbers within the piece's place.
        is_partial: Whether of any of them some columns were overwritten.
    """

    piece: Piece
    positions: Rows
    rows: Rows
    is_partial: bool


def pieces_of(fqn: str, entry: TensorEntry) -> list[Piece]:
    """All blobs of a tensor, in the order in which they overwrite one another."""
    return [
        Piece(
            fqn, index, number, shard.table_box or shard.box, rows, blob, f"{name_of(fqn, entry, index)} block {number}"
        )
        for index, shard in enumerate(entry.shards)
        if shard.blobs  # there are none where there are no columns
        for number, (rows, blob) in enumerate(zip(shard.rows.blocks, shard.blobs, strict=True))
    ]


def windows(size: tuple[int, ...], num_parts: int = 1) -> Iterator[Box]:
    """Boxes of rows that a tensor of this size is worked on in.

    Args:
        size: Of the tensor.
        num_parts: How many numbers are kept of a row: the more, the fewer rows are in a window.
    """
    whole = Box.whole(size)
    num_rows = max(1, WINDOW_ROWS // num_parts)
    for start in range(0, whole.num_rows, num_rows):
        yield Box((start, *whole.offsets[1:]), (min(num_rows, whole.num_rows - start), *whole.sizes[1:]))


def live_rows(
    pieces: Sequence[Piece], window: Box, reader: PackReader, where: str, is_filled: bool
) -> Iterator[LiveRows]:
    """The live rows of each piece within a window, newest piece first.

    Args:
        pieces: All of a tensor.
        window: Rows of it; for row-wise optimizer state, of its table.
        reader: Reads the pieces' packs.
        where: Names the checkpoint in errors.
        is_filled: Whether every row must be stored.

    Raises:
        DamagedError: Row numbers are not what was committed, or a row is nowhere stored.
    """
    inside = [piece for piece in pieces if _overlaps(piece, window)]
    coverage = Coverage(window, (piece.place for piece in inside))
    numbers = _row_numbers(inside, reader, where)
    for piece in reversed(inside):
        rows = numbers.of(piece.rows)
        if rows is None:
            rows = np.arange(piece.rows.first, piece.rows.first + piece.rows.span)
        first = window.first_row - piece.place.first_row
        start, stop = np.searchsorted(rows, (first, first + window.num_rows))
        own = rows[start:stop]
        covered = coverage.parts(piece.place, own)
        live = np.flatnonzero(~covered.all(axis=0))
        coverage.add(piece.place, own)
        yield LiveRows(piece, start + live, own[live], bool(covered[:, live].any()))
    hole = coverage.first_hole() if is_filled else None
    if hole is not None:
        raise DamagedError(f"{where}: row {hole} is nowhere stored; use another checkpoint")


def _row_numbers(pieces: Sequence[Piece], reader: PackReader, where: str) -> RowNumbers:
    coded = {piece.rows: piece for piece in pieces if piece.rows.blob is not None}
    blocks = {f"rows of {piece.key}": piece.rows for piece in coded.values()}
    blobs = [(key, block.blob) for key, block in blocks.items() if block.blob is not None]
    return RowNumbers(blocks, dict(reader.read(blobs)), where)


def _overlaps(piece: Piece, window: Box) -> bool:
    first = piece.place.first_row + piece.rows.first
    return first < window.first_row + window.num_rows and first + piece.rows.span > window.first_row

"""Moving: live rows of victims are copied into new blobs, codes as they are, in the order of their numbers.

Rows that belong together (of one box, one scheme and about one age) go into one shard, block by block. What is in
memory at a time is bounded whatever the size of the tables: the row numbers of a window, one block that is being filled
for each such group, and the blobs that it is filled from, which are read again if too many of them are needed at once.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from torchrec_cnr.format import split_blobs
from torchrec_cnr.format.manifest import DTYPES, Shard
from torchrec_cnr.format.row_sets import RowNumbers
from torchrec_cnr.maintenance.compaction.live_rows import LiveRows, Piece
from torchrec_cnr.quantization import exact_row_bytes
from torchrec_cnr.storage.pack_reader import PackReader
from torchrec_cnr.storage.store import Bytes

CACHE_BYTES = 96 << 20  # of blobs that rows are copied from

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CodedBlock:
    """Rows with their codes, as they will lie in a blob.

    Attributes:
        rows: int64 [n], strictly increasing, numbered within the box.
        codes: uint8 [n, row_bytes].
        exact: int64 [k], increasing: positions among the n of rows that codes do not represent.
        exact_values: uint8 [k, value_bytes].
    """

    rows: RowNumbers
    codes: Bytes
    exact: Positions
    exact_values: Bytes

    def __len__(self) -> int:
        return len(self.rows)

    def data(self, tail_bytes: int) -> Bytes:
        """The blob's bytes, where rows have such tails."""
        divided = None if len(self.exact) else split_blobs.split(self.codes, tail_bytes)
        if divided is not None:
            return divided
        positions = self.exact.astype("<u4").view(np.uint8)
        return np.concatenate((self.codes.reshape(-1), positions, self.exact_values.reshape(-1)))


def concatenated(blocks: Sequence[CodedBlock]) -> CodedBlock:
    """Blocks one behind the other."""
    starts = np.cumsum([0, *map(len, blocks)])
    return CodedBlock(
        np.concatenate([block.rows for block in blocks]),
        np.concatenate([block.codes for block in blocks]),
        np.concatenate([block.exact + start for block, start in zip(blocks, starts[:-1], strict=True)]),
        np.concatenate([block.exact_values for block in blocks]),
    )


class BlobCache:
    """Verified blobs, kept from one use to the next as long as there is room.

    A use goes through its blobs once, and the next one through most of them again. What is kept for other uses makes
    room, therefore, oldest first, but nothing that this use has kept: the next one would miss all of it.

    Args:
        reader: Reads them.
        max_bytes: What is kept.
    """

    def __init__(self, reader: PackReader, max_bytes: int = CACHE_BYTES) -> None:
        self._reader = reader
        self._max_bytes = max_bytes
        self._kept: dict[int, Bytes] = {}

    def blobs(self, pieces: Sequence[Piece], next_row: int) -> Iterator[tuple[Piece, Bytes]]:
        """Each piece and its bytes, in any order; kept are those that may have ``next_row`` or one behind it."""
        kept = [(piece, self._kept.pop(id(piece))) for piece in pieces if id(piece) in self._kept]
        others = deque(self._kept)
        missing = {piece.key: piece for piece in pieces if all(piece is not other for other, _ in kept)}
        read = self._reader.read((key, piece.blob) for key, piece in missing.items())
        for piece, data in chain(kept, ((missing[key], data) for key, data in read)):
            yield piece, data
            if piece.rows.first + piece.rows.span > next_row:
                self._keep(piece, data, others)

    def _keep(self, piece: Piece, data: Bytes, others: deque[int]) -> None:
        room = self._max_bytes - sum(blob.nbytes for blob in self._kept.values())
        while others and room < data.nbytes:
            room += self._kept.pop(others.popleft()).nbytes
        if room >= data.nbytes:
            # A copy of its own: what was read is a view of all that was read with it.
            self._kept[id(piece)] = data if data.base is None else data.copy()


@dataclass(eq=False)
class Group:
    """Live rows that go into one shard of their own.

    Attributes:
        shard: One of those that they come from: same box, table box and scheme.
        dtype: Of the tensor.
        block_rows: Rows in a block.
        cache: Where blobs come from.
        where: Names the checkpoint in errors.
        waiting: Rows that do not fill a block yet.
    """

    shard: Shard
    dtype: str
    block_rows: int
    cache: BlobCache
    where: str
    waiting: list[CodedBlock] = field(default_factory=list)

    @property
    def tail_bytes(self) -> int:
        """Of a row."""
        return self.shard.scheme.tail_bytes(self.shard.box.num_cols, DTYPES[self.dtype])

    @property
    def num_waiting(self) -> int:
        """Rows that wait."""
        return sum(map(len, self.waiting))

    @property
    def fill(self) -> float:
        """What part of a block they are."""
        return self.num_waiting / self.block_rows

    def add(self, found: Sequence[LiveRows]) -> Iterator[CodedBlock]:
        """Take the rows of a window, all behind those of the window before; yields blocks that are full."""
        rows = np.concatenate([live.rows for live in found])
        order = np.argsort(rows, kind="stable")
        rows, start = rows[order], 0
        while start < len(rows):
            stop = min(len(rows), start + self.block_rows - self.num_waiting)
            self.waiting.append(self._gathered(found, rows[start:stop]))
            start = stop
            if self.num_waiting == self.block_rows:
                yield from self.flush()

    def flush(self) -> Iterator[CodedBlock]:
        """What is left is a block, too."""
        if self.waiting:
            block, self.waiting = concatenated(self.waiting), []
            yield block

    def _gathered(self, found: Sequence[LiveRows], rows: RowNumbers) -> CodedBlock:
        """The codes of some rows, strictly increasing, out of all pieces that have some of them."""
        num_cols, itemsize = self.shard.box.num_cols, DTYPES[self.dtype].itemsize
        row_bytes = self.shard.scheme.row_bytes(num_cols, DTYPES[self.dtype])
        value_bytes = exact_row_bytes(num_cols, itemsize) - 4
        codes = np.empty((len(rows), row_bytes), dtype=np.uint8)
        wanted = {id(live.piece): part for live in found if (part := _between(live, rows[0], rows[-1])) is not None}
        exact: list[Positions] = [np.empty(0, dtype=np.int64)]
        values = [np.empty((0, value_bytes), dtype=np.uint8)]
        for piece, data in self.cache.blobs([part.piece for part in wanted.values()], int(rows[-1]) + 1):
            part = wanted[id(piece)]
            places = np.searchsorted(rows, part.rows)
            num_code_bytes = piece.rows.num_rows * row_bytes
            data = split_blobs.join(data, piece.rows.num_rows, row_bytes, self.tail_bytes, f"{self.where}: {piece.key}")
            _copy_rows(data[:num_code_bytes].reshape(-1, row_bytes), part.positions, codes, places)
            own, own_values = _exact_rows(data[num_code_bytes:], value_bytes)
            if len(own):
                chosen = np.isin(own, part.positions)
                exact.append(places[np.searchsorted(part.positions, own[chosen])])
                values.append(own_values[chosen])
        positions = np.concatenate(exact)
        order = np.argsort(positions)
        return CodedBlock(rows, codes, positions[order], np.concatenate(values)[order])


def _between(live: LiveRows, first: int, last: int) -> LiveRows | None:
    start, stop = np.searchsorted(live.rows, (first, last + 1))
    if start == stop:
        return None
    return LiveRows(live.piece, live.positions[start:stop], live.rows[start:stop], live.is_partial)


def _copy_rows(source: Bytes, positions: Positions, target: Bytes, places: Positions) -> None:
    """Rows as single elements: one copy each, rather than one for each byte."""
    row = np.dtype((np.void, source.shape[1]))
    target.view(row)[places, 0] = np.ascontiguousarray(source).view(row)[positions, 0]


def _exact_rows(data: Bytes, value_bytes: int) -> tuple[Positions, Bytes]:
    num_exact = len(data) // (4 + value_bytes)
    positions = data[: 4 * num_exact].copy().view("<u4").astype(np.int64)
    return positions, data[4 * num_exact :].reshape(num_exact, value_bytes)

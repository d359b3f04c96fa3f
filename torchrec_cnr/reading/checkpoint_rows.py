"""What a fold reads of one checkpoint: the numbers of its rows, and then the rows."""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format.exact_rows import exact_rows
from torchrec_cnr.format.manifest import DTYPES
from torchrec_cnr.format.row_sets import CodedRows, RowBlock, RowNumbers, decode_row_numbers
from torchrec_cnr.format.split_blobs import join
from torchrec_cnr.reading.plan import BlobRead, CheckpointReads
from torchrec_cnr.reading.regions import Block, PlacedRows
from torchrec_cnr.storage.pack_reader import PackReader
from torchrec_cnr.storage.store import Bytes


class BlockRowNumbers:
    """Row numbers of blocks, decoded when they are needed; the last one is kept for the table's optimizer state.

    Args:
        blocks: Coded blocks, by a key that names them in errors.
        codes: Their codes, by the same keys.
        where: The checkpoint, for errors.
    """

    def __init__(self, blocks: Mapping[str, RowBlock], codes: Mapping[str, Bytes], where: str) -> None:
        self._keys = {block: key for key, block in blocks.items()}
        self._codes = codes
        self._where = where
        self._last: tuple[RowBlock | None, RowNumbers] = (None, np.empty(0, dtype=np.int64))

    def of(self, block: RowBlock) -> RowNumbers | None:
        """int64 [num_rows], or None for consecutive rows."""
        if block.coding == "all":
            return None
        if self._last[0] != block:
            key = self._keys[block]
            coded = CodedRows(block.coding, block.first, block.span, self._codes[key].tobytes())
            self._last = (block, decode_row_numbers(coded, block.num_rows, f"{self._where}: {key}"))
        return self._last[1]


class CheckpointRows:
    """The rows that a fold reads of one checkpoint: first which they are, and then their codes.

    Args:
        plan: What is read.
        first_turn: The number of its first turn, among those of all checkpoints.
        thread_count: Threads that read.
        holds_logs: Whether codes that lie in a log are read with the row numbers, and held until they are asked for.
            It is slow to go back in a log.

    Attributes:
        plan: What is read.

    Raises:
        DamagedError: Bytes are not what was committed.
        StoreError: A pack cannot be read.
    """

    def __init__(self, plan: CheckpointReads, first_turn: int, thread_count: int, *, holds_logs: bool) -> None:
        store, manifest = plan.checkpoint.store, plan.checkpoint.manifest
        self.plan = plan
        self._first_turn = first_turn
        self._packs = PackReader(store, manifest.packs, thread_count)
        wanted = [(key, block.blob) for key, block in plan.row_blocks.items() if block.blob is not None]
        if holds_logs:
            wanted += [(key, read.blob) for key, read in plan.reads.items() if plan.is_in_log(read.blob)]
        self._held = dict(self._packs.read(wanted))
        codes = {key: self._held.pop(key) for key in plan.row_blocks}
        self._numbers = BlockRowNumbers(plan.row_blocks, codes, store.url)

    def placed(self) -> Iterator[tuple[int, BlobRead, PlacedRows]]:
        """Which rows they are, turn by turn, with the turn's number."""
        for number, turn in enumerate(self.plan.turns(), self._first_turn):
            for read in turn.values():
                yield number, read, self._placed(read)

    def blocks(self) -> Iterator[tuple[int, BlobRead, Block]]:
        """The rows themselves; once only, for what is held of them is let go.

        Raises:
            DamagedError, StoreError: As the constructor.
        """
        checkpoint, turns = self.plan.checkpoint, self.plan.turns()
        wanted = [[(key, read.blob) for key, read in turn.items() if key not in self._held] for turn in turns]
        found = self._packs.read(*wanted, prepare=self._joined)
        for number, (turn, rest) in enumerate(zip(turns, wanted, strict=True), self._first_turn):
            held = [(key, self._joined(key, self._held.pop(key))) for key in turn if key in self._held]
            for key, data in itertools.chain(held, itertools.islice(found, len(rest))):
                is_delta = checkpoint.manifest.parent is not None
                yield number, turn[key], _block(turn[key], data, self._placed(turn[key]), is_delta, self._where(key))

    def _joined(self, key: str, data: Bytes) -> Bytes:
        """A blob's rows, also if it is split; of files, in the threads that read, which have time for it."""
        read = self.plan.reads[key]
        num_cols, dtype = read.shard.box.num_cols, DTYPES[read.entry.dtype]
        row_bytes = read.shard.scheme.row_bytes(num_cols, dtype)
        tail_bytes = read.shard.scheme.tail_bytes(num_cols, dtype)
        return join(data, read.rows.num_rows, row_bytes, tail_bytes, self._where(key))

    def _where(self, key: str) -> str:
        return f"{self.plan.checkpoint.store.url}: {key}"

    def _placed(self, read: BlobRead) -> PlacedRows:
        found = self._numbers.of(read.rows)
        numbers = None if found is None else torch.from_numpy(found)
        return PlacedRows(read.shard.table_box or read.shard.box, read.rows.first, read.rows.num_rows, numbers)


def _block(read: BlobRead, data: Bytes, rows: PlacedRows, is_delta: bool, where: str) -> Block:
    shard, dtype = read.shard, DTYPES[read.entry.dtype]
    num_rows, num_cols = rows.num_rows, shard.box.num_cols
    num_code_bytes = num_rows * shard.scheme.row_bytes(num_cols, dtype)
    codes = torch.from_numpy(data[:num_code_bytes]).view(num_rows, -1)
    if dtype is torch.bool and bool((codes > 1).any()):
        raise DamagedError(f"{where}: bytes that are no bools; use another checkpoint")
    positions, values = exact_rows(data[num_code_bytes:], num_cols, dtype.itemsize)
    if len(positions) and (positions[-1] >= num_rows or (np.diff(positions) <= 0).any()):
        raise DamagedError(f"{where}: positions of exactly stored rows are out of order; use another checkpoint")
    exact_values = torch.from_numpy(values).clone().view(dtype)
    row_shape = shard.box.sizes[1:]
    return Block(rows, codes, shard.scheme, dtype, torch.from_numpy(positions), exact_values, row_shape, is_delta)

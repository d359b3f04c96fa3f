"""New packs: what a compaction writes, rows of one heat and about one age in each.

So the rows of young packs, which soon hold dead ones, can be rewritten alone.
"""

import hashlib
import logging
import math
from dataclasses import replace

import numpy as np

from torchrec_cnr.errors import StoreError
from torchrec_cnr.format.manifest import Pack
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowNumbers, encode_row_numbers
from torchrec_cnr.maintenance.compaction.plan import CompactionPlan
from torchrec_cnr.progress import Progress
from torchrec_cnr.storage.pack_writer import PackWriter
from torchrec_cnr.storage.store import Bytes

logger = logging.getLogger(__name__)

RowGroupKey = tuple[int, int]  # of rows: their heat, and the logarithm of their age
RowLayout = tuple[str, tuple[int, ...]]  # dtype and shape


class NewPacks:
    """The packs of a compaction, while they are written.

    Until its pack is written, a new blob has a pack number behind those of all old packs, and in place of an offset the
    number that the pack writer gave it.

    Args:
        plan: The compaction.
        save_id: Its own, which the names begin with.
        thread_count: Packs written at once.
        pack_bytes: Their size, roughly.
        progress: Told how many of how many bytes were copied.
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
        self._rows: dict[tuple[RowGroupKey, bytes], RowBlock] = {}
        self._num_bytes = 0

    @property
    def block_bytes(self) -> int:
        """How many bytes of values a blob should hold."""
        return self._writer.block_bytes

    def kind_of(self, blob: Blob) -> RowGroupKey:
        """Of an old blob's rows."""
        return self._kind_of[blob.pack]

    def add(self, kind: RowGroupKey, name: str, data: Bytes, typed: RowLayout | None = None) -> Blob:
        """Take a blob; ``typed`` says of one that holds values how other readers of packs see it."""
        self._num_bytes += data.nbytes
        if self._progress is not None:
            self._progress(self._num_bytes, max(self._num_bytes, self._plan.moved_bytes))
        self._kinds.append(kind)
        dtype, shape = ("uint8", data.shape) if typed is None else typed
        number = self._writer.add(name, dtype, shape, data, *kind)
        return Blob(len(self._plan.flat.packs), number, data.nbytes, 0)

    def add_rows(self, kind: RowGroupKey, name: str, rows: RowNumbers) -> RowBlock:
        """Take row numbers, int64 [n], strictly increasing: once where a table and its state have the same."""
        first, span = int(rows[0]), int(rows[-1] - rows[0]) + 1
        if span == len(rows):
            return RowBlock("all", first, span, len(rows), None)
        key = (kind, hashlib.sha256(rows.tobytes()).digest())
        if key not in self._rows:
            coded = encode_row_numbers(rows)
            blob = self.add(kind, name, np.frombuffer(coded.data, dtype=np.uint8))
            self._rows[key] = RowBlock(coded.coding, first, span, len(rows), blob)
        return self._rows[key]

    def finish(self) -> tuple[tuple[Pack, ...], tuple[Blob, ...]]:
        """Write what is left: all new packs, and all blobs by number."""
        packs, blobs = self._writer.finish()
        kinds = {blob.pack: kind for blob, kind in zip(blobs, self._kinds, strict=True)}
        newest_ns = dict(sorted(zip(self._kind_of, (use.written_ns for use in self._plan.uses), strict=True)))
        return tuple(replace(pack, written_ns=newest_ns[kinds[n]]) for n, pack in enumerate(packs)), blobs

    def close(self) -> None:
        """Stop the threads."""
        self._writer.close()

    def discard(self) -> None:
        """Remove what was written. What cannot be removed now, pruning removes."""
        self.close()
        try:
            for name in self._store.names():
                if name.startswith(f"{self._save_id}-"):
                    self._store.remove(name)
        except StoreError as error:
            logger.info("files of a compaction that failed stay until the next prune: %s", error)

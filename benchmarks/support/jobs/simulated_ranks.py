"""A job of many ranks as its coordinator sees it: the plans that it gathers, and the results that ranks report.

The plans are made by the library's own planner, one rank after another, as for staged state of an asynchronous save in
another process: this needs shapes, but no values. The results are those that ranks would report after writing their
shards. Nothing is encoded, and there are no data files.
"""

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

import torchrec_cnr as cnr
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import Pack, Shard
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowSet
from torchrec_cnr.lineage.checkpoint import Head
from torchrec_cnr.policies import Since
from torchrec_cnr.progress import SavePhases
from torchrec_cnr.saving.commit import RANK_RECORD, RankRecord, ShardRecord
from torchrec_cnr.saving.cut import Cut, StagedRows, TrackedItem
from torchrec_cnr.saving.planner import _received
from torchrec_cnr.saving.plug_in_messages import STAGED, StagedSave, StagedTensor
from torchrec_cnr.saving.running_saves import running_saves
from torchrec_cnr.sharding import ShardKey
from torchrec_cnr.storage.pack_writer import PACK_BYTES
from torchrec_cnr.tracking.modified_rows import RowList
from torchrec_cnr.tracking.tracked_tables import Pending

T = TypeVar("T")
SCHEME = cnr.AdaptiveAsymmetric.best(4)  # no scheme takes more space in a manifest
EXACT = cnr.NoQuantization()


@dataclass(frozen=True)
class Table:
    """A table with row-wise Adagrad, sharded by rows as in TorchRec.

    Attributes:
        name: Name of the table.
        num_rows: Number of rows.
        dim: Values per row.
    """

    name: str
    num_rows: int
    dim: int

    @property
    def weight(self) -> str:
        """The FQN of the table in the model."""
        return f"sparse_arch.embedding_bag_collection.embedding_bags.{self.name}.weight"

    @property
    def fqn(self) -> str:
        """The FQN of the table in the checkpoint."""
        return f"model.{self.weight}"

    @property
    def momentum_fqn(self) -> str:
        """The FQN of its optimizer state in the checkpoint."""
        return f"optim.state.{self.weight}.{self.name}.momentum1"

    def boxes(self, rank: int, num_ranks: int) -> tuple[Box, Box]:
        """Return a rank's regions of the table and its state. All ranks except the last ones have as many rows."""
        length = -(-self.num_rows // num_ranks)
        first = min(self.num_rows, rank * length)
        num_rows = min(length, self.num_rows - first)
        return Box((first, 0), (num_rows, self.dim)), Box((first,), (num_rows,))


@dataclass(frozen=True)
class ManyRanks:
    """Tables, and the ranks that hold them.

    Attributes:
        tables: The tables.
        num_ranks: Number of ranks.
        has_state: Whether the optimizer state is saved, too.
    """

    tables: tuple[Table, ...]
    num_ranks: int
    has_state: bool

    @classmethod
    def of(cls, num_tables: int, num_rows: int, dim: int, num_ranks: int, has_state: bool = True) -> "ManyRanks":
        """Create tables of ``num_rows`` and more rows, all of different sizes."""
        tables = tuple(Table(f"t{number}", num_rows + 1000 * number, dim) for number in range(num_tables))
        return cls(tables, num_ranks, has_state)

    @property
    def num_boxes(self) -> int:
        """The number of shards of all tensors."""
        return len(self.tables) * self.num_ranks * (2 if self.has_state else 1)

    def planner(self, rank: int, meta: StorageMeta, head: Head | None) -> cnr.CNRSavePlanner:
        """Return a rank's planner of a delta (or of a baseline, without a head), ready to create its local plan."""
        since = Since.EVER if head is None else Since.HEAD
        rows = None if head is None else StagedRows(since, (RowList(torch.zeros(1, dtype=torch.int64)),), b"")
        items: dict[ShardKey, TrackedItem] = {}
        weights: dict[str, StagedTensor] = {}
        states: dict[str, dict[str, StagedTensor]] = {}
        for table in self.tables:
            box, own_box = table.boxes(rank, self.num_ranks)
            weights[table.weight] = _staged(table.fqn, box, (table.num_rows, table.dim))
            places = {table.fqn: box}
            if self.has_state:
                momentum = _staged(table.momentum_fqn, own_box, (table.num_rows,))
                states[table.weight] = {f"{table.name}.momentum1": momentum}
                places[table.momentum_fqn] = own_box
            for fqn, place in places.items():
                values = torch.empty(place.sizes, device="meta")
                items[fqn, place.offsets] = TrackedItem(fqn, table.fqn, box, 0, values, rows)
        cut = Cut(cnr.Consecutive(), head, 0, items, Pending(), frozenset({since}))
        planner = _received(cut.policy, _TRACKER)
        staged = StagedSave(running_saves.add(has_begun=False), cut, _TRACKER)
        saved = {"model": weights, "optim": {"state": states}, STAGED: staged}
        planner.set_up_planner(saved, meta, is_coordinator=rank == 0)
        return planner

    def results(self, plan: SavePlan, rank: int, share: float) -> list[WriteResult]:
        """Return the results that a rank reports after writing a share of each shard's rows (all rows if it is 1)."""
        packs = _Packs(f"{plan.storage_data}-{rank}", random.Random(rank))
        items = {item.index.fqn: item for item in plan.items}
        records: list[tuple[WriteItem, ShardRecord]] = []
        for table in self.tables:
            box, own_box = table.boxes(rank, self.num_ranks)
            num_rows = round(share * box.num_rows)
            if share == 1:
                rows = RowSet.all(num_rows, num_rows)
            else:
                coded = packs.blob(box.num_rows // 10)
                rows = RowSet((RowBlock("bitmap", 3, box.num_rows - 7, num_rows, coded),))
            codes = packs.blob(num_rows * SCHEME.row_bytes(table.dim, torch.float32))
            weight = Shard(box, rows, (codes,), SCHEME)
            size = (table.num_rows, table.dim)
            records.append((items[table.fqn], ShardRecord(size, "float32", True, None, (weight,))))
            if self.has_state:
                state = Shard(own_box, rows, (packs.blob(4 * num_rows),), EXACT, box)
                record = ShardRecord(size[:1], "float32", False, table.fqn, (state,))
                records.append((items[table.momentum_fqn], record))
        results = [WriteResult(MetadataIndex(RANK_RECORD), 0, RankRecord(packs.finished(), SavePhases()))]
        return results + [WriteResult(item.index, 0, record) for item, record in records]


def make_packs(path: Path, results: Sequence[Sequence[WriteResult]]) -> None:
    """Create files of the sizes that ranks report. They are sparse, so they take no space on a disk."""
    for rank_results in results:
        for result in rank_results:
            if isinstance(result.storage_data, RankRecord):
                for pack in result.storage_data.packs:
                    with open(path / pack.name, "wb") as file:
                        file.truncate(pack.num_bytes)


class _Packs:
    """The places that a rank's blobs would have in data files."""

    def __init__(self, prefix: str, drawn: random.Random) -> None:
        self._prefix = prefix
        self._drawn = drawn
        self._packs: list[Pack] = []
        self._end = self._header_bytes = 1 << 12

    def blob(self, num_bytes: int) -> Blob:
        if self._end + num_bytes > PACK_BYTES:
            self.finished()
        start, self._end = self._end, self._end + num_bytes
        return Blob(len(self._packs), start, num_bytes, self._drawn.getrandbits(32))

    def finished(self) -> tuple[Pack, ...]:
        name = f"{self._prefix}-{len(self._packs)}.safetensors"
        self._packs.append(Pack(name, self._end, self._header_bytes, self._drawn.getrandbits(32)))
        self._end = self._header_bytes
        return tuple(self._packs)


_TRACKER = 1


def _staged(fqn: str, box: Box, size: tuple[int, ...]) -> StagedTensor:
    """Return a staged shard, with the plan that DCP makes for a shard of a ``ShardedTensor``."""
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(size))
    item = WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
    return StagedTensor((item,), is_replicated=False, shards={})


def gathered(value: T) -> T:
    """Return a value as it arrives from another process, which pickles it."""
    copy: T = pickle.loads(pickle.dumps(value))
    return copy

"""The storage reader: verified, resharded reads of a whole lineage.

Who calls what, on which rank, in one ``dcp.load``:

    1. reset                  all ranks  another checkpoint id may come with it
    2. read_metadata          all ranks  read and validate the manifests from the head to its baseline
    3. set_up_storage_reader  all ranks  raise what went wrong in 2: DCP would lose the error's type there; take a lease
    4. prepare_local_plan     all ranks  nothing
    5. prepare_global_plan    coordinator  nothing
    6. read_data              all ranks  fold the lineage into the planner's tensors; release the lease
"""

import os
import uuid
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchrec_cnr.errors import CNRError, DamagedError, LoadError, StateMismatchError
from torchrec_cnr.folding import fold, plan_fold
from torchrec_cnr.handover import InferenceReadItem, LoadMetadata, RestoredRows, RowStateReadItem, ValueReadItem
from torchrec_cnr.inference_regions import inference_regions, turns
from torchrec_cnr.leases import Lease
from torchrec_cnr.lineage import Lineage, existing, read_lineage
from torchrec_cnr.manifest import DTYPES, TensorEntry
from torchrec_cnr.objects import read_objects, serialized
from torchrec_cnr.pace import Bandwidth
from torchrec_cnr.packs import check_thread_count
from torchrec_cnr.progress import Progress
from torchrec_cnr.regions import LargestValueRegion, Region, RowStateRegion, TensorRegion, column_bounds
from torchrec_cnr.rows import Box
from torchrec_cnr.stores import Store
from torchrec_cnr.tracked import forget_overwritten


class CNRStorageReader(StorageReader):
    """Reads checkpoints that ``CNRStorageWriter`` wrote, baseline and deltas as one.

    Args:
        path: The checkpoint, a path or fsspec URL; usually ``latest(root)``.
        thread_count: Requests in flight at once. Each takes up to 16 MiB of memory.
        max_bytes_per_sec: What each rank may read a second, averaged over requests.
        progress: Told how many of how many bytes of rows this rank has read; once more from the beginning where
            inference tables are converted in several turns.

    Raises:
        CheckpointNotFoundError: ``path`` is None, because ``latest`` found nothing.
        ConfigurationError: An argument cannot work.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        thread_count: int = 2,
        max_bytes_per_sec: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        check_thread_count(thread_count)
        self._thread_count = thread_count
        self._bandwidth = Bandwidth(max_bytes_per_sec)
        self._progress = progress
        self._url = Store.open(existing(path)).url
        self._lineage: Lineage | None = None
        self._failure: CNRError | None = None
        self._load_id = ""
        self._lease: Lease | None = None
        self.reset()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load."""
        self._end_lease()
        if checkpoint_id is not None:
            self._url = Store.open(checkpoint_id).url
        self._lineage = None
        self._failure = None
        self._load_id = uuid.uuid4().hex[:16]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The head's metadata. DCP turns an error raised here into another one, so it is raised one step later."""
        meta = StorageMeta(checkpoint_id=self._url, load_id=self._load_id)
        self._lineage = self._failure = None
        try:
            self._lineage = read_lineage(self._url).limited(self._bandwidth)
        except CNRError as error:
            self._failure = error
            return LoadMetadata({}, storage_meta=meta)
        manifest = self._lineage.newest.manifest
        entries: dict[str, Any] = {fqn: _tensor_metadata(entry) for fqn, entry in manifest.tensors.items()}
        entries |= {fqn: BytesStorageMetadata() for fqn in manifest.objects}
        return LoadMetadata(entries, planner_data=dict(manifest.paths), storage_meta=meta, lineage=self._lineage)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise what went wrong while the manifests were read; let nobody prune what they name."""
        if self._failure is not None:
            raise self._failure
        self._end_lease()
        self._lease = Lease.take(Store.open(self._url), "load")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fold the lineage into the planner's tensors, and give it the objects."""
        try:
            self._read_data(plan, planner)
        finally:
            self._end_lease()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        if self._lineage is None:
            raise LoadError(f"{self._url}: data was asked for before the metadata was read")
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        targets = [planner.resolve_tensor(item).detach() for item in tensors]
        forget_overwritten(targets)
        regions: list[Region] = []
        for item, target in zip(tensors, targets, strict=True):
            if isinstance(item, InferenceReadItem):
                regions += _inference_regions(self._lineage, item, target)
            elif (region := self._region(self._lineage, item, target, planner)) is not None:
                regions.append(region)
        for turn in turns(regions):
            fold(plan_fold(self._lineage, turn), turn, self._thread_count, progress=self._progress)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        self._load_objects([item for item in plan.items if item.type is LoadItemType.BYTE_IO], planner)
        if isinstance(planner, RestoredRows):
            planner.finish_restore()

    def _region(self, lineage: Lineage, item: ReadItem, target: Tensor, planner: LoadPlanner) -> Region | None:
        """What is to be read; None if it is the state of no rows, which has no place in a table."""
        fqn = item.storage_index.fqn
        entry = lineage.newest.manifest.tensors[fqn]
        if isinstance(item, ValueReadItem):
            return LargestValueRegion(fqn, Box.whole(entry.size), DTYPES[entry.dtype], target)
        if target.dtype is not DTYPES[entry.dtype]:
            raise StateMismatchError(
                f"tensor {fqn!r}: the checkpoint {self._url} has {entry.dtype}, the state dict has {target.dtype}; "
                "load into a tensor of the saved dtype and convert it afterwards"
            )
        if tuple(target.shape) != tuple(item.lengths):
            raise StateMismatchError(
                f"tensor {fqn!r}: {list(item.lengths)} of {self._url} are to be loaded into {list(target.shape)}"
            )
        if isinstance(item, RowStateReadItem):
            return _row_state_region(lineage, fqn, item.table_box, target)
        if entry.table is not None:
            return _row_state_region(lineage, fqn, _table_box(entry, item), target) if len(target) else None
        origin = item.storage_index.offset or ()
        offsets = tuple(base + offset for base, offset in zip(origin, item.storage_offsets, strict=True))
        region = TensorRegion(fqn, Box(offsets, tuple(item.lengths)), target)
        if entry.is_table and isinstance(planner, RestoredRows):
            region.on_delta_rows = lambda rows: planner.restore_rows(item, rows)
        return region

    def _load_objects(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        if self._lineage is None:
            return
        by_fqn = {item.storage_index.fqn: item for item in items}
        for fqn, value in read_objects(self._lineage.newest, by_fqn, self._thread_count):
            planner.load_bytes(by_fqn[fqn], serialized(value, f"{self._url}: object {fqn!r}"))

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    @property
    def checkpoint_id(self) -> str:
        """Path or URL of the checkpoint."""
        return self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader could load from there."""
        return Store.can_open(checkpoint_id)


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(place.box.offsets), torch.Size(place.box.sizes)) for place in entry.places
    ]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.size), chunks)


def _row_state_region(lineage: Lineage, fqn: str, table_box: Box, target: Tensor) -> Region:
    """The state of the rows of a table's box, whether it was saved as row-wise, as [rows] or as [rows, 1]."""
    entry = lineage.newest.manifest.tensors[fqn]
    values = target if target.dim() == 1 else target[:, 0]
    if entry.table is not None:
        return RowStateRegion(fqn, table_box, values, column_bounds(lineage.shards(fqn), table_box))
    (first, _), (num_rows, _) = table_box.offsets, table_box.sizes
    if len(entry.size) == 1:
        return TensorRegion(fqn, Box((first,), (num_rows,)), values)
    return TensorRegion(fqn, Box((first, 0), (num_rows, 1)), values[:, None])


def _inference_regions(lineage: Lineage, item: InferenceReadItem, target: Tensor) -> list[Region]:
    fqn = item.storage_index.fqn
    dtype = DTYPES[lineage.newest.manifest.tensors[fqn].dtype]
    return inference_regions(fqn, target, item.row, dtype, lineage.shards(fqn))


def _table_box(entry: TensorEntry, item: ReadItem) -> Box:
    """The table's box for a read of row-wise state by a planner that knows of no tables: as in the checkpoint."""
    for place in entry.places:
        if place.table_box is not None and place.box.offsets == tuple(item.storage_index.offset or ()):
            (first, column), (_, width) = place.table_box.offsets, place.table_box.sizes
            return Box((first + item.storage_offsets[0], column), (item.lengths[0], width))
    raise DamagedError(f"tensor {item.storage_index.fqn!r}: no shard at {item.storage_index.offset}")

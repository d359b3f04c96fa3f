"""The storage reader: verified, resharded reads of a whole checkpoint chain.

The calls of one ``dcp.load``, in order, and the ranks on which DCP makes them:

    1. reset                  all ranks  begin a new load, perhaps with another checkpoint id
    2. read_metadata          all ranks  read and validate the checkpoint's manifest; rank 0, all back to the baseline
    3. set_up_storage_reader  all ranks  raise an error of step 2, since DCP would lose its type there; take a lease
                              coordinator  read the older manifests, if it is not rank 0
    4. prepare_local_plan     all ranks  nothing
    5. prepare_global_plan    coordinator  send the older manifests with the plans
    6. read_data              all ranks  validate the older manifests; merge the chain into the planner's tensors;
                                         release the lease
"""

import os
import uuid
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchrec_cnr import telemetry
from torchrec_cnr.errors import CNRError, LoadError
from torchrec_cnr.format.safe_pickle import serialized
from torchrec_cnr.human_text import url_text
from torchrec_cnr.lineage.checkpoint import existing, read_objects
from torchrec_cnr.lineage.manifest_files import SentFiles
from torchrec_cnr.lineage.recent import recent_checkpoints
from torchrec_cnr.loading.id_maps import sort_id_maps
from torchrec_cnr.loading.opened_chain import OpenedChain
from torchrec_cnr.loading.planner import CNRLoadPlanner
from torchrec_cnr.loading.read_items import LoadMetadata, item_regions
from torchrec_cnr.progress import Progress
from torchrec_cnr.reading.fold import fold
from torchrec_cnr.reading.plan import plan_fold
from torchrec_cnr.reading.regions import Region, TensorRegion, turns
from torchrec_cnr.reading.transforms import KnownTransforms
from torchrec_cnr.sharding import wait_for_devices
from torchrec_cnr.storage.leases import Lease
from torchrec_cnr.storage.local_copies import LocalCopies
from torchrec_cnr.storage.pack_writer import check_thread_count
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store
from torchrec_cnr.throttling import Bandwidth
from torchrec_cnr.tracking.tracked_tables import forget_overwritten


class CNRStorageReader(StorageReader):
    """Storage reader for checkpoints of ``CNRStorageWriter``; it merges a delta with all that it is based on.

    Args:
        path: The checkpoint, a path or fsspec URL; usually ``latest(root)``.
        thread_count: Number of requests in parallel. Each takes up to 16 MiB of memory.
        max_bytes_per_sec: Bytes per second that each rank reads at most, as an average over requests.
        local: A directory of this host, or ``LocalCopies``, as for the writer: rows are read from there if they are
            there, and otherwise from the store.
        row_log: Kafka topic of the rows of deltas (``KafkaRows``), if the writer used one.
        progress: Function that this rank calls with the number of bytes of rows read, and their total. If inference
            tables are converted in several turns, the count begins again in each.

    Raises:
        CheckpointNotFoundError: ``path`` is None, because ``latest`` found nothing.
        ConfigurationError: An argument is invalid.
        StoreError: The Kafka broker does not answer in time.

    Examples:
        >>> reader = cnr.CNRStorageReader("run/step-1", thread_count=4)
        >>> dcp.load(state, storage_reader=reader, planner=cnr.CNRLoadPlanner(tracker))
        >>> torch.equal(model["users"].weight, cnr.load_table("run/step-1", "model.users.weight"))
        True
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        thread_count: int = 2,
        max_bytes_per_sec: float | None = None,
        local: str | os.PathLike[str] | LocalCopies | None = None,
        row_log: RowLog | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        check_thread_count(thread_count)
        self._thread_count = thread_count
        self._bandwidth = Bandwidth(max_bytes_per_sec)
        self._copies = LocalCopies.of(local)
        self._progress = progress
        self._log = row_log
        if row_log is not None:
            row_log.open(may_make=False)
        self._url = Store.open(existing(path)).url
        self._lease: Lease | None = None
        self.reset()

    def __repr__(self) -> str:
        return f"CNRStorageReader({url_text(self._url)})"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load. ``read_metadata`` opens the checkpoint, since DCP reports no error from here to others."""
        self._end_lease()
        if checkpoint_id is not None:
            self._url = str(checkpoint_id)
        self._chain: OpenedChain | None = None
        self._failure: CNRError | None = None
        self._load_id = uuid.uuid4().hex[:16]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata. An error is raised one step later, because DCP would replace it here."""
        meta = StorageMeta(checkpoint_id=self._url, load_id=self._load_id)
        self._chain = self._failure = None
        try:
            store = replace(Store.open(self._url, row_log=self._log), copies=self._copies)
            self._url = meta.checkpoint_id = store.url
            self._chain = OpenedChain(store, self._bandwidth)
        except CNRError as error:
            recent_checkpoints.forget()  # so that the next save looks at the whole chain
            self._failure = error
            return LoadMetadata({}, storage_meta=meta)
        return replace(LoadMetadata.of(self._chain), storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise an error of ``read_metadata``, if there is one; protect the checkpoint from pruning by a lease.

        The coordinator reads the rest of the chain, unless it has done so, before any rank reads rows.
        """
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback refers to this frame: without this, both would be in a reference cycle
        self._end_lease()
        if is_coordinator and self._chain is not None:
            try:
                self._chain.read()
            except CNRError:
                recent_checkpoints.forget()
                raise
        self._lease = Lease.take(Store.open(self._url), "load")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Attach the manifests that this rank has read for the others."""
        sent = None if self._chain is None else self._chain.sent()
        return plans if sent is None or len(plans) < 2 else [replace(plan, storage_data=sent) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Merge the checkpoint chain into the planner's tensors, and pass it the objects."""
        try:
            logged = nullcontext() if self._copies is None else self._copies.logged(self._url)
            with telemetry.operation("load", checkpoint=self._url), logged:
                self._read_data(plan, planner)
        finally:
            self._end_lease()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        if self._chain is None:
            raise LoadError(f"{self._url}: read_data was called before read_metadata; call dcp.load")
        if isinstance(plan.storage_data, SentFiles):
            self._chain.receive(plan.storage_data)
        lineage = self._chain.read()
        newest = lineage.newest
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        targets = [planner.resolve_tensor(item).detach() for item in tensors]
        wait_for_devices(targets)  # training may still be writing to them, in a stream of its own
        forget_overwritten(targets)
        regions: list[Region] = []
        for item, target in zip(tensors, targets, strict=True):
            own_regions = item_regions(lineage, item, target)
            if isinstance(planner, CNRLoadPlanner) and planner.tracks(item):
                for region in own_regions:
                    if isinstance(region, TensorRegion):
                        region.on_delta_rows = partial(planner.restore_rows, item)
            regions += own_regions
        num_tensors = len({item.storage_index.fqn for item in tensors})
        fold_turn = partial(
            fold,
            thread_count=self._thread_count,
            checks_headers=2 * num_tensors >= len(newest.manifest.tensors),
            progress=self._progress,
            transforms=KnownTransforms(),
        )
        for turn in turns(regions):
            fold_turn(plan_fold(lineage, turn), turn)
        unordered = sort_id_maps(getattr(planner, "state_dict", {}), [item.dest_index.fqn for item in tensors])
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        objects = {item.storage_index.fqn: item for item in plan.items if item.type is LoadItemType.BYTE_IO}
        for fqn, value in read_objects(newest, objects, self._thread_count):
            planner.load_bytes(objects[fqn], serialized(value, f"{self._url}: object {fqn!r}"))
        if isinstance(planner, CNRLoadPlanner):
            planner.finish_restore(unordered)
        wait_for_devices(targets)  # training may continue in a stream of its own

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's path or URL."""
        return self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this reader can load from there."""
        return Store.can_open(checkpoint_id)

"""The objects that planner and writer send each other through DCP.

DCP passes its own objects between the plug-ins, which do not know each other. The classes here extend those objects by
what this package needs. All of them can be pickled, because plans and results travel between ranks.
"""

import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import _async_process_executor as dcp_process
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

from torchrec_cnr.errors import ConfigurationError, SaveError, StoreError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import CheckpointKind, Manifest, own_bytes
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.lineage.destination import Destination
from torchrec_cnr.lineage.journal import is_pruned
from torchrec_cnr.progress import SavePhases
from torchrec_cnr.saving.cut import Cut
from torchrec_cnr.saving.decision import Decision
from torchrec_cnr.saving.running_saves import RunningSave, running_saves
from torchrec_cnr.saving.sinks import Captured, OpenSink, RowDestination
from torchrec_cnr.saving.staged_values import StagedCodes, StagedValue
from torchrec_cnr.sharding import ShardKey
from torchrec_cnr.storage.fences import Fence, JobFences, own_fences
from torchrec_cnr.storage.files import Listing
from torchrec_cnr.storage.leases import Lease
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.modified_rows import RowList, SelectedRows

STAGED = "torchrec_cnr.staged"  # key of the ``StagedSave`` in a staged state dict


@dataclass(eq=False)
class StagedSave:
    """The state that an asynchronous save carries from its snapshot to the thread or process that saves.

    It is an entry of the staged state dict, and no checkpoint stores it.

    Attributes:
        running: Reports when the save has ended.
        cut: The snapshot of tracked tables; None if the state dict has none.
        tracker_id: Identifies the tracker of these tables.
        phases: What the copy took.
        live: Shards that were not copied, because they exceed ``staging_bytes``. They are written first, and training
            waits for that.
        released: Event that is set when they are written.
        failure: The error with which staging failed. It is raised during planning, so that all ranks receive it.
    """

    running: RunningSave
    cut: Cut | None = None
    tracker_id: int = 0
    phases: SavePhases = field(default_factory=SavePhases)
    live: frozenset[ShardKey] = frozenset()
    released: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        """Return no items: nothing is stored. Part of DCP's protocol for values that are not tensors.

        Every planner calls it when the save has begun.

        Raises:
            Exception: The error with which staging failed.
        """
        writing = WriterSave.of_thread()
        if writing is not None:
            writing.take(self)
        self.raise_failure()
        return []

    def raise_failure(self) -> None:
        """Raise the error with which staging failed, if it did.

        Raises:
            Exception: That error.
        """
        failure = self.failure
        if failure is not None:
            self.failure = SaveError(f"staging has failed before: {failure}")  # no cycle through the error's traceback
            try:
                raise failure
            finally:
                del failure

    def wait_for_live(self) -> None:
        """Wait until all shards that were not copied are written, or the save has failed."""
        if self.live:
            while not (self.released.wait(0.01) or self.running.has_ended):
                pass

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the save for another process, with any error that only this rank has seen, to be raised on all ranks.

        Raises:
            SaveError: That process has ended.
        """
        failure = self.failure
        try:
            self.running.begin()
        except SaveError as error:
            failure = error
        process = getattr(dcp_process._CHECKPOINT_PROCESS, "_save_process", None)
        if process is not None and not process.is_alive():
            raise SaveError(
                f"the process in which DCP saves has ended (exit code {process.exitcode}), and DCP does not start "
                "another one: restart the job, or save in a thread (AsyncCheckpointerType.THREAD)"
            )
        if self.live:
            failure = ConfigurationError(
                "rows of the largest tables exceed the writer's 'staging_bytes' and were not staged, so another "
                "process cannot save them: raise 'staging_bytes', or save in a thread (AsyncCheckpointerType.THREAD)"
            )
        if failure is not None:
            return _received, (None, 0, SavePhases(), _sendable(failure), _group_timeout_secs(), own_fences())
        return _received, (self.cut, self.tracker_id, self.phases, None, _group_timeout_secs(), own_fences())


def _group_timeout_secs() -> float | None:
    """Return the timeout of the default process group for collectives on the host; None if it is not known."""
    if not dist.is_initialized():
        return None
    options = getattr(_get_default_group()._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if isinstance(timeout, timedelta) else None


def _sendable(failure: Exception) -> Exception:
    """Return the error, or one with the same message that another process can receive."""
    try:
        pickle.loads(pickle.dumps(failure))
    except Exception:  # noqa: BLE001 - pickling an exception of another library can raise any error
        return SaveError(f"{type(failure).__name__}: {failure}")
    return failure


def _received(
    cut: Cut | None,
    tracker_id: int,
    phases: SavePhases,
    failure: Exception | None,
    group_timeout_secs: float | None,
    fences: JobFences,
) -> StagedSave:
    """Return the save in another process, and give DCP's process group there the job's timeout.

    DCP always makes that group with a timeout of half an hour.
    """
    own_fences().adopt(fences)
    if group_timeout_secs is not None and dist.is_initialized():
        _set_pg_timeout(timedelta(seconds=group_timeout_secs))
    return StagedSave(running_saves.add(has_begun=True), cut, tracker_id, phases, failure=failure)


@dataclass(eq=False)
class WriterSave:
    """The writer's part of one save on this rank, from ``storage_meta`` on. It belongs to the thread that saves.

    Attributes:
        store: The checkpoint.
        save_id: Id of this save, as this rank has drawn it; the coordinator's counts.
        began: Time at which the save began, by the monotonic clock.
        timeout_secs: Seconds to wait for previous saves.
        running: Reports when the save has ended; None until it has begun.
        staged: The staged save; None if the state dict is live.
        rank: This process's rank.
        is_coordinator: Whether this rank commits.
        destination: On the coordinator, the directory of the checkpoint, and the content of its root.
        latest: On the coordinator, the latest checkpoint, if a listing has shown for this save that it is unchanged.
        lease: On the coordinator, protects the files of the checkpoint from pruning.
        bases: On the coordinator, the checkpoints that this save is based on, the parent first; none for a baseline.
        fence: On the coordinator, the fence of the job, if the planner has a tracker.
        open_sink: Opens the sink for the rows.
        span: The recorded span of the save, for that of the commit.
    """

    store: Store
    save_id: str
    began: float
    timeout_secs: float
    running: RunningSave | None = None
    staged: StagedSave | None = None
    rank: int = 0
    is_coordinator: bool = False
    destination: Destination | None = None
    latest: Checkpoint | None = None
    lease: Lease | None = None
    bases: Sequence[Checkpoint] = ()
    fence: Fence | None = None
    open_sink: OpenSink | None = None
    span: Any = None

    @classmethod
    def of_thread(cls) -> "WriterSave | None":
        """Return the save that runs in this thread."""
        return getattr(_threads, "save", None)

    @property
    def root(self) -> Listing | None:
        """The content of the root, if it was listed."""
        return None if self.destination is None else self.destination.root

    def run_in_thread(self) -> None:
        """Make this the save that runs in this thread."""
        _threads.save = self

    def take(self, staged: StagedSave) -> None:
        """Begin a staged save here, in the thread or process in which DCP saves.

        Raises:
            SaveError: Other saves have begun because this one did not begin in time.
        """
        if self.staged is None:
            staged.running.begin()
            self.running, self.staged = staged.running, staged

    def begin(self) -> RunningSave:
        """Wait for previous saves, unless staging has done that.

        Raises:
            SaveError: They do not end in time.
        """
        if self.running is None:
            self.running = running_saves.add(has_begun=True)
            self.running.wait_for_earlier(self.timeout_secs)
        return self.running

    def protect_bases(self, bases: Sequence[Checkpoint]) -> bool:
        """Take leases on the checkpoints that this save is based on; return False if a prune removes one of them."""
        if self.lease is not None:
            new_leases = tuple([Lease.take(base.store, "save") for base in bases])
            self.lease.release_bases()  # of a choice of which a prune removes something, or of which one was refused
            self.lease.bases = new_leases
        self.bases = () if any(is_pruned(base.store, base.created_ns) for base in bases) else bases
        return len(self.bases) > 0

    def take_refused_leases(self) -> None:
        """Take the leases that the store refused before: otherwise a prune could remove the parent before the commit.

        The parent may be in another root, in which this job may not write. A tag protects it then.

        Raises:
            SaveError: A prune removes the parent, or the latest checkpoint, whose transforms are used.
            StoreError: The store refuses a lease again.
        """
        self.lease = self.lease or Lease.take(self.store, "save")
        bases = self.bases
        if all(self._has_lease_on(number) for number in range(len(bases))):
            return
        if not self.protect_bases(bases):
            urls = " or ".join(base.store.url for base in bases)
            raise SaveError(
                f"{self.store.url}: nothing was committed, because a prune removes its parent {urls}; save again: the "
                "next save will be a baseline"
            )
        for number, base in enumerate(bases):
            is_own_root = base.store.at("..").url == self.store.at("..").url
            if is_own_root and not self._has_lease_on(number):
                raise StoreError(
                    f"{self.store.url}: nothing was committed, because the store refuses the leases that protect its "
                    f"parent {base.store.url} from a prune; make both directories writable, and save again"
                )

    def _has_lease_on(self, number: int) -> bool:
        """Return whether one of the checkpoints that this save is based on has a lease."""
        leases = () if self.lease is None else self.lease.bases
        return number < len(leases) and leases[number] is not None

    def end_lease(self) -> None:
        """End the lease of a save that has committed nothing, so that its files can be pruned."""
        if self.lease is not None:
            self.lease.lapse()
            self.lease = None


_threads = threading.local()


@dataclass(kw_only=True)
class CNRStorageMeta(StorageMeta):
    """The message of the writer to the planner: the destinations of this save and of its rows. ``save_id`` is set."""

    writing: WriterSave
    destination: RowDestination

    @property
    def store(self) -> Store:
        """The checkpoint."""
        return self.writing.store


@dataclass(frozen=True)
class CommittedSize:
    """The size of what a save has committed.

    Attributes:
        kind: ``baseline`` or ``delta``.
        num_bytes: Bytes of its data files, in the store and in a Kafka topic, and of its manifest.
        num_rows: Number of stored rows of tables.
    """

    kind: CheckpointKind
    num_bytes: int
    num_rows: int

    @staticmethod
    def of(manifest: Manifest, manifest_bytes: int) -> "CommittedSize":
        """Return the size of a checkpoint as it was committed."""
        return CommittedSize(manifest.kind, own_bytes(manifest.packs) + manifest_bytes, manifest.num_rows)


@dataclass
class SaveMetadata(Metadata):
    """The planner's metadata, with its decision for ``StorageWriter.finish``.

    ``dcp.save`` returns it on all ranks, and the future of ``dcp.async_save`` does, with what the save took on each
    rank.
    """

    decision: Decision | None = None
    phases: tuple[SavePhases, ...] = ()
    size: CommittedSize | None = None


@dataclass(frozen=True, eq=False)
class StagedTensor:
    """Replacement for a tensor of any kind in a staged state dict.

    Attributes:
        write_items: The tensor's items in DCP's plan.
        is_replicated: Whether several ranks may have the same shard of it.
        shards: Its local shards, by their offsets, without those of the snapshot's items.
    """

    write_items: tuple[WriteItem, ...]
    is_replicated: bool
    shards: Mapping[tuple[int, ...], StagedValue]

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        """Return the tensor's items. Part of DCP's protocol for values that are not tensors."""
        return list(self.write_items)

    def tensor(self, offsets: tuple[int, ...]) -> Tensor:
        """Return the shard at these offsets."""
        shard = self.shards[offsets]
        return shard if isinstance(shard, Tensor) else shard.tensor()


@dataclass(frozen=True, eq=False)
class ShardData:
    """The data that the planner returns for a tracked shard: its values, and which of them to store.

    Attributes:
        values: [num_rows, ...], the whole shard, shared with the model; copies of the rows to store, where ``rows`` are
            lists; on the meta device, without values, where there are codes.
        rows: The rows to store, by their heat, or None for all. Items with the same object share their row numbers.
        group: Number that a table's shard and its optimizer state share, if the shard is tracked.
        codes: The codes of the values, if only codes were staged.
        captured: What else the sink must know.
        is_table: Whether the shard is of a table, rather than of optimizer state.
        table: For row-wise optimizer state, the FQN of its table.
        table_box: For row-wise optimizer state, the region of the table's shard.
        num_restores: Number of restores from a checkpoint in the history of the state.
    """

    values: Tensor
    rows: tuple[SelectedRows, ...] | None
    is_table: bool
    table: str | None = None
    table_box: Box | None = None
    num_restores: int = 0
    group: int | None = None
    codes: StagedCodes | None = None
    captured: Captured | None = None

    @property
    def has_rows_only(self) -> bool:
        """Whether the values are those of the rows to store, and no others."""
        return self.rows is not None and all(isinstance(part, RowList) for part in self.rows)

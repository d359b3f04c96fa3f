"""What planner and writer hand to one another through DCP.

DCP passes its own objects between the plug-ins, which do not know one another. These are those objects, with what we
need beside them; all of them survive pickling, because plans and results travel between ranks.
"""

import pickle
import threading
from collections.abc import Mapping
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

from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.progress import SavePhases
from torchrec_cnr.saving.cut import Cut
from torchrec_cnr.saving.decision import Decision
from torchrec_cnr.saving.running_saves import RunningSave, running_saves
from torchrec_cnr.saving.sinks import Captured, OpenSink, RowDestination
from torchrec_cnr.saving.staged_values import StagedCodes, StagedValue
from torchrec_cnr.sharding import ShardKey
from torchrec_cnr.storage.fences import Fence, JobFences, own_fences
from torchrec_cnr.storage.leases import Lease
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.modified_rows import RowList, SelectedRows

STAGED = "torchrec_cnr.staged"  # the entry of a staged state dict that holds the ``StagedSave``


@dataclass(eq=False)
class StagedSave:
    """What an asynchronous save carries from the moment of its cut to the thread or process that saves.

    It lies in the staged state dict, as an entry that no checkpoint holds.

    Attributes:
        running: Tells when the save has ended.
        cut: What is saved of tracked tables; None if the state dict has none.
        tracker_id: Tells whose tables these are.
        phases: What the copy took.
        live: Shards that were not copied, for want of room: they are written first, and training waits for that.
        released: Set once they are written.
        failure: What staging failed with. It is raised when ranks plan, so that all of them learn of it.
    """

    running: RunningSave
    cut: Cut | None = None
    tracker_id: int = 0
    phases: SavePhases = field(default_factory=SavePhases)
    live: frozenset[ShardKey] = frozenset()
    released: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        """DCP's protocol for what is no tensor; every planner calls it when the save has begun. Nothing is stored.

        Raises:
            Exception: What staging has failed with.
        """
        writing = WriterSave.of_thread()
        if writing is not None:
            writing.take(self)
        self.raise_failure()
        return []

    def raise_failure(self) -> None:
        """Raise what staging has failed with, if it has.

        Raises:
            Exception: That.
        """
        failure = self.failure
        if failure is not None:
            self.failure = SaveError(f"staging has failed before: {failure}")  # the traceback of the other leads here
            try:
                raise failure
            finally:
                del failure

    def wait_for_live(self) -> None:
        """Wait until all that was not copied is written, or the save has failed."""
        if self.live:
            while not (self.released.wait(0.01) or self.running.has_ended):
                pass

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process. What this rank alone can see travels there as a failure, to be raised on all ranks.

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
                f"the process that DCP saves in has ended (exit code {process.exitcode}), and DCP does not start "
                "another: restart the job, or let a thread save (AsyncCheckpointerType.THREAD)"
            )
        if self.live:
            failure = ConfigurationError(
                "rows of the largest tables exceed the writer's 'staging_bytes' and were not staged, so that no other "
                "process can save them: raise 'staging_bytes', or let a thread save (AsyncCheckpointerType.THREAD)"
            )
        if failure is not None:
            return _received, (None, 0, SavePhases(), _sendable(failure), _group_timeout_secs(), own_fences())
        return _received, (self.cut, self.tracker_id, self.phases, None, _group_timeout_secs(), own_fences())


def _group_timeout_secs() -> float | None:
    """Of the default process group, for collectives of the host; None if that cannot be told."""
    if not dist.is_initialized():
        return None
    options = getattr(_get_default_group()._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if isinstance(timeout, timedelta) else None


def _sendable(failure: Exception) -> Exception:
    """An error as another process can receive it."""
    try:
        pickle.loads(pickle.dumps(failure))
    except Exception:  # noqa: BLE001 - whatever an exception of somebody else's does when it is pickled
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
    """In another process. DCP makes its process group with a timeout of half an hour, whatever that of the job is."""
    own_fences().adopt(fences)
    if group_timeout_secs is not None and dist.is_initialized():
        _set_pg_timeout(timedelta(seconds=group_timeout_secs))
    return StagedSave(running_saves.add(has_begun=True), cut, tracker_id, phases, failure=failure)


@dataclass(eq=False)
class WriterSave:
    """The writer's part of one save on this rank, from ``storage_meta`` on. It belongs to the thread that saves.

    Attributes:
        store: The checkpoint.
        save_id: Of this save, as this rank would call it; the coordinator's counts.
        began: By the monotonic clock.
        timeout_secs: How long to wait for the saves before.
        running: Tells when the save has ended; None until it has begun.
        staged: What was staged; None if the state dict is live.
        rank: This one.
        is_coordinator: Whether it commits.
        lease: Keeps the files of the checkpoint from being pruned, on the coordinator.
        fence: Of the job, if the checkpoint has a lineage, on the coordinator.
        open_sink: Opens what the rows are written to.
    """

    store: Store
    save_id: str
    began: float
    timeout_secs: float
    running: RunningSave | None = None
    staged: StagedSave | None = None
    rank: int = 0
    is_coordinator: bool = False
    lease: Lease | None = None
    fence: Fence | None = None
    open_sink: OpenSink | None = None

    @classmethod
    def of_thread(cls) -> "WriterSave | None":
        """The one that runs in this thread."""
        return getattr(_threads, "save", None)

    def run_in_thread(self) -> None:
        """From now on it is the one that runs in this thread."""
        _threads.save = self

    def take(self, staged: StagedSave) -> None:
        """The save is one that was staged: it begins here, in the thread or process that DCP saves in.

        Raises:
            SaveError: Other saves have begun because this one did not in time.
        """
        if self.staged is None:
            staged.running.begin()
            self.running, self.staged = staged.running, staged

    def begin(self) -> RunningSave:
        """Wait for the saves before, unless that was done when the save was staged.

        Raises:
            SaveError: They do not end in time.
        """
        if self.running is None:
            self.running = running_saves.add(has_begun=True)
            self.running.wait_for_earlier(self.timeout_secs)
        return self.running

    def end_lease(self) -> None:
        """At the end of a save that has committed nothing: what it has left may be pruned."""
        if self.lease is not None:
            self.lease.lapse()
            self.lease = None


_threads = threading.local()


@dataclass(kw_only=True)
class CNRStorageMeta(StorageMeta):
    """What the writer tells the planner: where this save goes, and its rows. ``save_id`` is set."""

    writing: WriterSave
    destination: RowDestination

    @property
    def store(self) -> Store:
        """The checkpoint."""
        return self.writing.store


@dataclass(frozen=True)
class CommittedSize:
    """What a save has committed.

    Attributes:
        kind: ``baseline`` or ``delta``.
        num_bytes: Of its packs, in files and in a log, and of its manifest.
        num_rows: Rows of tables stored.
    """

    kind: str
    num_bytes: int
    num_rows: int


@dataclass
class SaveMetadata(Metadata):
    """The planner's metadata, with its decision for ``StorageWriter.finish``.

    All ranks get it from ``dcp.save``, and from the future of ``dcp.async_save``, with what the save took on each rank.
    """

    decision: Decision | None = None
    phases: tuple[SavePhases, ...] = ()
    size: CommittedSize | None = None


@dataclass(frozen=True, eq=False)
class StagedTensor:
    """What stands for a tensor of any kind in a state dict that was staged.

    Attributes:
        write_items: What DCP's plan says of it.
        is_replicated: Whether several ranks may hold one and the same shard of it.
        shards: Its local shards, by their offsets; those that a cut's items hold are not among them.
    """

    write_items: tuple[WriteItem, ...]
    is_replicated: bool
    shards: Mapping[tuple[int, ...], StagedValue]

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        """DCP's protocol for what is no tensor."""
        return list(self.write_items)

    def tensor(self, offsets: tuple[int, ...]) -> Tensor:
        """A shard."""
        shard = self.shards[offsets]
        return shard if isinstance(shard, Tensor) else shard.tensor()


@dataclass(frozen=True, eq=False)
class ShardData:
    """What the planner resolves a tracked shard to: its values, and which of them are to be stored.

    Attributes:
        values: [num_rows, ...], the whole shard, shared with the model; or, where ``rows`` are lists, copies of these.
            Where there are codes, none: on the meta device.
        rows: The rows to store, by their heat, or None for all. Items with one and the same object share their row
            numbers.
        group: A number that a table's shard and the optimizer state of its rows have in common, if it is tracked.
        codes: What the values were encoded as, if that is all that was staged.
        captured: What the sink must know besides.
        is_table: Whether it is a table, rather than its optimizer state.
        table: For row-wise optimizer state, the FQN of its table.
        table_box: And the box of the table's shard.
        num_restores: Restores from a checkpoint that the state has been through.
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

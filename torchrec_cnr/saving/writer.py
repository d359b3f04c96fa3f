"""The storage writer: decides HOW and WHERE a checkpoint is stored: quantization, data files, commit.

The calls of one ``dcp.save``, in order, and the ranks on which DCP makes them:

    1. storage_meta           all ranks    a new save begins: make its ``WriterSave``, with a new save id
    2. set_up_storage_writer  all ranks    learn the rank
    3. prepare_local_plan     all ranks    wait for previous saves, refuse an existing checkpoint, make the directory;
                                           the coordinator refuses to save if a newer job does, and takes a lease
    4. prepare_global_plan    coordinator  compare what all ranks must share; send the save id to all ranks
    5. write_data             all ranks    encode every item of the plan into data files
    6. finish                 coordinator  check all results against the plan, then commit: write the manifest, and
                                           release the lease

In ``dcp.async_save``, the writer is also the stager, which DCP calls before all this. Its ranges in torch's profiler
are ``torchrec_cnr.stage``, ``.encode``, ``.upload`` and ``.commit``.

The writer has no state of a single save, so several saves can run at a time. All calls of one save come from one
thread, and the ``WriterSave`` belongs to that thread.

A save never overwrites anything. Names of data files contain the save id, and the manifest is written only where none
exists.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from torch.profiler import record_function

from torchrec_cnr import telemetry
from torchrec_cnr.arguments import check_callable, check_count, check_secs, check_type
from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.human_text import count_text, url_text
from torchrec_cnr.kernels.cpu.compiling import one_thread
from torchrec_cnr.lineage.destination import Destination
from torchrec_cnr.lineage.recent import recent_checkpoints
from torchrec_cnr.policies import Since
from torchrec_cnr.progress import Count, Progress, SavePhases
from torchrec_cnr.quantization import NoQuantization, Quantization, SchemeRules
from torchrec_cnr.quantization.row_transform import RowTransform
from torchrec_cnr.saving.agreement import RankPlan, rank_plans
from torchrec_cnr.saving.block_writer import CompactedTopic
from torchrec_cnr.saving.commit import commit, file_of
from torchrec_cnr.saving.cut import TIMEOUT_SECS
from torchrec_cnr.saving.decision import Decision, RankData
from torchrec_cnr.saving.encoding import kernel_warm_ups
from torchrec_cnr.saving.planner import CNRSavePlanner
from torchrec_cnr.saving.plug_in_messages import STAGED, CNRStorageMeta, SaveMetadata, StagedSave, WriterSave
from torchrec_cnr.saving.rank_writer import RankWriter
from torchrec_cnr.saving.running_saves import asked_checkpoint_id, is_in_process_of_dcp
from torchrec_cnr.saving.sinks import FILES, PackSettings, PlainTopic, RowDestination
from torchrec_cnr.saving.staged_values import StagingBuffers
from torchrec_cnr.saving.staging import STAGING_BYTES, StagingOptions, stage
from torchrec_cnr.sharding import ShardKey, shard_key
from torchrec_cnr.storage.fences import fence_of
from torchrec_cnr.storage.leases import Lease
from torchrec_cnr.storage.local_copies import LocalCopies
from torchrec_cnr.storage.pack_writer import PACK_BYTES, check_pack_bytes, check_thread_count
from torchrec_cnr.storage.row_log import RowLog, check_row_log
from torchrec_cnr.storage.store import Store
from torchrec_cnr.throttling import Bandwidth, check_cpu_share
from torchrec_cnr.tracking.tracked_tables import TrackedRows, check_tracker

logger = logging.getLogger(__name__)


def destination_of(row_log: RowLog | None) -> RowDestination:
    """Return the destination for the rows of deltas. Only this function distinguishes the kinds of Kafka topics."""
    if row_log is None:
        return FILES
    block_bytes = row_log.block_bytes
    return PlainTopic(row_log) if block_bytes is None else CompactedTopic(row_log, block_bytes)


class CNRStorageWriter(StorageWriter, AsyncStager):
    """Storage writer that writes checkpoints of quantized rows to any fsspec file system.

    With ``CNRSavePlanner(tracker)`` a checkpoint can be a delta. With any other planner it is a baseline. In
    ``dcp.async_save`` the writer is also the stager, and copies only the rows that will be stored. Pass no other
    stager.

    Args:
        path: Directory of the checkpoint, a path or fsspec URL; ``checkpoint_id`` of ``dcp.save`` replaces it.
        quantization: One scheme for all tables, or a mapping from FQN patterns to schemes, for tables and all other
            tensors. Patterns are those of ``fnmatch``, and the first match wins. Tensors without a scheme are stored
            exactly.
        thread_count: Number of data files to write in parallel. Each takes up to 24 MiB of memory.
        sync_files: Whether to force local files to disk before the checkpoint is committed.
        pack_bytes: Approximate size of a data file, in bytes, by default 16 MiB. Use a small size for models of a few
            megabytes.
        staging_bytes: Bytes that an asynchronous save copies at most, by default 8 GiB. If the rows need more, the
            largest tables are not copied, and training waits until they are written.
        cpu_share: Share of one core that each rank's asynchronous save uses to encode, more than 0 and at most 1. It
            encodes in one thread, which pauses in between.
        timeout_secs: Seconds that a save waits for the previous one, if that is still running, by default 1800.
        max_bytes_per_sec: Bytes per second that each rank writes at most, as an average over data files.
        local: A directory of this host, or ``LocalCopies``: the data files that this rank writes are kept there, too.
            Restores on this host then need not read them from the store.
        tracker: The tracker whose rows asynchronous saves copy. It is needed only if several trackers track the tables.
        row_log: Kafka topic for the rows of deltas and for commit records (``KafkaRows``). By default, both are files.
        overwrite: Only False is accepted: an existing checkpoint is never overwritten.
        progress: Function that this rank calls with the number of shards and objects written, and their total.

    Raises:
        ConfigurationError: An argument is invalid, or the Kafka topic would lose rows.
        StoreError: The Kafka broker does not answer in time.

    Examples:
        >>> schemes = {"model.users.*": cnr.AdaptiveAsymmetric(bits=4)}  # all other tensors are stored exactly
        >>> writer = cnr.CNRStorageWriter("run/step-3", quantization=schemes, thread_count=2)
        >>> metadata = dcp.save(state, storage_writer=writer, planner=planner)
        >>> cnr.read_checkpoint("run/step-3").kind
        'delta'
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        quantization: Quantization | Mapping[str, Quantization] | None = None,
        thread_count: int = 1,
        sync_files: bool = True,
        pack_bytes: int = PACK_BYTES,
        staging_bytes: int = STAGING_BYTES,
        cpu_share: float = 1.0,
        timeout_secs: float = TIMEOUT_SECS,
        max_bytes_per_sec: float | None = None,
        local: str | os.PathLike[str] | LocalCopies | None = None,
        tracker: TrackedRows | None = None,
        row_log: RowLog | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        if overwrite:
            raise ConfigurationError(
                "'overwrite' must be False, because a checkpoint is written only once: save under another checkpoint_id"
            )
        check_thread_count(thread_count)
        check_type("sync_files", sync_files, bool, "True or False")
        check_pack_bytes(pack_bytes)
        check_cpu_share(cpu_share)
        check_count("staging_bytes", staging_bytes)
        check_secs("timeout_secs", timeout_secs)
        check_callable("progress", progress)
        check_row_log(row_log)
        if tracker is not None:
            check_tracker(tracker)
        self._tracker = tracker
        self._cpu_share = cpu_share
        self._pack_bytes = pack_bytes
        self._progress = progress
        self._sync_files = sync_files
        self._thread_count = thread_count
        self._rules = SchemeRules.of(quantization if quantization is not None else NoQuantization())
        self._bandwidth = Bandwidth(max_bytes_per_sec)
        self._copies = LocalCopies.of(local)
        self._destination = destination_of(row_log)
        self._transforms: dict[ShardKey, RowTransform] = {}  # that this process has learned
        self._staging = StagingOptions(self._rules, staging_bytes, timeout_secs, self._destination, self._transforms)
        self._buffers = WeakSet[StagingBuffers]()
        self._path = self._opened(path)
        self._threads = threading.local()
        if row_log is not None:
            row_log.open(may_make=True)
        kernel_warm_ups.writer_made(self, self._rules)
        self._warned: set[str] = set()  # FQNs whose rows are stored exactly, and patterns that match none

    def __repr__(self) -> str:
        patterns = self._rules.patterns
        quantization = count_text(len(patterns), "pattern") if patterns else repr(self._rules.tables)
        return f"CNRStorageWriter({url_text(self._path.url)}, {quantization})"

    def stage(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Wait for the previous save, take a snapshot, and copy the rows that an asynchronous save will store.

        If this fails, the save fails later, on all ranks. An error raised here would leave the other ranks waiting.
        """
        staged_state = stage(state_dict, self._staging, self._buffers, self._tracker)
        self._threads.staged = staged_state[STAGED]
        return staged_state

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether DCP, after the save has begun, waits until all that was not copied is written. Always True."""
        return True

    def synchronize_staging(self) -> None:
        """Wait until training may continue: not at all, unless ``staging_bytes`` was too small for all rows."""
        staged_save: StagedSave | None = self._threads.__dict__.pop("staged", None)
        if staged_save is not None:
            staged_save.running.watch_future()
            staged_save.wait_for_live()

    def lift_limits(self) -> None:
        """Write as fast as possible from now on, whatever ``cpu_share`` and ``max_bytes_per_sec`` say.

        Call this when the job is about to be killed. It also ends the pauses of a save that runs in a thread.
        """
        self._bandwidth.lifted.set()

    def close(self) -> None:
        """Free the memory of the staging buffer."""
        for buffers in self._buffers:
            buffers.free()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process. There, the copy writes what was staged here, without ``progress``."""
        return {**self.__dict__, "_progress": None, "_buffers": None, "_threads": None, "_tracker": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._buffers, self._threads = WeakSet(), threading.local()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set another checkpoint id for the saves of this thread; DCP calls this only if the caller passed one.

        ``storage_meta`` opens the checkpoint: DCP reports an error from there to all ranks, but not one from here.
        """
        if checkpoint_id is not None:
            self._threads.given, self._threads.asked = checkpoint_id, asked_checkpoint_id()

    def _opened(self, path: str | os.PathLike[str]) -> Store:
        store = Store.open(path, self._sync_files, self._destination.row_log)
        return replace(store, bandwidth=self._bandwidth, copies=self._copies)

    def storage_meta(self) -> StorageMeta:
        """Begin a save: draw its id, and return its destination for the planner. DCP calls this first in every save."""
        asked_id = asked_checkpoint_id()
        if isinstance(asked_id, str | os.PathLike) and asked_id != self._threads.__dict__.get("asked"):
            self.reset(asked_id)  # a ``state_dict`` method has saved in between, in this thread
        given_id = self._threads.__dict__.get("given")
        if given_id is not None:
            self._threads.path, self._threads.given = self._opened(given_id), None
        save = WriterSave(self._store, uuid.uuid4().hex[:16], time.monotonic(), self._staging.timeout_secs)
        save.run_in_thread()
        return CNRStorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=save.save_id, writing=save, destination=self._destination
        )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the rank; DCP passes it only to a parameter that is called ``kwargs``."""
        save = _save_of_thread()
        save.is_coordinator = is_coordinator
        save.rank = kwargs.get("rank") or 0
        if not kwargs.get("use_collectives", True):
            raise ConfigurationError(
                "use_collectives=False is not supported, because one commit covers all ranks: call dcp.save without it"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse an existing or nested checkpoint and a newer job, make the directory, and protect it by a lease."""
        save = _save_of_thread()
        running = save.begin()
        data = plan.storage_data if isinstance(plan.storage_data, RankData) else None
        is_tracked = data is not None and data.is_tracked
        if save.staged is not None and save.staged.cut is not None and not is_tracked:
            raise ConfigurationError(
                "the tables of this state dict are tracked, and their modified rows were staged for the tracker's "
                "CNRSavePlanner: pass that planner to dcp.async_save; with another planner, use dcp.save"
            )
        if isinstance(save.store.fs, MemoryFileSystem) and is_in_process_of_dcp():
            raise ConfigurationError(
                f"{save.store.url}: the process in which DCP saves has its own 'memory://', so this process would see "
                "no checkpoint: save to files, or save in a thread (AsyncCheckpointerType.THREAD)"
            )
        if save.is_coordinator:
            save.destination = Destination.of(save.store, lists_root=is_tracked)
            save.destination.refuse_nesting()
        save.store.make()
        if save.destination is not None:
            save.destination.refuse_other_format()
            if data is not None and is_tracked:  # before the check of the id, which a newer job has often taken, too
                save.fence = fence_of(save.store)
                save.latest = recent_checkpoints.take_unchanged(data.head) if data.head is not None else None
                is_in_root = save.latest is not None and save.latest.store.at("..").url == save.store.at("..").url
                save.fence.claim(save.destination.root if is_in_root else None)
            save.destination.refuse_committed()
        if save.is_coordinator:
            save.lease = Lease.take(save.store, "save")
            running.at_end = save.end_lease
        own_fence = partial(fence_of, save.store) if save.is_coordinator and is_tracked else None
        save.open_sink = self._destination.prepare(save.store, save.rank, save.is_coordinator, own_fence)
        rank_plan = RankPlan(
            checkpoint=save.store.url,
            quantization=repr(self._rules),
            row_log=repr(self._destination.row_log),
            sync_files=self._sync_files,
            is_staged=save.staged is not None,
            data=data,
        )
        return replace(plan, storage_data=rank_plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that all ranks agree, and send this save's id to them."""
        save = _save_of_thread()
        rank_plans(plans)
        self._destination.begin(save.store)
        return [replace(plan, storage_data=save.save_id) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Encode and write this rank's items."""
        try:
            results = self._written(plan, planner)
        finally:
            if isinstance(planner, CNRSavePlanner):
                planner.end_save()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _written(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        save, began, decision = _save_of_thread(), time.monotonic(), plan.planner_data
        open_sink, save.open_sink = save.open_sink, None
        assert open_sink is not None  # ``prepare_local_plan`` has set it
        settings = PackSettings(f"{plan.storage_data}-{save.rank}", self._thread_count, self._pack_bytes)
        staged_save, save.staged = save.staged, None  # frees the staged rows as soon as they are written
        is_behind_training = staged_save is not None and staged_save.cut is not None
        with closing(open_sink(settings, decision if isinstance(decision, Decision) else None)) as sink:
            count = Count(len(plan.items), self._progress)
            writer = RankWriter(sink, planner, self._rules, self._warned, count, self._transforms)
            live_keys = staged_save.live if staged_save is not None else frozenset()
            if staged_save is not None and live_keys:
                writer.write([item for item in plan.items if shard_key(item) in live_keys])
                sink.flush()
                staged_save.released.set()
            if is_behind_training:
                sink.throttle(self._cpu_share, self._bandwidth.lifted)
            with one_thread() if is_behind_training else nullcontext():
                writer.write([item for item in plan.items if shard_key(item) not in live_keys])
            phases = staged_save.phases if staged_save is not None else SavePhases()
            results = writer.finish(replace(phases, plan_secs=began - save.began))
        save.span = telemetry.record_write(results[0].storage_data.phases, save.began, save.store.url, save.rank)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint."""
        save, began = _save_of_thread(), time.monotonic()
        self._warn_of_unused_patterns(metadata)
        decision = metadata.decision if isinstance(metadata, SaveMetadata) else None
        if decision is None:
            decision = Decision(save.save_id, Since.EVER, policy="Full")
        with record_function("torchrec_cnr.commit"):
            file = file_of(save.store, decision, metadata, results, save.save_id)
            save.take_refused_leases()
            commit(save.store, file, save.lease, save.fence)
        if save.store.row_log is None:
            recent_checkpoints.add(file.checkpoint(save.store))
        if save.fence is not None:
            self._destination.committed(save.store, decision, file.manifest)
        if isinstance(metadata, SaveMetadata):
            commit_secs = time.monotonic() - began
            metadata.phases = tuple(replace(phases, commit_secs=commit_secs) for phases in file.phases)
            metadata.size = file.size
        num_links, size = 1 + len(file.manifest.history.delta_bytes), file.size
        telemetry.record_commit(save.began, began, save.span, size.kind, size.num_bytes, size.num_rows, num_links)
        lease, save.lease = save.lease, None
        if lease is not None:
            lease.release()

    def _warn_of_unused_patterns(self, metadata: Metadata) -> None:
        """Warn of patterns that match no tensor: because of a misspelled pattern, tables would not be quantized."""
        fqns = [fqn for fqn, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)]
        for pattern, nearest in self._rules.unused(fqns):
            if pattern not in self._warned:
                self._warned.add(pattern)
                names = ", ".join(map(repr, nearest)) or "none"
                logger.warning("'quantization': no tensor matches the pattern %r; most similar: %s", pattern, names)

    @property
    def _store(self) -> Store:
        """The directory of a save of this thread."""
        store: Store = getattr(self._threads, "path", self._path)
        return store

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's path or URL."""
        given_id = self._threads.__dict__.get("given")
        return self._store.url if given_id is None else str(given_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this writer can save there."""
        return Store.can_open(checkpoint_id)


def _save_of_thread() -> WriterSave:
    save = WriterSave.of_thread()
    if save is None:
        raise SaveError("no save has begun in this thread: call storage_meta first, as DCP does")
    return save

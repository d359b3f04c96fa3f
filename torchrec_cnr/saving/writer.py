"""The storage writer: HOW and WHERE a checkpoint is stored. Quantization, packs, commit.

Who calls what, on which rank, in one ``dcp.save``:

    1. storage_meta           all ranks    a new save begins: a new save id
    2. set_up_storage_writer  all ranks    learn the rank
    3. prepare_local_plan     all ranks    refuse an id that is taken, make the directory; the coordinator takes a lease
    4. prepare_global_plan    coordinator  refuse to save beside a later job; give its save id to all ranks
    5. write_data             all ranks    encode every item of the plan into packs
    6. finish                 coordinator  check all results against the plan, then commit: write the manifest, and
                                           release the lease

Before that, in ``dcp.async_save``, it is the stager as well. Its ranges in torch's profiler are ``torchrec_cnr.stage``,
``.encode``, ``.upload`` and ``.commit``.

Nothing is ever overwritten: packs bear the save id in their names, and the manifest is put only where none is.
"""

import os
import time
import uuid
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from torch.profiler import record_function

from torchrec_cnr.errors import CheckpointExistsError, ConfigurationError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.human_text import count_text, url_text
from torchrec_cnr.kernels.cpu.compiling import one_thread
from torchrec_cnr.policies import Since
from torchrec_cnr.progress import Count, Progress, SavePhases
from torchrec_cnr.quantization import NoQuantization, Quantization, SchemeRules
from torchrec_cnr.saving.block_writer import CompactedTopic
from torchrec_cnr.saving.commit import commit, file_of
from torchrec_cnr.saving.cut import TIMEOUT_SECS
from torchrec_cnr.saving.decision import Decision, RankData
from torchrec_cnr.saving.plug_in_messages import CNRStorageMeta, SaveMetadata
from torchrec_cnr.saving.rank_writer import RankWriter
from torchrec_cnr.saving.sinks import FILES, OpenSink, PackSettings, PlainTopic, RowDestination
from torchrec_cnr.saving.staging import STAGING_BYTES, Staging
from torchrec_cnr.sharding import shard_key
from torchrec_cnr.storage.fences import Fence, fence_of
from torchrec_cnr.storage.leases import Lease
from torchrec_cnr.storage.pack_writer import PACK_BYTES, check_pack_bytes, check_thread_count
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store
from torchrec_cnr.throttling import Bandwidth, check_cpu_share


def destination_of(row_log: RowLog | None) -> RowDestination:
    """Where the rows of deltas go: the one place that asks of which kind a log is."""
    if row_log is None:
        return FILES
    block_bytes = row_log.block_bytes
    return PlainTopic(row_log) if block_bytes is None else CompactedTopic(row_log, block_bytes)


class CNRStorageWriter(StorageWriter, AsyncStager):
    """Writes checkpoints of quantized rows to any fsspec file system.

    With ``CNRSavePlanner(tracker)`` a checkpoint may be a delta; with any other planner it is a baseline. For
    ``dcp.async_save`` it is its own stager, which copies nothing but the rows that will be stored; pass no other.

    Args:
        path: Directory of the checkpoint, a path or fsspec URL; ``checkpoint_id`` of ``dcp.save`` replaces it.
        quantization: One scheme for all tables, or a mapping from FQN patterns (``fnmatch``, first match wins) to
            schemes, for tables and all other tensors. Whatever gets no scheme is stored exactly.
        thread_count: Packs written at once. Each takes up to 24 MiB of memory.
        sync_files: Force local files to disk before the checkpoint counts as committed.
        pack_bytes: Size of the files that rows are written to, roughly. Small ones suit models of a few megabytes.
        staging_bytes: How much an asynchronous save copies. Of what exceeds it, the largest tables are not copied:
            training waits until they are written.
        cpu_share: How much of a core each rank's asynchronous save may take to encode, from more than 0 to 1: it does
            that in one thread, and rests in between.
        timeout_secs: How long an asynchronous save waits for the one before, if that is still under way.
        max_bytes_per_sec: What each rank may write a second, averaged over packs.
        row_log: Where rows of deltas and markers that commit go (``KafkaRows``). By default, both are files.
        overwrite: Only False: a checkpoint that is there is never overwritten.
        progress: Told how many of how many shards and objects this rank has written.

    Raises:
        ConfigurationError: An argument cannot work, or a topic of the log would lose rows.
        StoreError: The log does not answer in time.
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
        row_log: RowLog | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        if overwrite:
            raise ConfigurationError(
                "'overwrite' must be False: a checkpoint is written once; save under another checkpoint_id"
            )
        check_thread_count(thread_count)
        check_pack_bytes(pack_bytes)
        check_cpu_share(cpu_share)
        self._cpu_share = cpu_share
        self._pack_bytes = pack_bytes
        self._staged: SavePhases | None = None  # what this save's staging took
        self._failure: Exception | None = None  # of staging
        self._progress = progress
        self._sync_files = sync_files
        self._thread_count = thread_count
        self._rules = SchemeRules.of(quantization if quantization is not None else NoQuantization())
        self._staging = Staging(self._rules, staging_bytes, timeout_secs)
        self._bandwidth = Bandwidth(max_bytes_per_sec)
        self._destination = destination_of(row_log)
        self._open_sink: OpenSink | None = None  # of this save
        self._store = self._opened(path)
        if row_log is not None:
            row_log.open(may_make=True)
        self._save_id = ""
        self._rank = 0
        self._started = time.monotonic()
        self._is_coordinator = False
        self._lease: Lease | None = None
        self._fence: Fence | None = None  # of this save, if it has a lineage
        self._sent_fence: Fence | None = None  # of the job, if that is another process
        self._warned: set[str] = set()  # FQNs of which it was said that rows are stored exactly

    def __repr__(self) -> str:
        patterns = self._rules.patterns
        quantization = count_text(len(patterns), "pattern") if patterns else repr(self._rules.tables)
        return f"CNRStorageWriter({url_text(self._store.url)}, {quantization})"

    def stage(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Cut, and copy what an asynchronous save will hold; waits for the save before.

        If that fails, the save does, on all ranks: were it raised here, other ranks would wait for this one.

        Raises:
            SaveError: The save before has not ended in time.
        """
        live, paths = flatten_state_dict(dict(state_dict))
        self._staging.wait(live, self._destination)
        try:
            with record_function("torchrec_cnr.stage"):
                return dict(unflatten_state_dict(self._staging.stage(live), paths))
        except Exception as error:  # noqa: BLE001 - raised by the save
            self._failure = error
            return {}

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether DCP waits, once the save has begun, for what was not staged."""
        return True

    def synchronize_staging(self) -> None:
        """Wait until training may go on: at once, but where 'staging_bytes' was too little for all rows."""
        self._staging.synchronize()

    def close(self) -> None:
        """Give the memory back that rows were staged in."""
        self._staging.close()

    def __getstate__(self) -> dict[str, Any]:
        """In another process it writes what was staged here, for the same job, and tells nobody how far it is."""
        return {**self.__dict__, "_progress": None, "_open_sink": None, "_sent_fence": fence_of(self._store)}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another checkpoint id; DCP calls this only if it was given one."""
        if checkpoint_id is not None:
            self._store = self._opened(checkpoint_id)

    def _opened(self, path: str | os.PathLike[str]) -> Store:
        return replace(Store.open(path, self._sync_files, self._destination.row_log), bandwidth=self._bandwidth)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the rank; DCP passes it only to a parameter that is called ``kwargs``."""
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank") or 0
        if not kwargs.get("use_collectives", True):
            raise ConfigurationError("use_collectives=False is not supported: one commit holds all ranks' data")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse an id that is taken; make the directory, and let nobody prune it."""
        if self._staged is not None and not isinstance(plan.planner_data, RankData):
            raise ConfigurationError(
                "tables of this state are tracked, and their modified rows were staged for the tracker's "
                "CNRSavePlanner: pass that to dcp.async_save; with another planner, use dcp.save"
            )
        if self._store.exists(MANIFEST_FILE):
            raise CheckpointExistsError(
                f"{self._store.url} holds a committed checkpoint already; save under another checkpoint_id"
            )
        self._store.make()
        if self._is_coordinator:
            self._lease = Lease.take(self._store, "save")
        is_fenced = self._is_coordinator and isinstance(plan.planner_data, RankData)  # only it knows its job's fence
        own_fence = self._own_fence if is_fenced else None
        self._open_sink = self._destination.prepare(self._store, self._rank, self._is_coordinator, own_fence)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give this save's id to all ranks. Of jobs with lineages, only the latest may save to a root."""
        self._fence = None
        if isinstance(plans[0].planner_data, Decision):
            self._fence = self._own_fence()
            self._fence.claim()
        self._destination.begin(self._store)
        return [replace(plan, storage_data=self._save_id) for plan in plans]

    def _own_fence(self) -> Fence:
        sent = self._sent_fence
        return sent if sent is not None and sent.root == self._store.at("..") else fence_of(self._store)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Encode and write this rank's items."""
        began, decision = time.monotonic(), plan.planner_data
        assert self._open_sink is not None  # made when this rank's plan was
        settings = PackSettings(f"{plan.storage_data}-{self._rank}", self._thread_count, self._pack_bytes)
        with closing(self._open_sink(settings, decision if isinstance(decision, Decision) else None)) as sink:
            writer = RankWriter(sink, planner, self._rules, self._warned, Count(len(plan.items), self._progress))
            live = self._staging.live
            if live:
                writer.write([item for item in plan.items if shard_key(item) in live])
                sink.flush()
                self._staging.release()
            if self._staged is not None:
                sink.throttle(self._cpu_share)
            with one_thread() if self._staged is not None else nullcontext():  # behind training
                writer.write([item for item in plan.items if shard_key(item) not in live])
            results = writer.finish(replace(self._staged or SavePhases(), plan_secs=began - self._started))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit."""
        began = time.monotonic()
        decision = metadata.decision if isinstance(metadata, SaveMetadata) else None
        if decision is None:
            decision = Decision(self._save_id, Since.EVER, policy="Full")
        with record_function("torchrec_cnr.commit"):
            file = file_of(self._store, decision, metadata, results, self._save_id)
            commit(self._store, file, self._lease, self._fence)
        if self._fence is not None:
            self._destination.committed(self._store, decision, file.manifest)
        if isinstance(metadata, SaveMetadata):
            commit_secs = time.monotonic() - began
            metadata.phases = tuple(replace(phases, commit_secs=commit_secs) for phases in file.phases)
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def storage_meta(self) -> StorageMeta:
        """Where this save goes, for the planner; the first call of every save, and the only one that draws its id."""
        self._staged = self._staging.take_phases()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._lease is not None:  # the save before committed nothing
            self._lease.lapse()
            self._lease = None
        self._save_id = uuid.uuid4().hex[:16]
        self._started = time.monotonic()
        return CNRStorageMeta(
            checkpoint_id=self.checkpoint_id,
            save_id=self._save_id,
            store=self._store,
            destination=self._destination,
        )

    @property
    def checkpoint_id(self) -> str:
        """Path or URL of the checkpoint."""
        return self._store.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer could save there."""
        return Store.can_open(checkpoint_id)

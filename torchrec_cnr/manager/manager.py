"""``CheckpointManager``: one object for the checkpoints of a run. All that it does is available as functions, too.

``save`` and ``async_save`` pass the state to DCP when a checkpoint is due. After each commit, a thread on the
coordinator compacts and prunes.
"""

import logging
import os
import posixpath
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from torchrec_cnr import telemetry
from torchrec_cnr.arguments import check_count, check_secs, check_type
from torchrec_cnr.errors import CNRError, SaveError, StoreError
from torchrec_cnr.human_text import url_text
from torchrec_cnr.loading.load_report import LoadReport
from torchrec_cnr.maintenance.background_upkeep import Upkeep
from torchrec_cnr.maintenance.pruning.retention import Keep, check_keep
from torchrec_cnr.manager.background import Background, BackgroundSave, check_background
from torchrec_cnr.manager.callbacks import Callbacks
from torchrec_cnr.manager.continuation import Continuation
from torchrec_cnr.manager.local_checkpoints import LocalCheckpoints, LocalRun, NoLocalRun, check_local_checkpoints
from torchrec_cnr.manager.open_roots import open_roots
from torchrec_cnr.manager.preemption import Preemption, StopAgreement, check_preemption
from torchrec_cnr.manager.ranks import RunRanks
from torchrec_cnr.manager.restore import check_choice, check_state, path_of_step, restore_newest, step_of, target_of
from torchrec_cnr.manager.schedule import Facts, Schedule
from torchrec_cnr.manager.unused_copies import UnusedCopies
from torchrec_cnr.policies import Compacted, OneShot, Policy, check_policy
from torchrec_cnr.progress import Saved
from torchrec_cnr.quantization import Quantization
from torchrec_cnr.saving.planner import CNRSavePlanner
from torchrec_cnr.saving.plug_in_messages import SaveMetadata
from torchrec_cnr.saving.writer import CNRStorageWriter, destination_of
from torchrec_cnr.storage.local_copies import LocalCopies
from torchrec_cnr.storage.row_log import RowLog, check_row_log
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.tracked_tables import TrackedRows, check_tracker

logger = logging.getLogger(__name__)

StateSource = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class CheckpointManager:
    """Saves, restores, compacts and prunes the checkpoints of one run. They are named ``step-<n>`` under one root.

    All ranks must make the same calls. If a restore skips a corrupt checkpoint, the next checkpoint of the same step is
    named ``step-<n>-2``.

    Args:
        root: The directory that contains the checkpoints of the run, as a path or fsspec URL.
        tracker: The tracker that records the modified rows of the model.
        policy: Decides which earlier checkpoint each delta is based on. The default is ``Compacted``, or ``OneShot``
            if rows go to a compacted Kafka topic.
        quantization: How rows are stored; see ``CNRStorageWriter``.
        every_steps: ``save`` saves at every multiple of this number of steps.
        every_secs: ``save`` saves about this many seconds after the last checkpoint. With neither, it always saves.
        keep: Retention rules: which checkpoints are kept. None keeps all of them.
        num_retries: How many times a save is retried after the file system refused it.
        thread_count: Number of data files that are read or written at the same time.
        local: A directory of this host, or ``LocalCopies``: the data files that a rank writes and reads are kept there,
            too, and restores on the same host need not read them from the root.
        local_checkpoints: More frequent checkpoints on a disk of the host; see ``LocalCheckpoints``.
        background: Limits on the processor time, bandwidth, memory and compaction of background work.
        preemption: The signals after which all ranks save and the job stops. By default, none are handled.
        timeout_secs: How many seconds a rank waits for the others in a save, before an error names the missing ranks.
        row_log: Kafka topic (``KafkaRows``) for the rows of deltas and for commit records. By default, both are files.
        on_saved: Called on every rank with each committed checkpoint. :attr:`num_callback_errors` counts exceptions.
        on_progress: Called from any thread with the operation ("save", "restore", "compact", "prune"), what is done,
            and the total: shards of a save, files of a prune, otherwise bytes.

    Attributes:
        report: What the last :meth:`restore` loaded and left out; None before it.

    Raises:
        ConfigurationError: An argument is invalid or differs between ranks, or this process has a manager for the root.

    Examples:
        >>> manager = cnr.CheckpointManager("run", tracker, every_steps=1, keep=cnr.Keep(last=5))
        >>> first = manager.restore(state)  # 2, or None if there is no checkpoint yet
        >>> train()
        >>> manager.save(3, state).num_rows
        100
        >>> manager.close()
    """

    report: LoadReport | None = None
    _in_flight: BackgroundSave | None = None
    _upkeep: Upkeep | None = None

    def __init__(
        self,
        root: str | os.PathLike[str],
        tracker: TrackedRows,
        *,
        policy: Policy | None = None,
        quantization: Quantization | Mapping[str, Quantization] | None = None,
        every_steps: int | None = None,
        every_secs: float | None = None,
        keep: Keep | None = None,
        num_retries: int = 2,
        thread_count: int = 2,
        local: str | os.PathLike[str] | LocalCopies | None = None,
        local_checkpoints: LocalCheckpoints | None = None,
        background: Background | None = None,
        preemption: Preemption | None = None,
        timeout_secs: float = 1800.0,
        row_log: RowLog | None = None,
        on_saved: Callable[[Saved], None] | None = None,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        _check_arguments(tracker, keep, row_log, num_retries, background, preemption, local_checkpoints)
        check_secs("timeout_secs", timeout_secs)
        background = background or Background()
        if policy is None:
            policy = Compacted() if row_log is None or row_log.block_bytes is None else OneShot()
        check_policy(policy)
        destination_of(row_log).refuse_policy(policy)
        self._root, self._copies = Store.open(root).url, LocalCopies.of(local)
        self._log, self._tracker, self._keep = row_log, tracker, keep
        self._planner = CNRSavePlanner(tracker, policy=policy)
        self._callbacks, self._due = Callbacks(on_saved, on_progress), Schedule(every_steps, every_secs)
        self._writer = CNRStorageWriter(
            self._root,
            quantization=quantization,
            thread_count=thread_count,
            staging_bytes=background.staging_bytes,
            cpu_share=background.cpu_share,
            max_bytes_per_sec=background.max_bytes_per_sec,
            local=self._copies,
            tracker=tracker,
            timeout_secs=timeout_secs,
            row_log=row_log,
            progress=partial(self._callbacks.progress, "save"),
        )
        self._when_busy, self._num_retries = background.when_busy, num_retries
        self._thread_count, self._timeout_secs = thread_count, timeout_secs
        open_roots.enter(self._root, self)
        self._ranks = RunRanks(timeout_secs)  # a collective, so after the checks of all arguments
        same: dict[str, object] = {"every_steps": every_steps, "every_secs": every_secs, "num_retries": num_retries}
        same |= {"timeout_secs": timeout_secs, "when_busy": background.when_busy, "preemption": preemption}
        self._ranks.refuse_different(same, at_failure=lambda: open_roots.leave(self._root, self))
        self._due.begin, self._due.is_coordinator = self._ranks.begin_max, self._ranks.rank == 0
        self._stop = StopAgreement(preemption, self._ranks)
        if self._ranks.rank == 0:
            what, progress = background.compaction(policy), self._callbacks.progress
            self._upkeep = Upkeep(self._root, keep, *what, row_log=row_log, copies=self._copies, progress=progress)
        self._continuation = Continuation(self._root, row_log, tracker, self._ranks)
        self._unused = UnusedCopies(self._copies, self._root)
        self._begin_local(local_checkpoints, background)

    def _begin_local(self, given: LocalCheckpoints | None, background: Background) -> None:
        """Make the manager of the local checkpoints, if there are any. If that fails, close this one."""
        self._local: LocalRun | NoLocalRun = NoLocalRun(self._root, self._ranks)
        if given is None:
            return
        make = partial(CheckpointManager, thread_count=self._thread_count, timeout_secs=self._timeout_secs)
        try:
            self._local = LocalRun.of(given, self._continuation, self._tracker, self._ranks, background, make)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        head = self._tracker.head
        newest_text = "nothing saved yet" if head is None else f"newest {url_text(posixpath.basename(head.ref.path))}"
        return f"CheckpointManager({url_text(self._root)}, {newest_text}, keep={self._keep!r})"

    def save(self, step: int, state: StateSource, *, force: bool = False) -> Saved | None:
        """Save a checkpoint if one is due, and return once it is committed.

        Args:
            step: The number of the training step that was just completed.
            state: The state as for ``dcp.save``: live state dicts or ``Stateful`` objects. Or a function that returns
                it, which is called only if a checkpoint is due.
            force: Save even if no checkpoint is due. Must be the same on all ranks.

        Returns:
            The committed checkpoint, or None if none was due.

        Raises:
            ConfigurationError: ``step`` or ``state`` is invalid, or this manager was closed.
            CheckpointException, SaveError: All attempts failed. The next checkpoint includes the rows.
        """
        self._check_save(step, state)
        must_stop = self._stop.reach()
        self._local.save(step, state)
        agreed = self._due(step, self._facts(), force or must_stop)
        return None if agreed is None else self._save_with_retries(step, state, agreed)

    def _facts(self) -> Facts:
        is_busy = self._in_flight is not None and self._in_flight.is_running
        return Facts(is_busy, is_corrupt=self._upkeep is not None and self._upkeep.has_found_damage)

    def _check_save(self, step: int, state: StateSource) -> None:
        self._ranks.check_open()
        check_state(state, step)

    def _save_with_retries(self, step: int, state: StateSource, agreed: Facts) -> Saved:
        self._wait_before_save(step)
        num_retries = 0
        while True:
            started, metadata = time.monotonic(), None
            try:
                with telemetry.failures_of_saves(), self._ranks.explaining():
                    metadata = self._save(save, step, state, agreed)
            except CheckpointException as error:
                if num_retries == 0 or not self._continuation.is_committed(step, error):
                    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
                    is_final = any(not isinstance(failure, StoreError) for failure in failures.values())
                    if is_final or num_retries == self._num_retries:
                        raise
                    num_retries += 1
                    logger.warning("step %d: the save failed and is retried: %s", step, failures)
                    continue
            return self._finish(step, metadata, secs := time.monotonic() - started, secs, num_retries)

    def async_save(self, step: int, state: StateSource, *, force: bool = False) -> Future[Any] | None:
        """Copy the modified rows and other state if a checkpoint is due, and save the copy in the background.

        The arguments are those of :meth:`save`. The next call of this manager that saves, restores, waits or closes
        reports the outcome of this save.

        Returns:
            A future that completes when the checkpoint is committed, or None if none was started. Call :meth:`wait`
            for the ``Saved``: the result of the future is DCP's metadata. If the job must stop, the checkpoint is
            committed when this returns, and the result is the ``Saved``.

        Raises:
            ConfigurationError: ``step`` or ``state`` is invalid, or this manager was closed.
            CheckpointException, SaveError: The previous save failed, or is still running and ``when_busy`` is "fail".
        """
        self._check_save(step, state)
        must_stop = self._stop.reach()
        agreed = self._due(step, self._facts(), force or must_stop)
        if must_stop and agreed is not None:  # this process will be killed, so nothing may be left in the background
            done = Future[Any]()
            done.set_result(self._save_with_retries(step, state, agreed))
            return done
        self._local.async_save(step, state)
        if agreed is None:
            return None
        if self._when_busy != "wait" and agreed.is_busy:
            if self._when_busy == "skip":
                return None
            raise SaveError(f"step {step}: the previous save is still running; a later save includes all rows")
        began = time.monotonic()
        self._wait()
        started = time.monotonic()
        future: Future[Any] = self._save(async_save, step, state, agreed)
        at_end = partial(self._continuation.committed, step, self._upkeep)
        self._in_flight = BackgroundSave(step, future, began, started, at_end)
        self._due.saved()
        return future

    def _save(self, save_function: Callable[..., Any], step: int, state: StateSource, agreed: Facts) -> Any:
        self._settle_last_save()
        self._continuation.leave_other_roots()
        self._continuation.leave_corrupt(agreed, self._upkeep)
        self._continuation.abandon_newer()
        source = state() if callable(state) else state
        check_type("state", source, Mapping, "a mapping, or a function that returns one")
        return save_function(
            dict(source),
            checkpoint_id=self._continuation.path(step),
            storage_writer=self._writer,
            planner=self._planner,
            process_group=self._ranks.group,
        )

    def _settle_last_save(self) -> None:
        """Find out whether the last save was committed. If one rank raised, the others would wait in a collective."""
        try:
            self._planner.resolve_last_save()
        except CNRError as error:
            logger.info("cannot tell whether the last save was committed; the next save checks it again: %s", error)

    def _wait_before_save(self, step: int) -> None:
        """Wait for the background save. Raise its error, unless this save is the last one that the job can make."""
        if self.should_stop:
            self._writer.lift_limits()
        try:
            self._wait()
        except (CheckpointException, SaveError) as error:
            if not self.should_stop:
                raise
            logger.warning("step %d: saving before the job stops, although the save before has failed: %s", step, error)

    def wait(self) -> Saved | None:
        """Wait for the background save, if there is one, and return its checkpoint.

        Raises:
            CheckpointException, SaveError: That save failed. The next checkpoint includes the rows.
        """
        self._local.wait()
        return self._wait()

    def _wait(self) -> Saved | None:
        """Wait for the background save of this root."""
        ending, self._in_flight = self._in_flight, None
        if ending is None:
            return None
        try:
            with telemetry.failures_of_saves(), self._ranks.explaining():
                metadata = ending.result()
            return self._finish(ending.step, metadata, ending.stall_secs, ending.secs, 0)
        finally:
            del ending  # an error would refer to itself by it

    def _finish(
        self, step: int, metadata: SaveMetadata | None, stall_secs: float, secs: float, num_retries: int
    ) -> Saved:
        """Report a committed save. Nothing here may raise on one rank alone, since the other ranks have continued."""
        self._due.saved()
        self._settle_last_save()
        self._continuation.release()
        saved = self._continuation.saved(step, metadata, stall_secs, secs, num_retries)
        if self._upkeep is not None and not self.should_stop:  # this process will be killed
            self._upkeep.after(saved.path)
        self._unused.after(saved.path)
        telemetry.record_stall(saved)
        self._callbacks.saved(saved)
        return saved

    @property
    def num_callback_errors(self) -> int:
        """Number of times that ``on_saved`` or ``on_progress`` raised an exception on this rank."""
        return self._callbacks.num_errors

    def restore(
        self, state: StateSource, *, step: int | None = None, path: str | os.PathLike[str] | None = None
    ) -> int | None:
        """Load the newest readable checkpoint, or the one that ``step`` or ``path`` names.

        From this call on, only this job may save to the root, even if the load fails: the next save of any other job
        fails with ``FencedError``. If an older checkpoint was loaded by name, the next save marks the newer ones as
        abandoned. :func:`latest`, restores, and the counts of ``Keep`` then skip them.

        Args:
            state: The state as for ``dcp.load``. Its entries that are not tensors are replaced. So pass the mapping
                that training uses afterwards, or one with ``Stateful`` objects. A new optimizer gets its state.
            step: Load the checkpoint that was taken after this step.
            path: Load this checkpoint, from this root or another.

        Returns:
            The step after which the checkpoint was taken, or None if there is no checkpoint.

        Raises:
            ConfigurationError: ``state`` is not a mapping, both ``step`` and ``path`` are given, the root is a file, or
                this manager was closed.
            CheckpointNotFoundError: There is no checkpoint of that step.
            DamagedError: There are checkpoints, but none can be read.
            CheckpointException: The load failed for another reason, or the named checkpoint cannot be loaded.
                ``failures`` has the error of each rank, such as a ``StateMismatchError``. Or the background save
                failed, and nothing was loaded: call this again.
        """
        self._ranks.check_open()
        check_state(state)
        self.wait()
        target = target_of(state)
        root, chosen_path = Store.open(self._root, row_log=self._log), None if path is None else Store.open(path).url
        check_choice(step, path)
        local_step, report = self._local.restored(target, is_newest=step is None and path is None)
        if local_step is not None:
            self.report = report
            self._continuation.restored(local_step, None)
            return local_step
        if step is not None:
            chosen_path = self._ranks.decide(path_of_step(root, step) if self._ranks.rank == 0 else None)
        path_and_report = restore_newest(
            self._root,
            target,
            self._tracker,
            group=self._ranks.group,
            thread_count=self._thread_count,
            local=self._copies,
            row_log=self._log,
            progress=partial(self._callbacks.progress, "restore"),
            chosen=chosen_path,
        )
        if path_and_report is None:
            self._local.raise_failure()
            return None
        loaded_path, self.report = path_and_report
        restored_step = step_of(loaded_path)
        self._continuation.restored(restored_step, chosen_path)
        return restored_step

    def abandon_all(self) -> None:
        """Abandon all checkpoints of the root: the next save is a baseline, and restores skip those that are there.

        Raises:
            ConfigurationError: This manager was closed.
            StoreError: The root cannot be read or written to.
        """
        self._ranks.check_open()
        self.wait()
        self._continuation.leave_all()

    @property
    def should_stop(self) -> bool:
        """Whether a scheduler will kill the job, so that all ranks have saved and should end; see ``preemption``."""
        return self._stop.is_reached

    @property
    def exit_status(self) -> int:
        """The status to exit with: 0 if the training is complete, or that of ``Preemption`` if the job should stop."""
        return self._stop.exit_status

    def close(self) -> None:
        """Wait for the background save and, unless the job must stop, for maintenance; end threads and groups."""
        try:
            self.wait()
        finally:
            self._local.close()
            self._stop.close()
            self._continuation.release()
            self._unused.close()
            self._writer.close()
            self._ranks.close()
            open_roots.leave(self._root, self)
            if self._upkeep is not None:
                self._upkeep.close(waits=not self.should_stop)


def _check_arguments(
    tracker: object,
    keep: object,
    log: object,
    num_retries: object,
    background: object,
    preemption: object,
    local: object,
) -> None:
    """Check the arguments that neither the writer nor the planner nor the callbacks check."""
    check_tracker(tracker)
    check_keep(keep)
    check_row_log(log)
    check_count("num_retries", num_retries)
    check_background(background)
    check_preemption(preemption)
    check_local_checkpoints(local)

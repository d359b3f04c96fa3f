"""The manager: one object for the checkpoints of a run. It knows nothing that a function does not.

``save`` and ``async_save`` hand the state to DCP when a checkpoint is due, ``restore`` loads the newest that can be
read. On the coordinator, a thread of its own compacts and prunes after each commit. All ranks call everything alike.
"""

import itertools
import logging
import os
import posixpath
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from torchrec_cnr.arguments import check_callable, check_count, check_secs, check_type
from torchrec_cnr.errors import CheckpointExistsError, CNRError, ConfigurationError, FencedError, SaveError, StoreError
from torchrec_cnr.human_text import url_text
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.loading.fitting import LoadReport
from torchrec_cnr.maintenance.background_upkeep import Upkeep
from torchrec_cnr.maintenance.pruning.retention import Keep, check_keep
from torchrec_cnr.manager.background import Background, check_background
from torchrec_cnr.manager.callbacks import Callbacks
from torchrec_cnr.manager.open_roots import open_roots
from torchrec_cnr.manager.ranks import RunRanks
from torchrec_cnr.manager.restore import Return, abandon_newer, names_behind, path_of_step, restore_newest, step_of
from torchrec_cnr.manager.schedule import Schedule
from torchrec_cnr.policies import MAX_RATIO, Compacted, OneShot, Policy, check_policy
from torchrec_cnr.progress import Saved, SavePhases
from torchrec_cnr.quantization import Quantization
from torchrec_cnr.saving.planner import CNRSavePlanner
from torchrec_cnr.saving.plug_in_messages import CommittedSize, SaveMetadata
from torchrec_cnr.saving.writer import CNRStorageWriter, destination_of
from torchrec_cnr.storage.fences import claim
from torchrec_cnr.storage.row_log import RowLog, check_row_log
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.tracked_tables import TrackedRows, check_tracker

logger = logging.getLogger(__name__)

MAX_STEP = 10**18 - 1  # what a name has room for
StateSource = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class CheckpointManager:
    """Saves, restores, compacts and prunes the checkpoints of one run, ``step-<n>`` under one root.

    Where a restore has passed over a damaged checkpoint, that one keeps its name, and the next of its step is called
    ``step-<n>-2``.

    Args:
        root: Where the checkpoints lie, a path or fsspec URL.
        tracker: Knows the modified rows of the model.
        policy: What each checkpoint is a delta of; by default ``Compacted``, or ``OneShot`` where rows go to a
            compacted topic.
        quantization: How rows are stored; see ``CNRStorageWriter``.
        every_steps: ``save`` saves at every multiple of this number.
        every_secs: ``save`` saves when so much time went by since the last checkpoint. With neither, it always saves.
        keep: What is kept; None keeps everything.
        num_retries: How often a save that the file system refused is tried again.
        thread_count: Packs read and written at once.
        background: What work in the background may take: processor, memory, compaction.
        timeout_secs: How long a rank waits for the others in a save; one that is missing is named then.
        row_log: Where rows of deltas and markers that commit go (``KafkaRows``). By default, both are files.
        on_saved: Called on every rank with each checkpoint that was committed. What a callback raises is logged, and
            counted in :attr:`num_callback_errors`.
        on_progress: Called from any thread with what is being done ("save", "restore", "compact" or "prune") and how
            much is done of how much: shards of a save, files of a prune, bytes of others.
    """

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
        background: Background | None = None,
        timeout_secs: float = 1800.0,
        row_log: RowLog | None = None,
        on_saved: Callable[[Saved], None] | None = None,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        _check_arguments(tracker, keep, row_log, num_retries, background, on_saved, on_progress)
        check_secs("timeout_secs", timeout_secs)
        background = background or Background()
        if policy is None:
            policy = Compacted() if row_log is None or row_log.block_bytes is None else OneShot()
        check_policy(policy)
        destination_of(row_log).refuse_policy(policy)
        self._root = Store.open(root).url
        self._log = row_log
        self._tracker = tracker
        self._planner = CNRSavePlanner(tracker, policy=policy)
        self._callbacks = Callbacks(on_saved, on_progress)
        self._writer = CNRStorageWriter(
            self._root,
            quantization=quantization,
            thread_count=thread_count,
            staging_bytes=background.staging_bytes,
            cpu_share=background.cpu_share,
            timeout_secs=timeout_secs,
            row_log=row_log,
            progress=partial(self._callbacks.progress, "save"),
        )
        self._when_busy = background.when_busy
        self._keep = keep
        self._thread_count = thread_count
        self._due = Schedule(every_steps, every_secs)
        self._num_retries = num_retries
        self._in_flight: tuple[int, float, float, Future[Any]] | None = None
        does_compact = isinstance(policy, Compacted) if background.compacts is None else background.compacts
        max_ratio = policy.max_ratio if isinstance(policy, Compacted) else MAX_RATIO
        self._upkeep: Upkeep | None = None
        open_roots.enter(self._root, self)
        self._ranks = RunRanks(timeout_secs)  # once all arguments have been looked at
        self._refuse_different(every_steps, every_secs, timeout_secs)
        self._due.share = self._ranks.decide
        if self._ranks.rank == 0:
            progress = self._callbacks.progress
            self._upkeep = Upkeep(self._root, keep, does_compact, max_ratio, row_log=row_log, progress=progress)
        self.report: LoadReport | None = None
        self._passed_over: frozenset[str] = frozenset()
        self._back_at: Return | None = None

    def _refuse_different(self, every_steps: int | None, every_secs: float | None, timeout_secs: float) -> None:
        """By these, each rank decides alone whether it saves, waits or tries again: others would wait for it."""
        arguments = {
            "every_steps": every_steps,
            "every_secs": every_secs,
            "num_retries": self._num_retries,
            "timeout_secs": timeout_secs,
            "when_busy": self._when_busy,
        }
        try:
            self._ranks.refuse_different(arguments)
        except BaseException:
            self._ranks.close()
            open_roots.leave(self._root, self)
            raise

    def __repr__(self) -> str:
        head = self._tracker.head
        newest = "nothing saved yet" if head is None else f"newest {url_text(posixpath.basename(head.ref.path))}"
        return f"CheckpointManager({url_text(self._root)}, {newest}, keep={self._keep!r})"

    def save(self, step: int, state: StateSource, *, force: bool = False) -> Saved | None:
        """Save if a checkpoint is due; returns once it is committed.

        Args:
            step: The step that training has just made.
            state: As for ``dcp.save``: live state dicts or ``Stateful`` objects; or what returns it, called when due.
            force: Save whether it is due or not; the same on all ranks.

        Raises:
            CheckpointException, SaveError: It failed, as often as it was tried. The rows are in the next one.
        """
        _check_step(step, state)
        if not (force or self._due(step)):
            return None
        self.wait()
        num_retries = 0
        while True:
            started = time.monotonic()
            try:
                with self._ranks.explaining():
                    metadata = self._save(save, step, state)
            except CheckpointException as error:
                if num_retries > 0 and self._is_committed(step, error):
                    secs = time.monotonic() - started
                    return self._finish(step, None, secs, secs, num_retries)
                if num_retries == self._num_retries or not _may_be_tried_again(error):
                    raise
                num_retries += 1
                logger.warning("step %d: the save failed and is tried again: %s", step, error)
            else:
                secs = time.monotonic() - started
                return self._finish(step, metadata, secs, secs, num_retries)

    def async_save(self, step: int, state: StateSource, *, force: bool = False) -> Future[Any] | None:
        """Copy what a checkpoint needs if it is due, and save that in the background.

        How it ended shows at the next call of anything here, :meth:`wait` at the latest.

        Raises:
            SaveError: The save before is under way, and ``when_busy`` is "fail".
            CheckpointException, SaveError: The save before failed.
        """
        _check_step(step, state)
        if not (force or self._due(step)):
            return None
        if self._when_busy != "wait" and self._ranks.any(self._is_busy):
            if self._when_busy == "skip":
                return None
            raise SaveError(f"step {step}: the save before is still under way; its rows are in it, others in the next")
        self.wait()
        started = time.monotonic()
        future: Future[Any] = self._save(async_save, step, state)
        self._in_flight = (step, started, time.monotonic() - started, future)
        self._due.saved(step)
        return future

    def _is_committed(self, step: int, error: CheckpointException) -> bool:
        """Whether a save was refused because the try before it, which seemed to fail, had committed it."""
        is_there = all(isinstance(failure, CheckpointExistsError) for failure, _ in error.failures.values())
        head, path = self._tracker.head, Store.open(self._path(step)).path
        return is_there and head is not None and head.ref.path == path

    def _path(self, step: int) -> str:
        names = (f"step-{step}" if number == 1 else f"step-{step}-{number}" for number in itertools.count(1))
        return posixpath.join(self._root, next(name for name in names if name not in self._passed_over))

    @property
    def _is_busy(self) -> bool:
        return self._in_flight is not None and not self._in_flight[-1].done()

    def _save(self, how: Callable[..., Any], step: int, state: StateSource) -> Any:
        self._leave_other_roots()
        self._abandon()
        source = state() if callable(state) else state
        check_type("state", source, Mapping, "a mapping, or a function that returns one")
        return how(
            dict(source),
            checkpoint_id=self._path(step),
            storage_writer=self._writer,
            planner=self._planner,
            process_group=self._ranks.group,
        )

    def _leave_other_roots(self) -> None:
        """Begin a root with a baseline, whatever the job has loaded: it may be copied, moved or pruned alone."""
        self._settle_last_save()
        head, pending = self._tracker.head, self._tracker.pending
        paths = [] if head is None else [head.ref.path]
        if pending is not None and pending.place is not None:  # it may have been committed
            paths.append(pending.place[0])
        if any(Store.open(path).at("..").url != self._root for path in paths):
            self._tracker.forget()

    def _settle_last_save(self) -> None:
        """Learn how the last save ended, if that can be told: a rank alone must not raise, since others go on."""
        try:
            self._planner.resolve_last_save()
        except CNRError as error:
            logger.info("the next save looks at it, in a phase in which all ranks learn of an error: %s", error)

    def wait(self) -> Saved | None:
        """Wait for a save in the background; raises what it failed with."""
        if self._in_flight is None:
            return None
        step, started, stall_secs, future = self._in_flight
        self._in_flight = None
        try:
            with self._ranks.explaining():
                metadata = future.result()
        finally:
            del future  # an error would refer to itself by it
        return self._finish(step, metadata, stall_secs, time.monotonic() - started, 0)

    def _finish(
        self, step: int, metadata: SaveMetadata | None, stall_secs: float, secs: float, num_retries: int
    ) -> Saved:
        """Tell of a save that was committed. One rank alone raises nothing here: the others have gone on."""
        self._due.saved(step)
        self._settle_last_save()
        path = self._path(step)
        if metadata is None or metadata.size is None:
            size = self._ranks.decide(self._size_of(path) if self._ranks.rank == 0 else None)
        else:
            size = metadata.size
        saved = Saved(
            step=step,
            path=Store.open(path).url,
            kind=size.kind,
            num_bytes=size.num_bytes,
            num_rows=size.num_rows,
            stall_secs=stall_secs,
            secs=secs,
            phases=SavePhases() if metadata is None else metadata.phases[self._ranks.rank],
            num_retries=num_retries,
        )
        if self._upkeep is not None:
            self._upkeep.after(saved.path)
        self._callbacks.saved(saved)
        return saved

    def _size_of(self, path: str) -> CommittedSize | CNRError:
        try:
            found = read_checkpoint(Store.open(path, row_log=self._log))
        except CNRError as error:  # for all ranks
            return error
        num_bytes = sum(pack.num_bytes for pack in found.committed.packs) + found.manifest_bytes
        return CommittedSize(found.committed.kind, num_bytes, found.committed.num_rows)

    @property
    def num_callback_errors(self) -> int:
        """How often ``on_saved`` or ``on_progress`` has raised on this rank."""
        return self._callbacks.num_errors

    def restore(
        self, state: StateSource, *, step: int | None = None, path: str | os.PathLike[str] | None = None
    ) -> int | None:
        """Load the newest checkpoint that can be read, or the one that is asked for.

        From here on, this job is the one that saves to the root: saves of another one that still does are refused.
        After a return to an older checkpoint, the next save records in the root that the newer ones are abandoned:
        :func:`latest`, restores, and the counts of ``Keep`` pass them over from then on.

        Args:
            state: As for ``dcp.load``. Entries that are no tensors are replaced in it, so it must be the very mapping
                that training goes on with, or hold ``Stateful`` objects.
            step: Load the checkpoint that was taken after this step.
            path: Load this checkpoint, of this root or of another.

        Returns:
            The step after which it was taken, or None where there is no checkpoint.

        Raises:
            ConfigurationError: ``state`` is no mapping, such as a model, or both ``step`` and ``path`` are given.
            CheckpointNotFoundError: There is no checkpoint of that step.
            DamagedError: There are checkpoints, but none can be read.
            CheckpointException: The load failed otherwise, or that of the checkpoint that was asked for did.
        """
        _check_state(state)
        self.wait()
        target = state() if callable(state) else state
        check_type("state", target, dict, "a dict to load into")
        assert isinstance(target, dict)
        root, chosen = Store.open(self._root, row_log=self._log), None if path is None else Store.open(path).url
        if step is not None:
            check_count("step", step, 0, MAX_STEP)
            if chosen is not None:
                raise ConfigurationError("'step' and 'path' both name a checkpoint: give one of them")
        self._ranks.decide(self._claimed() if self._ranks.rank == 0 else None)
        if step is not None:
            chosen = self._ranks.decide(path_of_step(root, step) if self._ranks.rank == 0 else None)
        found = restore_newest(
            self._root,
            target,
            self._tracker,
            group=self._ranks.group,
            thread_count=self._thread_count,
            row_log=self._log,
            progress=partial(self._callbacks.progress, "restore"),
            chosen=chosen,
        )
        if found is None:
            return None
        loaded, self.report = found
        restored, head = step_of(loaded), self._tracker.head
        self._back_at = None if chosen is None or head is None else Return(chosen, head.created_ns)
        self._passed_over = self._ranks.decide(names_behind(root, restored) if self._ranks.rank == 0 else None)
        return restored

    def _abandon(self) -> None:
        """Record that a return to an older checkpoint has left others behind, before the first save after it."""
        if self._back_at is not None:
            root = Store.open(self._root, row_log=self._log)
            self._ranks.decide(abandon_newer(root, self._back_at) if self._ranks.rank == 0 else None)
            self._back_at = None

    def _claimed(self) -> CNRError | None:
        """Keep other jobs from adding checkpoints to the root; an error for all ranks if a third one just has."""
        try:
            claim(Store.open(self._root))
        except FencedError as error:
            return error
        except StoreError as error:
            logger.warning("nothing can be saved here, and another job may still do so: %s", error)
        return None

    def close(self) -> None:
        """Wait for everything that is under way."""
        try:
            self.wait()
        finally:
            self._writer.close()
            self._ranks.close()
            open_roots.leave(self._root, self)
            if self._upkeep is not None:
                self._upkeep.close()


def _may_be_tried_again(error: CheckpointException) -> bool:
    return all(isinstance(failure, StoreError) for failure, _ in error.failures.values())


def _check_arguments(
    tracker: object,
    keep: object,
    row_log: object,
    num_retries: object,
    background: object,
    on_saved: object,
    on_progress: object,
) -> None:
    """What neither the writer nor the planner checks, before anything is begun."""
    check_tracker(tracker)
    check_keep(keep)
    check_row_log(row_log)
    check_count("num_retries", num_retries)
    check_background(background)
    check_callable("on_saved", on_saved)
    check_callable("on_progress", on_progress)


def _check_step(step: object, state: object) -> None:
    check_count("step", step, 0, MAX_STEP)
    _check_state(state)


def _check_state(state: object) -> None:
    if isinstance(state, torch.nn.Module) or not (isinstance(state, Mapping) or callable(state)):
        raise ConfigurationError(
            f"'state' must be a mapping, or a function that returns one (got {type(state).__name__}); pass the live "
            "state dict, such as {'model': model.state_dict()}"
        )

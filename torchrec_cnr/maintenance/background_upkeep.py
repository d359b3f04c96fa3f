"""Maintenance in the background: a thread compacts and prunes the checkpoints of a run, so training never waits for it.

The thread works on one checkpoint at a time. Commits in the meantime are not queued: the newest one is next. After its
work it rests, so that a job that saves every second has its core for most of the time. Work that was skipped or failed
for a checkpoint is done after the next one, if the checkpoint is still kept then. A process that ends without ``close``
does not wait for the thread, since compaction and pruning may be killed at any moment.
"""

import concurrent.futures.thread  # noqa: F401 - registers its exit handler first, so that it runs after ours
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torchrec_cnr import telemetry
from torchrec_cnr.errors import CheckpointExistsError, CheckpointNotFoundError, CNRError, DamagedError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_checkpoint
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.compaction.compact import run_compaction
from torchrec_cnr.maintenance.compaction.plan import plan_compaction
from torchrec_cnr.maintenance.pruning.execute import run_prune
from torchrec_cnr.maintenance.pruning.plan import plan_prune
from torchrec_cnr.maintenance.pruning.retention import Keep, check_keep
from torchrec_cnr.policies import MAX_RATIO
from torchrec_cnr.storage.leases import leased
from torchrec_cnr.storage.local_copies import LocalCopies
from torchrec_cnr.storage.pack_writer import PACK_BYTES
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

MOVED_SHARE = 0.1  # share of the live bytes that one step of a compaction copies

_WORK_SHARE = 0.025  # of the time: training needs the core if a job saves every second
_MOST_REST_SECS = 20.0

logger = logging.getLogger(__name__)

_is_ending = threading.Event()  # set when the interpreter exits
threading._register_atexit(_is_ending.set)  # type: ignore[attr-defined]


class Upkeep:
    """The maintenance of a root in the background: compacts and prunes after each commit.

    Args:
        root: The directory that contains the checkpoints.
        keep: Retention rules; None keeps all checkpoints.
        compacts: Whether the newest checkpoint chain is compacted.
        max_ratio: The bytes that a restore may read, per byte that it needs.
        pack_bytes: The approximate size of new data files in bytes.
        row_log: The Kafka topic that contains the rows of deltas, if they are not in files.
        copies: Local copies, from which compactions read, and to which they write.
        progress: Called with the operation ("compact" or "prune"), the amount done and the total, in bytes or files.

    Attributes:
        num_errors: Number of times that maintenance has failed.
        has_found_damage: Whether the newest checkpoint was found to be corrupt.
    """

    def __init__(
        self,
        root: str,
        keep: Keep | None,
        compacts: bool,
        max_ratio: float = MAX_RATIO,
        pack_bytes: int = PACK_BYTES,
        row_log: RowLog | None = None,
        copies: LocalCopies | None = None,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        check_keep(keep)
        self._root = root
        self._log = row_log
        self._copies = None if copies is None else copies.without_reads()
        self._keep = keep
        self._compacts = compacts
        self._max_ratio = max_ratio
        self._pack_bytes = pack_bytes
        self._progress = progress
        self._changed = threading.Condition()
        self._waiting: str | None = None
        self._is_working = False
        self.num_errors = 0
        self.has_found_damage = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def after(self, path: str) -> None:
        """Start maintenance after a commit.

        Args:
            path: The checkpoint that was committed.
        """
        if self._keep is None and not self._compacts:
            return
        with self._changed:
            self._waiting = path
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cnr-upkeep", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, waits: bool = True) -> None:
        """Finish the remaining work, and end the thread.

        Args:
            waits: Whether to wait for this. If not, the thread begins nothing new, and the process may end before it.
        """
        with self._changed:
            self._is_closed = True
            if not waits:
                self._waiting, self._compacts = None, False
            self._changed.notify()
        if self._thread is not None and waits:
            self._thread.join()

    def _run(self) -> None:
        worked_secs = 0.0
        while (path := self._next(min(_MOST_REST_SECS, worked_secs * (1 / _WORK_SHARE - 1)))) is not None:
            began = time.monotonic()
            try:
                with telemetry.operation("maintenance", checkpoint=path):
                    self.run_for(read_checkpoint(Store.open(path, row_log=self._log)))
            except CheckpointNotFoundError as error:
                logger.info("%s needs no maintenance any more because it was pruned: %s", path, error)
            except BaseException as error:  # the thread must not end: nothing else compacts and prunes
                if _is_ending.is_set():  # executors refuse work while the interpreter exits; this is not a failure
                    return
                self.num_errors += 1
                is_foreign = not isinstance(error, CNRError)
                message = "%s: maintenance failed and is retried after the next checkpoint: %s"
                logger.warning(message, path, error, exc_info=is_foreign)
            worked_secs = time.monotonic() - began

    def _next(self, rest_secs: float) -> str | None:
        """Rest, unless this is being closed, and return the newest checkpoint when there is one."""
        with self._changed:
            self._is_working = False
            self._changed.wait_for(lambda: self._is_closed, rest_secs)
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            path, self._waiting = self._waiting, None
            self._is_working = path is not None
            return path

    def run_for(self, checkpoint: Checkpoint) -> None:
        """Compact a checkpoint's lineage, then prune. Then do the same for kept checkpoints that were skipped before.

        Raises:
            CNRError: Compaction or pruning failed. No checkpoint is lost.
        """
        try:
            self._compact(checkpoint)
        except DamagedError:
            self.has_found_damage = True
            logger.error(
                "%s cannot be restored, nor can a delta of it: the next save is a baseline", checkpoint.store.url
            )
            raise
        self.prune()
        for skipped in self._passed_over():
            if self._waiting is not None:  # a newer checkpoint comes first
                return
            self._compact(skipped)
            self.prune()

    @property
    def is_idle(self) -> bool:
        """Whether all that was committed is compacted and pruned, or has failed."""
        with self._changed:
            return self._waiting is None and not self._is_working

    def _passed_over(self) -> list[Checkpoint]:
        """Return the deltas that retention rules select, newest first."""
        if self._keep is None or not self._compacts:
            return []
        catalog = read_catalog(self._root, row_log=self._log)
        checkpoints = catalog.checkpoints
        selected = self._keep.choose([(catalog.entries[name], checkpoint) for name, checkpoint in checkpoints.items()])
        return [
            checkpoints[name]
            for name in reversed(list(checkpoints))
            if name in selected and checkpoints[name].parent is not None
        ]

    def _compact(self, checkpoint: Checkpoint) -> None:
        try:
            while self._compacts and not self.compact_some(checkpoint):
                self.prune()
        except CheckpointExistsError as error:
            logger.info("%s", error)
        except CNRError as error:
            if checkpoint.store.exists(MANIFEST_FILE):
                raise
            logger.info("%s need not be compacted any more because it was pruned: %s", checkpoint.store.url, error)

    def compact_some(self, checkpoint: Checkpoint) -> bool:
        """Compact a part of a checkpoint's lineage, so that little additional space is needed at a time.

        Returns:
            Whether nothing is left to compact.
        """
        with leased(checkpoint.store, "compact") as lease:
            store = replace(checkpoint.store, row_log=self._log, copies=self._copies)
            plan = plan_compaction(store, max_ratio=self._max_ratio, empties_log=True)
            # Each step looks at all row numbers, so a step of less than a data file would cost more than it copies.
            max_moved_bytes = max(round(MOVED_SHARE * plan.live_bytes), self._pack_bytes)
            if plan.moved_bytes > max_moved_bytes:
                plan = plan.restricted(max_moved_bytes)
            run_compaction(plan, lease, pack_bytes=self._pack_bytes, progress=partial(self._progress, "compact"))
        return plan.is_enough or not plan.rewritten

    def prune(self) -> None:
        """Remove the checkpoints that the retention rules do not keep."""
        if self._keep is not None:
            plan = plan_prune(self._root, self._keep, row_log=self._log)
            result = run_prune(plan, progress=partial(self._progress, "prune"))
            for name, reasons in result.failed.items():
                log_level = logging.WARNING if name in result.refused else logging.INFO  # else a process needs it
                logger.log(log_level, "%s/%s: not removed yet: %s", self._root, name, "; ".join(reasons))
            telemetry.record_root_size(plan.left_bytes)

"""Upkeep: compaction and retention of a run in a thread of its own, so that training never waits for either.

One checkpoint is worked on at a time. Commits that come meanwhile are not queued: the newest counts most, and what was
not done for one checkpoint is done after the next, if it is still kept then, also if it failed. A process that ends
without ``close`` does not wait for it: compaction and retention may die at any moment.
"""

import concurrent.futures.thread  # noqa: F401 - registers its own end first, and so comes after ours
import logging
import threading
from collections.abc import Callable
from functools import partial

from torchrec_cnr.errors import CheckpointExistsError, CheckpointNotFoundError, CNRError
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
from torchrec_cnr.storage.pack_writer import PACK_BYTES
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

MOVED_SHARE = 0.1  # of a model, copied at a time

logger = logging.getLogger(__name__)

_is_ending = threading.Event()  # the interpreter is
threading._register_atexit(_is_ending.set)  # type: ignore[attr-defined]


class Upkeep:
    """Keeps a root in order.

    Args:
        root: The root.
        keep: What is kept; None keeps everything.
        compacts: Whether the newest lineage is compacted.
        max_ratio: How much a restore may read, of what it needs.
        pack_bytes: Size of new files, roughly.
        row_log: The log that rows of deltas went to, if they did.
        progress: Told what is done of what, in "compact" (bytes) and "prune" (files).

    Attributes:
        num_errors: How often it has failed.
    """

    def __init__(
        self,
        root: str,
        keep: Keep | None,
        compacts: bool,
        max_ratio: float = MAX_RATIO,
        pack_bytes: int = PACK_BYTES,
        row_log: RowLog | None = None,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        check_keep(keep)
        self._root = root
        self._log = row_log
        self._keep = keep
        self._compacts = compacts
        self._max_ratio = max_ratio
        self._pack_bytes = pack_bytes
        self._progress = progress
        self._changed = threading.Condition()
        self._waiting: str | None = None
        self.num_errors = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def after(self, path: str) -> None:
        """The checkpoint at a path was committed."""
        if self._keep is None and not self._compacts:
            return
        with self._changed:
            self._waiting = path
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cnr-upkeep", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Do what is left to do, and end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (path := self._next()) is not None:
            try:
                self.run_for(read_checkpoint(Store.open(path, row_log=self._log)))
            except CheckpointNotFoundError as error:
                logger.info("%s needs no upkeep any more, it was pruned: %s", path, error)
            except BaseException as error:  # without this thread, nothing would be compacted or pruned any more
                if _is_ending.is_set():  # executors take no more work: this is no failure
                    return
                self.num_errors += 1
                is_foreign = not isinstance(error, CNRError)
                message = "%s: upkeep failed, and is done after the next checkpoint: %s"
                logger.warning(message, path, error, exc_info=is_foreign)

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            path, self._waiting = self._waiting, None
            return path

    def run_for(self, checkpoint: Checkpoint) -> None:
        """Compact a checkpoint's lineage, then prune; then do so for what was passed over while it was the newest.

        Raises:
            CNRError: Something of it failed; nothing is lost.
        """
        self._compact(checkpoint)
        self.prune()
        for late in self._passed_over():
            if self._waiting is not None:  # a newer one counts more
                return
            self._compact(late)
            self.prune()

    def _passed_over(self) -> list[Checkpoint]:
        """Deltas that are kept for themselves, newest first."""
        if self._keep is None or not self._compacts:
            return []
        catalog = read_catalog(self._root, row_log=self._log)
        there = catalog.checkpoints
        wanted = self._keep.choose([(catalog.entries[name], checkpoint) for name, checkpoint in there.items()])
        return [there[name] for name in reversed(list(there)) if name in wanted and there[name].kind == "delta"]

    def _compact(self, checkpoint: Checkpoint) -> None:
        try:
            while self._compacts and not self.compact_some(checkpoint):
                self.prune()
        except CheckpointExistsError as error:
            logger.info("%s", error)
        except CNRError as error:
            if checkpoint.store.exists(MANIFEST_FILE):
                raise
            logger.info("%s need not be compacted any more, it was pruned: %s", checkpoint.store.url, error)

    def compact_some(self, checkpoint: Checkpoint) -> bool:
        """Copy a part of what is to be copied, so that little room is taken at a time; whether that was all."""
        with leased(checkpoint.store, "compact") as lease:
            plan = plan_compaction(checkpoint.store.url, max_ratio=self._max_ratio, empties_log=True, row_log=self._log)
            max_moved_bytes = round(MOVED_SHARE * plan.live_bytes)
            if plan.moved_bytes > max_moved_bytes:
                plan = plan.restricted(max_moved_bytes)
            run_compaction(plan, lease, pack_bytes=self._pack_bytes, progress=partial(self._progress, "compact"))
        return plan.is_enough or not plan.victims

    def prune(self) -> None:
        """Remove what need not stay."""
        if self._keep is not None:
            plan = plan_prune(self._root, self._keep, row_log=self._log)
            result = run_prune(plan, progress=partial(self._progress, "prune"))
            for name, reasons in result.failed.items():
                level = logging.WARNING if name in result.refused else logging.INFO  # somebody is at work
                logger.log(level, "%s/%s: not removed yet: %s", self._root, name, "; ".join(reasons))

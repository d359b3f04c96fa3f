"""The checkpoint that a run continues from: its protection, the names that may not be used again, what is abandoned.

A run continues from the checkpoint that it has restored or saved last. After a restore of an older checkpoint, later
ones of the same root are there, committed and with names that the next saves would want.
"""

import itertools
import logging
import posixpath
from dataclasses import dataclass, replace
from itertools import takewhile

from torch.distributed.checkpoint.api import CheckpointException

from torchrec_cnr.errors import CheckpointExistsError, CheckpointNotFoundError, CNRError, StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.lineage.abandoned import mark_abandoned
from torchrec_cnr.lineage.checkpoint import Checkpoint, Head, read_checkpoint
from torchrec_cnr.lineage.journal import is_pruned
from torchrec_cnr.lineage.latest import newest_first
from torchrec_cnr.maintenance.background_upkeep import Upkeep
from torchrec_cnr.manager.ranks import RunRanks
from torchrec_cnr.manager.restore import NAME
from torchrec_cnr.manager.schedule import Facts
from torchrec_cnr.progress import Saved, SavePhases
from torchrec_cnr.saving.plug_in_messages import CommittedSize, SaveMetadata
from torchrec_cnr.storage.leases import Lease
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.tracked_tables import TrackedRows

logger = logging.getLogger(__name__)


class Continuation:
    """The checkpoint that a run continues from. Its methods are collective.

    Args:
        root: The URL of the run's root.
        row_log: The Kafka topic that contains the rows of deltas, if they are not in files.
        tracker: The tracker, whose head is that checkpoint.
        ranks: The ranks of the run; rank 0 does all I/O.

    Attributes:
        root: The root.
    """

    def __init__(self, root: str, row_log: RowLog | None, tracker: TrackedRows, ranks: RunRanks) -> None:
        self.root = Store.open(root, row_log=row_log)
        self._tracker = tracker
        self._ranks = ranks
        self._lease = BaseLease()
        self._back_at: Return | None = None  # the checkpoint that was loaded by name, until the next save
        names = names_behind_head(self.root, tracker.head) if ranks.rank == 0 else None
        self._taken: frozenset[str] = ranks.decide(names)

    def path(self, step: int) -> str:
        """Return the path of the checkpoint of a step, under a name that no other checkpoint has."""
        names = (f"step-{step}" if number == 1 else f"step-{step}-{number}" for number in itertools.count(1))
        return posixpath.join(self.root.url, next(name for name in names if name not in self._taken))

    def is_committed(self, step: int, error: CheckpointException) -> bool:
        """Return whether a save was refused because the previous attempt, which seemed to fail, committed it."""
        is_existing = all(isinstance(failure, CheckpointExistsError) for failure, _ in error.failures.values())
        head, path = self._tracker.head, Store.open(self.path(step)).path
        return is_existing and head is not None and head.ref.path == path

    def saved(
        self, step: int, metadata: SaveMetadata | None, stall_secs: float, secs: float, num_retries: int
    ) -> Saved:
        """Describe a committed checkpoint. Without the metadata of its save, rank 0 reads its size.

        Raises:
            CNRError: It cannot be read.
        """
        path = self.path(step)
        size: CommittedSize | None = None if metadata is None else metadata.size
        if size is None:
            size = self._ranks.decide(self._size_of(path) if self._ranks.rank == 0 else None)
        assert size is not None
        return Saved(
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

    def _size_of(self, path: str) -> CommittedSize | CNRError:
        try:
            checkpoint = read_checkpoint(replace(self.root, path=Store.open(path).path))
        except CNRError as error:
            return error
        return CommittedSize.of(checkpoint.committed, checkpoint.manifest_bytes)

    def committed(self, step: int, upkeep: Upkeep | None) -> None:
        """Do in the thread of a background save what need not wait for the next save.

        Rank 0 starts maintenance. The others read the manifest, which the next save needs while training waits.
        """
        if upkeep is not None:
            upkeep.after(self.path(step))
        if self._ranks.rank == 0 or self.root.row_log is not None:
            return
        try:
            read_checkpoint(replace(self.root, path=Store.open(self.path(step)).path))
        except CNRError as error:
            logger.debug("step %d: not read ahead: %s", step, error)

    def restored(self, step: int, chosen: str | None) -> None:
        """Continue from the checkpoint of a step that was loaded; ``chosen`` is its path if it was loaded by name.

        Raises:
            StoreError: The root cannot be listed.
        """
        head, is_first = self._tracker.head, self._ranks.rank == 0
        self._back_at = None if chosen is None or head is None else Return(chosen, head.created_ns)
        if not self._ranks.decide(self._lease.take(self.root, head) if is_first else None):
            self._tracker.forget()
        self._taken = self._ranks.decide(names_behind(self.root, step) if is_first else None)

    def abandon_newer(self) -> None:
        """Mark newer checkpoints as abandoned, if an older one was loaded by name since the last save.

        Raises:
            DamagedError, StoreError: As of :func:`abandon_newer`.
        """
        if self._back_at is not None:
            self._ranks.decide(abandon_newer(self.root, self._back_at) if self._ranks.rank == 0 else None)
            self._back_at = None

    def leave_all(self) -> None:
        """Abandon all checkpoints of the root, because the run does not continue from any of them.

        Raises:
            StoreError: The root cannot be read or written to.
        """
        self._taken = self._ranks.decide(abandoned_names(self.root) if self._ranks.rank == 0 else None)
        self._tracker.forget()
        self.release()

    def leave_other_roots(self) -> None:
        """Forget a latest checkpoint of another root, because a root should need no other root."""
        head, pending = self._tracker.head, self._tracker.pending
        paths = [] if head is None else [head.ref.path]
        if pending is not None and pending.place is not None:  # it may have been committed
            paths.append(pending.place[0])
        if any(Store.open(path).at("..").url != self.root.url for path in paths):
            self._tracker.forget()

    def leave_corrupt(self, agreed: Facts, upkeep: Upkeep | None) -> None:
        """Forget the latest checkpoint if maintenance, on rank 0, has found that it cannot be restored."""
        if agreed.is_corrupt:
            self._tracker.forget()
            if upkeep is not None:
                upkeep.has_found_damage = False

    def release(self) -> None:
        """End the protection of the checkpoint that was loaded: a save is committed, or the run ends."""
        self._lease.release()


class BaseLease:
    """A lease on the checkpoint that a job has loaded, until the job's next save is committed.

    That save may be a delta of the checkpoint. A prune would remove the checkpoint meanwhile if it is not the newest.
    """

    def __init__(self) -> None:
        self._lease: Lease | None = None

    def take(self, root: Store, head: Head | None) -> bool:
        """Protect a checkpoint, and return whether a delta may be based on it.

        It may not if a prune has begun to remove it. A request to remove it may take effect long after the process that
        sent it has ended.
        """
        self.release()
        if head is None or not _is_in(root, head.ref.path):  # no delta has a parent in another root
            return True
        checkpoint = Store.open(head.ref.path)
        self._lease = Lease.take(checkpoint, "save")
        try:
            if not is_pruned(checkpoint, head.created_ns):
                return True
            logger.info("%s: a prune removes this checkpoint, so the next save is a baseline", checkpoint.url)
        except StoreError as error:
            logger.info("%s: cannot tell whether it is kept, so the next save is a baseline: %s", checkpoint.url, error)
        self.release()
        return False

    def release(self) -> None:
        """Give up the lease, if there is one."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def names_behind(root: Store, step: int) -> frozenset[str] | CNRError:
    """Return the names of committed checkpoints of later steps, or an error to raise on all ranks.

    They are there if a restore skipped them or loaded an older one by name. New checkpoints need other names.
    """
    try:
        later_names = [name for name in root.names() if (match := NAME.fullmatch(name)) and int(match[1]) > step]
        return frozenset(name for name in later_names if root.at(name).exists(MANIFEST_FILE))
    except CNRError as error:
        return error


def abandoned_names(root: Store) -> frozenset[str] | CNRError:
    """Abandon all checkpoints of a root, and return their names, or an error to raise on all ranks."""
    try:
        mark_abandoned(root, list(newest_first(root)), None)
    except CNRError as error:
        return error
    return names_behind(root, -1)


def names_behind_head(root: Store, head: Head | None) -> frozenset[str]:
    """Return the names as :func:`names_behind`, if a new manager gets a tracker whose latest checkpoint is in its root.

    Another manager of this process may have restored it.
    """
    if head is None or Store.open(head.ref.path).at("..").url != root.url:
        return frozenset()
    match = NAME.fullmatch(posixpath.basename(head.ref.path))
    names = names_behind(root, int(match[1])) if match else frozenset()
    if isinstance(names, CNRError):
        logger.warning("cannot look for later checkpoints, whose names the next saves may not use: %s", names)
        return frozenset()
    return names


@dataclass(frozen=True)
class Return:
    """A checkpoint that a job has loaded by name, and from which it continues.

    Attributes:
        path: The URL of the checkpoint.
        created_ns: The time of its commit, in nanoseconds since 1970.
    """

    path: str
    created_ns: int


def abandon_newer(root: Store, back_at: Return) -> CNRError | None:
    """Mark the checkpoints as abandoned that are newer than the one from which a job continues.

    The checkpoint may have been pruned since it was loaded. The next save is then a baseline.

    Returns:
        An error to raise on all ranks, or None.
    """
    is_own = _is_in(root, back_at.path)
    try:
        checkpoints = newest_first(root, with_abandoned=True)
        newer = takewhile(lambda checkpoint: not is_own or checkpoint.created_ns > back_at.created_ns, checkpoints)
        mark_abandoned(root, list(newer), _read_if_there(root, back_at.path) if is_own else None)
    except CNRError as error:
        return error
    return None


def _read_if_there(root: Store, path: str) -> Checkpoint | None:
    try:
        return read_checkpoint(replace(root, path=Store.open(path).path))
    except CheckpointNotFoundError:
        return None


def _is_in(root: Store, path: str) -> bool:
    return Store.open(path).at("..").url == root.url

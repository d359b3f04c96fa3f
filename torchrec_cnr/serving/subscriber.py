"""The subscriber: applies each committed checkpoint to a live model, as soon as it is there, or not at all.

What an update does: ask the source for the newest commit, find the links to it, stage them while lookups go on, hold
lookups off, and swap everything in. Until the swap nothing of the model has changed, so a checkpoint that is damaged
leaves it as it was, and the next one that is not is applied on top of that.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import nn

from torchrec_cnr.errors import CheckpointNotFoundError, CNRError, ConfigurationError, DamagedError, StoreError
from torchrec_cnr.leases import leased
from torchrec_cnr.lineage import Checkpoint
from torchrec_cnr.manifest import Kind
from torchrec_cnr.packs import check_thread_count
from torchrec_cnr.serving.commits import Commit, Commits, RootCommits
from torchrec_cnr.serving.links import Links, read_links
from torchrec_cnr.serving.lookups import Lookups, share_forwards
from torchrec_cnr.serving.staged import Staged, stage
from torchrec_cnr.serving.targets import find_targets
from torchrec_cnr.stores import Store
from torchrec_cnr.tracked import forget_overwritten

logger = logging.getLogger(__name__)

_MOST_PATIENCE_SECS = 30.0  # between two attempts at one checkpoint that cannot be applied


@dataclass(frozen=True)
class Applied:
    """What an update did.

    Attributes:
        path: The checkpoint that the model now has.
        sha256: Digest of the manifest that committed it.
        kind: ``delta`` if its rows went on top of what was applied before, ``baseline`` if everything was replaced.
        num_checkpoints: How many were folded.
        num_rows: Rows of tables that were overwritten in this process.
        num_bytes: Bytes of packs that were read.
        read_secs: To find, read, verify and decode it, while lookups went on.
        apply_secs: To swap it in, while lookups waited.
        committed_to_applied_secs: From its commit, by the clock of who saved it, until lookups saw it.
    """

    path: str
    sha256: str
    kind: Kind
    num_checkpoints: int
    num_rows: int
    num_bytes: int
    read_secs: float
    apply_secs: float
    committed_to_applied_secs: float


@dataclass(frozen=True)
class Lag:
    """How far a model is behind, as of the last look at the commits.

    Attributes:
        num_checkpoints: Committed, and not applied.
        waiting_secs: For how long the oldest of these has been committed; 0 if there is none.
        age_secs: Of the commit that is applied; None if none is.
    """

    num_checkpoints: int
    waiting_secs: float
    age_secs: float | None


@dataclass(frozen=True)
class _State:
    """What the model has."""

    commit: Commit
    sha256: str


class RowSubscriber:
    """Keeps a model up to date with the checkpoints under a root.

    A forward of the model, or of an embedding module in it, sees the tensors of one checkpoint. In each process, this
    is about the shards that it holds; processes apply a checkpoint each in its own time.

    Used as a context manager, it applies the newest checkpoint, if there is one, and then follows in a thread.

    Args:
        model: Quantized (as ``InferenceTables`` takes it) or not, sharded or not. Its forwards are wrapped until
            :meth:`close`; compile or trace it afterwards, not before.
        root: A directory of checkpoints, path or fsspec URL; or a source of commits.
        key: What the model's state dict was saved under; None if it was saved as it is.
        interval_secs: Between two looks at the root.
        on_applied: Told of each update, in the thread that did it, when lookups go on already.
        allow_partial_load: Leave tensors of the model that checkpoints do not have as they are.
        thread_count: Requests in flight at once.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        root: str | os.PathLike[str] | Commits,
        *,
        key: str | None = "model",
        interval_secs: float = 0.2,
        on_applied: Callable[[Applied], None] | None = None,
        allow_partial_load: bool = False,
        thread_count: int = 2,
    ) -> None:
        check_thread_count(thread_count)
        if not 0 < interval_secs < math.inf:
            raise ConfigurationError(f"'interval_secs' must be more than 0 (got {interval_secs})")
        self._model = model
        self._commits: Commits = RootCommits(root) if isinstance(root, str | os.PathLike) else root
        self._key = key
        self._interval_secs = interval_secs
        self._on_applied = on_applied
        self._allow_partial = allow_partial_load
        self._thread_count = thread_count
        self._state: _State | None = None
        self._known: Sequence[Commit] = ()
        self._failure: Exception | None = None
        self._untold: Exception | None = None  # of the thread, for who closes it
        self._failed: tuple[Commit | None, int] = (None, 0)  # the newest commit then, and how often in a row
        self._retry_at_secs = 0.0
        self._turn = threading.RLock()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lookups = Lookups()
        self._hooks = share_forwards(model, self._lookups)

    def update(self) -> Applied | None:
        """Apply the newest checkpoint, if it is not applied yet.

        One that is damaged or gone is passed over for the newest before it that is newer than what is applied.

        Returns:
            What was done; None if there was nothing to do.

        Raises:
            DamagedError, CheckpointNotFoundError: Nothing newer than what is applied can be read; it stays.
            StateMismatchError: The checkpoint does not fit the model, which stays as it is.
            VersionError, StoreError: The newest cannot be read; the model stays as it is.
            ConfigurationError: It is called from within a forward, or after :meth:`close`.
        """
        if self._is_closed.is_set():
            raise ConfigurationError("this RowSubscriber is closed; make another one")
        with self._turn:
            self._untold = None
            return self._update()

    @property
    def applied(self) -> str | None:
        """The checkpoint that the model has, if it has one."""
        state = self._state
        return None if state is None else state.commit.path

    @property
    def lag(self) -> Lag:
        """How far the model is behind, as of the last look."""
        state, known, now_ns = self._state, self._known, time.time_ns()
        if state is None:
            missing = list(known)
        else:
            missing = [commit for commit in known if commit.created_ns > state.commit.created_ns]
            missing = missing or [commit for commit in known[:1] if commit != state.commit]
        oldest_ns = min((commit.created_ns for commit in missing), default=now_ns)
        waiting_secs = max(0.0, (now_ns - oldest_ns) / 1e9)
        return Lag(len(missing), waiting_secs, None if state is None else (now_ns - state.commit.created_ns) / 1e9)

    @property
    def failure(self) -> Exception | None:
        """Why the newest checkpoint is not applied, if the last attempt at it failed."""
        return self._failure

    def looking_up(self) -> AbstractContextManager[None]:
        """To be held by who reads tables without a forward of the model: nothing is swapped in meanwhile."""
        return self._lookups.shared()

    def start(self) -> None:
        """Apply the newest checkpoint, if there is one, and follow in a thread from now on.

        Failures of the thread are logged, it keeps trying, and :meth:`close` raises the one that it could not mend.

        Raises:
            CNRError: As :meth:`update`; nothing is followed then.
        """
        if self._thread is not None:
            raise ConfigurationError("this RowSubscriber follows already")
        self.update()
        self._thread = threading.Thread(target=self._follow, name="cnr-follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following, and unwrap the model's forwards; it keeps what it has.

        Raises:
            CNRError: The last attempt of the thread failed.
        """
        self._close()
        untold, self._untold = self._untold, None
        if untold is not None:
            raise untold

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close()

    def _close(self) -> None:
        self._is_closed.set()
        self._commits.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._hooks.remove()

    def _follow(self) -> None:
        while not self._is_closed.is_set():
            try:
                self._commits.wait(self._interval_secs)
                with self._turn:
                    if not self._is_closed.is_set():
                        self._update(is_patient=True)
            except Exception as error:  # whatever it is, the model stays as it is, and the next checkpoint may do
                self._untold = error
                is_ours = isinstance(error, CNRError)
                logger.warning("the model stays at %s: %s", self.applied, error, exc_info=not is_ours)
                self._is_closed.wait(self._interval_secs)  # a source that fails may not have waited

    def _update(self, is_patient: bool = False) -> Applied | None:
        newest = None
        try:
            self._known = self._commits.newest_first()
            newest = next(iter(self._known), None)
            if is_patient and newest == self._failed[0] and time.monotonic() < self._retry_at_secs:
                return None
            applied = self._apply_newest(self._known)
            if applied is not None and self._on_applied is not None:
                self._on_applied(applied)
        except Exception as error:
            self._failure = error
            num_failures = self._failed[1] + 1 if newest == self._failed[0] else 1
            self._failed = (newest, num_failures)
            patience_secs = min(_MOST_PATIENCE_SECS, self._interval_secs * 2.0 ** min(num_failures, 20))
            self._retry_at_secs = time.monotonic() + patience_secs
            raise
        self._failure, self._untold, self._failed = None, None, (None, 0)
        return applied

    def _apply_newest(self, commits: Sequence[Commit]) -> Applied | None:
        failure: CNRError | None = None
        for commit in commits:
            if self._state is not None and (
                commit == self._state.commit
                or (failure is not None and commit.created_ns <= self._state.commit.created_ns)
            ):
                break
            try:
                return self._apply(commit, self._state)
            except (DamagedError, CheckpointNotFoundError) as error:
                logger.info("%s cannot be applied, the one before is tried: %s", commit.path, error)
                failure = failure or error
        if failure is not None:
            raise failure
        return None

    def _apply(self, commit: Commit, before: _State | None) -> Applied | None:
        started_secs = time.perf_counter()
        with leased(Store.open(commit.path), "load"):
            links, staged = self._staged(commit, None if before is None else before.sha256)
        head = links.lineage.newest
        state = _State(commit, head.sha256)
        if staged is None:  # it is applied already, and was known by another name or time
            self._state = state
            return None
        forget_overwritten([part.tensor for part in staged.parts])
        with self._lookups.exclusive():
            swap_secs = time.perf_counter()
            self._state = None  # if the swap fails half-way, everything must be read again
            staged.swap_in()
            self._state = state
            done_secs = time.perf_counter()
        if before is not None and not links.is_delta and head.kind == "delta":
            logger.info("%s does not stand on %s: everything was read again", commit.path, before.commit.path)
        return _applied(head, links, staged, swap_secs - started_secs, done_secs - swap_secs)

    def _staged(self, commit: Commit, applied: str | None) -> tuple[Links, Staged | None]:
        """The first way to a checkpoint that can be gone, and what it leads to; None if that is applied."""
        for links in read_links(commit.path, applied):
            if links.lineage.newest.sha256 == applied:
                return links, None
            targets = find_targets(self._model, self._key, links.lineage, allow_partial=self._allow_partial)
            try:
                staged = stage(links, targets, self._thread_count)
            except (DamagedError, StoreError) as error:
                if not links.is_delta:
                    raise
                logger.info("%s: its whole lineage is tried: %s", commit.path, error)
                continue
            if staged is not None:
                return links, staged
        raise DamagedError(f"{commit.path}: nothing leads to it; use another checkpoint")


def _applied(head: Checkpoint, links: Links, staged: Staged, read_secs: float, apply_secs: float) -> Applied:
    return Applied(
        path=head.store.url,
        sha256=head.sha256,
        kind="delta" if links.is_delta else "baseline",
        num_checkpoints=len(links.lineage.checkpoints),
        num_rows=staged.num_rows,
        num_bytes=staged.num_bytes,
        read_secs=read_secs,
        apply_secs=apply_secs,
        committed_to_applied_secs=time.time() - head.created_ns / 1e9,
    )

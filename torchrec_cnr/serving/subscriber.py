"""The subscriber: applies each committed checkpoint to a live model, as soon as it is there, or not at all.

A checkpoint that is damaged leaves the model as it was, and the next one that is not is applied on top of that. What
fails in the thread is logged and tried again, with ever longer pauses until there is another checkpoint.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from torch import nn

from torchrec_cnr.arguments import check_callable, check_secs, check_type
from torchrec_cnr.errors import CheckpointNotFoundError, CNRError, ConfigurationError, DamagedError, StoreError
from torchrec_cnr.human_text import url_text
from torchrec_cnr.serving.commit_sources import Commit, Commits, MarkerCommits, RootCommits
from torchrec_cnr.serving.served_model import ServedModel
from torchrec_cnr.serving.updates_report import Applied, Lag, lag_of
from torchrec_cnr.storage.pack_writer import check_thread_count
from torchrec_cnr.storage.row_log import RowLog, check_row_log

logger = logging.getLogger(__name__)

_MAX_PATIENCE_SECS = 30.0  # between two attempts at one checkpoint that cannot be applied


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
        row_log: The log that rows of deltas go to, if they do (``KafkaRows``); its markers tell of commits at once.

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
        row_log: RowLog | None = None,
    ) -> None:
        check_thread_count(thread_count)
        check_type("model", model, nn.Module, "a torch module")
        check_secs("interval_secs", interval_secs)
        check_callable("on_applied", on_applied)
        check_row_log(row_log)
        self._commits = _commits(root, row_log)
        self._interval_secs = interval_secs
        self._on_applied = on_applied
        self._known: Sequence[Commit] = ()
        self._failure: BaseException | None = None
        self._untold: BaseException | None = None  # of the thread, for who closes it
        self._failed: tuple[Commit | None, int] = (None, 0)  # the newest commit then, and how often in a row
        self._retry_at_secs = 0.0
        self._turn = threading.RLock()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._served = ServedModel(
            model, key, allow_partial=allow_partial_load, thread_count=thread_count, row_log=row_log
        )

    def __repr__(self) -> str:
        applied = "nothing applied" if self.applied is None else url_text(self.applied)
        state = "closed" if self._is_closed.is_set() else "not started" if self._thread is None else "following"
        return f"RowSubscriber({applied}, {self.lag}, {state})"

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
        commit = self._served.commit
        return None if commit is None else commit.path

    @property
    def lag(self) -> Lag:
        """How far the model is behind, as of the last look."""
        return lag_of(self._served.commit, self._known)

    @property
    def failure(self) -> BaseException | None:
        """Why the newest checkpoint is not applied, if the last attempt at it failed, or could not be heard of."""
        return self._failure

    def looking_up(self) -> AbstractContextManager[None]:
        """To be held by who reads tables without a forward of the model: nothing is swapped in meanwhile."""
        return self._served.looking_up()

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
        try:
            if untold is not None:
                raise untold
        finally:
            del untold  # it would refer to itself

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
        self._served.close()

    def _follow(self) -> None:
        while not self._is_closed.is_set():
            try:
                unheard = self._wait()
                with self._turn:
                    if not self._is_closed.is_set():
                        self._update(is_patient=True)
                        if unheard is not None:
                            self._failure = self._untold = unheard
            except BaseException as error:  # whatever it is, the model stays as it is, and the next checkpoint may do
                self._untold = error
                is_ours = isinstance(error, CNRError)
                logger.warning("the model stays at %s: %s", self.applied, error, exc_info=not is_ours)
                self._is_closed.wait(self._interval_secs)  # a source that fails may not have waited

    def _wait(self) -> StoreError | None:
        """Until there may be a new checkpoint; why none could be heard of, if the source does not answer."""
        try:
            self._commits.wait(self._interval_secs)
        except StoreError as error:
            logger.warning("new checkpoints are looked for, but not heard of: %s", error)
            self._is_closed.wait(self._interval_secs)  # a source that fails may not have waited
            return error
        return None

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
        except BaseException as error:
            self._failure = error
            num_failures = self._failed[1] + 1 if newest == self._failed[0] else 1
            self._failed = (newest, num_failures)
            patience_secs = min(_MAX_PATIENCE_SECS, self._interval_secs * 2.0 ** min(num_failures, 20))
            self._retry_at_secs = time.monotonic() + patience_secs
            raise
        self._failure, self._untold, self._failed = None, None, (None, 0)
        return applied

    def _apply_newest(self, commits: Sequence[Commit]) -> Applied | None:
        applied, failure = self._served.commit, None
        try:
            for commit in commits:
                if applied == commit or (applied and failure and commit.created_ns <= applied.created_ns):
                    break
                try:
                    return self._served.apply(commit)
                except (DamagedError, CheckpointNotFoundError) as error:
                    logger.info("%s cannot be applied, the one before is tried: %s", commit.path, error)
                    failure = failure or error
            if failure is not None:
                raise failure
        finally:
            del failure  # it would refer to itself
        return None


def _commits(root: str | os.PathLike[str] | Commits, row_log: RowLog | None) -> Commits:
    if not isinstance(root, str | os.PathLike):
        return root
    return RootCommits(root) if row_log is None else MarkerCommits(root, row_log)

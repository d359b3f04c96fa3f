"""The subscriber: applies each committed checkpoint to a live model, completely or not at all.

A corrupt checkpoint leaves the model unchanged, and the next valid one is applied. Failures in the thread are logged
and retried with exponential backoff. The next checkpoint is tried at once.
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

from torchrec_cnr import telemetry
from torchrec_cnr.arguments import check_callable, check_secs, check_type
from torchrec_cnr.errors import CheckpointNotFoundError, CNRError, ConfigurationError, DamagedError, StoreError
from torchrec_cnr.human_text import url_text
from torchrec_cnr.serving.commit_sources import Commit, Commits, MarkerCommits, RootCommits
from torchrec_cnr.serving.served_model import ServedModel
from torchrec_cnr.serving.updates_report import Applied, Lag, lag_of
from torchrec_cnr.storage.pack_writer import check_thread_count
from torchrec_cnr.storage.row_log import RowLog, check_row_log

logger = logging.getLogger(__name__)

_MAX_PATIENCE_SECS = 30.0  # longest pause between two attempts to apply the same checkpoint


class RowSubscriber:
    """Online updates of a model: applies the checkpoints under a root as they are committed.

    Each forward of the model, or of an embedding module in it, sees the tensors of one checkpoint. This holds for the
    shards of each process separately: processes do not apply a checkpoint at the same moment.

    As a context manager, it applies the newest checkpoint, if there is one, and then follows the job in a thread.

    Args:
        model: The model, quantized (as ``InferenceTables`` takes it) or not, sharded or not. Its forwards are wrapped
            until :meth:`close`. Pass the module that you call: trace or script a model first, and pass the result.
            ``torch.compile`` may come before or after, but pass the model itself.
        root: Path or fsspec URL of a directory of checkpoints; or a source of commits.
        key: The key that the model's state dict was saved under; None if it was saved without a key.
        interval_secs: Seconds between two looks at the root.
        on_applied: Called with the report of each update, in the thread that applied it, when lookups run again.
        allow_partial_load: Whether tensors that are missing in checkpoints keep their values.
        thread_count: Number of requests in flight at the same time.
        row_log: The Kafka topic (``KafkaRows``) that rows of deltas are sent to, if any. Its commit records announce
            checkpoints at once.

    Raises:
        ConfigurationError: An argument is invalid.

    Examples:
        >>> served = torch.nn.ModuleDict({"users": torch.nn.EmbeddingBag(1_000, 16)})
        >>> with cnr.RowSubscriber(served, "run") as subscriber:
        ...     print(subscriber.applied)
        ...     with subscriber.looking_up():
        ...         row = served["users"].weight[7]
        /.../run/step-2
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
        self._untold: BaseException | None = None  # the thread's last failure, for ``close`` to raise
        self._failed: tuple[Commit | None, int] = (None, 0)  # newest commit then, and failures in a row
        self._retry_at_secs = 0.0
        self._turn = threading.RLock()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._served = ServedModel(
            model, key, allow_partial=allow_partial_load, thread_count=thread_count, row_log=row_log
        )

    def __repr__(self) -> str:
        applied_text = "nothing applied" if self.applied is None else url_text(self.applied)
        state = "closed" if self._is_closed.is_set() else "not started" if self._thread is None else "following"
        return f"RowSubscriber({applied_text}, {self.lag}, {state})"

    def update(self) -> Applied | None:
        """Apply the newest checkpoint, if it is not applied yet.

        If it is corrupt or missing, apply the newest valid one that is newer than the applied checkpoint.

        Returns:
            A report; None if there was nothing to apply.

        Raises:
            DamagedError, CheckpointNotFoundError: No checkpoint newer than the applied one can be read. The model is
                unchanged.
            StateMismatchError: The checkpoint does not fit the model, which is unchanged.
            VersionError, StoreError: The newest checkpoint cannot be read. The model is unchanged.
            ConfigurationError: The call comes from within a forward, or after :meth:`close`.
        """
        if self._is_closed.is_set():
            raise ConfigurationError("this RowSubscriber is closed; create another one")
        with self._turn:
            self._untold = None
            return self._update()

    @property
    def applied(self) -> str | None:
        """Path or URL of the applied checkpoint; None if there is none."""
        commit = self._served.commit
        return None if commit is None else commit.path

    @property
    def lag(self) -> Lag:
        """The lag of the model, as of the last look at the commits."""
        return lag_of(self._served.commit, self._known)

    @property
    def failure(self) -> BaseException | None:
        """The error of the last attempt to look for or apply the newest checkpoint; None if it succeeded."""
        return self._failure

    def looking_up(self) -> AbstractContextManager[None]:
        """Return a context manager to read tables without a forward; no checkpoint is swapped in during its block."""
        return self._served.looking_up()

    def start(self) -> None:
        """Apply the newest checkpoint, if there is one, and then follow the job in a thread.

        The thread logs failures and retries. :meth:`close` raises the last failure, unless a later attempt succeeded.

        Raises:
            CNRError: :meth:`update` failed. The thread does not start.
        """
        if self._thread is not None:
            raise ConfigurationError("this RowSubscriber has already been started; call start() only once")
        self.update()
        self._thread = threading.Thread(target=self._follow, name="cnr-follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and unwrap the model's forwards. The model keeps the applied checkpoint.

        Raises:
            CNRError: The last attempt of the thread failed.
        """
        self._close()
        untold_error, self._untold = self._untold, None
        try:
            if untold_error is not None:
                raise untold_error
        finally:
            del untold_error  # otherwise the traceback of the error would refer to the error

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
                wait_error = self._wait()
                with self._turn:
                    if not self._is_closed.is_set():
                        self._update(is_patient=True)
                        if wait_error is not None:
                            self._failure = self._untold = wait_error
            except BaseException as error:  # the model is unchanged, and the next checkpoint may work
                self._untold = error
                is_ours = isinstance(error, CNRError)
                logger.warning("an update failed, the model keeps %s: %s", self.applied, error, exc_info=not is_ours)
                self._is_closed.wait(self._interval_secs)  # a source that fails may not have waited

    def _wait(self) -> StoreError | None:
        """Wait until there may be a new checkpoint. Return the error if the source does not answer."""
        try:
            self._commits.wait(self._interval_secs)
        except StoreError as error:
            logger.warning("the source does not announce new checkpoints, looking for them at intervals: %s", error)
            self._is_closed.wait(self._interval_secs)  # a source that fails may not have waited
            return error
        return None

    def _update(self, is_patient: bool = False) -> Applied | None:
        newest_commit = None
        try:
            self._known = self._commits.newest_first()
            newest_commit = next(iter(self._known), None)
            if is_patient and newest_commit == self._failed[0] and time.monotonic() < self._retry_at_secs:
                return None
            applied = self._apply_newest(self._known)
            if applied is not None and self._on_applied is not None:
                self._on_applied(applied)
        except BaseException as error:
            telemetry.record_lag(self.lag.waiting_secs)
            self._failure = error
            num_failures = self._failed[1] + 1 if newest_commit == self._failed[0] else 1
            self._failed = (newest_commit, num_failures)
            patience_secs = min(_MAX_PATIENCE_SECS, self._interval_secs * 2.0 ** min(num_failures, 20))
            self._retry_at_secs = time.monotonic() + patience_secs
            raise
        telemetry.record_lag(self.lag.waiting_secs)
        self._failure, self._untold, self._failed = None, None, (None, 0)
        return applied

    def _apply_newest(self, commits: Sequence[Commit]) -> Applied | None:
        applied_commit, failure = self._served.commit, None
        try:
            for commit in commits:
                if applied_commit == commit or (
                    applied_commit and failure and commit.created_ns <= applied_commit.created_ns
                ):
                    break
                try:
                    with telemetry.operation("update", checkpoint=commit.path):
                        return self._served.apply(commit)
                except (DamagedError, CheckpointNotFoundError) as error:
                    logger.info("cannot apply %s, trying the checkpoint before it: %s", commit.path, error)
                    failure = failure or error
            if failure is not None:
                raise failure
        finally:
            del failure  # otherwise the traceback of the error would refer to the error
        return None


def _commits(root: str | os.PathLike[str] | Commits, row_log: RowLog | None) -> Commits:
    if not isinstance(root, str | os.PathLike):
        return root
    return RootCommits(root) if row_log is None else MarkerCommits(root, row_log)

"""The saves of this process that are running. A save begins after the previous saves have ended on this rank.

Two saves of one process group must not overlap, because their collectives would be mixed up. The same holds for two
saves of DCP's own process, which has one pipe. If two threads waited for its answer, one would get the other's.

A save has ended on a rank when its last collective has returned, which is after the manifest is in the store. DCP does
not report this to plug-ins. But it does the whole save within one call. For ``dcp.save``, that is a call in the
caller's thread. For ``dcp.async_save``, it is a call in a separate thread, which saves or waits for another process. A
save is running as long as that call is on the stack of its thread.

An asynchronous save is staged first, and DCP begins it in its own thread a little later. It is expected to begin until
the future that ``dcp.async_save`` returns is done.

As with DCP's own writer, the interpreter ends only after all running saves. If the last one fails, that is logged.
"""

import concurrent.futures.thread  # noqa: F401 - it must register its function for the interpreter's end before ours
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from torchrec_cnr.errors import SaveError

logger = logging.getLogger(__name__)

_POLL_SECS = 0.005
_DCP = "torch.distributed.checkpoint"
_ONE_SAVE = "_save_state_dict"  # DCP's function that calls writer and planner
_SERVING_LOOP = "_checkpointing_subprocess"  # DCP's function that runs all saves of its own process
_FUTURE = "upload_future"  # the name in ``dcp.async_save`` of the future that it returns
_OUTCOME_SECS = 10.0  # from the end of a save until its future is done


@dataclass(frozen=True)
class _Call:
    """A call of DCP's, on the stack of a thread. It keeps none of the call's variables alive.

    Attributes:
        thread_id: Id of the thread.
        frame_id: ``id`` of the frame. It is unique while the frame runs, but a later frame may get it.
        code: The code that the frame executes.
    """

    thread_id: int
    frame_id: int
    code: CodeType

    @classmethod
    def current(cls) -> "_Call | None":
        """Return the outermost call of DCP's in this thread; None if there is none."""
        outermost = None
        for frame in _dcp_frames():
            if frame.f_code.co_name != _SERVING_LOOP:
                outermost = cls(threading.get_ident(), id(frame), frame.f_code)
        return outermost

    @property
    def is_running(self) -> bool:
        """Whether the call has not returned."""
        frame = sys._current_frames().get(self.thread_id)
        while frame is not None:
            if id(frame) == self.frame_id and frame.f_code is self.code:
                return True
            frame = frame.f_back
        return False


def _dcp_frames() -> Iterator[FrameType]:
    """Yield the frames of DCP's calls in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_DCP):
            yield frame
        frame = frame.f_back


def _is_for_process() -> bool:
    """Return whether this thread is in a ``dcp.async_save`` by DCP's own process."""
    name = "async_checkpointer_type"
    return any(frame.f_locals.get(name) is AsyncCheckpointerType.PROCESS for frame in _dcp_frames())


def is_in_process_of_dcp() -> bool:
    """Return whether this thread saves in the process that DCP starts for ``AsyncCheckpointerType.PROCESS``."""
    return any(frame.f_code.co_name == _SERVING_LOOP for frame in _dcp_frames())


def asked_checkpoint_id() -> object:
    """Return the checkpoint id that was passed to the innermost call of DCP's; None if there is none."""
    for frame in _dcp_frames():
        if "checkpoint_id" in frame.f_code.co_varnames:
            return frame.f_locals.get("checkpoint_id")
    return None


def _queue_id() -> int:
    """Return the id of a queue, whose saves run one by one: the process group's, or the thread's if there is none."""
    for frame in _dcp_frames():
        if "process_group" in frame.f_code.co_varnames:
            group = frame.f_locals.get("process_group")
            if group is not None:
                return id(group)
    return id(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else threading.get_ident()


class RunningSave:
    """One save of this rank, from its first call until DCP's call has returned.

    Args:
        registry: The registry of all saves.
        number: Position in the order of saves; saves of one queue run in this order.

    Attributes:
        at_end: Function that is called once the save has ended, at the next save or at the end of the interpreter.
        is_cleaned_up: Whether that has happened.
    """

    def __init__(self, registry: "RunningSaves", number: int) -> None:
        self.number = number
        self.at_end: Callable[[], None] | None = None
        self.is_cleaned_up = False
        self._registry = registry
        self._queue_id = _queue_id()
        self._is_for_process = _is_for_process()
        self._stager = _Call.current()
        self._stager_id = threading.get_ident()
        self._is_watched = False
        self._is_done = threading.Event()
        self._failure: str | None = None
        self._call: _Call | None = None
        self._has_begun = False
        self._is_given_up = False  # then the save must not begin: a later one may use its staging buffer
        self._lock = threading.Lock()

    def watch_future(self) -> None:
        """Observe the future of the save that the current call of ``dcp.async_save`` has staged and submitted."""
        for frame in _dcp_frames():
            future = frame.f_locals.get(_FUTURE)
            if isinstance(future, Future):
                self._is_watched = True
                future.add_done_callback(self._note_outcome)
                return

    def _note_outcome(self, future: "Future[Any]") -> None:
        error = None if future.cancelled() else future.exception()
        self._failure = None if error is None else f"{type(error).__name__}: {error}"
        self._is_done.set()

    def log_failure(self) -> None:
        """Log an error if the save has failed: the script may end without asking its future."""
        if self._is_watched and self._is_done.wait(_OUTCOME_SECS) and self._failure is not None:
            logger.error("the last asynchronous save failed: %s", self._failure)

    def begin(self) -> None:
        """Begin the save in the current call of DCP's. Outside of DCP, later saves do not wait for this one.

        Raises:
            SaveError: Other saves have begun because this one did not begin in time.
        """
        with self._lock:
            if self._is_given_up:
                raise SaveError("the save was staged, but another save began before it did: save again")
            self._call = _Call.current()
            self._has_begun = True
        if sum(frame.f_code.co_name == _ONE_SAVE for frame in _dcp_frames()) < 2:  # not nested in another save
            for other_save in self._registry.running():
                call = other_save._call
                if other_save is not self and call is not None and call.thread_id == threading.get_ident():
                    other_save._call = None  # its call has returned, but a later one may reuse its frame's id

    @property
    def has_ended(self) -> bool:
        """Whether DCP's call has returned, so that no collective of this save is running on this rank."""
        if self._has_begun:
            call = self._call
            return call is None or not call.is_running
        is_staging = self._stager is not None and self._stager.is_running
        if is_staging and threading.get_ident() != self._stager_id:
            return False
        is_coming = self._is_watched and not self._is_done.is_set()
        with self._lock:
            if not is_coming and not self._has_begun:  # it may have begun since the check above
                self._is_given_up = True
            return self._is_given_up

    def forget_threads(self) -> None:
        """Replace the lock in a forked child: a thread that does not exist there may hold it."""
        self._lock = threading.Lock()

    def is_before(self, other: "RunningSave") -> bool:
        """Return whether the other save must wait for this one."""
        is_one_queue = self._queue_id == other._queue_id or (self._is_for_process and other._is_for_process)
        return is_one_queue and self.number < other.number

    def wait_for_earlier(self, timeout_secs: float) -> None:
        """Wait until the previous saves have ended.

        Raises:
            SaveError: They have not ended within the timeout.
        """
        for save in self._registry.running():
            if save.is_before(self):
                save.wait(timeout_secs)

    def wait(self, timeout_secs: float | None) -> None:
        """Wait until the save has ended; in its own thread, return at once.

        Raises:
            SaveError: It has not ended within the timeout.
        """
        began = time.monotonic()
        call = self._call
        if call is not None and call.thread_id == threading.get_ident():
            return
        while not self.has_ended:
            if timeout_secs is not None and time.monotonic() > began + timeout_secs:
                raise SaveError(
                    f"the previous save has not ended within {timeout_secs:g} s, and no other can begin before: wait "
                    "for the future that dcp.async_save returned, or give the writer a longer 'timeout_secs'"
                )
            time.sleep(_POLL_SECS)


class RunningSaves:
    """Registry of all saves of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: list[RunningSave] = []
        self._num_saves = 0

    def add(self, *, has_begun: bool) -> RunningSave:
        """Add a save that begins in this thread, or that is staged. Saves that have ended are cleaned up first."""
        self.clean_up()
        with self._lock:
            self._num_saves += 1
            save = RunningSave(self, self._num_saves)
            self._saves.append(save)
        if has_begun:
            save.begin()
        return save

    def running(self) -> list[RunningSave]:
        """Return the saves that were added and are not cleaned up."""
        with self._lock:
            return list(self._saves)

    def clean_up(self) -> None:
        """Remove the saves that have ended, and call their ``at_end``."""
        for save in self.running():
            if save.has_ended:
                self._clean_up(save)

    def _clean_up(self, save: RunningSave) -> None:
        with self._lock:
            if save.is_cleaned_up:
                return
            save.is_cleaned_up = True
            self._saves.remove(save)
        if save.at_end is not None:
            save.at_end()

    def wait_for_all(self) -> None:
        """Wait for all saves, before the interpreter ends."""
        for save in self.running():
            save.wait(None)
            self._clean_up(save)
            save.log_failure()

    def forget(self) -> None:
        """Forget all saves in a forked child, where none of them runs."""
        for save in self._saves:  # a snapshot may still ask whether one of them has ended
            save.forget_threads()
        self.__init__()  # type: ignore[misc]  # the lock may be held by a thread that the child does not have


running_saves = RunningSaves()
os.register_at_fork(after_in_child=running_saves.forget)
# A running save still writes in threads. So this must be called before the executors of ``concurrent.futures`` refuse
# new work; they were registered earlier. Functions of ``atexit`` are called after both.
threading._register_atexit(running_saves.wait_for_all)  # type: ignore[attr-defined]

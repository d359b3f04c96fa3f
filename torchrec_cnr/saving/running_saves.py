"""The saves of this process that are running. A save begins after those before it have ended on this rank.

Two saves of one process group must not overlap: their collectives would meet. Neither must two saves of DCP's own
process: it has one pipe, and of two threads that wait for its answer, one would get that of the other.

A save has ended on a rank when its last collective has, which is after its manifest is in the store. DCP tells no
plug-in of that moment. It does everything within one call, though: ``dcp.save`` in the caller's thread, or in a thread
of its own for ``dcp.async_save``, or in such a thread that waits for another process. A save runs as long as that call
is on the stack of its thread.

An asynchronous save is staged first, and DCP begins it in its own thread a little later. It comes until the future that
``dcp.async_save`` returns is done.

The interpreter ends after all saves that are running, as with DCP's own writer. If the last one fails, that is logged.
"""

import concurrent.futures.thread  # noqa: F401 - it must have registered its own end of the interpreter before us
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
_ONE_SAVE = "_save_state_dict"  # the part of a save that calls writer and planner
_SERVING_LOOP = "_checkpointing_subprocess"  # of DCP's own process, which does all saves in it
_FUTURE = "upload_future"  # what ``dcp.async_save`` calls the future that it returns
_OUTCOME_SECS = 10.0  # from the end of a save until its future is done


@dataclass(frozen=True)
class _Call:
    """A call of DCP's, on the stack of a thread. Keeps none of its variables alive.

    Attributes:
        thread_id: The thread.
        frame_id: ``id`` of the frame, which no other frame has while this one runs, but the next one may have.
        code: What it executes.
    """

    thread_id: int
    frame_id: int
    code: CodeType

    @classmethod
    def current(cls) -> "_Call | None":
        """The outermost call of DCP's that this thread is in; None if it is in none."""
        outermost = None
        for frame in _dcp_frames():
            if frame.f_code.co_name != _SERVING_LOOP:
                outermost = cls(threading.get_ident(), id(frame), frame.f_code)
        return outermost

    @property
    def is_running(self) -> bool:
        """Whether it has not returned."""
        frame = sys._current_frames().get(self.thread_id)
        while frame is not None:
            if id(frame) == self.frame_id and frame.f_code is self.code:
                return True
            frame = frame.f_back
        return False


def _dcp_frames() -> Iterator[FrameType]:
    """Calls of DCP's that this thread is in, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_DCP):
            yield frame
        frame = frame.f_back


def _is_for_process() -> bool:
    """Whether this thread is in a ``dcp.async_save`` by DCP's own process."""
    name = "async_checkpointer_type"
    return any(frame.f_locals.get(name) is AsyncCheckpointerType.PROCESS for frame in _dcp_frames())


def is_in_process_of_dcp() -> bool:
    """Whether this thread saves in the process that DCP starts for ``AsyncCheckpointerType.PROCESS``."""
    return any(frame.f_code.co_name == _SERVING_LOOP for frame in _dcp_frames())


def asked_checkpoint_id() -> object:
    """The checkpoint id that the innermost call of DCP's was given; None if none."""
    for frame in _dcp_frames():
        if "checkpoint_id" in frame.f_code.co_varnames:
            return frame.f_locals.get("checkpoint_id")
    return None


def _queue_id() -> int:
    """Saves of one queue run one after the other: those of a process group, or of a thread where there is none."""
    for frame in _dcp_frames():
        if "process_group" in frame.f_code.co_varnames:
            group = frame.f_locals.get("process_group")
            if group is not None:
                return id(group)
    return id(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else threading.get_ident()


class RunningSave:
    """One save of this rank, from its first call until DCP has left it.

    Args:
        registry: Knows all of them.
        number: Saves of one queue run in the order of their numbers.

    Attributes:
        at_end: Called once it has ended, at the next save or at the end of the interpreter.
        is_cleaned_up: Whether that is over.
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
        self._is_given_up = False  # from then on it must not begin: what was staged may be gone
        self._lock = threading.Lock()

    def watch_future(self) -> None:
        """Learn what becomes of the save, which this call of ``dcp.async_save`` has staged and submitted."""
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
        """Log that the save has failed: the script may end without asking its future."""
        if self._is_watched and self._is_done.wait(_OUTCOME_SECS) and self._failure is not None:
            logger.error("the last asynchronous save has failed: %s", self._failure)

    def begin(self) -> None:
        """The save runs in the call of DCP's that this thread is in; if it is in none, the save is not waited for.

        Raises:
            SaveError: Other saves have begun because this one did not in time.
        """
        with self._lock:
            if self._is_given_up:
                raise SaveError("the save was staged, and did not begin before another one did: save again")
            self._call = _Call.current()
            self._has_begun = True
        if sum(frame.f_code.co_name == _ONE_SAVE for frame in _dcp_frames()) < 2:  # it is within no other save
            for other in self._registry.running():
                call = other._call
                if other is not self and call is not None and call.thread_id == threading.get_ident():
                    other._call = None  # its call has returned, but a later one may have the same frame

    @property
    def has_ended(self) -> bool:
        """Whether DCP has left it: no collective of this save runs any more on this rank."""
        if self._has_begun:
            call = self._call
            return call is None or not call.is_running
        is_staging = self._stager is not None and self._stager.is_running
        if is_staging and threading.get_ident() != self._stager_id:
            return False
        is_coming = self._is_watched and not self._is_done.is_set()
        with self._lock:
            if not is_coming and not self._has_begun:  # it may have begun meanwhile
                self._is_given_up = True
            return self._is_given_up

    def forget_threads(self) -> None:
        """In a forked child: a thread that the child does not have may hold the lock."""
        self._lock = threading.Lock()

    def is_before(self, other: "RunningSave") -> bool:
        """Whether the other one must wait for this one."""
        is_one_queue = self._queue_id == other._queue_id or (self._is_for_process and other._is_for_process)
        return is_one_queue and self.number < other.number

    def wait_for_earlier(self, timeout_secs: float) -> None:
        """Wait until the saves before this one have ended.

        Raises:
            SaveError: They have not within the timeout.
        """
        for save in self._registry.running():
            if save.is_before(self):
                save.wait(timeout_secs)

    def wait(self, timeout_secs: float | None) -> None:
        """Wait until it has ended; in its own thread, at once.

        Raises:
            SaveError: It has not within the timeout.
        """
        began = time.monotonic()
        call = self._call
        if call is not None and call.thread_id == threading.get_ident():
            return
        while not self.has_ended:
            if timeout_secs is not None and time.monotonic() > began + timeout_secs:
                raise SaveError(
                    f"the save before has not ended within {timeout_secs:g} s, so that no other can begin: wait for "
                    "the future that dcp.async_save returned, or give the writer a longer 'timeout_secs'"
                )
            time.sleep(_POLL_SECS)


class RunningSaves:
    """All of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: list[RunningSave] = []
        self._num_saves = 0

    def add(self, *, has_begun: bool) -> RunningSave:
        """A save that begins in this thread, or that is staged. What has ended meanwhile is cleaned up."""
        self.clean_up()
        with self._lock:
            self._num_saves += 1
            save = RunningSave(self, self._num_saves)
            self._saves.append(save)
        if has_begun:
            save.begin()
        return save

    def running(self) -> list[RunningSave]:
        """Those that were added and not cleaned up."""
        with self._lock:
            return list(self._saves)

    def clean_up(self) -> None:
        """Drop those that have ended, and do what is to be done at their end."""
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
        """Before the interpreter ends."""
        for save in self.running():
            save.wait(None)
            self._clean_up(save)
            save.log_failure()

    def forget(self) -> None:
        """In a forked child, nothing of this runs."""
        for save in self._saves:  # a cut may still ask how one of them has ended
            save.forget_threads()
        self.__init__()  # type: ignore[misc]  # the lock may be held by a thread that the child does not have


running_saves = RunningSaves()
os.register_at_fork(after_in_child=running_saves.forget)
# Called before the executors of ``concurrent.futures``, which were registered earlier, refuse new work: a save that
# runs still writes in threads. ``atexit`` is later than both.
threading._register_atexit(running_saves.wait_for_all)  # type: ignore[attr-defined]

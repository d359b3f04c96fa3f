"""What the library and DCP take from Python's modules, as the scheduler gives it: threads, clocks, random values.

``installed`` replaces the names ``threading``, ``time``, ``uuid``, ``ThreadPoolExecutor`` and ``dist`` in the modules
that use them. Outside of tasks, all of them are what they were.
"""

import concurrent.futures
import os
import random
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Self

from tests.simulator.engine.scheduler import FindingError, Killed, Scheduler, Task, this_task

EPOCH_SECS = 1_700_000_000


def _task() -> Task:
    task = this_task()
    assert task is not None
    return task


class Lock:
    """A lock, reentrant if so asked."""

    def __init__(self, is_reentrant: bool = False) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._is_reentrant = is_reentrant

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As a real one."""
        task = this_task()
        if task is None:
            return True
        if self._is_reentrant and self._owner is task:
            self._depth += 1
            return True
        limit = None if timeout < 0 else timeout
        if not blocking and not self._is_free():
            return False
        if not task.sim.wait("lock", self._is_free, limit):
            return False
        self._owner, self._depth = task, 1
        return True

    def _is_free(self) -> bool:
        return self._owner is None or self._owner.process.is_dead or self._owner.has_ended

    def release(self) -> None:
        """As a real one."""
        self._depth -= 1
        if self._depth <= 0:
            self._owner = None

    def locked(self) -> bool:
        """Whether somebody has it."""
        return not self._is_free()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """An event."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        """As a real one."""
        return self._is_set

    def set(self) -> None:
        """As a real one."""
        self._is_set = True

    def clear(self) -> None:
        """As a real one."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """As a real one."""
        task = this_task()
        if task is None:
            return self._is_set
        task.is_timer = task.is_daemon and timeout is not None  # a heartbeat: nothing comes of it
        found = task.sim.wait("event", self.is_set, timeout)
        task.is_timer = False
        return found


class Condition:
    """A condition; spurious wake-ups are allowed, and so they happen."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or Lock(is_reentrant=True)
        self._num_notices = 0

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """As a real one."""
        seen = self._num_notices
        self._lock.release()
        found = _task().sim.wait("condition", lambda: self._num_notices > seen, timeout)
        self._lock.acquire()
        return found

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """As a real one."""
        until = None if timeout is None else _task().sim.now + timeout
        while not (found := predicate()):
            left = None if until is None else until - _task().sim.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        """As a real one."""
        self._num_notices += 1

    def notify_all(self) -> None:
        """As a real one."""
        self._num_notices += 1


class Thread:
    """A thread of the process that makes it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self.daemon = daemon
        self._target, self._args, self._kwargs = target, tuple(args), kwargs or {}
        self.task: Task | None = None

    def start(self) -> None:
        """As a real one."""
        sim, process = _task().sim, _task().process
        self.task = sim.spawn(process, f"{process.name}/{self.name}", self._live)
        self.task.is_daemon = bool(self.daemon)
        process.own.setdefault("threads", {})[self.task] = self
        sim.point(f"starts {self.name}")

    def _live(self) -> None:
        try:
            self.run()
        except FindingError:
            raise
        except Exception as error:
            raise FindingError("a thread has died", f"{self.name}: {type(error).__name__}: {error}") from error

    def run(self) -> None:
        """What it does."""
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        """As a real one."""
        return self.task is not None and not self.task.has_ended

    def join(self, timeout: float | None = None) -> None:
        """As a real one."""
        _task().sim.wait(f"join of {self.name}", lambda: not self.is_alive(), timeout)

    @property
    def ident(self) -> int | None:
        """As a real one."""
        return None if self.task is None else self.task.number


class Timer(Thread):
    """A thread that waits first."""

    def __init__(self, interval: float, function: Callable[[], Any]) -> None:
        super().__init__(name="timer", target=self._wait)
        self._secs, self._function = interval, function
        self._is_cancelled = False

    def start(self) -> None:
        """As a real one."""
        super().start()
        assert self.task is not None
        self.task.is_timer = True

    def _wait(self) -> None:
        if not _task().sim.wait("its time", lambda: self._is_cancelled, self._secs):
            _task().is_timer = False
            self._function()

    def cancel(self) -> None:
        """As a real one."""
        self._is_cancelled = True


class _Module:
    """A module of Python's, some of whose names are others within a task."""

    def __init__(self, module: Any, own: dict[str, Any]) -> None:
        self._module, self._own = module, own

    def __getattr__(self, name: str) -> Any:
        own = self._own.get(name)
        return getattr(self._module, name) if own is None or this_task() is None else own


def _current_thread() -> Any:
    task = _task()
    threads = task.process.own.setdefault("threads", {})
    if task not in threads:
        threads[task] = thread = Thread(name=task.name)
        thread.task = task
    return threads[task]


def _enumerate() -> list[Any]:
    _current_thread()
    return [thread for thread in _task().process.own["threads"].values() if thread.is_alive()]


def _clock(read: Callable[[Scheduler, float], Any], name: str) -> Callable[[], Any]:
    def now() -> Any:
        task = _task()
        task.sim.point(name, is_told=False)
        return read(task.sim, task.process.clock_secs)

    return now


def _current_frames() -> dict[int, FrameType]:
    """What the threads of this process do, by their numbers, which are never used again."""
    task, frames = _task(), sys._current_frames()
    own = [other for other in task.sim.tasks if other.process is task.process and not other.has_ended]
    return {other.number: frames[other.thread_id] for other in own if other.thread_id in frames}


def frame_id(found: object) -> int:
    """``id``; frames at one depth of a stack have the same, as if each took the memory of the one before."""
    if not isinstance(found, FrameType) or this_task() is None:
        return id(found)
    depth = 0
    while found.f_back is not None:
        depth, found = depth + 1, found.f_back
    return depth


sys_module = _Module(sys, {"_current_frames": _current_frames})
threads_module = _Module(
    threading,
    {
        "Thread": Thread,
        "Timer": Timer,
        "Lock": Lock,
        "RLock": lambda: Lock(is_reentrant=True),
        "Event": Event,
        "Condition": Condition,
        "current_thread": _current_thread,
        "enumerate": _enumerate,
        "get_ident": lambda: _task().number,
    },
)
time_module = _Module(
    time,
    {
        "sleep": lambda secs: _task().sim.nap(secs),
        "time": _clock(lambda sim, ahead: EPOCH_SECS + sim.now + ahead, "reads the clock"),
        "time_ns": _clock(lambda sim, ahead: int((EPOCH_SECS + sim.now + ahead) * 1e6) * 1000, "reads the clock"),
        "monotonic": lambda: _task().sim.now,
        "perf_counter": lambda: _task().sim.now,
        "thread_time": lambda: 0.0,
    },
)
# What a finalizer does at the end of a process, no task does: the scheduler ends its threads.
weakref_module = _Module(weakref, {"finalize": lambda _, call, *args: partial(call, *args)})
uuid_module = _Module(uuid, {"uuid4": lambda: uuid.UUID(int=_task().sim.unique())})


def method_logger(**_: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """DCP's decorator, which logs calls and so reads clocks before and after them; it does not compose the messages.

    DCP decorates and calls one function for each value of a state dict. Nothing happens between these calls.
    """

    def decorated(call: Callable[..., Any]) -> Callable[..., Any]:
        task = this_task()
        if task is None or call.__name__.startswith("_stateful_to_state_dict"):
            return call

        def logged(*args: Any, **kwargs: Any) -> Any:
            task.sim.point("begins", is_told=False)
            found = call(*args, **kwargs)
            task.sim.point("ends", is_told=False)
            return found

        return logged

    return decorated


def started(pid: int) -> int:
    """When a process of this host began."""
    process = _task().process
    for task in _task().sim.tasks:
        if (task.process.host, task.process.number) == (process.host, pid) and not task.process.is_dead:
            return pid
    raise FileNotFoundError(f"/proc/{pid}/stat")


os_module = _Module(os, {"getpid": lambda: _task().process.number})
random_module = _Module(
    random, {"uniform": lambda low, high: low + (high - low) * (_task().sim.unique() % 1000) / 1000}
)


class _Future(concurrent.futures.Future[Any]):
    """A future of a task's executor."""

    def _wait(self, timeout: float | None) -> None:
        if this_task() is not None and not _task().sim.wait("a future", self.done, timeout):
            raise concurrent.futures.TimeoutError

    def result(self, timeout: float | None = None) -> Any:
        """As a real one."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As a real one."""
        self._wait(timeout)
        return super().exception(0)


class _Executor:
    """A pool of threads, whose threads end when there is nothing to do."""

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "pool") -> None:
        self._most = max_workers or 4
        self._name = thread_name_prefix
        self._work: deque[tuple[_Future, Callable[[], Any]]] = deque()
        self._threads: list[Thread] = []
        self._num_busy = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> _Future:
        """As a real one."""
        if _task().process.own.get("is_ending"):
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        future = _Future()
        self._work.append((future, lambda: fn(*args, **kwargs)))
        if self._num_busy < self._most:
            self._num_busy += 1
            thread = Thread(target=self._serve, name=self._name)
            self._threads.append(thread)
            thread.start()
        return future

    def _serve(self) -> None:
        while self._work:
            future, call = self._work.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                found = call()
            except Killed:
                raise
            except BaseException as error:  # noqa: BLE001 - raised by whoever asks the future
                future.set_exception(error)
            else:
                future.set_result(found)
        self._num_busy -= 1

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Iterator[Any]:
        """As a real one."""
        futures = [self.submit(fn, *values) for values in zip(*iterables, strict=False)]
        return iter([future.result() for future in futures])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As a real one."""
        if cancel_futures:
            for future, _call in self._work:
                future.cancel()
        if wait and this_task() is not None:
            _task().sim.wait("the end of a pool", lambda: not any(thread.is_alive() for thread in self._threads))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class _Caller(concurrent.futures.Executor):
    """A pool without threads: whoever gives it work does it, as checks do after a schedule."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        """As a real one."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised by whoever asks the future
            future.set_exception(error)
        return future


def executor(*args: Any, **kwargs: Any) -> Any:
    """A pool of threads of this task's process; outside of tasks, one without threads."""
    return _Caller() if this_task() is None else _Executor(*args, **kwargs)

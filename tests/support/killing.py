"""Functions that run in a process of their own, which may be killed at any of its storage operations.

The processes are forked from one that has imported everything and runs no threads: since torch's threads and a fork of
pytest's own process go badly together, and because an import takes seconds and a fork a hundredth of one.

An operation is whatever a file system sees: a file is opened, has been created (and is empty still), is forced to disk,
linked or removed, a directory is made, listed or removed. ``every_kill`` goes through all of them.
"""

import builtins
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import torch

ArgsT = TypeVarTuple("ArgsT")
ResultT = TypeVar("ResultT")

CHILD_SECS = 120.0
_SPAWN = multiprocessing.get_context("spawn")
_EVENTS = frozenset(
    {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.symlink", "os.rename"}
    | {"os.truncate", "os.chmod", "os.utime"}
)


class ChildError(AssertionError):
    """A function raised in its process, or did not end."""


def in_child(fn: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> ResultT | int:
    """Run a function of a module in a process of its own: its result, or minus the signal that it died by.

    Several threads may do so at once.
    """
    with _one_at_a_time:
        nursery = _idle.pop() if _idle else _Nursery()
    outcome: ResultT | int = nursery.run(fn, args)
    with _one_at_a_time:
        _idle.append(nursery)
    return outcome


@dataclass(frozen=True)
class Kill:
    """What became of a function.

    Attributes:
        number: Before which storage operation it was to be killed, from 1.
        root: Where it ran.
        finished: Whether it had fewer operations, and returned.
    """

    number: int
    root: str
    finished: bool


def every_kill(prepare: Callable[[int], str], fn: Callable[[str], object], step: int = 1) -> Iterator[Kill]:
    """Kill a function before its first storage operation, its second, and so on until it finishes.

    Args:
        prepare: Makes a root for the n-th kill, always alike; returns its path.
        fn: A function of a module that works on a root. Operations elsewhere are not counted.
        step: How many operations there are from one kill to the next.
    """
    for number in itertools.count(1, step):
        root = prepare(number)
        outcome = in_child(_run_until, fn, root, number)
        if outcome not in (True, -signal.SIGKILL):
            raise ChildError(f"before operation {number} it ended with {outcome}")
        yield Kill(number, root, outcome is True)
        if outcome is True:
            return


def _run_until(fn: Callable[[str], object], root: str, number: int) -> bool:
    def die(current: int) -> None:
        if current == number:
            os.kill(os.getpid(), signal.SIGKILL)

    watch_operations(root, die)
    fn(root)
    return True


def watch_operations(root: str, act: Callable[[int], None]) -> None:
    """Call ``act(number)`` before each storage operation below ``root`` of this process, from 1; for ever."""
    numbers = itertools.count(1)

    def is_below(*paths: object) -> bool:
        return any(str(path) == root or str(path).startswith(f"{root}/") for path in paths)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _EVENTS and is_below(*args[:2]):
            act(next(numbers))

    sys.addaudithook(hook)
    open_, fsync = builtins.open, os.fsync

    def open_and_count(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = open_(file, mode, *args, **kwargs)
        if is_below(file) and set(mode) & set("wxa"):
            act(next(numbers))
        return opened

    def count_and_fsync(descriptor: int) -> None:
        act(next(numbers))
        fsync(descriptor)

    builtins.open = open_and_count  # type: ignore[assignment]  # as it is called here
    os.fsync = count_and_fsync  # type: ignore[assignment]  # as it is called here


# The process that the others are forked from.


class _Nursery:
    """Forks a process for each function; holds what they import."""

    def __init__(self) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_nurse, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._connection.send_bytes(pickle.dumps((fn, args)))
        if not self._connection.poll(CHILD_SECS):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            raise ChildError(f"{fn.__name__}{args} did not end within {CHILD_SECS} s")
        returned, payload = pickle.loads(self._connection.recv_bytes())
        if not returned:
            raise ChildError(f"in a child: {payload}")
        return payload


_idle: list[_Nursery] = []  # whose functions have ended
_one_at_a_time = threading.Lock()


def _nurse(connection: Connection) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            connection.send_bytes(_in_fork(connection.recv_bytes()))


def _in_fork(task: bytes) -> bytes:
    """What a task returned or raised in a fork of this process, or how that ended."""
    try:
        fn, args = pickle.loads(task)
    except Exception:  # noqa: BLE001 - the parent raises it
        return pickle.dumps((False, traceback.format_exc()))
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiving)
        _answer(sending, fn, args)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        payload = pipe.read()
    exitcode = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return payload if exitcode == 0 else pickle.dumps((True, exitcode))


def _answer(sending: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    try:
        answer = pickle.dumps((True, fn(*args)))
    except BaseException:  # noqa: BLE001 - the parent raises it; some errors of DCP are no Exception
        answer = pickle.dumps((False, traceback.format_exc()))
    while answer:
        answer = answer[os.write(sending, answer) :]
    os._exit(0)

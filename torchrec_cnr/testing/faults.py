"""Faults: a store that stands before another one, counts its operations, and spoils those it is told to.

It behaves as an object store does. A file that is written is put at once, when it is closed; what a fault spoils is
therefore a request, and not a part of one. It is known to fsspec by the URL ``faulty://<name>``, in this process only.
"""

import errno
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Self, TypeVar

import fsspec

ResultT = TypeVar("ResultT")

PROTOCOL = "faulty"

OperationKind = Literal["read", "put", "put new", "look up", "list", "remove", "make"]
CHANGES = frozenset({"put", "put new", "remove"})  # what may be done later: they return nothing


class Fault(Enum):
    """What happens to an operation.

    ``FAIL``: it is not done, and an error says so. ``LOSE``: it is done, and an error says it is not: the answer was
    lost. ``DELAY``: it takes longer. ``TRUNCATE``: half of the bytes are put, or read, and no error says so.
    ``DUPLICATE``: it is done twice, as by a client that tries again. ``REORDER``: it is done after the next one, though
    the caller was told that it is done. ``CRASH``: the process is killed before it.
    """

    FAIL = "fail"
    LOSE = "lose"
    DELAY = "delay"
    TRUNCATE = "truncate"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CRASH = "crash"

    def spoils(self, kind: OperationKind) -> bool:
        """Whether it makes a difference to an operation of some kind; one that it does not is done as it should be."""
        if self is Fault.TRUNCATE:
            return kind in ("read", "put", "put new")
        return kind in CHANGES or self not in (Fault.LOSE, Fault.DUPLICATE, Fault.REORDER)


@dataclass(frozen=True)
class Operation:
    """What was asked of the store.

    Attributes:
        kind: "read", "put", "put new" (which fails if the name exists), "look up", "list", "remove" or "make".
        path: Of what, within the store.
        num_bytes: How many were to be put; 0 for other kinds.
    """

    kind: OperationKind
    path: str
    num_bytes: int = 0


class FaultyStore:
    """A directory whose operations may be spoiled; known to fsspec while it is open.

    Operations are numbered from 1, in the order in which they arrive from any thread.

    Args:
        url: The directory that stands behind it, a path or fsspec URL.
        name: Its name in URLs; ranks of one job must give theirs the same one. By default one of its own.
        delay_secs: How long a ``DELAY`` takes.

    Attributes:
        url: What to pass for a root, or to join a checkpoint's name to.
        faults: By number, what happens to an operation; may be changed at any time.
        operations: All so far.
        inner: The file system behind it.
        root: The directory's path there.
        uploads: Where local files are put together; the directory is removed in the end.
    """

    def __init__(self, url: str | os.PathLike[str], name: str | None = None, delay_secs: float = 0.2) -> None:
        self.faults: dict[int, Fault] = {}
        self.operations: list[Operation] = []
        self.inner, root = fsspec.core.url_to_fs(os.fspath(url))
        self.root = str(root).rstrip("/")
        self.uploads = f"{self.root}.uploads"
        self._name = name or uuid.uuid4().hex[:12]
        self.url = f"{PROTOCOL}://{self._name}"
        self._delay_secs = delay_secs
        self._late: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        open_stores[self._name] = self
        fsspec.register_implementation(PROTOCOL, "torchrec_cnr.testing.file_system.FaultyFileSystem", clobber=True)
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Do what is late, and be known no longer."""
        self._do_late()
        open_stores.pop(self._name, None)
        with suppress(OSError):  # there is none, or another process is not done
            os.rmdir(self.uploads)

    def clear(self) -> None:
        """Forget operations and faults, and do what is late: the next operation is the first again."""
        self._do_late()
        with self._lock:
            self.operations.clear()
            self.faults.clear()

    def do(self, operation: Operation, act: Callable[[bool], ResultT]) -> ResultT | None:
        """Count an operation, and do it as its fault says; None if it is done later.

        Args:
            operation: Which.
            act: Does it; with half of the bytes, if it is told so.
        """
        with self._lock:
            self.operations.append(operation)
            fault = self.faults.get(len(self.operations))
            late, self._late = self._late, []
        try:
            return self._spoiled(fault, operation, act)
        finally:
            for postponed in late:
                postponed()

    def _spoiled(self, fault: Fault | None, operation: Operation, act: Callable[[bool], ResultT]) -> ResultT | None:
        match fault:
            case Fault.CRASH:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.FAIL:
                raise OSError(errno.EIO, "injected fault: not done", operation.path)
            case Fault.LOSE:
                act(False)
                raise OSError(errno.EIO, "injected fault: the answer was lost", operation.path)
            case Fault.DELAY:
                time.sleep(self._delay_secs)
            case Fault.DUPLICATE:
                act(False)
            case Fault.REORDER if operation.kind in CHANGES:
                with self._lock:
                    self._late.append(lambda: _unheard(act))
                return None
        return act(fault is Fault.TRUNCATE)

    def _do_late(self) -> None:
        with self._lock:
            late, self._late = self._late, []
        for act in late:
            act()


def _unheard(act: Callable[[bool], object]) -> None:
    """Whoever asked was told that it is done."""
    with suppress(OSError):
        act(False)


open_stores: dict[str, FaultyStore] = {}

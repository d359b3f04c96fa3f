"""Fault injection: a store that wraps another one, counts its operations, and injects faults into chosen ones.

It behaves as an object store does: a file is written in one request, when it is closed. A fault therefore affects a
whole request. In this process only, fsspec opens it by the URL ``faulty://<name>``.
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
from typing import Any, Literal, Self, TypeVar

import fsspec

ResultT = TypeVar("ResultT")

PROTOCOL = "faulty"

OperationKind = Literal["read", "put", "put new", "look up", "list", "remove", "make"]
CHANGES = frozenset({"put", "put new", "remove"})  # only these can be reordered, since they return nothing


class Fault(Enum):
    """A fault of an operation.

    ``FAIL``: it is not done, and raises an error. ``LOSE``: it is done, but raises an error, because the answer was
    lost. ``DELAY``: it takes longer. ``TRUNCATE``: only half of the bytes are written or read, without an error.
    ``DUPLICATE``: it is done twice, as by a client that retries. ``REORDER``: it is done only after the next operation,
    but returns at once. ``CRASH``: the process is killed before it.

    Examples:
        >>> from torchrec_cnr.testing import Fault
        >>> Fault.TRUNCATE.spoils("read"), Fault.TRUNCATE.spoils("list")
        (True, False)
    """

    FAIL = "fail"
    LOSE = "lose"
    DELAY = "delay"
    TRUNCATE = "truncate"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CRASH = "crash"

    def spoils(self, kind: OperationKind) -> bool:
        """Return whether the fault affects operations of this kind; other operations are done correctly."""
        if self is Fault.TRUNCATE:
            return kind in ("read", "put", "put new")
        return kind in CHANGES or self not in (Fault.LOSE, Fault.DUPLICATE, Fault.REORDER)


@dataclass(frozen=True)
class Operation:
    """A request to the store.

    Attributes:
        kind: "read", "put", "put new" (which fails if the name exists), "look up", "list", "remove" or "make".
        path: Path of the file or directory, relative to the store.
        num_bytes: Number of bytes to write; 0 for kinds that do not write.

    Examples:
        >>> from torchrec_cnr.testing import FaultyStore
        >>> with FaultyStore("run") as store:
        ...     checkpoint = cnr.read_checkpoint(f"{store.url}/step-2")
        >>> store.operations[0]
        Operation(kind='read', path='step-2/manifest.json', num_bytes=0)
    """

    kind: OperationKind
    path: str
    num_bytes: int = 0


class FaultyStore:
    """A directory with injected faults, which fsspec can open while this object is open.

    Operations are numbered from 1, in the order in which they arrive from any thread.

    Args:
        url: The wrapped directory, as a path or fsspec URL.
        name: The name of the store in URLs, by default a random one. The ranks of a job must use the same name.
        delay_secs: Duration of a ``DELAY``, in seconds.

    Attributes:
        url: The URL of the store, to be used as a root or as the directory of checkpoints.
        faults: The fault of each operation that has one, by its number; may be changed at any time.
        operations: All operations so far.
        inner: The wrapped file system.
        root: The path of the directory in the wrapped file system.
        uploads: A directory for local files that are being written; ``close`` removes it.

    Examples:
        >>> from torchrec_cnr.testing import Fault, FaultyStore
        >>> with FaultyStore("run") as store:
        ...     store.faults[1] = Fault.FAIL  # the first operation from now on
        ...     try:
        ...         cnr.latest(store.url)
        ...     except cnr.StoreError:
        ...         print("failed:", store.operations[0].kind)
        failed: list
    """

    def __init__(self, url: str | os.PathLike[str], name: str | None = None, delay_secs: float = 0.2) -> None:
        self.faults: dict[int, Fault] = {}
        self.operations: list[Operation] = []
        self.inner: Any
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
        """Do all reordered operations, and unregister the store."""
        self._do_late()
        open_stores.pop(self._name, None)
        with suppress(OSError):  # the directory is missing, or another process still uses it
            os.rmdir(self.uploads)

    def clear(self) -> None:
        """Do all reordered operations, then clear operations and faults; the next operation has number 1 again."""
        self._do_late()
        with self._lock:
            self.operations.clear()
            self.faults.clear()

    def do(self, operation: Operation, act: Callable[[bool], ResultT]) -> ResultT | None:
        """Record an operation, and do it with its fault. Return None if it is done later.

        Args:
            operation: The operation.
            act: Does the operation; if its argument is true, with half of the bytes.
        """
        with self._lock:
            self.operations.append(operation)
            fault = self.faults.get(len(self.operations))
            late_acts, self._late = self._late, []
        try:
            return self._spoiled(fault, operation, act)
        finally:
            for postponed in late_acts:
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
            late_acts, self._late = self._late, []
        for act in late_acts:
            act()


def _unheard(act: Callable[[bool], object]) -> None:
    """Do a reordered operation, ignoring errors: its caller was already told that it is done."""
    with suppress(OSError):
        act(False)


open_stores: dict[str, FaultyStore] = {}

"""Leases: how whoever saves to, loads from or compacts a checkpoint keeps it from being pruned meanwhile.

A lease is a small file in the checkpoint's directory whose name says what for and until when it holds. Pruning treats
the checkpoint as one that is to be kept, with all that it needs. The lease is removed when the work is done, and runs
out by itself if the process dies. Where nothing can be written, work goes on without one.
"""

import json
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torchrec_cnr.errors import StoreError
from torchrec_cnr.storage.store import Store

logger = logging.getLogger(__name__)

LEASE_SECS = 6 * 3600  # longer than any save, load or compaction should take
_NAME = re.compile(r"[0-9a-f]{16}\.(?P<until_ns>\d{1,20})\.(?P<purpose>[a-z]{1,20})\.lease")

Purpose = Literal["save", "load", "compact"]


@dataclass(frozen=True)
class Lease:
    """A lease on a checkpoint.

    Attributes:
        store: The checkpoint's directory.
        name: The file in it.
        purpose: What for.
        until_ns: Unix time in nanoseconds when it runs out.
    """

    store: Store
    name: str
    purpose: str
    until_ns: int

    @classmethod
    def take(cls, store: Store, purpose: Purpose) -> "Lease | None":
        """Write a lease into a directory that exists; None where that cannot be done."""
        lease = cls.until(store, purpose, time.time_ns() + LEASE_SECS * 10**9)
        content = json.dumps({"purpose": purpose, "host": socket.gethostname(), "pid": os.getpid()}).encode()
        try:
            store.put(lease.name, [content], is_durable=False)
        except StoreError as error:
            logger.info("no lease: pruning will not know of this %s: %s", purpose, error)
            lease.release()  # on a full disk an empty file is there, which nobody would remove
            return None
        return lease

    @classmethod
    def until(cls, store: Store, purpose: str, until_ns: int) -> "Lease":
        """A lease with a name of its own, which is not written yet."""
        return cls(store, f"{uuid.uuid4().hex[:16]}.{until_ns}.{purpose}.lease", purpose, until_ns)

    @property
    def has_run_out(self) -> bool:
        """Whether it holds no longer."""
        return self.until_ns <= time.time_ns()

    def release(self) -> None:
        """Remove the file. A failure is not worth failing for: the lease runs out."""
        try:
            self.store.remove(self.name)
        except StoreError as error:
            logger.info("a lease stays until it runs out: %s", error)

    def lapse(self) -> None:
        """End it, and leave one that has run out: by that, pruning recognises what a save that failed has left."""
        try:
            self.store.put(self.until(self.store, self.purpose, time.time_ns()).name, [], is_durable=False)
        except StoreError as error:
            logger.info("a lease stays until it runs out: %s", error)
            return
        self.release()


@contextmanager
def leased(store: Store, purpose: Purpose) -> Iterator[None]:
    """Hold a lease for a while."""
    lease = Lease.take(store, purpose)
    try:
        yield
    finally:
        if lease is not None:
            lease.release()


def is_lease(name: str) -> bool:
    """Whether a file is a lease, be it over or not."""
    return _NAME.fullmatch(name) is not None


def in_force(store: Store, names: Iterable[str], now_ns: int) -> list[Lease]:
    """Those of a directory's files that are leases and are not over, what holds longest first."""
    matches = [found for name in names if (found := _NAME.fullmatch(name))]
    leases = [Lease(store, found[0], found["purpose"], int(found["until_ns"])) for found in matches]
    return sorted((lease for lease in leases if lease.until_ns > now_ns), key=lambda lease: -lease.until_ns)


def holds(names: Iterable[str], now_ns: int) -> bool:
    """Whether any of a directory's files is a lease that is not over."""
    return any(int(found["until_ns"]) > now_ns for name in names if (found := _NAME.fullmatch(name)))

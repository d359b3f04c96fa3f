"""Leases: how whoever saves to, loads from or compacts a checkpoint keeps it from being pruned meanwhile.

A lease is a small file in the checkpoint's directory whose name says until when it holds. Pruning treats the checkpoint
as one that is to be kept, with all that it needs. The lease is removed when the work is done, and runs out by itself if
the process dies. Where nothing can be written, work goes on without one.
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
from torchrec_cnr.stores import Store

logger = logging.getLogger(__name__)

LEASE_SECS = 6 * 3600  # longer than any save, load or compaction should take
_NAME = re.compile(r"[0-9a-f]{16}\.(\d{1,20})\.lease")

Purpose = Literal["save", "load", "compact"]


@dataclass(frozen=True)
class Lease:
    """A lease on a checkpoint.

    Attributes:
        store: The checkpoint's directory.
        name: The file in it.
    """

    store: Store
    name: str

    @classmethod
    def take(cls, store: Store, purpose: Purpose) -> "Lease | None":
        """Write a lease into a directory that exists; None where that cannot be done."""
        lease = cls(store, f"{uuid.uuid4().hex[:16]}.{time.time_ns() + LEASE_SECS * 10**9}.lease")
        content = json.dumps({"purpose": purpose, "host": socket.gethostname(), "pid": os.getpid()}).encode()
        try:
            store.put(lease.name, [content], is_durable=False)
        except StoreError as error:
            logger.info("no lease: pruning will not know of this %s: %s", purpose, error)
            return None
        return lease

    def release(self) -> None:
        """Remove the file. A failure is not worth failing for: the lease runs out."""
        try:
            self.store.remove(self.name)
        except StoreError as error:
            logger.info("a lease stays until it runs out: %s", error)


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


def holds(names: Iterable[str], now_ns: int) -> bool:
    """Whether any of a directory's files is a lease that is not over."""
    return any(int(found[1]) > now_ns for name in names if (found := _NAME.fullmatch(name)))

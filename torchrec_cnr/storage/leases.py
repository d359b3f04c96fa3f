"""Leases: how whoever saves to, loads from or compacts a checkpoint keeps it from being pruned meanwhile.

A lease is a small file in the checkpoint's directory whose name says what for and until when it holds. Pruning treats
the checkpoint as one that is to be kept, with all that it needs. The lease is renewed while the work goes on, and
removed when it is done. If the process dies, it runs out by itself; on the same machine, it is over at once. Where
nothing can be written, work goes on without one.

Leases and prunes go by the store's clock, since those of machines may differ by days.
"""

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from torchrec_cnr.errors import CNRError, StoreError
from torchrec_cnr.storage.retries import is_object_store
from torchrec_cnr.storage.store import Store

logger = logging.getLogger(__name__)

LEASE_SECS = 6 * 3600  # of a process that has died on another machine
_RENEWAL_SECS = LEASE_SECS / 3
_MAX_AHEAD_NS = (LEASE_SECS + 24 * 3600) * 10**9  # no lease of ours holds longer, but where clocks cannot be asked
_MAX_CLOCK_ERROR_NS = 60 * 10**9  # which is too little to write another lease
_MAX_OWNER_BYTES = 4096
_NAME = re.compile(r"[0-9a-f]{16}\.(?P<until_ns>\d{1,20})\.(?P<purpose>[a-z]{1,20})\.lease")

Purpose = Literal["save", "load", "compact"]


@dataclass
class Lease:
    """A lease on a checkpoint.

    Attributes:
        store: The checkpoint's directory.
        name: The file in it.
        purpose: What for.
        until_ns: Unix time in nanoseconds, by the store's clock, when it runs out, if it is not renewed.
        is_left: Whether it is neither renewed nor removed any more.
    """

    store: Store
    name: str
    purpose: str
    until_ns: int
    is_left: bool = field(default=False, repr=False, compare=False)
    _is_changing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _renewal: threading.Timer | None = field(default=None, repr=False, compare=False)
    _ahead_ns: int = field(default=0, repr=False, compare=False)  # of this machine's clock, the store's

    @classmethod
    def take(cls, store: Store, purpose: Purpose) -> "Lease | None":
        """Write a lease into a directory that exists; None where that cannot be done."""
        now_ns = time.time_ns()
        lease = cls.until(store, purpose, now_ns + LEASE_SECS * 10**9)
        try:
            store.put(lease.name, [lease._content()], is_durable=False)
        except StoreError as error:
            logger.info("no lease: pruning will not know of this %s: %s", purpose, error)
            lease.release()  # on a full disk an empty file is there, which nobody would remove
            return None
        try:
            ahead_ns = store.modified_ns(lease.name) - now_ns
            if abs(ahead_ns) > _MAX_CLOCK_ERROR_NS:
                lease._ahead_ns = ahead_ns
                lease._replace()
        except StoreError as error:
            logger.info("a lease goes by this machine's clock: %s", error)
        lease._renew_later()
        return lease

    @classmethod
    def until(cls, store: Store, purpose: str, until_ns: int) -> "Lease":
        """A lease with a name of its own, which is not written yet."""
        return cls(store, f"{uuid.uuid4().hex[:16]}.{until_ns}.{purpose}.lease", purpose, until_ns)

    def _content(self) -> bytes:
        told = {"purpose": self.purpose, "host": socket.gethostname(), **msgspec.structs.asdict(Owner.own())}
        return json.dumps(told).encode()

    def _renew_later(self) -> None:
        this = weakref.ref(self)  # nobody renews the lease of a writer that is gone
        self._renewal = threading.Timer(_RENEWAL_SECS, lambda: _renew(this()))
        self._renewal.daemon = True
        self._renewal.start()

    def renew(self) -> None:
        """Write another one, which holds longer, and remove this one; where that fails, this one holds on."""
        with self._is_changing:
            if self._renewal is None:
                return
            try:
                self._replace()
            except StoreError as error:
                logger.warning("a lease could not be renewed: %s", error)
            self._renew_later()

    def _replace(self) -> None:
        later = self.until(self.store, self.purpose, time.time_ns() + self._ahead_ns + LEASE_SECS * 10**9)
        self.store.put(later.name, [self._content()], is_durable=False)
        before, self.name, self.until_ns = self.name, later.name, later.until_ns
        self.store.remove(before)

    def _end_renewals(self) -> None:
        with self._is_changing:
            if self._renewal is not None:
                self._renewal.cancel()
                self._renewal = None

    @property
    def has_run_out(self) -> bool:
        """Whether it holds no longer."""
        return self.until_ns <= time.time_ns() + self._ahead_ns

    @property
    def is_lost(self) -> bool:
        """Whether it holds no longer, or somebody has removed it: by a clock that is ahead, it had run out.

        Raises:
            StoreError: The store does not tell.
        """
        with self._is_changing:
            return self.has_run_out or not self.store.exists(self.name)

    def release(self) -> None:
        """Remove the file, unless it was left. A failure is not worth failing for: the lease runs out."""
        if self.is_left:
            return
        self._end_renewals()
        try:
            self.store.remove(self.name)
        except StoreError as error:
            logger.info("a lease stays until it runs out: %s", error)

    def leave(self) -> None:
        """End the work, but leave the file until it runs out: a request that seems to have failed may still arrive.

        Also after this process has ended: from now on, the file names no owner.
        """
        self._end_renewals()
        self.is_left = True
        try:
            self.store.put(self.name, [b"{}"], is_durable=False)  # an empty file is a lease that has lapsed
        except StoreError as error:
            logger.warning("a lease ends with this process, although a request may still arrive: %s", error)

    def lapse(self) -> None:
        """End it, and leave one that has run out: by that, pruning recognises what a save that failed has left.

        One that was left stays as it is.
        """
        if self.is_left:
            return
        self._end_renewals()
        try:
            self.store.put(self.until(self.store, self.purpose, 0).name, [], is_durable=False)
        except StoreError as error:
            logger.info("a lease stays until it runs out: %s", error)
            return
        self.release()


def _renew(lease: Lease | None) -> None:
    if lease is not None:
        lease.renew()


class Owner(msgspec.Struct, frozen=True):
    """The process that has taken a lease.

    Attributes:
        boot: What Linux calls the time since a machine was started; machines and their containers differ by it.
        pids: The name space of its number.
        pid: Its number.
        started: When it began, in ticks since the boot: numbers are used again.
    """

    boot: str
    pids: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> "Owner":
        """This process; on systems that do not tell, one that nobody finds dead."""
        try:
            return cls(*_machine(), os.getpid(), _started(os.getpid()))
        except (OSError, ValueError, IndexError):
            return cls("", "", os.getpid(), 0)

    @property
    def is_dead(self) -> bool:
        """Whether it ran on this machine and has ended, as far as this process can tell."""
        try:
            if (self.boot, self.pids) != _machine():
                return False
            return _started(self.pid) != self.started
        except (FileNotFoundError, ProcessLookupError):
            return bool(self.boot)
        except (OSError, ValueError, IndexError):
            return False


def _machine() -> tuple[str, str]:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.readlink("/proc/self/ns/pid")


def _started(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


@contextmanager
def leased(store: Store, purpose: Purpose) -> Iterator[Lease | None]:
    """Hold a lease for a while, where one can be written."""
    lease = Lease.take(store, purpose)
    try:
        yield lease
    finally:
        if lease is not None:
            lease.release()


def is_lease(name: str) -> bool:
    """Whether a file is a lease, be it over or not."""
    return _NAME.fullmatch(name) is not None


def in_force(store: Store, names: Iterable[str], now_ns: int) -> list[Lease]:
    """Those of a directory's files that are leases and are not over, what holds longest first.

    One whose process has ended on this machine is over. One that would hold longer than any that is written is none.
    """
    matches = [found for name in names if (found := _NAME.fullmatch(name))]
    leases = [Lease(store, found[0], found["purpose"], int(found["until_ns"])) for found in matches]
    leases = [replace(lease, until_ns=_until_ns(lease, now_ns)) for lease in leases]
    holding = (
        lease for lease in leases if now_ns < lease.until_ns <= now_ns + _MAX_AHEAD_NS and not _is_abandoned(lease)
    )
    return sorted(holding, key=lambda lease: -lease.until_ns)


def _until_ns(lease: Lease, now_ns: int) -> int:
    """Until when a lease holds, by the store's clock, where the clock of who took it may be days behind that."""
    if lease.until_ns > now_ns or not is_object_store(lease.store.fs):
        return lease.until_ns
    try:
        if lease.store.listing().files.get(lease.name) == 0:  # it has lapsed
            return lease.until_ns
        return lease.store.modified_ns(lease.name) + LEASE_SECS * 10**9
    except StoreError as error:
        if isinstance(error.__cause__, NotImplementedError):
            return lease.until_ns
        logger.info("a lease is taken for one that holds, since the store does not tell when it was written: %s", error)
        return now_ns + LEASE_SECS * 10**9


def _is_abandoned(lease: Lease) -> bool:
    """Whether it was taken by a process of this machine that has ended; what stands in it is not trusted."""
    try:
        return msgspec.json.decode(lease.store.read(lease.name, 0, _MAX_OWNER_BYTES), type=Owner).is_dead
    except (OSError, CNRError, ValueError, RecursionError, OverflowError):
        return False


def holds(store: Store, names: Iterable[str], now_ns: int) -> bool:
    """Whether any of a directory's files is a lease that is not over."""
    return bool(in_force(store, names, now_ns))

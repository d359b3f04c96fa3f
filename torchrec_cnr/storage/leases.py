"""Leases: files that protect a checkpoint from pruning while a save, a load or a compaction uses it.

A lease is a small file in the checkpoint's directory. Its name contains its purpose and the time when it expires.
Pruning keeps a checkpoint with a valid lease, and everything that this checkpoint needs. The owner renews the lease
while it works, and then removes it. If the owner's process dies, the lease expires; processes on the same machine treat
it as expired at once. If the lease cannot be written, a load or the save of a baseline continues without one.

Leases and prunes use the store's clock, since the clocks of machines may differ by days.
"""

import json
import logging
import math
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from torchrec_cnr.errors import CNRError, StoreError
from torchrec_cnr.storage.retries import is_object_store
from torchrec_cnr.storage.store import Store

logger = logging.getLogger(__name__)

LEASE_SECS = 6 * 3600  # how long the lease of a process that died on another machine is valid
_RENEWAL_SECS = LEASE_SECS / 3
_MAX_AHEAD_NS = (LEASE_SECS + 24 * 3600) * 10**9  # leases expire earlier than this, unless a clock could not be read
_MAX_CLOCK_ERROR_NS = 60 * 10**9  # a smaller difference does not justify a second write
_CLOCK_SECS = 3600  # how long the difference of two clocks is not read again
_MAX_OWNER_BYTES = 4096
_NAME = re.compile(r"[0-9a-f]{16}\.(?P<until_ns>\d{1,20})\.(?P<purpose>[a-z]{1,20})\.lease")

Purpose = Literal["save", "load", "compact"]


@dataclass
class Lease:
    """A lease on a checkpoint.

    Attributes:
        store: The checkpoint's directory.
        name: Name of the lease file in ``store``.
        purpose: What the lease is for; a ``Purpose``.
        until_ns: When the lease expires unless it is renewed, as Unix time in nanoseconds by the store's clock.
        is_left: Whether this process no longer renews or removes the lease.
        bases: For a save of a delta, leases on the checkpoints that it uses; None for one that could not be written.
            They end with this lease.
    """

    store: Store
    name: str
    purpose: str
    until_ns: int
    is_left: bool = field(default=False, repr=False, compare=False)
    bases: "tuple[Lease | None, ...]" = field(default=(), repr=False, compare=False)
    _is_changing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _is_renewed: bool = field(default=False, repr=False, compare=False)
    _ahead_ns: int = field(default=0, repr=False, compare=False)  # store's clock minus this machine's clock

    @classmethod
    def take(cls, store: Store, purpose: Purpose) -> "Lease | None":
        """Write a lease into an existing directory; return None if it cannot be written."""
        known_ns = _clocks.known_ahead_ns(store)
        now_ns = time.time_ns()
        lease = cls.until(store, purpose, now_ns + (known_ns or 0) + LEASE_SECS * 10**9)
        lease._ahead_ns = known_ns or 0
        try:
            store.put(lease.name, [lease._content()], is_durable=False)
        except StoreError as error:
            logger.info("cannot write a lease; pruning may remove the checkpoint during this %s: %s", purpose, error)
            lease.release()  # a full disk can leave an empty file, which no other process would remove
            return None
        try:
            if known_ns is None and (ahead_ns := _clocks.read_ahead_ns(store, lease.name, now_ns)):
                lease._ahead_ns = ahead_ns
                lease._replace()
        except StoreError as error:
            logger.info("cannot read the store's clock; the lease uses the clock of this machine: %s", error)
        lease._is_renewed = True
        _renewals.add(lease)
        return lease

    @classmethod
    def until(cls, store: Store, purpose: str, until_ns: int) -> "Lease":
        """Return a lease with a new name, without writing it."""
        return cls(store, f"{uuid.uuid4().hex[:16]}.{until_ns}.{purpose}.lease", purpose, until_ns)

    def _content(self) -> bytes:
        fields = {"purpose": self.purpose, "host": socket.gethostname(), **msgspec.structs.asdict(Owner.own())}
        return json.dumps(fields).encode()

    def renew(self) -> None:
        """Replace the lease file with one that expires later. If that fails, the old one is still valid."""
        with self._is_changing:
            if not self._is_renewed:
                return
            try:
                self._replace()
            except StoreError as error:
                logger.warning("cannot renew a lease; trying again later: %s", error)

    def _replace(self) -> None:
        renewed = self.until(self.store, self.purpose, time.time_ns() + self._ahead_ns + LEASE_SECS * 10**9)
        self.store.put(renewed.name, [self._content()], is_durable=False)
        old_name, self.name, self.until_ns = self.name, renewed.name, renewed.until_ns
        self.store.remove(old_name)

    def _end_renewals(self) -> None:
        with self._is_changing:
            self._is_renewed = False
        _renewals.discard(self)

    @property
    def has_run_out(self) -> bool:
        """Return whether the lease has expired."""
        return self.until_ns <= time.time_ns() + self._ahead_ns

    def is_lost(self, listed: Collection[str] = ()) -> bool:
        """Return whether the lease has expired, or a process whose clock is ahead has removed it as expired.

        Args:
            listed: The names in its directory, if they were listed a moment ago.

        Raises:
            StoreError: The store does not answer.
        """
        with self._is_changing:
            return self.has_run_out or (self.name not in listed and not self.store.exists(self.name))

    def release(self) -> None:
        """Remove the lease file, unless the lease was left. A failure is only logged: the lease expires anyway."""
        if self.is_left:
            return
        self._end_renewals()
        self.release_bases()
        try:
            self.store.remove(self.name)
        except StoreError as error:
            logger.info("cannot remove a lease, which expires later: %s", error)

    def release_bases(self) -> None:
        """Remove the leases on other checkpoints."""
        for base in filter(None, self.bases):
            base.release()

    def leave(self) -> None:
        """Stop renewing, but keep the file until it expires: a request that seems to have failed may still arrive.

        The file then names no owner, so that the lease is valid even after this process has ended.
        """
        self._end_renewals()
        for base in filter(None, self.bases):
            base.leave()
        self.is_left = True
        try:
            self.store.put(self.name, [b"{}"], is_durable=False)  # not empty: an empty file is a lapsed lease
        except StoreError as error:
            logger.warning("a lease ends with this process although a request may still arrive: %s", error)

    def lapse(self) -> None:
        """Replace the lease with an expired one, which lets pruning recognise the files of a failed save.

        A lease that was left does not change.
        """
        if self.is_left:
            return
        self._end_renewals()
        try:
            self.store.put(self.until(self.store, self.purpose, 0).name, [], is_durable=False)
        except StoreError as error:
            logger.info("cannot end a lease, which expires later: %s", error)
            self.release_bases()
            return
        self.release()


class _Clocks:
    """The differences between the clocks of stores and of this machine, by root, so that few leases read them."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[int, int, float]] = {}

    def known_ahead_ns(self, store: Store) -> int | None:
        """Return the difference in ns, 0 if it is small; None if it must be read.

        It must be read again after an hour, and if this machine's clock was set.
        """
        ahead_ns, at_ns, at_secs = self._read.get(store.at("..").url, (0, 0, -math.inf))
        past_secs = time.monotonic() - at_secs
        was_set = abs(time.time_ns() - at_ns - past_secs * 1e9) > _MAX_CLOCK_ERROR_NS
        return None if past_secs > _CLOCK_SECS or was_set else ahead_ns

    def read_ahead_ns(self, store: Store, name: str, written_ns: int) -> int:
        """Read the difference from a file that was written at ``written_ns`` by this machine's clock.

        Raises:
            StoreError: The store does not tell when the file was written.
        """
        ahead_ns = store.modified_ns(name) - written_ns
        if abs(ahead_ns) <= _MAX_CLOCK_ERROR_NS:
            ahead_ns = 0
        self._read[store.at("..").url] = ahead_ns, written_ns, time.monotonic()
        return ahead_ns


_clocks = _Clocks()


class _Renewals:
    """Renews all leases of this process in one thread.

    The thread begins with the first lease. It ends when it wakes and there is no lease, which is hours after the last
    one: if each save began a thread, malloc's arenas for these threads would keep tens of MiB.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin again in a forked child, which has neither the thread nor the leases of its parent."""
        self._is_changing = threading.RLock()  # a signal handler may save while this thread begins a save
        self._thread: threading.Thread | None = None
        # By identity. Renewals end when the writer that holds a lease is garbage collected.
        self._leases = weakref.WeakValueDictionary[int, Lease]()

    def add(self, lease: Lease) -> None:
        """Renew a lease from now on."""
        with self._is_changing:
            self._leases[id(lease)] = lease
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="cnr-leases", daemon=True)
                self._thread.start()

    def discard(self, lease: Lease) -> None:
        """Renew a lease no longer."""
        with self._is_changing:
            self._leases.pop(id(lease), None)

    def _run(self) -> None:
        never = threading.Event()
        while True:
            never.wait(_RENEWAL_SECS)
            with self._is_changing:
                leases = list(self._leases.values())
                if not leases:
                    self._thread = None
                    return
            for lease in leases:
                lease.renew()
            del leases, lease  # otherwise this thread would keep them until it wakes again


_renewals = _Renewals()
os.register_at_fork(after_in_child=_renewals.forget)


class Owner(msgspec.Struct, frozen=True):
    """The process that has taken a lease.

    Attributes:
        boot: Linux's boot id, which tells machines and boots apart.
        pids: The PID namespace, which tells containers apart.
        pid: The process id in this namespace.
        started: When the process began, in clock ticks since the boot. It tells processes with a reused ``pid`` apart.
    """

    boot: str
    pids: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> "Owner":
        """Return this process. If the system gives no boot id, the owner never counts as dead."""
        try:
            return cls(*_machine(), os.getpid(), _started(os.getpid()))
        except (OSError, ValueError, IndexError):
            return cls("", "", os.getpid(), 0)

    @property
    def is_dead(self) -> bool:
        """Return whether the process ran on this machine and has ended, as far as this process can tell."""
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
    """Hold a lease during the ``with`` block, if one can be written."""
    lease = Lease.take(store, purpose)
    try:
        yield lease
    finally:
        if lease is not None:
            lease.release()


def is_lease(name: str) -> bool:
    """Return whether a file is a lease, valid or expired."""
    return _NAME.fullmatch(name) is not None


def in_force(store: Store, names: Iterable[str], now_ns: int) -> list[Lease]:
    """Return the valid leases among a directory's files, those that expire last first.

    A lease is not valid if its process on this machine has ended, or if it expires later than this package allows.
    """
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    leases = [Lease(store, match[0], match["purpose"], int(match["until_ns"])) for match in matches]
    leases = [replace(lease, until_ns=_until_ns(lease, now_ns)) for lease in leases]
    valid_leases = (
        lease for lease in leases if now_ns < lease.until_ns <= now_ns + _MAX_AHEAD_NS and not _is_abandoned(lease)
    )
    return sorted(valid_leases, key=lambda lease: -lease.until_ns)


def _until_ns(lease: Lease, now_ns: int) -> int:
    """Return when a lease expires by the store's clock, even if its owner's clock is days behind that."""
    if lease.until_ns > now_ns or not is_object_store(lease.store.fs):
        return lease.until_ns
    try:
        if lease.store.listing().files.get(lease.name) == 0:  # a lapsed lease
            return lease.until_ns
        return lease.store.modified_ns(lease.name) + LEASE_SECS * 10**9
    except StoreError as error:
        if isinstance(error.__cause__, NotImplementedError):
            return lease.until_ns
        logger.info("cannot read when a lease was written; treating it as valid: %s", error)
        return now_ns + LEASE_SECS * 10**9


def _is_abandoned(lease: Lease) -> bool:
    """Return whether a process of this machine took the lease and has ended. The file's content is untrusted."""
    try:
        return msgspec.json.decode(lease.store.read(lease.name, 0, _MAX_OWNER_BYTES), type=Owner).is_dead
    except (OSError, CNRError, ValueError, RecursionError, OverflowError):
        return False


def holds(store: Store, names: Iterable[str], now_ns: int) -> bool:
    """Return whether any of a directory's files is a valid lease."""
    return bool(in_force(store, names, now_ns))

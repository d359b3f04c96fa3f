"""Fences: if two jobs save to one root, the newer one continues, and the saves of the older one fail.

A job that was thought dead may still be saving when its replacement starts. A fence is a small numbered file in the
root, which only one job can create. Before its first save, every job creates the fence after the highest that it has
seen. A restored job has looked for it at its load, and any other job looks before its first save. A manager creates its
fence before it looks for the latest checkpoint. As soon as there is a higher fence, the saves of a job fail.

Fences are never removed, and their numbers have no gaps. So a job finds the highest without listing the root.
"""

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from torchrec_cnr.errors import CheckpointExistsError, FencedError
from torchrec_cnr.storage.files import Listing
from torchrec_cnr.storage.store import Store
from torchrec_cnr.storage.urls import without_client

_MAX_BYTES = 1 << 12  # of a fence
_NAME = re.compile(r"fence-(?P<number>\d{8})\.json")


@dataclass(frozen=True)
class Fence:
    """The fence of a job in a root.

    Attributes:
        root: The root.
        seen: Number of the highest fence when the job began or loaded its checkpoint; 0 if there was none.
        owner: Content of the job's own fence, which identifies the job.
    """

    root: Store
    seen: int
    owner: bytes

    @property
    def number(self) -> int:
        """The number of the job's own fence."""
        return self.seen + 1

    def claim(self, listing: Listing | None = None) -> None:
        """Create this job's fence unless it exists already, and check that it is the highest.

        Args:
            listing: The content of the root, if it was listed in this moment. It saves requests. Pass it only if the
                root has a checkpoint of this process: otherwise another job may have removed the root and made it
                again, with a fence of the same name.

        Raises:
            FencedError: Another job has created this fence, or a higher one.
            StoreError: The root cannot be written to or read.
        """
        with _turn(self.root):
            name = _name(self.seen + 1)
            key = without_client(self.root.url), self.seen, self.owner
            if key in _job.claimed and listing is not None and name in listing.files:
                if _name(self.seen + 2) in listing.files:
                    raise self._lost(self.seen + 2)
                return
            if not self.root.exists(name):
                self.create()
            elif _read(self.root, self.seen + 1) != self.owner:
                raise self._lost(self.seen + 1)
            self.check()
            _job.claimed.add(key)

    def create(self) -> None:
        """Create this job's fence.

        Raises:
            FencedError: Another job has created it.
            StoreError: The root cannot be written to.
        """
        try:
            self.root.put_new(_name(self.seen + 1), self.owner, uuid.uuid4().hex[:16])
        except CheckpointExistsError as error:
            raise self._lost(self.seen + 1) from error
        _job.claimed.add((without_client(self.root.url), self.seen, self.owner))

    def check(self) -> None:
        """Check that this job may commit.

        Raises:
            FencedError: A newer job has created a higher fence.
            StoreError: The root cannot be read.
        """
        if self.root.exists(_name(self.seen + 2)):
            raise self._lost(self.seen + 2)

    def _lost(self, number: int) -> FencedError:
        return FencedError(
            f"{self.root.url}: another job saves here now, as {_name(number)} shows ({_told(self.root, number)}); "
            "nothing was committed; end this job, or load the latest checkpoint with CNRLoadPlanner(tracker) and "
            "continue from there; jobs that run in parallel need separate roots"
        )


def _owner() -> bytes:
    owner = {"job": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), "since_ns": time.time_ns()}
    return json.dumps(owner).encode()


class JobFences(dict[str, Fence]):
    """The fences of a job, by root.

    Attributes:
        owner: Content of the fences that this job creates.
        claimed: Root, number seen and owner of each fence that this process has claimed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owner = _owner()
        self.claimed = set[tuple[str, int, bytes]]()

    def fence(self, root: Store, is_new: bool = False) -> Fence:
        """Return the fence of a root. With ``is_new``, look for the highest fence again."""
        url = without_client(root.url)
        if not is_new and (known_fence := self.get(url)) is not None:
            return known_fence
        with _turn(root):  # otherwise a thread could replace what another thread saw later
            fence = self.get(url)
            if fence is None or is_new:
                highest_number = highest(root, 0 if fence is None else fence.seen + self._has_claimed(fence))
                if highest_number and not is_new and _read(root, highest_number) == self.owner:
                    highest_number -= 1  # another process that saves for this job has created it
                fence = self[url] = Fence(root, highest_number, self.owner)
            return fence

    def _has_claimed(self, fence: Fence) -> bool:
        return (without_client(fence.root.url), fence.seen, fence.owner) in self.claimed

    def adopt(self, job: "JobFences") -> None:
        """Save for the job of another process from now on."""
        self.owner = job.owner
        self.update(job)

    def forget(self) -> None:
        """Become a separate job from now on."""
        self.clear()
        self.owner = _owner()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.owner, dict(self))


def _received(owner: bytes, fences: Mapping[str, Fence]) -> JobFences:
    job = JobFences()
    job.owner = owner
    job.update(fences)
    return job


_turns: dict[str, threading.RLock] = {}  # by root; threads of this process look at and create fences one at a time


def _turn(root: Store) -> threading.RLock:
    """Return the lock to hold while a thread looks at a root's fences and acts on what it saw."""
    return _turns.setdefault(without_client(root.url), threading.RLock())


_job = JobFences()
os.register_at_fork(after_in_child=_turns.clear)  # a thread that does not exist in the child may hold a lock
os.register_at_fork(after_in_child=_job.forget)


def fence_of(checkpoint: Store) -> Fence:
    """Return the fence under which this process saves to the root of a checkpoint.

    Raises:
        StoreError: The root cannot be read.
    """
    return _job.fence(checkpoint.at(".."))


def restored_from(checkpoint: Store) -> None:
    """Record that this process continues from a checkpoint, so that it replaces all earlier jobs of that root.

    Raises:
        StoreError: The root cannot be read.
    """
    _job.fence(checkpoint.at(".."), is_new=True)


def claim(root: Store) -> Fence:
    """Claim a root before this process continues from its latest checkpoint, so that saves of other jobs fail.

    Returns:
        The fence that was created.

    Raises:
        FencedError: Another job has claimed the root at the same moment.
        StoreError: The root cannot be written to or read.
    """
    root.make()
    with _turn(root):  # if two threads do this, the later one creates a fence after that of the first
        fence = _job.fence(root, is_new=True)
        fence.create()
        return fence


def current(root: Store) -> Fence:
    """Return the fence of this process's job in a root. It may not have been created yet.

    Raises:
        StoreError: The root cannot be read.
    """
    return _job.fence(root)


def owner_of(root: Store, number: int) -> str | None:
    """Return the content of a fence, which identifies a job; None for the number 0.

    Raises:
        StoreError: The root cannot be read.
    """
    return _read(root, number).decode(errors="replace") if number else None


def own_owner() -> str:
    """Return the content of the fences of this process's job."""
    return _job.owner.decode()


def own_fences() -> JobFences:
    """Return the fences of this process's job. A process that saves for the same job adopts them."""
    return _job


def is_fence(name: str) -> bool:
    """Return whether a file of a root has the name of a fence."""
    return _NAME.fullmatch(name) is not None


def highest(root: Store, known: int = 0) -> int:
    """Return the number of the highest fence; 0 if there is none. Takes a logarithmic number of look-ups.

    Args:
        root: The root.
        known: The number of a fence that this process has seen there, which is most often the highest. Two look-ups
            then suffice. The root may have been removed since.
    """
    first = low = known if known and root.exists(_name(known)) else 0
    high = low + 1
    while root.exists(_name(high)):
        low, high = high, first + 2 * (high - first)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if root.exists(_name(middle)) else (low, middle)
    return low


def _name(number: int) -> str:
    return f"fence-{number:08d}.json"


def _read(root: Store, number: int) -> bytes:
    """Return the content of a fence, truncated to ``_MAX_BYTES``, since the file is untrusted."""
    return root.read(_name(number), 0, _MAX_BYTES)


class _Owner(msgspec.Struct):
    """The part of a fence's content that messages show."""

    host: str
    pid: int


def _told(root: Store, number: int) -> str:
    """Return which process created a fence, for a message. The file's content is untrusted."""
    try:
        owner = msgspec.json.decode(_read(root, number), type=_Owner)
        return f"host {owner.host[:80]!r}, process {owner.pid}"
    except (OSError, ValueError, RecursionError):
        return "unknown owner"

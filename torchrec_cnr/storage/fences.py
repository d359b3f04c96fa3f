"""Fences: of two jobs that save to one root, one goes on and the other is refused.

A job that was thought dead may still be saving when its replacement does. A fence is a small file in the root, with a
number, that only one job can put. Every job puts the one behind the highest that it saw, before its first save: one
that was restored saw it at its load, any other sees it then. A manager puts it before it looks for the newest.
Once there is a higher one, a job's saves are refused.

Fences are never removed, and their numbers have no gaps, so that the highest is found without listing the root.
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
from torchrec_cnr.storage.store import Store
from torchrec_cnr.storage.urls import without_client

_MAX_BYTES = 1 << 12  # of a fence
_NAME = re.compile(r"fence-(?P<number>\d{8})\.json")


@dataclass(frozen=True)
class Fence:
    """What a job knows of the fences of a root.

    Attributes:
        root: The root.
        seen: Number of the highest fence when the job began, or loaded what it goes on from; 0 if there was none.
        owner: What its own fence holds: by this, jobs are told apart.
    """

    root: Store
    seen: int
    owner: bytes

    def claim(self) -> None:
        """Put up this job's fence, unless it is there already, and see that it is the highest.

        Raises:
            FencedError: Another job has.
            StoreError: The root cannot be written to, or read.
        """
        with _turn(self.root):
            name = _name(self.seen + 1)
            try:
                if not self.root.exists(name):
                    self.root.put_new(name, self.owner, uuid.uuid4().hex[:16])
                is_ours = _read(self.root, self.seen + 1) == self.owner
            except CheckpointExistsError:
                is_ours = False
            if not is_ours:
                raise self._lost(self.seen + 1)
            self.check()

    def check(self) -> None:
        """Whether this job may commit.

        Raises:
            FencedError: Another job came later.
            StoreError: The root cannot be read.
        """
        if self.root.exists(_name(self.seen + 2)):
            raise self._lost(self.seen + 2)

    def _lost(self, number: int) -> FencedError:
        return FencedError(
            f"{self.root.url}: another job saves here now, since {_name(number)} ({_told(self.root, number)}); nothing "
            "was committed: end this job, or load the newest checkpoint with CNRLoadPlanner(tracker) and go on from "
            "there; jobs that are to save side by side need roots of their own"
        )


def _owner() -> bytes:
    owner = {"job": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), "since_ns": time.time_ns()}
    return json.dumps(owner).encode()


class JobFences(dict[str, Fence]):
    """The fences of a job, by root.

    Attributes:
        owner: What its own fences hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owner = _owner()

    def fence(self, root: Store, is_new: bool = False) -> Fence:
        """That of a root; made anew if so asked."""
        place = without_client(root.url)
        if not is_new and (known := self.get(place)) is not None:
            return known
        with _turn(root):  # else a thread could put what it saw in the place of what another one saw later
            found = self.get(place)
            if found is None or is_new:
                seen = highest(root)
                if seen and not is_new and _read(root, seen) == self.owner:
                    seen -= 1  # put up by another process that saves for this job
                found = self[place] = Fence(root, seen, self.owner)
            return found

    def adopt(self, job: "JobFences") -> None:
        """From now on, this process saves for another one's job."""
        self.owner = job.owner
        self.update(job)

    def forget(self) -> None:
        """From now on, this process is a job of its own."""
        self.clear()
        self.owner = _owner()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.owner, dict(self))


def _received(owner: bytes, fences: Mapping[str, Fence]) -> JobFences:
    job = JobFences()
    job.owner = owner
    job.update(fences)
    return job


_turns: dict[str, threading.RLock] = {}  # by root: threads of this process look and put one after the other


def _turn(root: Store) -> threading.RLock:
    """Held from the look at a root's fences until what follows from it is done."""
    return _turns.setdefault(without_client(root.url), threading.RLock())


_job = JobFences()
os.register_at_fork(after_in_child=_turns.clear)  # a thread that the child does not have may hold one
os.register_at_fork(after_in_child=_job.forget)


def fence_of(checkpoint: Store) -> Fence:
    """The fence under which this process saves to the root of a checkpoint.

    Raises:
        StoreError: The root cannot be read.
    """
    return _job.fence(checkpoint.at(".."))


def restored_from(checkpoint: Store) -> None:
    """This process goes on from a checkpoint: all jobs that saved to its root until now are the past.

    Raises:
        StoreError: The root cannot be read.
    """
    _job.fence(checkpoint.at(".."), is_new=True)


def claim(root: Store) -> None:
    """This process is about to go on from the newest checkpoint of a root: no other job adds to it from now on.

    Raises:
        FencedError: Another job has done the same at this moment.
        StoreError: The root cannot be written to, or read.
    """
    root.make()
    with _turn(root):  # of two threads, the later one puts a fence of its own behind that of the first
        _job.fence(root, is_new=True).claim()


def own_fences() -> JobFences:
    """Those of this process's job, which a process that saves for it adopts."""
    return _job


def is_fence(name: str) -> bool:
    """Whether a file of a root is named like a fence."""
    return _NAME.fullmatch(name) is not None


def highest(root: Store) -> int:
    """The number of the highest fence; 0 if there is none. Looks at a handful of names."""
    low, high = 0, 1
    while root.exists(_name(high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if root.exists(_name(middle)) else (low, middle)
    return low


def _name(number: int) -> str:
    return f"fence-{number:08d}.json"


def _read(root: Store, number: int) -> bytes:
    """What a fence holds; of one that somebody else made too long, no more than tells it from others."""
    return root.read(_name(number), 0, _MAX_BYTES)


class _Owner(msgspec.Struct):
    """What a message tells of whoever put a fence."""

    host: str
    pid: int


def _told(root: Store, number: int) -> str:
    """Who put a fence, for a message; what stands in it is not trusted."""
    try:
        owner = msgspec.json.decode(_read(root, number), type=_Owner)
        return f"host {owner.host[:80]!r}, process {owner.pid}"
    except (OSError, ValueError, RecursionError):
        return "it does not tell whose"

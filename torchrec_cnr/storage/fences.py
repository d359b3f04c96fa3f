"""Fences: of two jobs that save to one root, one goes on and the other is refused.

A job that was thought dead may still be saving when its replacement does. A fence is a small file in the root, with a
number, that only one job can put. Every job puts the one behind the highest that it saw, before its first save: one
that was restored saw it at its load, any other sees it then. Once there is a higher one, its saves are refused.

Fences are never removed, and their numbers have no gaps, so that the highest is found without listing the root.
"""

import json
import os
import re
import socket
import time
import uuid
from dataclasses import dataclass

import msgspec

from torchrec_cnr.errors import CheckpointExistsError, FencedError
from torchrec_cnr.storage.store import Store
from torchrec_cnr.storage.urls import without_client

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
        name = _name(self.seen + 1)
        try:
            if not self.root.exists(name):
                self.root.put_new(name, self.owner, uuid.uuid4().hex[:16])
            is_ours = self.root.read(name) == self.owner
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


class _Jobs(dict[str, Fence]):
    """The fences of this process, by root."""

    def fence(self, root: Store, is_new: bool = False) -> Fence:
        """That of a root; made anew if so asked."""
        place = without_client(root.url)
        found = self.get(place)
        if found is None or is_new:
            found = self[place] = Fence(root, highest(root), _owner())
        return found


_jobs = _Jobs()
os.register_at_fork(after_in_child=_jobs.clear)  # a child is a job of its own


def fence_of(checkpoint: Store) -> Fence:
    """The fence under which this process saves to the root of a checkpoint.

    Raises:
        StoreError: The root cannot be read.
    """
    return _jobs.fence(checkpoint.at(".."))


def restored_from(checkpoint: Store) -> None:
    """This process goes on from a checkpoint: all jobs that saved to its root until now are the past.

    Raises:
        StoreError: The root cannot be read.
    """
    _jobs.fence(checkpoint.at(".."), is_new=True)


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


class _Owner(msgspec.Struct):
    """What a message tells of whoever put a fence."""

    host: str
    pid: int


def _owner() -> bytes:
    owner = {"job": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), "since_ns": time.time_ns()}
    return json.dumps(owner).encode()


def _told(root: Store, number: int) -> str:
    """Who put a fence, for a message; what stands in it is not trusted."""
    try:
        owner = msgspec.json.decode(root.read(_name(number)), type=_Owner)
        return f"host {owner.host[:80]!r}, process {owner.pid}"
    except (OSError, ValueError, RecursionError):
        return "it does not tell whose"

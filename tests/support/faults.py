"""Faults that a test injects: phases of a save that fail, methods that wait, full disks, flipped bits, other users."""

import ctypes
import functools
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from torchrec_cnr.saving import staging

PLANNER_PHASES = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data")
WRITER_PHASES = ("prepare_local_plan", "prepare_global_plan", "write_data", "finish")
COORDINATOR_PHASES = frozenset({"create_global_plan", "prepare_global_plan", "finish"})
PHASES = (*PLANNER_PHASES, *WRITER_PHASES)
NOBODY = 65534
WAIT_SECS = 100.0  # also for processes that import torch first


# Errors


class InjectedError(RuntimeError):
    """What a save of a test fails with."""


def causes(error: CheckpointException) -> dict[int, BaseException]:
    """What failed on which rank, as DCP reports it on every rank."""
    return {rank: failure[0] for rank, failure in error.failures.items()}


def failures_of(act: Callable[[], object]) -> dict[int, BaseException]:
    """What makes a save or a load fail, by rank."""
    with pytest.raises(CheckpointException) as raised:
        act()
    return causes(raised.value)


def failure_of(act: Callable[[], object]) -> BaseException:
    """The one thing that makes a save or a load fail."""
    (cause,) = failures_of(act).values()
    return cause


def own_rank() -> int:
    """This process's rank, 0 where there is no group."""
    return dist.get_rank() if dist.is_initialized() else 0


def raising(name: str) -> Callable[..., Any]:
    """A function that fails."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise InjectedError(f"{name} failed on rank {own_rank()}")

    return fail


# Methods


def replace_method(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Give an object or a class another method of the same signature, since DCP looks at the names of parameters."""
    setattr(owner, name, functools.wraps(getattr(owner, name))(replacement))


def act_before(owner: Any, name: str, act: Callable[[], object]) -> None:
    """Have an object, or all of a class, do something before a method's work."""
    original = getattr(owner, name)

    def act_then(*args: Any, **kwargs: Any) -> Any:
        act()
        return original(*args, **kwargs)

    replace_method(owner, name, act_then)


@contextmanager
def slowed(owner: Any, *names: str, secs: float) -> Iterator[None]:
    """Have methods of an object, or of all of a class, take longer, but not for later tests of the same ranks."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(owner, name, getattr(owner, name))
            act_before(owner, name, lambda: time.sleep(secs))
        yield


def has_committed(phase: str, when: str) -> bool:
    """Whether a save that fails there leaves a checkpoint."""
    return (phase, when) == ("finish", "after")


@contextmanager
def failing(
    planner: cnr.CNRSavePlanner, writer: cnr.CNRStorageWriter, phase: str, when: str, rank: int
) -> Iterator[None]:
    """Have a phase of saves fail on one rank, ``before`` it does its work or ``after``.

    Phases that only the coordinator has fail there. ``resolve_data`` fails at its second item. ``stage`` is what only
    asynchronous saves have, of all writers.
    """
    target: Any = staging if phase == "stage" else planner if phase in PLANNER_PHASES else writer
    if own_rank() != (0 if phase in COORDINATOR_PHASES else rank):
        yield
        return
    name = "_staged" if phase == "stage" else phase
    original = getattr(target, name)
    num_calls = 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if phase == "resolve_data" and num_calls == 1:
            return original(*args, **kwargs)
        if when == "after":
            original(*args, **kwargs)
        return raising(phase)()

    with mock.patch.object(target, name, functools.wraps(original)(fail)):
        yield


# Disks and files


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """No file of this process may become larger. Python ignores SIGXFSZ: a write fails instead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(path: str, num_bytes: int) -> Iterator[None]:
    """Mount a file system of this size, seen by this process only; raise OSError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.makedirs(path)
    namespace, private, recursive = 0x00020000, 0x40000, 0x4000
    is_mounted = (
        libc.unshare(namespace) == 0
        and libc.mount(b"none", b"/", None, private | recursive, None) == 0
        and libc.mount(b"tmpfs", path.encode(), b"tmpfs", 0, f"size={num_bytes}".encode()) == 0
    )
    if not is_mounted:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        yield
    finally:
        libc.umount2(path.encode(), 0)


def flip(path: str | Path, place: int, bit: int = 0) -> None:
    """Change one bit of a file.

    Args:
        path: The file.
        place: Of the byte; from the end where it is negative.
        bit: Of the byte.
    """
    data = bytearray(Path(path).read_bytes())
    data[place] ^= 1 << bit
    Path(path).write_bytes(data)


def flip_middle(path: str | Path) -> None:
    """Change a bit in the middle of a file."""
    flip(path, Path(path).stat().st_size // 2)


# Other users and processes


def give_to_nobody(root: Path) -> None:
    """Make a directory that of a user without privileges."""
    for path in (root, *root.rglob("*")):
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)


def become_nobody() -> None:
    """Give up, for good, the privileges by which this process may write everywhere."""
    if os.geteuid() == 0:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)


def wait_for(path: Path) -> None:
    """Wait until another process has made a file."""
    deadline = time.monotonic() + WAIT_SECS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} is not written"
        time.sleep(0.01)

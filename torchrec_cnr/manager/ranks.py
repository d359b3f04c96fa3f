"""The ranks of a run: their process groups for saves and decisions, and a heartbeat that identifies missing ranks.

When a collective fails or times out, it does not say which rank is missing. So a thread of every rank increments a
counter in the group's store once a second. A rank whose counter stops is dead or stopped.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.manager.restore import shared

logger = logging.getLogger(__name__)

HEARTBEAT_SECS = 1.0
_MAX_MISSED = 5  # heartbeats, since other threads of a live process may hold the GIL for a while
_instances = iter(range(1 << 62))  # all ranks create heartbeats in the same order, so these numbers agree


class Heartbeat:
    """The heartbeat of this rank, which begins at once. All ranks must create theirs in the same order.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.
        store: The store that contains the counters of all ranks.
    """

    def __init__(self, rank: int, world_size: int, store: Store) -> None:
        self._store = store
        self._prefix = f"torchrec_cnr/pulse/{next(_instances)}"
        self._rank = rank
        self._world_size = world_size
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="cnr-pulse", daemon=True)
        self._thread.start()
        # If the thread were in a call of the store while the interpreter exits, the process would crash.
        self._stop = weakref.finalize(self, _stop, self._is_closed, self._thread)

    def missing(self) -> Sequence[int]:
        """Return the ranks whose heartbeat has stopped. This takes some seconds.

        If the store does not answer either, return all ranks except this one.
        """
        missing_ranks: list[int] = []
        thread = threading.Thread(
            target=lambda: missing_ranks.extend(self._missing()), name="cnr-pulse-look", daemon=True
        )
        thread.start()
        thread.join(3 * _MAX_MISSED * HEARTBEAT_SECS)  # if the process of the store was stopped, its clients hang
        return self._others() if thread.is_alive() else missing_ranks

    def _missing(self) -> Sequence[int]:
        try:
            beats_before = self._beats()
            time.sleep(_MAX_MISSED * HEARTBEAT_SECS)
            beats_after = self._beats()
        except (RuntimeError, OSError) as error:
            logger.warning("the group's store does not answer: %s", error)
            return self._others()
        return [rank for rank in self._others() if beats_before[rank] == beats_after[rank]]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank != self._rank]

    def close(self) -> None:
        """End the heartbeat. The other ranks then regard this rank as missing."""
        self._stop()

    def _beat(self) -> None:
        while True:
            try:
                self._store.add(f"{self._prefix}/{self._rank}", 1)
            except (RuntimeError, OSError):  # the process that hosts the store has ended: the next collective fails
                return
            if self._is_closed.wait(HEARTBEAT_SECS):
                return

    def _beats(self) -> list[int]:
        return [self._store.add(f"{self._prefix}/{rank}", 0) for rank in range(self._world_size)]


def _stop(is_closed: threading.Event, thread: threading.Thread) -> None:
    is_closed.set()
    thread.join(HEARTBEAT_SECS)


class RunRanks:
    """All ranks of the default process group, or this process alone. All ranks must create it together.

    Background saves have a process group of their own, and decisions have another. On a shared group, their collectives
    could be mixed up with each other and with those of training.

    Args:
        timeout_secs: How many seconds a rank waits for the others.

    Attributes:
        rank: The rank of this process.
        group: The process group for saves and loads; None if there is only one process.
    """

    def __init__(self, timeout_secs: float) -> None:
        self.rank = 0
        self._is_closed = False
        self.group: dist.ProcessGroup | None = None
        self._deciding: dist.ProcessGroup | None = None
        self._pulse: Heartbeat | None = None
        if dist.is_initialized():
            timeout = timedelta(seconds=timeout_secs)
            self.rank = dist.get_rank()
            self.group = dist.new_group(backend="gloo", timeout=timeout)
            self._deciding = dist.new_group(backend="gloo", timeout=timeout)
            self._pulse = Heartbeat(self.rank, dist.get_world_size(), _get_default_store())

    def check_open(self) -> None:
        """Check that the manager is open: without its groups, each rank would save for itself.

        Raises:
            ConfigurationError: It was closed.
        """
        if self._is_closed:
            raise ConfigurationError("this manager was closed; create another one to save or restore")

    def decide(self, value: Any) -> Any:
        """Return the value of rank 0 on all ranks. If it is a ``CNRError``, raise it on all."""
        try:
            return shared(value, self._deciding)
        finally:
            del value  # else an error would be in a reference cycle with its own traceback

    def any(self, is_so: bool) -> bool:
        """Return whether ``is_so`` is true on any rank."""
        return any(self._gathered(is_so))

    def begin_max(self, numbers: Sequence[int]) -> Callable[[], Sequence[int]]:
        """Begin to find the largest of each number of all ranks. Return a function that waits for the result."""
        if self._deciding is None:
            return lambda: numbers
        values = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        work = dist.all_reduce(values, dist.ReduceOp.MAX, self._deciding, async_op=True)

        def answer() -> Sequence[int]:
            work.wait()
            largest: list[int] = values.tolist()
            return largest

        return answer

    def refuse_different(self, arguments: Mapping[str, object], at_failure: Callable[[], None]) -> None:
        """Compare the arguments by which each rank decides by itself whether to save, wait or retry.

        Args:
            arguments: The arguments of this rank, by name.
            at_failure: Called before an error is raised, when these ranks are closed.

        Raises:
            ConfigurationError: An argument differs between ranks. It is raised on all ranks.
        """
        try:
            self._refuse_different(arguments)
        except BaseException:
            self.close()
            at_failure()
            raise

    def _refuse_different(self, arguments: Mapping[str, object]) -> None:
        arguments_by_rank = self._gathered(dict(arguments))
        for name, value in arguments_by_rank[0].items():
            for rank, other_arguments in enumerate(arguments_by_rank):
                if other_arguments[name] != value:
                    got = f"{value!r} on rank 0, {other_arguments[name]!r} on rank {rank}"
                    raise ConfigurationError(f"{name!r} must be the same on all ranks (got {got})")

    def _gathered(self, value: Any) -> list[Any]:
        if self._deciding is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._deciding)
        dist.all_gather_object(values, value, group=self._deciding)
        return values

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Replace an error of a save's collective with one that names the missing ranks, if any are missing."""
        try:
            yield
        except RuntimeError as error:
            missing = () if self._pulse is None else self._pulse.missing()
            if not missing:
                raise
            ranks = f"rank {missing[0]} does" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} do"
            raise SaveError(
                f"{ranks} not answer: killed, stopped, or disconnected. The save was committed if it has a manifest; "
                "start the job again and restore the newest checkpoint"
            ) from error

    def close(self) -> None:
        """End the heartbeat of this rank and destroy its process groups."""
        self._is_closed = True
        if self._pulse is not None:
            self._pulse.close()
        for group in (self.group, self._deciding):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self.group = self._deciding = None

"""The ranks of a run: their process groups for saves and decisions, and a heartbeat that names a missing rank.

A collective that fails or times out tells that some rank is missing, not which. So every rank counts up a number in the
group's store, once a second, from a thread of its own, whatever else it does. A rank whose number stops is dead or
stopped.
"""

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.manager.restore import shared

logger = logging.getLogger(__name__)

HEARTBEAT_SECS = 1.0
_MAX_MISSED = 5  # beats, since a process may hold the interpreter's lock for a while
_instances = iter(range(1 << 62))  # ranks make theirs in one order


class Heartbeat:
    """This rank's pulse, from now on; all ranks make theirs alike.

    Args:
        rank: This rank.
        world_size: How many there are.
        store: Where ranks find one another's.
    """

    def __init__(self, rank: int, world_size: int, store: Store) -> None:
        self._store = store
        self._prefix = f"torchrec_cnr/pulse/{next(_instances)}"
        self._rank = rank
        self._world_size = world_size
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="cnr-pulse", daemon=True)
        self._thread.start()
        # Not to be caught in the store when the interpreter ends, which would end it with a crash.
        self._stop = weakref.finalize(self, _stop, self._is_closed, self._thread)

    def missing(self) -> Sequence[int]:
        """Ranks whose pulse has stopped; takes some seconds. All but this one, if not even the store answers."""
        found: list[int] = []
        looking = threading.Thread(target=lambda: found.extend(self._missing()), name="cnr-pulse-look", daemon=True)
        looking.start()
        looking.join(3 * _MAX_MISSED * HEARTBEAT_SECS)  # a store whose process was stopped keeps its clients waiting
        return self._others() if looking.is_alive() else found

    def _missing(self) -> Sequence[int]:
        try:
            before = self._beats()
            time.sleep(_MAX_MISSED * HEARTBEAT_SECS)
            after = self._beats()
        except (RuntimeError, OSError) as error:
            logger.warning("the group's store does not answer: %s", error)
            return self._others()
        return [rank for rank in self._others() if before[rank] == after[rank]]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank != self._rank]

    def close(self) -> None:
        """End it: others will take this rank for missing."""
        self._stop()

    def _beat(self) -> None:
        while True:
            try:
                self._store.add(f"{self._prefix}/{self._rank}", 1)
            except (RuntimeError, OSError):  # whoever has the store is gone: the next collective will tell
                return
            if self._is_closed.wait(HEARTBEAT_SECS):
                return

    def _beats(self) -> list[int]:
        return [self._store.add(f"{self._prefix}/{rank}", 0) for rank in range(self._world_size)]


def _stop(is_closed: threading.Event, thread: threading.Thread) -> None:
    is_closed.set()
    thread.join(HEARTBEAT_SECS)


class RunRanks:
    """All ranks of the default group, or this process alone; all ranks make theirs alike.

    Saves in the background must not meet collectives of training, on one group, nor decisions that are made meanwhile.

    Args:
        timeout_secs: How long a rank waits for the others.

    Attributes:
        rank: This one.
        group: For saves and loads; None where there is one process.
    """

    def __init__(self, timeout_secs: float) -> None:
        self.rank = 0
        self.group: dist.ProcessGroup | None = None
        self._deciding: dist.ProcessGroup | None = None
        self._pulse: Heartbeat | None = None
        if dist.is_initialized():
            timeout = timedelta(seconds=timeout_secs)
            self.rank = dist.get_rank()
            self.group = dist.new_group(backend="gloo", timeout=timeout)
            self._deciding = dist.new_group(backend="gloo", timeout=timeout)
            self._pulse = Heartbeat(self.rank, dist.get_world_size(), _get_default_store())

    def decide(self, value: Any) -> Any:
        """What rank 0 has, on all ranks."""
        try:
            return shared(value, self._deciding)
        finally:
            del value  # an error would refer to itself

    def any(self, is_so: bool) -> bool:
        """Whether it is so on any rank."""
        return any(self._gathered(is_so))

    def refuse_different(self, arguments: Mapping[str, object]) -> None:
        """Compare arguments by which each rank decides alone whether it takes part in a collective.

        Raises:
            ConfigurationError: One is not the same on all ranks; raised on all of them.
        """
        given = self._gathered(dict(arguments))
        for name, value in given[0].items():
            for rank, other in enumerate(given):
                if other[name] != value:
                    got = f"{value!r} on rank 0, {other[name]!r} on rank {rank}"
                    raise ConfigurationError(f"{name!r} must be the same on all ranks (got {got})")

    def _gathered(self, value: Any) -> list[Any]:
        if self._deciding is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(self._deciding)
        dist.all_gather_object(found, value, group=self._deciding)
        return found

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Replace an error that came from a collective of a save by one that names the missing ranks, if any are."""
        try:
            yield
        except RuntimeError as error:
            missing = () if self._pulse is None else self._pulse.missing()
            if not missing:
                raise
            ranks = f"rank {missing[0]} does" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} do"
            raise SaveError(
                f"{ranks} not answer: killed, stopped, or cut off. Whether the save was committed, its manifest tells; "
                "start the job again, and restore the newest checkpoint"
            ) from error

    def close(self) -> None:
        """This rank leaves, and gives its groups back."""
        if self._pulse is not None:
            self._pulse.close()
        for group in (self.group, self._deciding):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self.group = self._deciding = None

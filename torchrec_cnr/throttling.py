"""Throttling: limits on the share of a core, and on the bandwidth, that background work uses."""

import threading
import time

from torchrec_cnr.arguments import check_positive
from torchrec_cnr.errors import ConfigurationError


class CpuThrottle:
    """A throttle that rests between pieces of work, so that the calling thread uses only a share of a core.

    Args:
        cpu_share: The share of a core, more than 0 and at most 1.
        lifted: Set when the limit does not hold any more, which also ends a rest; None if it always holds.
    """

    def __init__(self, cpu_share: float, lifted: threading.Event | None = None) -> None:
        self._rest_secs = 1 / cpu_share - 1  # for each second of work
        self._worked_secs = time.thread_time()
        self._lifted = lifted or threading.Event()

    def rest(self) -> None:
        """Rest after a piece of work, in proportion to the processor time that it took."""
        if self._rest_secs > 0:
            self._lifted.wait(self._rest_secs * max(0.0, time.thread_time() - self._worked_secs))
            self._worked_secs = time.thread_time()


class Bandwidth:
    """A limit on the bytes per second of all threads together. Single writes may exceed it for a moment.

    Args:
        bytes_per_sec: The limit in bytes per second, or None for no limit.

    Attributes:
        lifted: Set when the limit does not hold any more, which also ends all waits.

    Raises:
        ConfigurationError: ``bytes_per_sec`` is not a number above 0.
    """

    def __init__(self, bytes_per_sec: float | None = None) -> None:
        if bytes_per_sec is not None:
            check_positive("max_bytes_per_sec", bytes_per_sec)
        self._bytes_per_sec = bytes_per_sec
        self.lifted = threading.Event()
        self._free_secs = 0.0  # the time at which all bytes so far would have been sent, at this rate
        self._lock = threading.Lock()

    def wait(self, num_bytes: int) -> None:
        """Wait until this many bytes may be sent."""
        if self._bytes_per_sec is None or self.lifted.is_set():
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_secs)
            self._free_secs = begin + num_bytes / self._bytes_per_sec
        self.lifted.wait(begin - now)

    def __reduce__(self) -> tuple[type["Bandwidth"], tuple[float | None]]:
        """Pickle only the limit: another process counts its own bytes."""
        return Bandwidth, (self._bytes_per_sec,)


def check_cpu_share(cpu_share: float) -> None:
    """Raise an error if ``cpu_share`` is not a share of a core.

    Raises:
        ConfigurationError: ``cpu_share`` is not a number above 0 and at most 1.
    """
    check_positive("cpu_share", cpu_share)
    if cpu_share > 1:
        raise ConfigurationError(f"'cpu_share' must be more than 0 and at most 1 (got {cpu_share})")

"""Pace: work behind training takes no more than its share of a core, and files no more than theirs of a network."""

import threading
import time

from torchrec_cnr.arguments import check_positive
from torchrec_cnr.errors import ConfigurationError


class CpuThrottle:
    """Rests between pieces of work, as long as the calling thread's share of a core asks for.

    Args:
        cpu_share: Of a core, from more than 0 to 1.
    """

    def __init__(self, cpu_share: float) -> None:
        self._rest_secs = 1 / cpu_share - 1  # for each second of work
        self._worked_secs = time.thread_time()

    def rest(self) -> None:
        """A piece of work is done."""
        if self._rest_secs > 0:
            time.sleep(self._rest_secs * max(0.0, time.thread_time() - self._worked_secs))
            self._worked_secs = time.thread_time()


class Bandwidth:
    """Lets so many bytes pass a second, of all threads together: by the second, not by the packet.

    Args:
        bytes_per_sec: How many; None for any.

    Raises:
        ConfigurationError: Not a number above 0.
    """

    def __init__(self, bytes_per_sec: float | None = None) -> None:
        if bytes_per_sec is not None:
            check_positive("max_bytes_per_sec", bytes_per_sec)
        self._bytes_per_sec = bytes_per_sec
        self._free_secs = 0.0  # when all that has passed would have, at this rate
        self._lock = threading.Lock()

    def wait(self, num_bytes: int) -> None:
        """Wait until as many bytes may pass."""
        if self._bytes_per_sec is None:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_secs)
            self._free_secs = begin + num_bytes / self._bytes_per_sec
        time.sleep(begin - now)

    def __reduce__(self) -> tuple[type["Bandwidth"], tuple[float | None]]:
        """Another process has one of its own."""
        return Bandwidth, (self._bytes_per_sec,)


def check_cpu_share(cpu_share: float) -> None:
    """Refuse what is no share.

    Raises:
        ConfigurationError: It is not above 0, or above 1.
    """
    check_positive("cpu_share", cpu_share)
    if cpu_share > 1:
        raise ConfigurationError(f"'cpu_share' must be more than 0 and at most 1 (got {cpu_share})")

"""Pace: work behind training takes no more than its share of a core."""

import time

from torchrec_cnr.errors import ConfigurationError


class Pace:
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


def check_cpu_share(cpu_share: float) -> None:
    """Refuse what is no share.

    Raises:
        ConfigurationError: It is not above 0, or above 1.
    """
    if not 0 < cpu_share <= 1:
        raise ConfigurationError(f"'cpu_share' must be more than 0 and at most 1 (got {cpu_share})")

"""Background saves: whether the save that was staged before still runs. DCP tells only who holds its future.

Until it has ended, nothing may be staged again: its rows would be overwritten in memory, and its marks settled too
early. DCP runs each asynchronous save in a thread of its own, which ends with it. With threads that is where the
planner is set up; with a process it is the thread that sends the save there and waits for the answer, and so the one
that pickles this. If DCP fails before that, no thread is left that is younger than the staging. A checkpoint that is
committed tells as well, for executors of other kinds.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from torchrec_cnr.errors import SaveError

_LOOK_SECS = 0.5  # between two looks into the store
_BEGIN_SECS = 120.0  # until a save begins: it may have to start a process first; what begins later is refused


class BackgroundSave:
    """The save that was staged last.

    Args:
        timeout_secs: How long to wait for its end.
    """

    def __init__(self, timeout_secs: float) -> None:
        self.timeout_secs = timeout_secs
        self._began = threading.Event()
        self._began.set()
        self._thread: threading.Thread | None = None
        self._older: frozenset[threading.Thread] = frozenset()

    def staged(self) -> None:
        """From now on a save is in flight, although DCP may not have begun it yet."""
        self._began.clear()
        self._thread = None
        self._older = frozenset(threading.enumerate())

    def started(self) -> None:
        """The save runs, in the thread that calls this."""
        self._thread = threading.current_thread()
        self._began.set()

    def finished(self) -> None:
        """Nothing of it runs any more."""
        self._thread = None
        self._began.set()

    @property
    def has_finished(self) -> bool:
        """Whether nothing of it runs any more."""
        if self._began.is_set():
            return self._thread is None or not self._thread.is_alive()
        return self._older.issuperset(threading.enumerate()) and not self._began.is_set()

    def wait(self, is_committed: Callable[[], bool]) -> None:
        """Wait for its end.

        Args:
            is_committed: Whether its checkpoint is in the store.

        Raises:
            SaveError: That took too long.
        """
        began = look = time.monotonic()
        while not self.has_finished and self._thread is not threading.current_thread():
            now = time.monotonic()
            if now > look + _LOOK_SECS:
                if is_committed():
                    break
                look = now
            if self._thread is None and now > began + _BEGIN_SECS:
                break
            if now > began + self.timeout_secs:
                raise SaveError(
                    f"the save before has not ended within {self.timeout_secs:g} s, so that no other can be staged: "
                    "wait for the future that dcp.async_save returned, or give the writer a longer 'timeout_secs'"
                )
            if self._thread is None:
                self._began.wait(0.01)
            else:
                self._thread.join(0.01)
        self.finished()

    def __reduce__(self) -> tuple[Any, ...]:
        self.started()
        return BackgroundSave, (self.timeout_secs,)

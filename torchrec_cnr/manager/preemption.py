"""Preemption: a scheduler announces by a signal that it will kill the job, and all ranks save once more.

The signal may reach one rank only, but all ranks must save at the same step. So each rank begins an all-reduce of its
flag at the end of each step, and reads the result at the end of the next one. By then it is there, so no rank waits. A
job of long steps, or with little time, may read it at once.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakSet

from torchrec_cnr.arguments import check_count, check_type
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.human_text import given_text
from torchrec_cnr.manager.ranks import RunRanks


@dataclass(frozen=True)
class Preemption:
    """The signals by which a scheduler announces that it will kill the job, and the exit status of a job that stops.

    At the end of the step in which such a signal comes, or of the next one, all ranks save a checkpoint. Then
    ``CheckpointManager.should_stop`` becomes true on all of them. This save, and one that is still running, ignore the
    limits of ``Background``, and ``close`` does not wait for maintenance.

    Attributes:
        signals: The signals. Slurm, Kubernetes and torchrun send SIGTERM; Slurm's ``--signal`` can send any other.
        exit_status: ``CheckpointManager.exit_status`` of a job that stops. It must not be 0, which
            schedulers read as success. The default is what a shell reports of a process that SIGTERM has ended.
        overlap: Whether the ranks agree during the next step, which takes no time, but delays the save by one step.
            Otherwise each step ends with an all-reduce of one number, for which it waits.

    Raises:
        ConfigurationError: A value is no signal that a process can handle, or no exit status from 1 to 255.

    Examples:
        >>> import signal
        >>> preemption = cnr.Preemption(signals=(signal.SIGUSR1,))
        >>> manager = cnr.CheckpointManager("run", tracker, preemption=preemption)
        >>> manager.should_stop, manager.exit_status
        (False, 0)
    """

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)
    exit_status: int = 128 + signal.SIGTERM
    overlap: bool = True

    def __post_init__(self) -> None:
        check_type("signals", self.signals, tuple, "a tuple of signals, such as (signal.SIGTERM,)")
        for number in self.signals:
            if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
                raise ConfigurationError(f"'signals' must be signals that a process can handle (got {number!r})")
        check_count("exit_status", self.exit_status, 1, 255)
        check_type("overlap", self.overlap, bool, "True or False")

    def __repr__(self) -> str:
        return given_text(self)


def check_preemption(preemption: object) -> None:
    """Check the argument of a manager.

    Raises:
        ConfigurationError: It is neither a ``Preemption`` nor None; or this is not the main thread, in which alone
            Python handles signals.
    """
    check_type("preemption", preemption, (Preemption, type(None)), "a Preemption, such as Preemption()")
    if preemption is not None and threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "'preemption' needs a manager that is made in the main thread, where Python handles signals: make it "
            "there, or pass preemption=None"
        )


_Handler = Callable[[int, FrameType | None], Any] | int | None


class Signals:
    """Handles signals from its creation until it is closed. Handlers of before are called, too.

    Args:
        signals: The signals to handle.

    Attributes:
        were_received: Whether one of them was received.
    """

    def __init__(self, signals: tuple[signal.Signals, ...]) -> None:
        self.were_received = False
        self._earlier: dict[signal.Signals, _Handler] = {}
        for number in signals:
            self._earlier[number] = signal.signal(number, self._receive)
        _of_process.add(self)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.were_received = True
        earlier = self._earlier.get(signal.Signals(number))
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def close(self) -> None:
        """Put the earlier handlers back, unless others have replaced them."""
        if threading.current_thread() is not threading.main_thread():
            return  # handlers cannot be changed here; they only set a flag
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        self._earlier.clear()


_of_process: WeakSet[Signals] = WeakSet()


def _close_in_child() -> None:
    """Let signals end a forked child, such as a worker of a data loader, as if there were no manager."""
    for signals in list(_of_process):
        signals.close()


os.register_at_fork(after_in_child=_close_in_child)


class StopAgreement:
    """Whether the job must stop, as all ranks have agreed at the same step.

    Args:
        preemption: The signals; None for none.
        ranks: The ranks that agree.

    Attributes:
        is_reached: Whether they have agreed to stop.
        exit_status: The exit status of the job: 0 unless it must stop.
    """

    def __init__(self, preemption: Preemption | None, ranks: RunRanks) -> None:
        self._preemption = preemption
        self._ranks = ranks
        self._signals = Signals(preemption.signals if preemption is not None else ())
        self._answer: Callable[[], Sequence[int]] | None = None
        self.is_reached = False

    @property
    def exit_status(self) -> int:
        return self._preemption.exit_status if self._preemption is not None and self.is_reached else 0

    def reach(self) -> bool:
        """Return whether all ranks agree to stop at this step, which is so once. All ranks call this at each step."""
        if self._preemption is None or self.is_reached:
            return False
        begun = self._ranks.begin_max([self._signals.were_received])
        answer, self._answer = (self._answer, begun) if self._preemption.overlap else (begun, None)
        self.is_reached = answer is not None and answer()[0] > 0
        return self.is_reached

    def close(self) -> None:
        """Handle signals no longer, unless the job stops.

        When the first rank has exited, torchrun sends SIGTERM to the others. They would die in the middle of what they
        still do.
        """
        if not self.is_reached:
            self._signals.close()
        self._answer = None

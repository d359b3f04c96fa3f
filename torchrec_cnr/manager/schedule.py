"""The schedule of checkpoints: at multiples of a number of steps, or after a number of seconds, and on all ranks alike.

The clocks of ranks differ, so the coordinator decides for all of them. A collective at every step would be too
expensive. So the coordinator estimates, from the speed so far, how many calls are left until the checkpoint is due. It
is asked again after half of them. Each question is a collective that ends in the background: ranks begin it at one call
and read the answer at the next one, so that no rank waits for another.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchrec_cnr.arguments import check_count, check_secs

_MAX_CALLS = 1000  # that are estimated to be left


@dataclass(frozen=True)
class Facts:
    """Facts that all ranks must know alike when they save.

    Attributes:
        is_busy: Whether the previous save is still running.
        is_corrupt: Whether maintenance has found that the latest checkpoint cannot be restored.
    """

    is_busy: bool = False
    is_corrupt: bool = False


def _of_one_rank(numbers: Sequence[int]) -> Callable[[], Sequence[int]]:
    return lambda: numbers


@dataclass
class Schedule:
    """Decides whether a checkpoint is due.

    Attributes:
        every_steps: Save at every multiple of this number of steps.
        every_secs: Save when this many seconds have passed since the last save.
        begin: Begins to find the largest of each number of all ranks, and returns a function that waits for the result.
        is_coordinator: Whether the clock of this rank counts.
    """

    every_steps: int | None
    every_secs: float | None
    begin: Callable[[Sequence[int]], Callable[[], Sequence[int]]] = _of_one_rank
    is_coordinator: bool = True
    _saved_at: float = field(default_factory=time.monotonic)
    _num_calls: int = 0  # since the last save
    _ask_at: int = 1
    _question: Callable[[], Sequence[int]] | None = None  # returns the answer to what was asked at the last call

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            check_count("every_steps", self.every_steps, least=1)
        if self.every_secs is not None:
            check_secs("every_secs", self.every_secs)

    def __call__(self, step: int, own: Facts, force: bool = False) -> Facts | None:
        """Return what is true on any rank, if a checkpoint is due after this step; otherwise None.

        All ranks must call this at every step, with the same arguments but for ``own``.

        Args:
            step: The number of the step.
            own: What is true on this rank.
            force: Whether a checkpoint is due in any case.
        """
        self._num_calls += 1
        is_time, agreed = self._answer()
        if force or is_time or self._is_due_at(step):
            return agreed or _facts(self._begun(own)())
        is_asked = self.every_secs is not None and self._num_calls >= self._ask_at
        if is_asked or self._is_due_at(step + 1):
            self._question = self._begun(own)
        return None

    def saved(self) -> None:
        """Record that a checkpoint was taken."""
        self._saved_at, self._num_calls, self._ask_at, self._question = time.monotonic(), 0, 1, None

    def _is_due_at(self, step: int) -> bool:
        if self.every_steps is None:
            return self.every_secs is None
        return step % self.every_steps == 0

    def _answer(self) -> tuple[bool, Facts | None]:
        """Return whether it is time for a checkpoint, and what ranks agree on, if this was asked at the last call."""
        if self._question is None:
            return False, None
        numbers, self._question = self._question(), None
        self._ask_at = max(self._ask_at, self._num_calls - 1 + max(1, numbers[0] // 2))
        return numbers[0] == 0, _facts(numbers)

    def _begun(self, own: Facts) -> Callable[[], Sequence[int]]:
        calls_left = self._calls_left() if self.is_coordinator else 0
        return self.begin([calls_left, own.is_busy, own.is_corrupt])

    def _calls_left(self) -> int:
        """Return after how many calls, from the next one on, a checkpoint is due; 0 if it is due at the next one."""
        if self.every_secs is None:
            return _MAX_CALLS
        passed_secs = time.monotonic() - self._saved_at
        calls_left = (self.every_secs - passed_secs) * self._num_calls / max(passed_secs, 1e-3) - 1
        return 0 if calls_left <= 0 else max(1, min(_MAX_CALLS, int(calls_left)))


def _facts(numbers: Sequence[int]) -> Facts:
    return Facts(*map(bool, numbers[1:]))

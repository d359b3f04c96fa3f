"""The schedule of checkpoints: at multiples of a number of steps, or after a number of seconds, and on all ranks alike.

The clocks of ranks differ, so the coordinator decides for all of them. A collective at every step would be too
expensive. So the coordinator estimates, from the speed so far, how many steps are left until the checkpoint is due. It
is asked again after half of them. Each question is a collective that ends in the background: ranks begin it at one step
and read the answer at the next one, so that no rank waits for another.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchrec_cnr.arguments import check_count, check_secs

_MAX_STEPS = 1000  # from one question to the next


@dataclass(frozen=True)
class Facts:
    """What ranks must know alike when they save.

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
    _saved_step: int | None = None
    _ask_at: int = 0
    _question: tuple[int, Callable[[], Sequence[int]]] | None = None  # the step at which it was begun, and its answer

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
        is_time, agreed = self._answer(step)
        if force or is_time or self._is_due_at(step):
            return agreed or self._facts(self._begun(step, own))
        if step >= self._ask_at or self._is_due_at(step + 1):
            self._question = step, self._begun(step, own)
        return None

    def saved(self, step: int) -> None:
        """Record that a checkpoint was taken."""
        self._saved_at, self._saved_step, self._ask_at, self._question = time.monotonic(), step, step + 1, None

    def _is_due_at(self, step: int) -> bool:
        if self.every_steps is None:
            return self.every_secs is None
        return step % self.every_steps == 0

    def _answer(self, step: int) -> tuple[bool, Facts | None]:
        """Return whether it is time for a checkpoint, and what ranks agree on, if this was asked at the last step."""
        if self._saved_step is None:
            self._saved_step = step
        if self._question is None:
            return False, None
        (asked_at, answer), self._question = self._question, None
        steps_left = answer()[0]
        self._ask_at = max(self._ask_at, asked_at + max(1, steps_left // 2))
        return steps_left == 0, self._facts(answer)

    @staticmethod
    def _facts(answer: Callable[[], Sequence[int]]) -> Facts:
        return Facts(*map(bool, answer()[1:]))

    def _begun(self, step: int, own: Facts) -> Callable[[], Sequence[int]]:
        steps_left = self._steps_left(step) if self.is_coordinator else 0
        return self.begin([steps_left, own.is_busy, own.is_corrupt])

    def _steps_left(self, step: int) -> int:
        """Return after how many steps, from the next one on, a checkpoint is due; 0 if it is due after the next one."""
        if self.every_secs is None or self._saved_step is None:
            return _MAX_STEPS
        passed_secs = time.monotonic() - self._saved_at
        steps_per_sec = max(1, step - self._saved_step) / max(passed_secs, 1e-3)
        steps_left = (self.every_secs - passed_secs) * steps_per_sec - 1
        return 0 if steps_left <= 0 else max(1, min(_MAX_STEPS, int(steps_left)))

"""The schedule of checkpoints: at multiples of a number of steps, or after a number of seconds, and on all ranks alike.

The clocks of ranks differ, so the coordinator decides for all of them. A collective at every step would be too
expensive. So the coordinator estimates, from the speed so far, how many steps are left until the checkpoint is due. It
is asked again after half of them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torchrec_cnr.arguments import check_count, check_secs


@dataclass
class Schedule:
    """Decides whether a checkpoint is due.

    Attributes:
        every_steps: Save at every multiple of this number of steps.
        every_secs: Save when this many seconds have passed since the last save.
        share: Returns the coordinator's number on all ranks. All ranks call it at the same steps.
    """

    every_steps: int | None
    every_secs: float | None
    share: Callable[[int], int] = lambda steps: steps
    _saved_at: float = field(default_factory=time.monotonic)
    _saved_step: int | None = None
    _ask_at: int = 0

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            check_count("every_steps", self.every_steps, least=1)
        if self.every_secs is not None:
            check_secs("every_secs", self.every_secs)

    def __call__(self, step: int) -> bool:
        """Return whether to save after this step. All ranks must call it at every step."""
        if self.every_steps is None and self.every_secs is None:
            return True
        if self.every_steps is not None and step % self.every_steps == 0:
            return True
        return self.every_secs is not None and self._is_time(step, self.every_secs)

    def saved(self, step: int) -> None:
        """Record that a checkpoint was taken."""
        self._saved_at, self._saved_step, self._ask_at = time.monotonic(), step, step + 1

    def _is_time(self, step: int, every_secs: float) -> bool:
        if self._saved_step is None:
            self._saved_step = step
        if step < self._ask_at:
            return False
        wait_steps = self.share(self._steps_left(step, self._saved_step, every_secs))
        self._ask_at = step + max(1, wait_steps // 2)
        return wait_steps == 0

    def _steps_left(self, step: int, saved_step: int, every_secs: float) -> int:
        passed_secs = time.monotonic() - self._saved_at
        if passed_secs >= every_secs:
            return 0
        steps_per_sec = max(1, step - saved_step) / max(passed_secs, 1e-3)
        return max(1, min(1000, int((every_secs - passed_secs) * steps_per_sec)))

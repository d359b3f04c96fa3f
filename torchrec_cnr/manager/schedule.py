"""When a checkpoint is due: every so many steps, or every so many seconds, at the same step on all ranks.

Clocks of ranks differ, and asking all of them at every step would cost more than the answer is worth. So the
coordinator says at which step to ask again: at half of the steps that it expects until the time is up, by the pace so
far.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torchrec_cnr.arguments import check_count, check_secs


@dataclass
class Schedule:
    """Whether a checkpoint is due.

    Attributes:
        every_steps: Save at every multiple of this number.
        every_secs: Save when so much time went by since the last save.
        share: Gives all ranks the coordinator's number; called by all of them at the same steps.
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
        """Whether to save after this step; to be called at every step, on all ranks."""
        if self.every_steps is None and self.every_secs is None:
            return True
        if self.every_steps is not None and step % self.every_steps == 0:
            return True
        return self.every_secs is not None and self._is_time(step, self.every_secs)

    def saved(self, step: int) -> None:
        """A checkpoint was taken."""
        self._saved_at, self._saved_step, self._ask_at = time.monotonic(), step, step + 1

    def _is_time(self, step: int, every_secs: float) -> bool:
        if self._saved_step is None:
            self._saved_step = step
        if step < self._ask_at:
            return False
        wait_steps = self.share(self._steps_left(step, self._saved_step, every_secs))
        self._ask_at = step + max(1, wait_steps // 2)
        return wait_steps == 0

    def _steps_left(self, step: int, since: int, every_secs: float) -> int:
        passed = time.monotonic() - self._saved_at
        if passed >= every_secs:
            return 0
        pace = max(1, step - since) / max(passed, 1e-3)
        return max(1, min(1000, int((every_secs - passed) * pace)))

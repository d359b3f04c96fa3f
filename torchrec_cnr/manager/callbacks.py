"""The callbacks of a manager: what they raise ends neither a save nor a thread."""

import logging
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from torchrec_cnr.progress import Saved

logger = logging.getLogger(__name__)


class Callbacks:
    """Calls what the user has passed. An error of it is logged with its traceback once, and counted.

    Args:
        on_saved: Gets each checkpoint that was committed; None for nobody.
        on_progress: Gets what is being done, and how much of how much is done; None for nobody.

    Attributes:
        num_errors: Calls that raised.
    """

    def __init__(
        self, on_saved: Callable[[Saved], None] | None, on_progress: Callable[[str, int, int], None] | None
    ) -> None:
        self.num_errors = 0
        self._on_saved = on_saved
        self._on_progress = on_progress
        self._told: set[str] = set()
        self._counting = threading.Lock()

    def saved(self, saved: Saved) -> None:
        """A checkpoint was committed."""
        self._call("on_saved", self._on_saved, saved)

    def progress(self, what: str, num_done: int, num_total: int) -> None:
        """So much is done; called from any thread."""
        self._call("on_progress", self._on_progress, what, num_done, num_total)

    def _call(self, name: str, callback: Callable[..., None] | None, *args: Any) -> None:
        if callback is None:
            return
        try:
            callback(*args)
        except (Exception, CheckpointException) as error:  # foreign code, whose errors are not those of a checkpoint
            with self._counting:
                self.num_errors += 1
                is_first = name not in self._told
                self._told.add(name)
            if is_first:
                logger.warning("%s raised, which ends nothing; later errors of it are counted", name, exc_info=error)

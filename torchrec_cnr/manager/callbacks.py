"""The callbacks of a manager: an exception that they raise ends neither a save nor a thread."""

import logging
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from torchrec_cnr.arguments import check_callable
from torchrec_cnr.progress import Saved

logger = logging.getLogger(__name__)


class Callbacks:
    """The callbacks that the user passed to a manager.

    The first exception of each callback is logged with its traceback. All of them are counted.

    Args:
        on_saved: Called with each committed checkpoint; None for no callback.
        on_progress: Called with the operation, the amount done and the total; None for no callback.

    Attributes:
        num_errors: Number of calls that raised an exception.

    Raises:
        ConfigurationError: An argument is neither a function nor None.
    """

    def __init__(
        self, on_saved: Callable[[Saved], None] | None, on_progress: Callable[[str, int, int], None] | None
    ) -> None:
        check_callable("on_saved", on_saved)
        check_callable("on_progress", on_progress)
        self.num_errors = 0
        self._on_saved = on_saved
        self._on_progress = on_progress
        self._told: set[str] = set()
        self._counting = threading.Lock()

    def saved(self, saved: Saved) -> None:
        """Call ``on_saved`` with a committed checkpoint."""
        self._call("on_saved", self._on_saved, saved)

    def progress(self, what: str, num_done: int, num_total: int) -> None:
        """Call ``on_progress`` with the operation ``what``, the amount done and the total. Any thread may call it."""
        self._call("on_progress", self._on_progress, what, num_done, num_total)

    def _call(self, name: str, callback: Callable[..., None] | None, *args: Any) -> None:
        if callback is None:
            return
        try:
            callback(*args)
        except (Exception, CheckpointException) as error:  # the user's code may raise anything; the save goes on
            with self._counting:
                self.num_errors += 1
                is_first = name not in self._told
                self._told.add(name)
            if is_first:
                logger.warning("%s raised an exception; later ones are only counted", name, exc_info=error)

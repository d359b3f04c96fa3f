"""Progress: how much of how much is done, told to whoever draws it or logs it."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # what is done, of what


class Count:
    """Adds up what is done.

    Args:
        total: What there is to do.
        progress: Whom to tell; None for nobody.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0

    def add(self, num: int) -> None:
        """So much more is done."""
        self._done += num
        if self._progress is not None:
            self._progress(self._done, self._total)

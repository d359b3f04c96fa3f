"""Removal of local copies that no restore of a run needs any more, on each rank and in the background."""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor

from torchrec_cnr.errors import CNRError
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.storage.local_copies import LocalCopies

logger = logging.getLogger(__name__)

_EVERY_SECS = 30.0


class UnusedCopies:
    """Removes the copies that the newest checkpoint does not need, when copies take more than half of their room.

    Without this, the oldest copies would be removed. These are often those of a baseline, which is still needed.

    Args:
        copies: The copies; None if there are none.
        root: The URL of the run's root.
    """

    def __init__(self, copies: LocalCopies | None, root: str) -> None:
        self._copies = copies
        self._root = root
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="cnr-copies")
        self._last: Future[None] | None = None
        self._began = time.monotonic() - _EVERY_SECS

    def after(self, path: str) -> None:
        """Look for unused copies after a commit, unless this was done a moment ago; ``path`` is the checkpoint."""
        is_busy = self._last is not None and not self._last.done()
        if self._copies is not None and not is_busy and time.monotonic() >= self._began + _EVERY_SECS:
            self._began = time.monotonic()
            self._last = self._threads.submit(remove_unused, self._copies, self._root, path)

    def wait(self) -> None:
        """Wait until nothing is being removed."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown()


def remove_unused(copies: LocalCopies, root: str, path: str) -> None:
    """Remove copies that a checkpoint does not need, if they take more than half of their room.

    Args:
        copies: The copies.
        root: The URL of the run's root.
        path: The newest checkpoint of the run.
    """
    try:
        if copies.is_filling():
            checkpoints = read_lineage(path).checkpoints
            packs = (pack for checkpoint in checkpoints for each in checkpoint.manifests for pack in each.packs)
            copies.remove_unused(root, {pack.name for pack in packs})
    except (CNRError, OSError) as error:  # a later checkpoint brings the next look
        logger.info("%s: cannot tell which local copies are unused: %s", path, error)

"""Commits that a log tells of: markers wake a subscriber up, a moment after a checkpoint is committed.

What is there to be applied, the root says, as ever; so a checkpoint that was committed before there was a log counts
too, and so does one whose marker the log has forgotten.
"""

import os
import threading
from collections.abc import Sequence

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.manifest import FILE_NAME
from torchrec_cnr.marking import settle
from torchrec_cnr.row_logs import Marker, RowLog, root_id
from torchrec_cnr.serving.commits import Commit, RootCommits
from torchrec_cnr.stores import Store

_SLICE_SECS = 0.1  # within which a wait notices that it was ended


class MarkerCommits:
    """The checkpoints directly under a root, whose commits a log tells of.

    Args:
        root: A path or fsspec URL.
        log: The log.
    """

    def __init__(self, root: str | os.PathLike[str], log: RowLog) -> None:
        self._root = Store.open(root, log=log)
        self._log = log
        self._commits = RootCommits(root)
        self._next: int | None = None  # offset of the first marker that was not seen
        self._is_closed = threading.Event()

    def newest_first(self) -> Sequence[Commit]:
        """See `Commits`."""
        if self._next is None:
            settle(self._root)
            self._see(self._log.markers(root_id(self._root.url), 1))
        return self._commits.newest_first()

    def wait(self, timeout_secs: float) -> None:
        """See `Commits`; returns as soon as there is a marker."""
        left_secs = timeout_secs
        while left_secs > 0 and self._next is not None and not self._is_closed.is_set():
            try:
                found = self._log.markers_from(self._next, min(left_secs, _SLICE_SECS))
            except DamagedError:  # so far behind that the log has forgotten what comes next
                self._next = None
                return
            if found:
                self._see(found)
                return
            left_secs -= _SLICE_SECS

    def close(self) -> None:
        """See `Commits`."""
        self._is_closed.set()
        self._commits.close()

    def _see(self, markers: Sequence[Marker]) -> None:
        """Markers come a moment before manifests get their names."""
        own = [marker for marker in markers if marker.root == root_id(self._root.url)]
        if any(not self._root.at(marker.name).exists(FILE_NAME) for marker in own):
            settle(self._root)
        self._next = max((marker.offset + 1 for marker in markers), default=self._next or 0)

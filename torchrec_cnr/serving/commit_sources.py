"""Sources of commits: which checkpoints there are to be applied, as a root directory or a Kafka topic tells.

Who calls what, one thread at a time: ``wait`` until there may be a new checkpoint, then ``newest_first`` for all there
are. ``RootCommits`` looks at a directory. Looking is cheap: a manifest's first bytes are read once, when it appears,
and a local directory is listed only after its modification time has changed.

``MarkerCommits`` is woken by markers in a topic, a moment after a checkpoint is committed. The root still decides what
there is: so a checkpoint counts that was committed before there was a topic, or whose marker the topic no longer has.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torchrec_cnr.errors import DamagedError, LoadError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.human_text import instant_text, url_text
from torchrec_cnr.lineage.abandoned import mark_of, marked_name
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.lineage.latest import committed_ns
from torchrec_cnr.lineage.marker_commit import publish_marked
from torchrec_cnr.storage.row_log import Marker, RowLog, root_id
from torchrec_cnr.storage.store import Store

_FAR_NS = 1 << 63  # some 250 years after now
_SETTLED_NS = 10**9  # after which a directory's time of modification tells of the next change, however coarse it is


@dataclass(frozen=True)
class Commit:
    """A checkpoint that was committed.

    Attributes:
        path: Its path or URL.
        created_ns: When, as its first manifest has it, in Unix nanoseconds; infinity if that cannot be told.
    """

    path: str
    created_ns: float

    def __repr__(self) -> str:
        when = instant_text(int(self.created_ns)) if 0 <= self.created_ns < _FAR_NS else "at an unknown time"
        return f"Commit({url_text(self.path)}, {when})"


class Commits(Protocol):
    """A source of commits. It may forget those older than the newest that was applied."""

    def newest_first(self) -> Sequence[Commit]:
        """All that is there to be applied, the newest first.

        Raises:
            StoreError: The source does not answer.
        """
        ...

    def wait(self, timeout_secs: float) -> None:
        """Return when there may be a new one, after a time, or as soon as the source is closed.

        Raises:
            StoreError: Nothing was heard; there may be a new one all the same.
        """
        ...

    def close(self) -> None:
        """End a wait, in another thread; there will be no other call."""
        ...


class RootCommits:
    """The checkpoints directly under a root that are not abandoned.

    Args:
        root: A path or fsspec URL.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Store.open(root)
        self._commits: dict[str, Commit] = {}
        self._pending: set[str] = set()  # directories without a manifest
        self._marks: dict[str, set[str]] = {}  # the files that mark checkpoints of a name as abandoned
        self._mark_of: dict[Commit, str] = {}  # the name of the file that would mark it; "" if it cannot be read
        self._stamps: dict[str, int] = {}  # of local directories, the root's under ""
        self._is_closed = threading.Event()

    def __repr__(self) -> str:
        return f"RootCommits({url_text(self._root.url)})"

    def newest_first(self) -> Sequence[Commit]:
        """See `Commits`."""
        for name in sorted(self._pending | self._changed_names()):
            self._look_at(name)
        found = [commit for name, commit in self._commits.items() if not self._is_abandoned(name, commit)]
        return sorted(found, key=lambda commit: (commit.created_ns, commit.path), reverse=True)

    def wait(self, timeout_secs: float) -> None:
        """See `Commits`; a directory does not tell, so this is a pause."""
        self._is_closed.wait(timeout_secs)

    def close(self) -> None:
        """See `Commits`."""
        self._is_closed.set()

    def _changed_names(self) -> set[str]:
        """Directories that may hold another manifest than when they were looked at last."""
        if not self._has_changed(""):
            return set()
        listing = self._root.listing()
        self._marks = {}
        for file in listing.files:
            if (marked := marked_name(file)) is not None:
                self._marks.setdefault(marked, set()).add(file)
        names = {*listing.directories, *listing.links}
        for gone in (self._commits.keys() | self._pending) - names:
            self._commits.pop(gone, None)
            self._stamps.pop(gone, None)
            self._pending.discard(gone)
        if self._root.is_local:
            return {name for name in names if self._has_changed(name)}
        newest = max(self._commits, key=lambda name: self._commits[name].created_ns, default=None)
        return {name for name in names if name not in self._commits or name == newest}

    def _is_abandoned(self, name: str, commit: Commit) -> bool:
        if name not in self._marks:
            return False
        if commit not in self._mark_of:
            try:
                self._mark_of[commit] = mark_of(read_checkpoint(self._root.at(name)))
            except LoadError:  # told when it is applied
                self._mark_of[commit] = ""
        return self._mark_of[commit] in self._marks[name]

    def _has_changed(self, name: str) -> bool:
        """Whether names in a directory came or went since this was asked last; True where that cannot be told."""
        if not self._root.is_local:
            return True
        try:
            stamp = os.stat(self._root.child(name)).st_mtime_ns
        except OSError:
            self._stamps.pop(name, None)
            return True
        if self._stamps.get(name) == stamp:
            return False
        if time.time_ns() - stamp > _SETTLED_NS:
            self._stamps[name] = stamp
        return True

    def _look_at(self, name: str) -> None:
        at_ns = committed_ns(self._root.at(name), logging.INFO)
        known = self._commits.get(name)
        if at_ns is None and known is not None and self._root.at(name).exists(MANIFEST_FILE):
            return  # it may not be read just now: an older one must not be applied in its place
        if at_ns is None:
            self._commits.pop(name, None)
            self._pending.add(name)
        else:
            self._pending.discard(name)
            if known is None or at_ns != float("inf"):  # what was applied may be damaged afterwards
                self._commits[name] = Commit(self._root.at(name).url, at_ns)


_SLICE_SECS = 0.1  # within which a wait notices that it was ended


class MarkerCommits:
    """The checkpoints directly under a root, whose commits a log tells of.

    Args:
        root: A path or fsspec URL.
        row_log: The log.
    """

    def __init__(self, root: str | os.PathLike[str], row_log: RowLog) -> None:
        self._root = Store.open(root, row_log=row_log)
        self._log = row_log
        self._commits = RootCommits(root)
        self._next: int | None = None  # offset of the first marker that was not seen; None to look through the root
        self._is_closed = threading.Event()

    def newest_first(self) -> Sequence[Commit]:
        """See `Commits`."""
        if self._next is None:
            self._begin()
        return self._commits.newest_first()

    def wait(self, timeout_secs: float) -> None:
        """See `Commits`; returns as soon as there is a marker, and raises if the log does not answer."""
        left_secs = timeout_secs
        if self._next is None:
            self._commits.wait(timeout_secs)
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

    def _begin(self) -> None:
        end = self._log.end()  # what is marked from now on wakes a wait up
        publish_marked(self._root)
        self._next = end

    def _see(self, markers: Sequence[Marker]) -> None:
        """Markers come a moment before manifests get their names."""
        self._next = None  # if that fails, because of whatever name a marker has
        publish_marked(self._root, {marker.name for marker in markers if marker.root == root_id(self._root.url)})
        self._next = max(marker.offset + 1 for marker in markers)

"""Sources of commits: a root directory or a Kafka topic, which announces the checkpoints to apply.

Call ``wait``, which returns when there may be a new checkpoint, and then ``newest_first``, which returns all of them.
Only one thread at a time may do so. ``RootCommits`` polls a directory. Polling is cheap: the first bytes of a manifest
are read once, when it appears, and a local directory is listed only after its modification time has changed.

``MarkerCommits`` waits for markers in a topic, which arrive a moment after each commit. The list of checkpoints still
comes from the root. So it includes those committed before the topic existed, and those whose marker has expired.
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

_FAR_NS = 1 << 63  # about 250 years from now
_SETTLED_NS = 10**9  # a change this long after the last one alters a modification time of any resolution


@dataclass(frozen=True)
class Commit:
    """A committed checkpoint.

    Attributes:
        path: Path or URL of the checkpoint.
        created_ns: Unix time of the commit in nanoseconds, from its first manifest; infinity if it cannot be read.

    Examples:
        >>> commit = cnr.RootCommits("run").newest_first()[0]
        >>> commit.path
        '/.../run/step-2'
        >>> commit.created_ns == cnr.read_checkpoint("run/step-2").created_ns
        True
    """

    path: str
    created_ns: float

    def __repr__(self) -> str:
        time_text = instant_text(int(self.created_ns)) if 0 <= self.created_ns < _FAR_NS else "at an unknown time"
        return f"Commit({url_text(self.path)}, {time_text})"


class Commits(Protocol):
    """A source of commits. It may drop commits that are older than the newest applied one.

    Examples:
        >>> class Released:
        ...     def newest_first(self):
        ...         return [cnr.Commit("run/step-1", created_ns=0)]
        ...
        ...     def wait(self, timeout_secs): ...
        ...     def close(self): ...
        >>> served = torch.nn.ModuleDict({"users": torch.nn.EmbeddingBag(1_000, 16)})
        >>> with cnr.RowSubscriber(served, Released()) as subscriber:
        ...     print(subscriber.applied)
        run/step-1
    """

    def newest_first(self) -> Sequence[Commit]:
        """Return all checkpoints that can be applied, the newest first.

        Raises:
            StoreError: The source does not answer.
        """
        ...

    def wait(self, timeout_secs: float) -> None:
        """Return when there may be a new checkpoint, after a timeout, or as soon as the source is closed.

        Raises:
            StoreError: The source does not answer; there may still be a new checkpoint.
        """
        ...

    def close(self) -> None:
        """End a ``wait`` in another thread. No other call may follow."""
        ...


class RootCommits:
    """The checkpoints directly under a root that are not abandoned.

    Args:
        root: A path or fsspec URL.

    Examples:
        >>> [commit.path for commit in cnr.RootCommits("run").newest_first()]
        ['/.../run/step-2', '/.../run/step-1']
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Store.open(root)
        self._commits: dict[str, Commit] = {}
        self._pending: set[str] = set()  # directories without a manifest
        self._marks: dict[str, set[str]] = {}  # names of the files that mark a checkpoint as abandoned, by its name
        self._mark_of: dict[Commit, str] = {}  # name of the file that would mark it; "" if it is unreadable
        self._stamps: dict[str, int] = {}  # modification times of local directories; the root's under ""
        self._is_closed = threading.Event()

    def __repr__(self) -> str:
        return f"RootCommits({url_text(self._root.url)})"

    def newest_first(self) -> Sequence[Commit]:
        """Return all checkpoints, the newest first; see ``Commits``."""
        for name in sorted(self._pending | self._changed_names()):
            self._look_at(name)
        commits = [commit for name, commit in self._commits.items() if not self._is_abandoned(name, commit)]
        return sorted(commits, key=lambda commit: (commit.created_ns, commit.path), reverse=True)

    def wait(self, timeout_secs: float) -> None:
        """Wait for the whole timeout, since a directory announces nothing; see ``Commits``."""
        self._is_closed.wait(timeout_secs)

    def close(self) -> None:
        """End a wait in another thread; see ``Commits``."""
        self._is_closed.set()

    def _changed_names(self) -> set[str]:
        """Return the directories whose manifest may have changed since the last look."""
        if not self._has_changed(""):
            return set()
        listing = self._root.listing()
        self._marks = {}
        for file in listing.files:
            if (abandoned_name := marked_name(file)) is not None:
                self._marks.setdefault(abandoned_name, set()).add(file)
        names = {*listing.directories, *listing.links}
        for removed_name in (self._commits.keys() | self._pending) - names:
            self._commits.pop(removed_name, None)
            self._stamps.pop(removed_name, None)
            self._pending.discard(removed_name)
        if self._root.is_local:
            return {name for name in names if self._has_changed(name)}
        newest_name = max(self._commits, key=lambda name: self._commits[name].created_ns, default=None)
        return {name for name in names if name not in self._commits or name == newest_name}

    def _is_abandoned(self, name: str, commit: Commit) -> bool:
        if name not in self._marks:
            return False
        if commit not in self._mark_of:
            try:
                self._mark_of[commit] = mark_of(read_checkpoint(self._root.at(name)))
            except LoadError:  # raised again when the checkpoint is applied
                self._mark_of[commit] = ""
        return self._mark_of[commit] in self._marks[name]

    def _has_changed(self, name: str) -> bool:
        """Return whether the names in a directory may have changed since the last call."""
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
        known_commit = self._commits.get(name)
        if at_ns is None and known_commit is not None and self._root.at(name).exists(MANIFEST_FILE):
            return  # it cannot be read at the moment, and an older one must not be applied instead
        if at_ns is None:
            self._commits.pop(name, None)
            self._pending.add(name)
        else:
            self._pending.discard(name)
            if known_commit is None or at_ns != float("inf"):  # an applied checkpoint may become corrupt later
                self._commits[name] = Commit(self._root.at(name).url, at_ns)


_SLICE_SECS = 0.1  # interval at which a wait checks whether the source was closed


class MarkerCommits:
    """The checkpoints directly under a root, whose commits a log announces.

    Args:
        root: A path or fsspec URL.
        row_log: The log that contains the markers.
    """

    def __init__(self, root: str | os.PathLike[str], row_log: RowLog) -> None:
        self._root = Store.open(root, row_log=row_log)
        self._log = row_log
        self._commits = RootCommits(root)
        self._next: int | None = None  # offset of the first unseen marker; None to search the root again
        self._is_closed = threading.Event()

    def newest_first(self) -> Sequence[Commit]:
        """Return all checkpoints, the newest first; see ``Commits``."""
        if self._next is None:
            self._begin()
        return self._commits.newest_first()

    def wait(self, timeout_secs: float) -> None:
        """Wait for a marker; see ``Commits``."""
        left_secs = timeout_secs
        if self._next is None:
            self._commits.wait(timeout_secs)
        while left_secs > 0 and self._next is not None and not self._is_closed.is_set():
            try:
                markers = self._log.markers_from(self._next, min(left_secs, _SLICE_SECS))
            except DamagedError:  # the log has already removed the next marker
                self._next = None
                return
            if markers:
                self._see(markers)
                return
            left_secs -= _SLICE_SECS

    def close(self) -> None:
        """End a wait in another thread; see ``Commits``."""
        self._is_closed.set()
        self._commits.close()

    def _begin(self) -> None:
        end_offset = self._log.end()  # later markers end a wait
        publish_marked(self._root)
        self._next = end_offset

    def _see(self, markers: Sequence[Marker]) -> None:
        """Publish the manifests of these markers, since a manifest gets its name a moment after its marker."""
        self._next = None  # so that the root is searched again if the next line fails
        publish_marked(self._root, {marker.name for marker in markers if marker.root == root_id(self._root.url)})
        self._next = max(marker.offset + 1 for marker in markers)

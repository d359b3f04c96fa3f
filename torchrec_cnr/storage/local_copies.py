"""Local copies: data files that a rank wrote or read are kept on a disk of its host, and restores read them from there.

A copy has the name of its data file, with a suffix, and all bytes at the same places. What was not copied is a hole.
Nothing depends on what is in a copy: a reader compares each blob with its digest in the manifest, and reads from the
store what is missing, torn, stale or foreign. So copies are written without forcing them to disk, by several processes
at once, and can be removed at any time. The store alone decides which checkpoints exist.
"""

import errno
import logging
import os
import posixpath
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedWriter
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from torchrec_cnr.arguments import check_count
from torchrec_cnr.errors import ConfigurationError, DamagedError
from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.human_text import bytes_text
from torchrec_cnr.storage.files import Buffer
from torchrec_cnr.storage.local_files import read_array
from torchrec_cnr.storage.row_log import root_id
from torchrec_cnr.storage.urls import checked_url, protocol_of

logger = logging.getLogger(__name__)

_DISK_PART, _FREE_PART = 0.25, 0.5  # of a file system, and of what others leave of it, that copies take by default
_COUNT_PART = 64  # the directory is measured again after this part of its bytes was written
_ROOM_PART = 0.75  # of the bytes that are left when copies are removed
_YOUNG_SECS = 60.0  # the checkpoint of a younger copy may not be committed yet
_FOLDER, _SUFFIX = "cnr-copies-", ".copy"  # only files with such names are removed
_ROOT = re.compile(re.escape(_FOLDER) + "[0-9a-f]{16}")


@dataclass(frozen=True)
class _Copy:
    """A file in the directory: its path, the bytes that it takes on the disk, and when it was written, in seconds."""

    path: str
    num_bytes: int
    written_at: float


class LocalCopies:
    """Copies of data files on a disk of this host, from which restores read what the host has already had.

    Pass the same directory to the writer and to the readers of a run, or to ``CheckpointManager``. The ranks of a host
    may share it, and so may several runs. What a rank saves goes to the store and to the copies. A restore reads each
    blob from the copies if its digest is right there, and otherwise from the store, and copies it. If the disk is full
    or fails, a warning is logged once, and saves and restores use the store alone.

    Args:
        path: A directory of a local file system, such as ``/local/nvme/run`` or ``/dev/shm/run``. It is made when it
            is needed.
        max_bytes: Bytes that copies may take, about. If more are needed, the oldest copies are removed. The default is
            a quarter of the file system, and at most half of what other files leave of it.

    Attributes:
        num_local_bytes: Bytes that this process has read from copies.
        num_store_bytes: Bytes that it has read from the store, because no copy had them.

    Raises:
        ConfigurationError: The path is not local, or ``max_bytes`` is not a whole number of at least 1.

    Examples:
        >>> copies = cnr.LocalCopies("/dev/shm/run", max_bytes=1 << 30)
        >>> writer = cnr.CNRStorageWriter("run", local=copies)
        >>> metadata = dcp.save(state, checkpoint_id="run/step-3", storage_writer=writer, planner=planner)
        >>> dcp.load(state, storage_reader=cnr.CNRStorageReader("run/step-3", local=copies))
        >>> copies.num_local_bytes > 0, copies.num_store_bytes > 0  # the older checkpoints had no copies yet
        (True, True)
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        name = checked_url(path)
        if protocol_of(name) not in ("", "file") or "\0" in name or not _is_encodable(name):
            raise ConfigurationError(f"'local' must be a directory of a local file system (got {name!r})")
        if max_bytes is not None:
            check_count("max_bytes", max_bytes, least=1)
        self._path = str(LocalFileSystem._strip_protocol(name))
        self._max_bytes = max_bytes
        self._keeps_reads = True
        self._locks: dict[
            int, threading.Lock
        ] = {}  # by process: after a fork, a lock may be held by a thread that is gone
        self._num_until_count = 0
        self._has_warned = False
        self.num_local_bytes = 0
        self.num_store_bytes = 0

    def __repr__(self) -> str:
        return f"LocalCopies({self._path!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process."""
        return {**self.__dict__, "_locks": {}}

    @property
    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    @classmethod
    def of(cls, given: "str | os.PathLike[str] | LocalCopies | None") -> "LocalCopies | None":
        """Return the copies that a user has asked for: a path, or copies themselves; None for none."""
        return given if given is None or isinstance(given, LocalCopies) else cls(given)

    def without_reads(self) -> "LocalCopies":
        """Return the same copies for maintenance, whose reads are not worth a copy: its host may never need them."""
        copies = LocalCopies(self._path, max_bytes=self._max_bytes)
        copies._keeps_reads = False
        return copies

    def put(self, place: str, parts: Sequence[Buffer]) -> None:
        """Copy a data file that was written.

        Args:
            place: Path or URL of the data file.
            parts: Its content.
        """
        num_bytes = sum(memoryview(part).nbytes for part in parts)

        def write(path: str) -> None:
            with _opened(path, os.O_TRUNC) as file:
                for part in parts:
                    file.write(part)

        self._keep(place, num_bytes, write)

    def fill(self, place: str, start: int, data: Bytes) -> None:
        """Copy bytes that were read from the store, of which the first is at ``start`` in the data file."""
        with self._lock:
            self.num_store_bytes += data.nbytes
        if self._keeps_reads:
            self._keep(place, data.nbytes, lambda path: _write_at(path, start, data))

    def read(self, place: str, start: int, stop: int, on_piece: Callable[[Bytes], None]) -> Bytes | None:
        """Return bytes of a copy, which the caller must compare with their digests; None if there are not so many.

        Args:
            place: Path or URL of the data file.
            start: Offset of the first byte.
            stop: Offset after the last byte.
            on_piece: Called with consecutive views of the bytes, each as soon as it was read.
        """
        try:
            data = read_array(self._path_of(place), start, stop, on_piece)
        except FileNotFoundError:
            return None
        except (OSError, DamagedError) as error:
            self._warn(error)
            return None
        return data if data.nbytes == stop - start else None

    def used(self, num_bytes: int) -> None:
        """Count bytes that were read from a copy and had the right digests."""
        with self._lock:
            self.num_local_bytes += num_bytes

    @contextmanager
    def logged(self, url: str) -> Iterator[None]:
        """Log how many bytes a load reads from copies and from the store; ``url`` is the checkpoint."""
        local, store = self.num_local_bytes, self.num_store_bytes
        yield
        local, store = self.num_local_bytes - local, self.num_store_bytes - store
        logger.info("%s: %s read from local copies, %s from the store", url, bytes_text(local), bytes_text(store))

    def is_filling(self) -> bool:
        """Return whether copies take more than half of their room, so that unused ones should be removed."""
        taken_bytes = sum(copy.num_bytes for copy in self._copies())
        return taken_bytes > self._most_bytes(taken_bytes) / 2

    def remove_unused(self, root: str, used: Collection[str]) -> None:
        """Remove copies of data files under a root, except those with these names and those of the last minute."""
        newest = time.time() - _YOUNG_SECS
        folder = posixpath.join(self._path, _FOLDER + root_id(root))
        for copy in list(self._copies()):
            directory, name = posixpath.split(copy.path)
            if directory == folder and name.removesuffix(_SUFFIX) not in used and copy.written_at < newest:
                _remove(copy.path)

    def _path_of(self, place: str) -> str:
        directory, name = posixpath.split(place)
        return posixpath.join(self._path, _FOLDER + root_id(posixpath.dirname(directory)), name + _SUFFIX)

    def _keep(self, place: str, num_bytes: int, write: Callable[[str], None]) -> None:
        path = self._path_of(place)
        try:
            os.makedirs(folder := posixpath.dirname(path), exist_ok=True)
            if os.path.islink(folder):
                raise OSError(errno.ELOOP, "a link, whose files would not be counted", folder)
            if not self._has_room(num_bytes):
                return
            write(path)
        except OSError as error:
            self._warn(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                _remove(path)  # others may need the space, and half of a file is of little use

    def _has_room(self, num_bytes: int) -> bool:
        """Return whether so many bytes can be written; remove the oldest copies if they take too much."""
        with self._lock:
            self._num_until_count -= num_bytes
            if self._num_until_count >= 0:
                return True
            copies = sorted(self._copies(), key=lambda copy: copy.written_at)
            total = sum(copy.num_bytes for copy in copies)
            most_bytes = self._most_bytes(total)
            total += num_bytes
            if total > most_bytes >= num_bytes:
                for copy in copies:
                    if total <= max(num_bytes, _ROOM_PART * most_bytes):
                        break
                    total -= copy.num_bytes if _remove(copy.path) else 0
            has_room = total <= most_bytes
            self._num_until_count = most_bytes // _COUNT_PART if has_room else 0
            return has_room

    def _most_bytes(self, taken_bytes: int) -> int:
        """Return how many bytes copies may take that take so many now."""
        if self._max_bytes is not None:
            return self._max_bytes
        existing = self._path
        while not os.path.exists(existing):
            existing = posixpath.dirname(existing)
        usage = shutil.disk_usage(existing)
        return int(min(_DISK_PART * usage.total, _FREE_PART * (usage.free + taken_bytes)))

    def _copies(self) -> Iterator[_Copy]:
        """Yield all copies. Other files in the directory are not touched."""
        for folder in _entries(self._path):
            if not _ROOT.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in _entries(folder.path):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if entry.name.endswith(_SUFFIX):
                    yield _Copy(entry.path, status.st_blocks * 512, status.st_mtime)

    def _warn(self, error: Exception) -> None:
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
        logger.warning("%s: copies cannot be used; the store is used instead: %s", self._path, error)


def _is_encodable(name: str) -> bool:
    """Return whether a file can have this name."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def _entries(path: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _opened(path: str, flags: int = 0) -> BufferedWriter:
    """Open a regular file for writing; make it if there is none.

    Raises:
        OSError: It cannot be opened, or is a link, a pipe or a device. Opening a pipe would wait for a reader.
    """
    flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o666), "wb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a regular file", path)


def _write_at(path: str, start: int, data: Bytes) -> None:
    """Write bytes into a file, which is made if there is none; what was never written is a hole."""
    with _opened(path) as file:
        file.seek(start)
        file.write(data.data)


def _remove(path: str) -> bool:
    """Remove a file, and return whether it is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        logger.debug("cannot remove %s: %s", path, error)
        return False
    return True

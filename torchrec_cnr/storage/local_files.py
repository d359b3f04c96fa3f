"""Local files: what makes files and their names durable, and a file appear at once and whole."""

import ctypes
import errno
import fcntl
import os
import posixpath
import stat
from collections.abc import Callable
from contextlib import suppress
from io import FileIO

import numpy as np
import numpy.typing as npt

from torchrec_cnr.errors import DamagedError

_PIECE_BYTES = 256 << 10  # stays in a core's cache until it was looked at
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # from file systems without hard links
_HERE, _NOT_REPLACING = -100, 1  # AT_FDCWD and RENAME_NOREPLACE of <fcntl.h> and <linux/fs.h>


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: str) -> None:
    """Make a directory and those above it, durably: each has its name for good before anything is in it.

    Whoever made the one that is there already may have been killed before it was durable, so that its name is forced to
    disk once more, where this process may read the directory above.
    """
    missing: list[str] = []
    there = path
    while there != "/" and not os.path.exists(there):
        missing.append(there)
        there = posixpath.dirname(there)
    with suppress(PermissionError):
        sync_directory(posixpath.dirname(there))
    for directory in reversed(missing):
        os.makedirs(directory, exist_ok=True)
        sync_directory(posixpath.dirname(directory))
    os.makedirs(path, exist_ok=True)  # refuses a file of that name


def remove_empty(path: str) -> None:
    """Remove a directory if it is there and nothing is in it."""
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def link_new(path: str, data: bytes, unlinked: str, sync_files: bool) -> None:
    """Write a file atomically, unless its name exists: one that is created exclusively is there before its bytes are.

    Args:
        path: The file.
        data: What is in it.
        unlinked: What it is called until it is whole.
        sync_files: Whether it is forced to disk.

    Raises:
        FileExistsError: The name exists.
    """
    try:
        with open(unlinked, "xb") as file:
            file.write(data)
            if sync_files:
                file.flush()
                os.fsync(file.fileno())
        if sync_files:
            sync_directory(posixpath.dirname(path))  # the packs' names, which must not come after the manifest's
        try:
            os.link(unlinked, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _rename_new(unlinked, path)
    finally:
        if os.path.exists(unlinked):
            os.unlink(unlinked)
    if sync_files:
        sync_directory(posixpath.dirname(path))


def _rename_new(unlinked: str, path: str) -> None:
    """Give a file its name where there are no links, unless the name exists.

    The name is never there without all bytes, also if the process is killed meanwhile. The kernel renames the file only
    if the name is free, in one step, where the file system can. Elsewhere a lock of the directory keeps others from
    taking the name between the look and the rename; the lock ends with the process.

    Raises:
        FileExistsError: The name exists.
    """
    if _rename_at_once(unlinked, path):
        return
    directory = os.open(posixpath.dirname(path), os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        os.rename(unlinked, path)
    finally:
        os.close(directory)


def _rename_at_once(unlinked: str, path: str) -> bool:
    """Rename a file by Linux's ``renameat2``, which no module of Python has; False if the file system cannot.

    Raises:
        OSError: As :func:`_rename_new`.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(unlinked), _HERE, os.fsencode(path), _NOT_REPLACING) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, *_NO_LINKS):
        return False
    raise OSError(number, os.strerror(number), path)


def open_plain(path: str) -> FileIO:
    """Open a file to read it, if it is one: a link may lead to any file of this machine, and a pipe need not end.

    Raises:
        DamagedError: It is a symbolic link, a pipe, a device or a socket.
        OSError: It cannot be opened, or is a directory.
    """
    kind = os.lstat(path).st_mode
    if stat.S_ISREG(kind):  # opened such that it makes no difference if it is something else by now
        file = FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        kind = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(kind):
            return file
        file.close()
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    what = "a symbolic link" if stat.S_ISLNK(kind) else "a pipe, a device or a socket"
    raise DamagedError(f"{path}: {what}, expected a file; put a copy of what was saved in its place")


def cat_file(path: str, start: int | None, end: int | None) -> bytes:
    """As fsspec's, of a file that is one."""
    return read_array(path, start or 0, end).tobytes()


def pass_over(piece: npt.NDArray[np.uint8]) -> None:
    """Do nothing with a piece of what is read."""


def read_array(
    path: str, start: int, stop: int | None, on_piece: Callable[[npt.NDArray[np.uint8]], None] = pass_over
) -> npt.NDArray[np.uint8]:
    """Bytes of a file, in an array of their own; fewer where it is shorter.

    Args:
        path: The file.
        start: First byte.
        stop: Byte behind the last; None for all.
        on_piece: Called with one view of the array after another, each as soon as it holds its bytes.

    Raises:
        DamagedError, OSError: As :func:`open_plain`.
    """
    with open_plain(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        size = max(0, (num_bytes if stop is None else min(stop, num_bytes)) - start)
        array = np.empty(size, dtype=np.uint8)
        file.seek(start)
        filled = 0
        while filled < size and (count := file.readinto(array[filled : filled + _PIECE_BYTES].data)):
            on_piece(array[filled : filled + count])
            filled += count
        return array[:filled]

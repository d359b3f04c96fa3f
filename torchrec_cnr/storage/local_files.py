"""Local files: make files and their names durable, and create files atomically."""

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

_PIECE_BYTES = 256 << 10  # small enough to be in a core's cache when ``on_piece`` reads it
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # errors of file systems without hard links
_HERE, _NOT_REPLACING = -100, 1  # AT_FDCWD and RENAME_NOREPLACE of <fcntl.h> and <linux/fs.h>


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: str) -> None:
    """Create a directory and its parents durably: each has a durable name before anything is created in it.

    The process that created the first existing parent may have been killed before that was durable. So its name is
    forced to disk again, if this process may read the directory above it.
    """
    missing: list[str] = []
    ancestor = path
    while ancestor != "/" and not os.path.exists(ancestor):
        missing.append(ancestor)
        ancestor = posixpath.dirname(ancestor)
    with suppress(PermissionError):
        sync_directory(posixpath.dirname(ancestor))
    for directory in reversed(missing):
        os.makedirs(directory, exist_ok=True)
        sync_directory(posixpath.dirname(directory))
    os.makedirs(path, exist_ok=True)  # raises an error if a file has that name


def remove_empty(path: str) -> None:
    """Remove a directory if it exists and is empty."""
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def link_new(path: str, data: bytes, unlinked: str, sync_files: bool) -> None:
    """Write a file atomically, unless its name exists. With ``open(path, "xb")``, the name would precede the bytes.

    Args:
        path: Path of the file.
        data: Content of the file.
        unlinked: Temporary path, until the file is complete.
        sync_files: Whether to force the file and its name to disk.

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
            sync_directory(posixpath.dirname(path))  # the packs' names must be durable before the manifest's name
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
    """Rename a file unless the name exists, in a file system without hard links.

    The name never exists without all bytes, even if the process is killed. If the file system supports it, the kernel
    checks that the name is free and renames the file in one step. Otherwise a lock of the directory prevents other
    processes from taking the name between check and rename. The lock ends with the process.

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
    """Rename a file with Linux's ``renameat2``, which Python does not wrap; return False if it is not supported.

    Raises:
        FileExistsError: The name exists.
        OSError: The file cannot be renamed for another reason.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(unlinked), _HERE, os.fsencode(path), _NOT_REPLACING) == 0:
        return True
    error_number = ctypes.get_errno()
    if error_number in (errno.EINVAL, *_NO_LINKS):
        return False
    raise OSError(error_number, os.strerror(error_number), path)


def open_plain(path: str) -> FileIO:
    """Open a regular file for reading. A link could lead to any file of this machine, and a pipe may never end.

    Raises:
        DamagedError: The path is a symbolic link, a pipe, a device or a socket.
        OSError: The path cannot be opened, or is a directory.
    """
    kind = os.lstat(path).st_mode
    if stat.S_ISREG(kind):  # these flags are safe even if the path is another kind of file by now
        file = FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        kind = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(kind):
            return file
        file.close()
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    what = "a symbolic link" if stat.S_ISLNK(kind) else "a pipe, a device or a socket"
    raise DamagedError(f"{path}: expected a regular file, got {what}; replace it by a copy of the saved file")


def cat_file(path: str, start: int | None, end: int | None) -> bytes:
    """Return bytes of a regular file, like fsspec's ``cat_file``."""
    return read_array(path, start or 0, end).tobytes()


def pass_over(piece: npt.NDArray[np.uint8]) -> None:
    """Ignore a piece that was read."""


def read_array(
    path: str, start: int, stop: int | None, on_piece: Callable[[npt.NDArray[np.uint8]], None] = pass_over
) -> npt.NDArray[np.uint8]:
    """Return bytes of a file in a new array; fewer if the file is shorter.

    Args:
        path: Path of the file.
        start: Offset of the first byte.
        stop: Offset after the last byte; None for the end of the file.
        on_piece: Called with consecutive views of the array, each as soon as it has been read.

    Raises:
        DamagedError: The path is a symbolic link, a pipe, a device or a socket.
        OSError: The file cannot be read, or is a directory.
    """
    with open_plain(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        size = max(0, (num_bytes if stop is None else min(stop, num_bytes)) - start)
        array = np.empty(size, dtype=np.uint8)
        file.seek(start)
        num_filled = 0
        while num_filled < size and (count := file.readinto(array[num_filled : num_filled + _PIECE_BYTES].data)):
            on_piece(array[num_filled : num_filled + count])
            num_filled += count
        return array[:num_filled]

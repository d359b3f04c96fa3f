"""Files that are written piece by piece, and directory listings, in any fsspec file system."""

import os
import posixpath
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from typing import Any

Buffer = bytes | memoryview

READ_AHEAD_BYTES = 4 << 20
_SMALL_BYTES = 16 << 20


class Stream:
    """A file that is being written; see ``Store.create``.

    Attributes:
        store: The store that the file is written to.
        name: The name of the file in the store.
        num_bytes: The number of bytes written so far.

    Args:
        file: The open file of the file system.
        errors: Returns a context manager that turns the file system's errors into ``StoreError``.
    """

    def __init__(self, store: Any, name: str, file: Any, errors: Callable[[], AbstractContextManager[None]]) -> None:
        self.store = store
        self.name = name
        self.num_bytes = 0
        self._file = file
        self._errors = errors

    def write(self, data: Buffer) -> int:
        """Append bytes; return their number.

        Raises:
            StoreError: The file system cannot write.
        """
        with self._errors():
            self._file.write(data)
        num_bytes = memoryview(data).nbytes
        self.num_bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Do nothing: only a complete file is used."""

    def close(self) -> None:
        """Do nothing: ``Store.create`` closes the file."""


class Upload:
    """An upload with one request if the file is small, so that it can be retried, and piece by piece otherwise.

    Args:
        put: Uploads all bytes at once.
        begin: Opens a file to write piece by piece.
    """

    def __init__(self, put: Callable[[bytes], object], begin: Callable[[], Any]) -> None:
        self._put = put
        self._begin = begin
        self._held: list[Buffer] = []
        self._num_held_bytes = 0
        self._file: Any = None
        self.closed = False

    def write(self, data: Buffer) -> None:
        """Append bytes."""
        if self._file is None:
            self._held.append(bytes(data))
            self._num_held_bytes += len(self._held[-1])
            if self._num_held_bytes <= _SMALL_BYTES:
                return
            self._file, data = self._begin(), b"".join(self._held)
            self._held = []
        self._file.write(data)

    def close(self) -> None:
        """Upload the remaining bytes."""
        if self.closed:
            return
        self.closed = True
        if self._file is None:
            self._put(b"".join(self._held))
        else:
            self._file.close()

    def discard(self) -> None:
        """Abort the upload."""
        self.closed = True
        if self._file is not None:
            give_up(self._file, None)


class RangedFile(RawIOBase):
    """A file that is read range by range.

    Args:
        read: Returns the bytes from one offset to another.
        num_bytes: The size of the file in bytes.
    """

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int) -> None:
        super().__init__()
        self._read = read
        self._num_bytes = num_bytes
        self._place = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Set the position; return it."""
        start = {SEEK_SET: 0, SEEK_CUR: self._place, SEEK_END: self._num_bytes}[whence]
        self._place = max(0, start + offset)
        return self._place

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._place

    def readall(self) -> bytes:
        """Read the remaining bytes with one request instead of many small ones."""
        content = self._read(self._place, self._num_bytes) if self._num_bytes > self._place else b""
        self._place += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; return the number of bytes."""
        stop = min(self._place + memoryview(buffer).nbytes, self._num_bytes)
        content = self._read(self._place, stop) if stop > self._place else b""
        memoryview(buffer).cast("B")[: len(content)] = content
        self._place += len(content)
        return len(content)


def give_up(file: Any, partial: str | None) -> None:
    """Close an incomplete file, ignoring errors, and remove it if it has a temporary name.

    Discard an upload if the file system supports that: closing it would create an object without its last bytes.
    """
    with suppress(Exception):
        file.discard()
        file.closed = True
    with suppress(Exception):
        file.close()
    if partial is not None and os.path.exists(partial):
        os.unlink(partial)


@dataclass(frozen=True)
class Listing:
    """The content of a directory.

    Attributes:
        files: Sizes of the files in bytes, by name.
        directories: Names of the directories in it.
        links: Names of the symbolic links to directories.
    """

    files: Mapping[str, int]
    directories: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted([*self.files, *self.directories, *self.links])

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, Any]], path: str) -> "Listing":
        """Return the listing that corresponds to the result of ``ls(path, detail=True)``."""
        files: dict[str, int] = {}
        directories, links = [], []
        for entry in sorted(entries, key=lambda entry: str(entry["name"])):
            entry_path = str(entry["name"]).rstrip("/")
            name = posixpath.basename(entry_path)
            if entry_path == path:  # a file of this name, or an object that represents the directory
                continue
            if entry["type"] == "directory":
                directories.append(name)
            elif entry.get("islink") and os.path.isdir(entry_path):
                links.append(name)
            else:
                files[name] = int(entry["size"] or 0)
        return cls(files, tuple(directories), tuple(links))

"""Files that are written piece by piece, and listings of directories, on any fsspec file system."""

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
        store: The store that it is written to.
        name: What it is called there.
        num_bytes: How many were written.

    Args:
        file: The file.
        errors: What the file system's errors are turned into others by.
    """

    def __init__(self, store: Any, name: str, file: Any, errors: Callable[[], AbstractContextManager[None]]) -> None:
        self.store = store
        self.name = name
        self.num_bytes = 0
        self._file = file
        self._errors = errors

    def write(self, data: Buffer) -> int:
        """Append bytes; returns how many.

        Raises:
            StoreError: The file system refused.
        """
        with self._errors():
            self._file.write(data)
        num_bytes = memoryview(data).nbytes
        self.num_bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Nothing: what counts is a file that is whole."""

    def close(self) -> None:
        """Nothing: ``Store.create`` does."""


class Upload:
    """A file that is put at once if it is small, so that it can be put again, and piece by piece if it is not.

    Args:
        put: Puts all bytes.
        begin: Opens a file for pieces.
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
        """Put what is left."""
        if self.closed:
            return
        self.closed = True
        if self._file is None:
            self._put(b"".join(self._held))
        else:
            self._file.close()

    def discard(self) -> None:
        """Put nothing."""
        self.closed = True
        if self._file is not None:
            give_up(self._file, None)


class RangedFile(RawIOBase):
    """A file that is read range by range.

    Args:
        read: Reads from one byte to another.
        num_bytes: Of the file.
    """

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int) -> None:
        super().__init__()
        self._read = read
        self._num_bytes = num_bytes
        self._place = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Go to a byte."""
        start = {SEEK_SET: 0, SEEK_CUR: self._place, SEEK_END: self._num_bytes}[whence]
        self._place = max(0, start + offset)
        return self._place

    def tell(self) -> int:
        """Which byte comes next."""
        return self._place

    def readall(self) -> bytes:
        """Read what is left, by one request and not by many small ones."""
        found = self._read(self._place, self._num_bytes) if self._num_bytes > self._place else b""
        self._place += len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; returns how many bytes."""
        stop = min(self._place + memoryview(buffer).nbytes, self._num_bytes)
        found = self._read(self._place, stop) if stop > self._place else b""
        memoryview(buffer).cast("B")[: len(found)] = found
        self._place += len(found)
        return len(found)


def give_up(file: Any, partial: str | None) -> None:
    """Close a file that is not whole, whatever it says, and remove it if it has a name of its own.

    An upload is dropped, where the file system can do that: closed, it would come into being, without its end.
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
    """What is in a directory.

    Attributes:
        files: Sizes in bytes, by name.
        directories: Names.
        links: Names of symbolic links to directories.
    """

    files: Mapping[str, int]
    directories: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All of them, sorted."""
        return sorted([*self.files, *self.directories, *self.links])

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, Any]], path: str) -> "Listing":
        """From what ``ls(path, detail=True)`` returns."""
        files: dict[str, int] = {}
        directories, links = [], []
        for entry in sorted(entries, key=lambda entry: str(entry["name"])):
            entry_path = str(entry["name"]).rstrip("/")
            name = posixpath.basename(entry_path)
            if entry_path == path:  # a file of this name, or what stands for the directory in an object store
                continue
            if entry["type"] == "directory":
                directories.append(name)
            elif entry.get("islink") and os.path.isdir(entry_path):
                links.append(name)
            else:
                files[name] = int(entry["size"] or 0)
        return cls(files, tuple(directories), tuple(links))

"""Files that are written piece by piece, and listings of directories, on any fsspec file system."""

import os
import posixpath
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

Buffer = bytes | memoryview


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

"""Streams: files that are written piece by piece."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
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

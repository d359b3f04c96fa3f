"""A store of limited speed: a file system in memory to which only so many bytes per second can be written."""

import threading
import time
import uuid
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

PROTOCOL = "limited"


class _Line:
    """The connection to a store, which sends one file after another."""

    def __init__(self, bytes_per_sec: float) -> None:
        self._bytes_per_sec = bytes_per_sec
        self._free_secs = 0.0  # the time at which all files so far have been sent
        self._lock = threading.Lock()

    def send(self, num_bytes: int) -> None:
        """Wait until the files before and these bytes have been sent."""
        with self._lock:
            now = time.monotonic()
            self._free_secs = end_secs = max(now, self._free_secs) + num_bytes / self._bytes_per_sec
        time.sleep(end_secs - now)


_lines: dict[str, _Line] = {}


class LimitedFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The file system of all limited stores. Only writes of whole files, such as data files, take time."""

    protocol = PROTOCOL
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix(f"{PROTOCOL}://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a file in the time that its bytes take."""
        _lines[self._strip_protocol(path).split("/")[1]].send(len(value))
        super().pipe_file(path, value, mode, **kwargs)


fsspec.register_implementation(PROTOCOL, LimitedFileSystem)


def limited_store(bytes_per_sec: float) -> str:
    """Return the URL of an empty store. All writers to it share its speed."""
    name = uuid.uuid4().hex
    _lines[name] = _Line(bytes_per_sec)
    return f"{PROTOCOL}://{name}"


def remove(url: str) -> None:
    """Remove a store with all its files."""
    fs, path = fsspec.core.url_to_fs(url)
    fs.rm(path, recursive=True)
    del _lines[path.removeprefix("/")]

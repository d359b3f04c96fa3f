"""What the library calls to reach a local disk, which goes to the simulated one where a path is below ``MOUNT``.

The library's own code of local file systems runs as it is, and so does fsspec's: only the modules ``os``, ``fcntl`` and
``ctypes``, ``open`` and ``FileIO`` are others for it. All else is what it was.
"""

import builtins
import ctypes
import fcntl
import io
import os
import posixpath
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from fsspec.implementations import local

from tests.simulator.engine import virtual
from tests.simulator.engine.disk import FIRST_DESCRIPTOR, MOUNT, Disk


class _Present:
    disk: Disk | None = None


def open_disk(disk: Disk | None) -> None:
    """What is below ``MOUNT`` from now on."""
    _Present.disk = disk


def _disk() -> Disk:
    assert _Present.disk is not None
    return _Present.disk


def _is_simulated(place: Any) -> bool:
    if isinstance(place, int):
        return place >= FIRST_DESCRIPTOR
    return isinstance(place, str) and (place == MOUNT or place.startswith(f"{MOUNT}/"))


def _either(simulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a path or descriptor."""

    def call(place: Any, *args: Any, **kwargs: Any) -> Any:
        return simulated(_disk(), place, *args, **kwargs) if _is_simulated(place) else real(place, *args, **kwargs)

    return call


class _Module:
    """A module of Python's, some of whose names are others."""

    def __init__(self, module: Any, **own: Any) -> None:
        self._module = module
        self.__dict__ |= own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_IN_OS = {
    "open": Disk.open,
    "close": Disk.close,
    "fsync": Disk.fsync,
    "fstat": Disk.fstat,
    "stat": Disk.stat,
    "lstat": Disk.stat,
    "scandir": Disk.scandir,
    "makedirs": Disk.makedirs,
    "rmdir": Disk.rmdir,
    "unlink": Disk.unlink,
    "remove": Disk.unlink,
    "link": Disk.link,
    "rename": Disk.rename,
    "replace": Disk.rename,
}
_IN_PATH: dict[str, Callable[..., Any]] = {
    "exists": Disk.exists,
    "lexists": Disk.lexists,
    "isdir": Disk.isdir,
    "islink": lambda disk, path: False,
    "realpath": lambda disk, path: posixpath.normpath(path),
}
_path = _Module(posixpath, **{name: _either(call, getattr(posixpath, name)) for name, call in _IN_PATH.items()})
_own = {name: _either(call, getattr(os, name)) for name, call in _IN_OS.items()}
os_module = _Module(virtual.os_module, path=_path, **_own)
_fcntl_module = _Module(fcntl, flock=_either(Disk.flock, fcntl.flock))
_ctypes_module = _Module(
    ctypes,
    CDLL=lambda *_, **__: SimpleNamespace(
        renameat2=lambda _, old, __, new, ___: _disk().rename_new(os.fsdecode(old), os.fsdecode(new))
    ),
    get_errno=lambda: _disk().last_errno,
)


class _Raw(io.RawIOBase):
    """An open file."""

    def __init__(self, disk: Disk, descriptor: int, *, is_written: bool = False) -> None:
        super().__init__()
        self._disk, self._descriptor, self._is_written = disk, descriptor, is_written
        self._place = 0
        self._is_short = False

    def fileno(self) -> int:
        """As a real one."""
        return self._descriptor

    def readable(self) -> bool:
        """As a real one."""
        return not self._is_written

    def writable(self) -> bool:
        """As a real one."""
        return self._is_written

    def seekable(self) -> bool:
        """As a real one."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As a real one, from the beginning."""
        self._place = offset
        return offset

    def tell(self) -> int:
        """As a real one."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """As a real one."""
        view = memoryview(buffer).cast("B")
        found = self._disk.read(self._descriptor, self._place, len(view))
        view[: len(found)] = found
        self._place += len(found)
        return len(found)

    def write(self, data: Any) -> int:
        """As a real one: on a full disk it writes less, and then nothing."""
        found = bytes(data)
        if self._disk.is_full("a write"):
            if self._is_short or len(found) < 2:
                raise self._disk.no_space(self._descriptor)
            found = found[: len(found) // 2]
            self._is_short = True
        self._disk.write(self._descriptor, found)
        self._place += len(found)
        return len(found)

    def close(self) -> None:
        """As a real one."""
        if not self.closed:
            super().close()
            if self._is_written:
                self._disk.written(self._descriptor)
            self._disk.close(self._descriptor)


def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """As ``open``."""
    if not _is_simulated(path):
        return builtins.open(path, mode, *args, **kwargs)
    disk = _disk()
    return io.BufferedWriter(_Raw(disk, disk.create(path, is_new=mode == "xb"), is_written=True))


def _file_io(descriptor: int) -> Any:
    return _Raw(_disk(), descriptor) if _is_simulated(descriptor) else io.FileIO(descriptor)


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced, by module and name, besides ``os`` in the library."""
    files = sys.modules["torchrec_cnr.storage.local_files"]
    yield local, "os", os_module
    yield files, "fcntl", _fcntl_module
    yield files, "ctypes", _ctypes_module
    yield files, "FileIO", _file_io
    for module in (files, sys.modules["torchrec_cnr.storage.store"]):
        yield module, "open", open_file

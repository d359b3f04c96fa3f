"""The file system of a ``FaultyStore``, for fsspec."""

import io
import os
import posixpath
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from torchrec_cnr.testing.faults import PROTOCOL, FaultyStore, Operation, OperationKind, open_stores


class FaultyFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that forwards requests to the directory that a ``FaultyStore`` wraps.

    The methods are those of fsspec, and each call is one operation.
    """

    protocol = PROTOCOL

    def info(self, path: str, **_: Any) -> Mapping[str, Any]:
        """Return the name, size and type of a file or directory.

        Raises:
            FileNotFoundError: There is no such file or directory.
        """
        entry: Mapping[str, Any] = self._do("look up", path, lambda fs, inner: fs.info(inner))
        return {**entry, "name": _outer(path, entry)}

    def exists(self, path: str, **_: Any) -> bool:
        """Return whether a file or directory exists. A failed request raises an error, unlike in fsspec's default."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def isdir(self, path: str) -> bool:
        """Return whether a directory exists."""
        try:
            return bool(self.info(path)["type"] == "directory")
        except FileNotFoundError:
            return False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List the contents of a directory."""
        listing = self._do("list", path, lambda fs, inner: fs.ls(inner, detail=True))
        entries = [{**entry, "name": _outer(path, entry)} for entry in listing]
        return entries if detail else [entry["name"] for entry in entries]

    def modified(self, path: str) -> Any:
        """Return when a file was last written."""
        return self._do("look up", path, lambda fs, inner: fs.modified(inner))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory."""
        self._do("make", path, lambda fs, inner: fs.makedirs(inner, exist_ok=exist_ok))

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self._do("remove", path, lambda fs, inner: fs.rm_file(inner))

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        self._do("remove", path, lambda fs, inner: fs.rmdir(inner))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return the bytes of a file, or a range of them."""
        return bytes(self._do("read", path, lambda fs, inner: fs.cat_file(inner, start=start, end=end)))

    def open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> io.BytesIO:
        """Open a file, which is read at once ("rb"), or written when it is closed ("wb", or "xb" if it must be new)."""
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        if mode not in ("wb", "xb"):
            raise NotImplementedError(f"mode {mode!r} is not supported, expected 'rb', 'wb' or 'xb'")
        return _Upload(path, is_new=mode == "xb")

    def _do(self, kind: OperationKind, path: str, act: Callable[[Any, str], Any]) -> Any:
        """Do one operation in the wrapped file system; ``TRUNCATE`` returns half of the bytes that are read."""
        store, inner = _place(path)

        def do(is_half: bool) -> Any:
            result = act(store.inner, inner)
            return result[: len(result) // 2] if is_half and kind == "read" else result

        return store.do(Operation(kind, posixpath.relpath(inner, store.root)), do)


class _Upload(io.BytesIO):
    """A file that is being written."""

    def __init__(self, path: str, is_new: bool) -> None:
        super().__init__()
        self._path = path
        self._is_new = is_new

    def close(self) -> None:
        """Write the file."""
        if self.closed:
            return
        data = self.getvalue()
        super().close()
        store, inner = _place(self._path)
        kind: OperationKind = "put new" if self._is_new else "put"

        def put(is_half: bool) -> None:
            _put(store, inner, data[: len(data) // 2] if is_half else data, self._is_new)

        store.do(Operation(kind, posixpath.relpath(inner, store.root), len(data)), put)


def _put(store: FaultyStore, path: str, data: bytes, is_new: bool) -> None:
    """Write a file atomically: no reader sees a part of it."""
    if not isinstance(store.inner, LocalFileSystem):
        with store.inner.open(path, "xb" if is_new else "wb") as file:
            file.write(data)
        return
    os.makedirs(store.uploads, exist_ok=True)
    os.makedirs(posixpath.dirname(path), exist_ok=True)
    partial = f"{store.uploads}/{uuid.uuid4().hex}"
    with open(partial, "xb") as file:
        file.write(data)
    if is_new:
        try:
            os.link(partial, path)
        finally:
            os.unlink(partial)
    else:
        os.replace(partial, path)


def _place(path: str) -> tuple[FaultyStore, str]:
    """Return the store of a path or URL, and the path in the wrapped file system."""
    name, _, inner_path = str(FaultyFileSystem._strip_protocol(path)).lstrip("/").partition("/")
    store = open_stores.get(name)
    if store is None:
        raise OSError(f"{PROTOCOL}://{name}: no FaultyStore named {name!r} is open in this process")
    return store, posixpath.join(store.root, inner_path).rstrip("/")


def _outer(path: str, entry: Mapping[str, Any]) -> str:
    """Return the path in this file system of an entry that the wrapped file system returned for ``path``."""
    store, _ = _place(path)
    name = store.url.removeprefix(f"{PROTOCOL}://")
    return posixpath.join(name, posixpath.relpath(str(entry["name"]), store.root)).removesuffix("/.")

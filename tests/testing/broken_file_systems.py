"""File systems for tests of the conformance checks: one keeps every promise, and for each check one does not."""

import io
import time
from typing import Any
from urllib.parse import unquote

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem


class Honest(DirFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The local files, but for the store no local ones: it uses nothing but fsspec's methods."""

    protocol = "honest"

    def __init_subclass__(cls) -> None:
        cls.protocol = cls.__name__.lower()

    def __init__(self, **_: Any) -> None:
        super().__init__(path="/", fs=LocalFileSystem())

    def unstrip_protocol(self, name: str) -> str:
        return f"{self.protocol}://{name}"


class LosesTheEnd(Honest):
    """The last byte of a file is not read."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return bytes(super().cat_file(path, start=start, end=end))[: None if end else -1]


class ReadsWhole(Honest):
    """Reads know no ranges."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return bytes(super().cat_file(path))


class RemembersListings(Honest):
    """A directory is listed as it was when it was listed first."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self._listed: dict[tuple[str, bool], Any] = {}

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        return self._listed.setdefault((path, detail), super().ls(path, detail=detail))


class FindsAll(Honest):
    """What is not there is said to be an empty file."""

    def info(self, path: str, **_: Any) -> Any:
        try:
            return super().info(path)
        except FileNotFoundError:
            return {"name": path, "size": 0, "type": "file"}


class Forbids(Honest):
    """What is not there may not be asked for."""

    def info(self, path: str, **_: Any) -> Any:
        try:
            return super().info(path)
        except FileNotFoundError as error:
            raise PermissionError("forbidden") from error


class KeepsAll(Honest):
    """Nothing is removed, and no error says so."""

    def rm_file(self, path: str) -> None:
        pass


class Unquotes(Honest):
    """A name is taken for a part of a URL."""

    def _join(self, path: str) -> Any:
        return super()._join(unquote(path))


class MixesUploads(Honest):
    """Of files that are put at the same time, all get the newest one's bytes."""

    newest = b""

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        MixesUploads.newest = value
        time.sleep(0.02)
        super().pipe_file(path, MixesUploads.newest)


class LivesInThePast(Honest):
    """Its clock has stood still."""

    def modified(self, path: str) -> Any:
        return super().modified(path).replace(year=1990)


class Overwrites(Honest):
    """A name that must be new need not be."""

    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        return super().open(path, mode.replace("x", "w"), *args, **kwargs)


class LooksFirst(Honest):
    """Whether a name is there is asked, and then a file is put: two that do so at once both win."""

    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if mode != "xb":
            return super().open(path, mode, *args, **kwargs)
        if self.exists(path):
            raise FileExistsError(path)
        time.sleep(0.05)
        return super().open(path, "wb", *args, **kwargs)


class SaysBusy(Honest):
    """A name that is taken is an error as any other."""

    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        try:
            return super().open(path, mode, *args, **kwargs)
        except FileExistsError as error:
            raise OSError("busy") from error


class _Bounded(io.BytesIO):
    def __init__(self, fs: Honest, path: str) -> None:
        super().__init__()
        self.fs, self.path = fs, path

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()[: 2 << 20]
            super().close()
            self.fs.pipe_file(self.path, data)


class KeepsTwoMiB(Honest):
    """What is beyond a size is lost, and no error says so."""

    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        return _Bounded(self, path) if mode == "wb" else super().open(path, mode, *args, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        super().pipe_file(path, bytes(value)[: 2 << 20], **kwargs)


class HidesTheNewest(Honest):
    """A directory is listed without what came last, in the order of names."""

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        found = super().ls(path, detail=detail)
        return sorted(found, key=lambda entry: entry["name"] if detail else entry)[:-1]

"""Storage in memory: an object store, whose operations the scheduler may delay, fail, lose, cut short or repeat.

``sim://<name>/...`` is known to fsspec; within ``torchrec_cnr`` it counts as an object store. There are no directories,
what is put is there at once and whole, a put may ask that the name is new, and nothing is renamed.
"""

import io
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from tests.simulator.engine.scheduler import Scheduler, this_task
from tests.simulator.engine.virtual import EPOCH_SECS

PROTOCOL = "sim"
MAX_DELAY_SECS = 5
LATE_SECS = (0.01, 0.03, 0.1, 0.3, 1, 5, 20, 40)


@dataclass
class FaultShares:
    """How often something happens to an operation of the store."""

    fail: float = 0.0
    refuse: float = 0.0
    lose: float = 0.0
    cut: float = 0.0
    repeat: float = 0.0
    late: float = 0.0
    delay: float = 0.0
    kill: float = 0.0


@dataclass
class Objects:
    """All that is stored.

    Attributes:
        sim: Decides.
        shares: Of faults.
        files: Bytes and time of the last write, by path.
        on_change: Told of each change that has happened: its kind, the path, and the bytes.
        num_faults: Faults so far.
        root: Where checkpoints are.
    """

    sim: Scheduler
    shares: FaultShares
    files: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    on_change: Callable[[str, str, bytes], None] = lambda kind, path, data: None
    num_faults: int = 0
    root: str = f"{PROTOCOL}://bucket/run"

    def url(self, path: str) -> str:
        """What the library calls a path."""
        return f"{PROTOCOL}://{path}"

    def host_of(self, name: str) -> str:
        """The host of a process, by the name of its place."""
        return name

    def do(self, kind: str, path: str, act: Callable[[], Any], cut: Callable[[], Any] | None = None) -> Any:
        """One operation, as the scheduler lets it happen."""
        task = this_task()
        if task is None:
            return act()
        sim, shares = self.sim, self.shares
        name = posixpath.join(*path.split("/")[-2:])
        what = f"{kind} {name}"
        sim.point(what)
        changes = kind in ("put", "put new", "remove")
        if shares.delay and sim.chance(shares.delay, f"delay {what}"):
            sim.sleep(1 + sim.unique() % MAX_DELAY_SECS)
        if shares.kill and sim.chance(shares.kill, f"kill {task.process.name} before {what}"):
            sim.kill(task.process, f"before {what}")
            sim.point("dies")
        if shares.fail and sim.chance(shares.fail, f"fail {what}"):
            self._tell(f"fails: {what}")
            raise ConnectionError("simulated: not done")
        if shares.refuse and sim.chance(shares.refuse, f"refuse {what}"):
            self._tell(f"refused: {what}")
            raise PermissionError("simulated: refused")
        if changes and shares.late and sim.chance(shares.late, f"late {what}"):
            self._tell(f"fails, and is done later: {what}")
            self._do_later(act, what)
            if sim.chance(0.5, f"late {what}: its client gives up"):
                raise PermissionError("simulated: no answer, and no second attempt")
            raise TimeoutError("simulated: no answer yet")
        if cut is not None and shares.cut and sim.chance(shares.cut, f"cut {what}"):
            self._tell(f"cut short: {what}")
            cut()
            return None
        found = act()
        if changes and shares.repeat and sim.chance(shares.repeat, f"repeat {what}"):
            self._tell(f"done twice: {what}")
            found = act()
        if changes and shares.lose and sim.chance(shares.lose, f"lose answer of {what}"):
            self._tell(f"done, but the answer is lost: {what}")
            raise ConnectionError("simulated: the answer was lost")
        if changes:
            sim.point(f"has done {what}")
        return found

    def _tell(self, what: str) -> None:
        self.num_faults += 1
        self.sim.tell(f"*** {what}")

    def _do_later(self, act: Callable[[], Any], what: str) -> None:
        """Do it when its client has been told that it failed."""
        sim, client = self.sim, this_task()
        assert client is not None
        server = client.process.own["server"]

        def do() -> None:
            sim.sleep(LATE_SECS[sim.unique() % len(LATE_SECS)])
            sim.tell(f"is done late: {what}")
            try:
                act()
            except OSError as error:
                sim.tell(f"had no effect: {error}")

        sim.spawn(server, "store", do).client = client.process

    def now(self) -> float:
        """Seconds, by the store's clock."""
        return EPOCH_SECS + self.sim.now

    def put(self, path: str, data: bytes, is_new: bool) -> None:
        """Put a file."""
        if is_new and path in self.files:
            raise FileExistsError(path)
        self.files[path] = (data, self.now())
        self.on_change("put", path, data)

    def remove(self, path: str) -> None:
        """Remove a file; that it is not there is no error, as in S3."""
        if (found := self.files.pop(path, None)) is not None:
            self.on_change("remove", path, found[0])

    def read(self, path: str, start: int | None, stop: int | None) -> bytes:
        """Bytes of a file."""
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path][0][start:stop]


class _Present:
    objects: Objects | None = None


def open_objects(objects: Objects | None) -> None:
    """What ``sim://`` is from now on."""
    fsspec.register_implementation(PROTOCOL, SimulatedFileSystem, clobber=True)
    _Present.objects = objects


class _Upload(io.BytesIO):
    def __init__(self, path: str, is_new: bool) -> None:
        super().__init__()
        self._path, self._is_new = path, is_new

    def close(self) -> None:
        """Put it."""
        if not self.closed:
            data = self.getvalue()
            super().close()
            _put(self._path, data, self._is_new)


def _put(path: str, data: bytes, is_new: bool) -> None:
    store = _objects()
    half = None if is_new else lambda: store.put(path, data[: len(data) // 2], is_new)
    store.do("put new" if is_new else "put", path, lambda: store.put(path, data, is_new), half)


def _objects() -> Objects:
    assert _Present.objects is not None
    return _Present.objects


class SimulatedFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The simulated store, for fsspec."""

    protocol = (PROTOCOL, "s3")
    cachable = False

    def info(self, path: str, **_: Any) -> Mapping[str, Any]:
        """What is there."""
        path = self._strip_protocol(path)
        return dict(_objects().do("look up", path, lambda: self._info(path)))

    def _info(self, path: str) -> Mapping[str, Any]:
        if path in _objects().files:
            return {"name": path, "type": "file", "size": len(_objects().files[path][0])}
        if any(name.startswith(f"{path}/") for name in _objects().files):
            return {"name": path, "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def exists(self, path: str, **_: Any) -> bool:
        """Whether something is there."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def isdir(self, path: str) -> bool:
        """Whether something lies below."""
        try:
            return bool(self.info(path)["type"] == "directory")
        except FileNotFoundError:
            return False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What is in a directory."""
        path = self._strip_protocol(path)
        entries = _objects().do("list", path, lambda: self._entries(path))
        return entries if detail else [entry["name"] for entry in entries]

    def _entries(self, path: str) -> list[Any]:
        found: dict[str, Any] = {}
        for name, (data, _) in sorted(_objects().files.items()):
            if name.startswith(f"{path}/"):
                first, _, rest = name[len(path) + 1 :].partition("/")
                kind = "directory" if rest else "file"
                found[first] = {"name": f"{path}/{first}", "type": kind, "size": 0 if rest else len(data)}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values())

    def modified(self, path: str) -> datetime:
        """When it was written last."""
        path = self._strip_protocol(path)

        def look() -> datetime:
            if path not in _objects().files:
                raise FileNotFoundError(path)
            return datetime.fromtimestamp(_objects().files[path][1], UTC)

        found: datetime = _objects().do("look up", path, look)
        return found

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: there are no directories."""

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        path = self._strip_protocol(path)
        _objects().do("remove", path, lambda: _objects().remove(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Bytes of a file."""
        path = self._strip_protocol(path)
        return bytes(_objects().do("read", path, lambda: _objects().read(path, start, end)))

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        """Put a file."""
        _put(self._strip_protocol(path), bytes(value), is_new=False)

    def open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> io.BytesIO:
        """A file, read at once, or put when it is closed."""
        path = self._strip_protocol(path)
        return io.BytesIO(self.cat_file(path)) if mode == "rb" else _Upload(path, is_new=mode == "xb")

"""A local disk in memory: files and directories, of which a power failure leaves what was forced to disk.

Each operation is a point where the scheduler may switch, fail it, fill the disk for a while, kill the process, or cut
the power of the host. Then all of its processes die. Of each name in a directory, one of the states since the directory
was last forced to disk is there; of each file, what was last forced to disk, or part of what was written since.

``disk_calls`` has what takes the place of Python's functions.
"""

import errno
import os
import posixpath
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.simulator.engine.disk_plan import DiskPlan
from tests.simulator.engine.scheduler import Process, Scheduler, this_task
from tests.simulator.engine.virtual import EPOCH_SECS

MOUNT = "/simulated"
FIRST_DESCRIPTOR = 1 << 30  # no real one is as high
FULL_SECS = (0.01, 0.05, 0.2, 1)
_LOOK_SHARE = 0.3  # of the switches at other points


@dataclass(eq=False)
class File:
    """A file.

    Attributes:
        data: What is in it.
        forced: What was in it when it was last forced to disk.
        written_secs: When it was last written.
    """

    data: bytes = b""
    forced: bytes = b""
    written_secs: float = 0.0


@dataclass(eq=False)
class Directory:
    """A directory.

    Attributes:
        entries: What is in it, by name.
        forced: What was in it when it was last forced to disk.
        changes: Names that were given, or taken away (None), since then.
        lock: The descriptor by which it is locked, and that one's process.
    """

    entries: "dict[str, File | Directory]" = field(default_factory=dict)
    forced: "dict[str, File | Directory]" = field(default_factory=dict)
    changes: "list[tuple[str, File | Directory | None]]" = field(default_factory=list)
    lock: tuple[int, Process | None] | None = None

    def put(self, name: str, node: "File | Directory | None") -> None:
        """Give a name to a file or directory, or take it away."""
        if node is None:
            del self.entries[name]
        else:
            self.entries[name] = node
        self.changes.append((name, node))

    def force(self) -> None:
        """Force the names to disk."""
        self.forced, self.changes = dict(self.entries), []

    @property
    def is_free(self) -> bool:
        """Whether no process that lives has locked it."""
        return self.lock is None or (self.lock[1] is not None and self.lock[1].is_dead)


@dataclass
class Disk:
    """A disk, and the host that it is in.

    Attributes:
        sim: Decides.
        plan: What it can do, and how often something happens.
        on_change: Told of each change that has happened: its kind ("put", "remove" or "lost"), the path, and the bytes.
        root: Where checkpoints are.
        last_errno: Of the last call that returned a number.
    """

    sim: Scheduler
    plan: DiskPlan
    on_change: Callable[[str, str, bytes], None] = lambda kind, path, data: None
    root: str = f"{MOUNT}/jobs/run"
    last_errno: int = 0
    _top: Directory = field(default_factory=Directory)
    _opened: dict[int, tuple[str, File | Directory]] = field(default_factory=dict)
    _num_opened: int = 0
    _num_boots: int = 0
    _full_until: float = 0.0

    def __post_init__(self) -> None:
        self._top.entries["jobs"] = Directory()  # made by an administrator
        self._top.force()

    # For the harness

    @property
    def files(self) -> list[str]:
        """Paths of all files."""
        return [path for path, _ in _below(self._top, MOUNT)]

    def url(self, path: str) -> str:
        """What the library calls a path."""
        return path

    def host_of(self, name: str) -> str:
        """The host of a process: there is one, since its last boot."""
        return f"host, boot {self._num_boots}"

    def lose_power(self) -> None:
        """All processes of the host die, and what was not forced to disk is lost or torn, as the seed says."""
        self.sim.tell("*** the power fails")
        for process in {task.process: None for task in self.sim.tasks if "server" in task.process.own}:
            self.sim.kill(process, "no power")
        before = dict(_below(self._top, MOUNT))
        self._restart(self._top)
        after = dict(_below(self._top, MOUNT))
        self._opened.clear()
        self._num_boots += 1
        for path, file in before.items():
            if path not in after:
                self.on_change("lost", path, file.data)

    def _restart(self, directory: Directory) -> None:
        found = dict(directory.forced)
        for name in dict.fromkeys(name for name, _ in directory.changes):
            states = [directory.forced.get(name), *(node for other, node in directory.changes if other == name)]
            found.pop(name, None)
            if (node := states[self._pick(len(states))]) is not None:
                found[name] = node
        directory.entries, directory.lock = found, None
        directory.force()
        for node in found.values():
            if isinstance(node, Directory):
                self._restart(node)
            elif node.data != node.forced:
                torn = node.data[: self._pick(len(node.data) + 1)]
                zeros = bytes(len(node.data) - len(torn))
                node.data = node.forced = (node.forced, node.data, torn, torn + zeros)[self._pick(4)]

    def _pick(self, count: int) -> int:
        return self.sim.unique() % count

    # What every operation goes through

    def _do(self, kind: str, path: str, cut: Callable[[], None] | None = None) -> None:
        """An operation is about to happen: whatever may happen before, or in its place."""
        task, sim, plan = this_task(), self.sim, self.plan
        if task is None:
            return
        is_look = kind in ("look up", "stat")
        what = f"{kind} {posixpath.join(*path.split('/')[-2:])}"
        sim.point(what, _LOOK_SHARE if is_look else 1.0, is_told=not is_look)
        if not is_look and kind not in ("open", "read", "list", "lock", "look for"):
            if plan.kill and sim.chance(plan.kill, f"kill {task.process.name} before {what}"):
                if cut is not None and sim.chance(0.5, f"half of {what}"):
                    cut()
                sim.kill(task.process, f"before {what}")
                sim.point("dies")
            if plan.power and sim.chance(plan.power, f"no power before {what}"):
                self.lose_power()
                sim.point("dies")
        if kind.startswith("look"):  # of which Python hides the errors
            return
        if plan.fail and sim.chance(plan.fail, f"fail {what}"):
            self._fail(errno.EIO, what)
        is_refused = kind not in ("write", "sync", "lock", "open") or isinstance(self._there(path), File)
        if plan.refuse and is_refused and sim.chance(plan.refuse, f"refuse {what}"):
            self._fail(errno.EACCES, what)

    def _fail(self, number: int, what: str) -> None:
        self.sim.tell(f"*** fails: {what}")
        raise OSError(number, f"simulated: {os.strerror(number)}", what)

    def is_full(self, what: str) -> bool:
        """Whether there is no space for what is about to be written."""
        if this_task() is None:
            return False
        if self.plan.fill and self.sim.chance(self.plan.fill, f"full before {what}"):
            self._full_until = self.sim.now + FULL_SECS[self._pick(len(FULL_SECS))]
            self.sim.tell("*** the disk is full")
        return self.sim.now < self._full_until

    # Names

    def _find(self, path: str) -> File | Directory:
        """What has this name."""
        node: File | Directory | None = self._top
        for name in posixpath.normpath(path).removeprefix(MOUNT).strip("/").split("/"):
            if isinstance(node, File):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            node = node.entries.get(name) if name else node
            if node is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node

    def _there(self, path: str) -> File | Directory | None:
        try:
            return self._find(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _directory(self, path: str) -> tuple[Directory, str]:
        """The directory of a file, and its name there."""
        above, _, name = path.rstrip("/").rpartition("/")
        found = self._find(above)
        if isinstance(found, File):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return found, name

    def _free(self, path: str) -> tuple[Directory, str]:
        """As above; the name is not taken."""
        directory, name = self._directory(path)
        if name in directory.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return directory, name

    def _file(self, path: str) -> File:
        found = self._find(path)
        if isinstance(found, Directory):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return found

    def exists(self, path: str) -> bool:
        """As ``os.path.exists``."""
        self._do("look up", path)
        return self._there(path) is not None

    def lexists(self, path: str) -> bool:
        """As ``os.path.lexists``, after which names are taken."""
        self._do("look for", path)
        return self._there(path) is not None

    def isdir(self, path: str) -> bool:
        """As ``os.path.isdir``."""
        self._do("look up", path)
        return isinstance(self._there(path), Directory)

    def stat(self, path: str, **_: Any) -> SimpleNamespace:
        """As ``os.stat``; there are no symbolic links."""
        self._do("stat", path)
        return _status(self._find(path))

    def scandir(self, path: str) -> AbstractContextManager[list[str]]:
        """As ``os.scandir``, but it has paths."""
        self._do("list", path)
        found = self._find(path)
        if isinstance(found, File):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return nullcontext([f"{path}/{name}" for name in sorted(found.entries)])

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """As ``os.makedirs``."""
        above = posixpath.dirname(path)
        if self._there(above) is None:
            self.makedirs(above, exist_ok=True)
        self._do("mkdir", path)
        if exist_ok and isinstance(self._there(path), Directory):
            return
        if self.is_full(f"mkdir {path}"):
            self._fail(errno.ENOSPC, f"mkdir {path}")
        directory, name = self._free(path)
        directory.put(name, Directory())

    def rmdir(self, path: str) -> None:
        """As ``os.rmdir``."""
        self._do("rmdir", path)
        directory, name = self._directory(path)
        found = self._find(path)
        if isinstance(found, File):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if found.entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        directory.put(name, None)

    def unlink(self, path: str) -> None:
        """As ``os.unlink``."""
        self._do("unlink", path)
        file, (directory, name) = self._file(path), self._directory(path)
        directory.put(name, None)
        self.on_change("remove", path, file.data)

    def link(self, path: str, new: str) -> None:
        """As ``os.link``."""
        self._do("link", new)
        if not self.plan.has_links:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), new)
        file, (directory, name) = self._file(path), self._free(new)
        directory.put(name, file)
        self.on_change("put", new, file.data)

    def rename(self, path: str, new: str) -> None:
        """As ``os.rename`` of a file, which takes the place of another one."""
        self._do("rename", new)
        file, (directory, name) = self._file(path), self._directory(path)
        other, other_name = self._directory(new)
        directory.put(name, None)
        other.put(other_name, file)
        self.on_change("put", new, file.data)

    def rename_new(self, path: str, new: str) -> int:
        """As ``renameat2`` with ``RENAME_NOREPLACE``."""
        try:
            if not self.plan.has_renames:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), new)
            self._do("rename to new", new)
            self._free(new)
            file, (directory, name) = self._file(path), self._directory(path)
            other, other_name = self._directory(new)
            directory.put(name, None)
            other.put(other_name, file)
            self.on_change("put", new, file.data)
        except OSError as error:
            self.last_errno = error.errno or errno.EIO
            return -1
        return 0

    # Descriptors

    def create(self, path: str, is_new: bool) -> int:
        """Open a file to write it from its beginning."""
        self._do("create", path)
        if is_new or self._there(path) is None:
            directory, name = self._free(path)
            directory.put(name, File(written_secs=self.now()))
        self._file(path).data = b""
        return self._descriptor(path)

    def open(self, path: str, *_: Any) -> int:
        """As ``os.open``, to read."""
        self._do("open", path)
        return self._descriptor(path)

    def _descriptor(self, path: str) -> int:
        self._num_opened += 1
        number = FIRST_DESCRIPTOR + self._num_opened
        self._opened[number] = path, self._find(path)
        return number

    def close(self, descriptor: int) -> None:
        """As ``os.close``."""
        _, node = self._opened.pop(descriptor, ("", None))
        if isinstance(node, Directory) and node.lock is not None and node.lock[0] == descriptor:
            node.lock = None

    def fstat(self, descriptor: int) -> SimpleNamespace:
        """As ``os.fstat``."""
        return _status(self._opened[descriptor][1])

    def fsync(self, descriptor: int) -> None:
        """As ``os.fsync``."""
        path, node = self._opened[descriptor]
        self._do("sync", path)
        if isinstance(node, Directory):
            node.force()
        else:
            node.forced = node.data

    def flock(self, descriptor: int, _: int) -> None:
        """As ``fcntl.flock`` of a directory, exclusively."""
        path, node = self._opened[descriptor]
        self._do("lock", path)
        assert isinstance(node, Directory)
        task = this_task()
        if task is not None:
            self.sim.wait(f"the lock of {path}", lambda: node.is_free)
        node.lock = descriptor, task.process if task is not None else None

    def write(self, descriptor: int, data: bytes) -> None:
        """Append to a file."""
        path, file = self._opened[descriptor]
        assert isinstance(file, File)

        def append(part: bytes) -> None:
            file.data, file.written_secs = file.data + part, self.now()

        self._do("write", path, lambda: append(data[: len(data) // 2]))
        append(data)

    def read(self, descriptor: int, start: int, num_bytes: int) -> bytes:
        """Bytes of a file."""
        path, file = self._opened[descriptor]
        self._do("read", path)
        assert isinstance(file, File)
        return file.data[start : start + num_bytes]

    def written(self, descriptor: int) -> None:
        """A file that was open to be written is closed."""
        path, node = self._opened.get(descriptor, ("", None))
        if isinstance(node, File) and self._there(path) is node:
            self.on_change("put", path, node.data)

    def no_space(self, descriptor: int) -> OSError:
        """What a write to a full disk raises."""
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._opened[descriptor][0])

    def now(self) -> float:
        """Seconds, by the host's clock."""
        return EPOCH_SECS + self.sim.now


def _below(directory: Directory, path: str) -> Iterator[tuple[str, File]]:
    for name, node in directory.entries.items():
        if isinstance(node, File):
            yield f"{path}/{name}", node
        else:
            yield from _below(node, f"{path}/{name}")


def _status(node: File | Directory) -> SimpleNamespace:
    is_file = isinstance(node, File)
    size, secs = (len(node.data), node.written_secs) if isinstance(node, File) else (0, float(EPOCH_SECS))
    mode = (stat.S_IFREG if is_file else stat.S_IFDIR) | 0o700
    times = {"st_mtime": secs, "st_ctime": secs}
    return SimpleNamespace(st_mode=mode, st_size=size, st_uid=0, st_gid=0, st_ino=id(node), st_nlink=1, **times)

"""Stores: a directory in any fsspec file system, where checkpoints are.

A store writes files once and whole. ``put_new`` is the commit primitive: the name either holds all bytes, durably, or
does not exist, and of several writers one wins. Every failure becomes a ``StoreError`` that names the file. A file that
is read whole has a maximum size, since its writer is not trusted.
"""

import errno
import logging
import os
import posixpath
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import BufferedReader
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from torchrec_cnr.errors import CheckpointExistsError, CNRError, ConfigurationError, DamagedError, StoreError
from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.storage import local_files, retries
from torchrec_cnr.storage.files import READ_AHEAD_BYTES, Buffer, Listing, RangedFile, Stream, Upload, give_up
from torchrec_cnr.storage.local_files import link_new, make_directory, open_plain, pass_over, sync_directory
from torchrec_cnr.storage.retries import Result, is_object_store, is_transient
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.urls import (
    OWN_S3FS,
    S3FS,
    canonical_path,
    checked_url,
    protocol_of,
    without_client,
    without_secrets,
)
from torchrec_cnr.throttling import Bandwidth

logger = logging.getLogger(__name__)

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)  # nor can a file of that name be
# Of the answer 412, s3fs makes ``FileExistsError`` only if it says which condition failed; many servers do not.
_REFUSED = (errno.EEXIST, errno.EINVAL)
_CLOCK = re.compile(r"[0-9a-f]{16}\.clock")
_one_at_a_time = threading.Lock()
_ERRNO: dict[type[Exception], int] = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    NotADirectoryError: errno.ENOTDIR,
    PermissionError: errno.EACCES,
}


@dataclass(frozen=True)
class Store:
    """A directory.

    Attributes:
        fs: Its fsspec file system.
        path: Its path there, without the protocol, as ``canonical_path`` spells it.
        sync_files: Whether local files are forced to disk before a write counts as done.
        bandwidth: What puts and reads of arrays take.
        row_log: Where packs of its checkpoints may lie that are no files.
    """

    fs: Any
    path: str
    sync_files: bool = True
    bandwidth: Bandwidth = field(default_factory=Bandwidth, compare=False)
    row_log: RowLog | None = field(default=None, compare=False)

    @classmethod
    def open(
        cls, url: "str | os.PathLike[str] | Store", sync_files: bool = True, row_log: RowLog | None = None
    ) -> "Store":
        """The directory at a local path or fsspec URL, or what is one already; nothing is created.

        Raises:
            ConfigurationError: The URL's protocol is unknown, or its package is not installed; or see ``checked_url``
                and ``canonical_path``.
        """
        if isinstance(url, Store):
            return url
        name = checked_url(url)
        try:
            fs, path = _client_of(name)
        except (ValueError, ImportError) as error:
            raise ConfigurationError(f"{name!r}: not a path or URL that fsspec can open ({error})") from error
        return cls(fs, canonical_path(path, isinstance(fs, LocalFileSystem)), sync_files, row_log=row_log)

    @classmethod
    def can_open(cls, url: str | os.PathLike[str]) -> bool:
        """Whether :meth:`open` would succeed."""
        try:
            cls.open(url)
        except (ConfigurationError, TypeError):
            return False
        return True

    @property
    def url(self) -> str:
        """The full name, protocol included where it is not the local file system."""
        return self.path if isinstance(self.fs, LocalFileSystem) else str(self.fs.unstrip_protocol(self.path))

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's file systems."""
        return isinstance(self.fs, LocalFileSystem)

    def at(self, path: str) -> "Store":
        """Another directory of the same file system, by a path relative to this one."""
        return replace(self, path=posixpath.normpath(posixpath.join(self.path, path)))

    def is_beside(self, other: "Store") -> bool:
        """Whether both are in one file system, so that one can name the other by a relative path."""
        ours, theirs = self.fs, other.fs  # which fsspec calls different where they were opened by different threads
        same_arguments = (ours.storage_args, ours.storage_options) == (theirs.storage_args, theirs.storage_options)
        return same_arguments and (type(ours) is type(theirs) or self._service == other._service)

    @property
    def _service(self) -> str:
        return without_client(self.url).partition("://")[0]

    def child(self, name: str) -> str:
        """The path of a file in this directory."""
        return f"{self.path.rstrip('/')}/{name}"

    def make(self) -> None:
        """Create the directory and its parents, where the file system has directories."""
        if is_object_store(self.fs):
            return
        is_durable = self.is_local and self.sync_files
        with self._errors("create", ""):
            make_directory(self.path) if is_durable else self.fs.makedirs(self.path, exist_ok=True)

    def exists(self, name: str) -> bool:
        """Whether a file is there.

        Raises:
            StoreError: The file system does not tell, which fsspec's own ``exists`` takes for a no.
        """
        return self._size(name) is not None

    def _size(self, name: str) -> int | None:
        """Bytes of a file; None if it is not there."""
        found = _if_there(lambda: self._try("look up", name, lambda: self._info(self.child(name))))
        return None if found is None else int(found["size"] or 0)

    def _info(self, path: str) -> dict[str, Any]:
        try:
            return dict(self._fresh().info(path))
        except Exception as error:
            if not self.is_local and retries.is_unexplained(error):
                self.fs.cat_file(path, start=0, end=1)  # whose answer has a reason
                raise ConnectionError(f"an answer that has passed: {error}") from error
            raise

    def _check_whole(self, name: str, num_bytes: int) -> None:
        """What was written must be there: not every file system says so when it is not."""
        if (found := self._size(name)) != num_bytes:
            raise self._not_whole(name, num_bytes, found)

    def _not_whole(self, name: str, num_bytes: int, found: int | None) -> StoreError:
        there = "it is not there" if found is None else f"{found} are there"
        return StoreError(f"cannot write {self.url}/{name}: {num_bytes} bytes were written, and {there}")

    def is_directory(self) -> bool:
        """Whether the directory is there; in an object store, whether something is in it."""
        return bool(self._try("look up", "", lambda: self._fresh().isdir(self.path)))

    def names(self) -> list[str]:
        """Names in the directory, sorted; empty where there is no directory."""
        return self.listing().names

    def listing(self) -> Listing:
        """What is in the directory; nothing where there is no directory."""
        entries = _if_there(lambda: self._try("list", "", lambda: self._fresh().ls(self.path, detail=True)))
        return Listing.of(entries or (), self.path)

    def modified_ns(self, name: str = "") -> int:
        """Unix time in nanoseconds when a file, or the directory itself, was written last, by the store's clock."""
        path = self.child(name).rstrip("/")
        return self._try("look up", name, lambda: int(self._fresh().modified(path).timestamp() * 1e9))

    def now_ns(self) -> int:
        """Return the Unix time in nanoseconds by the clock that stamps files, since those of machines may be wrong.

        Where the store keeps no times, it is this machine's.

        Raises:
            StoreError: A file cannot be written and looked up.
        """
        name = f"{uuid.uuid4().hex[:16]}.clock"
        try:
            self.put(name, [], is_durable=False)
            return self.modified_ns(name)
        except StoreError as error:
            if not isinstance(error.__cause__, NotImplementedError):
                raise
            return time.time_ns()
        finally:
            with suppress(StoreError):
                self.remove(name)

    def remove(self, name: str, is_durable: bool = False) -> None:
        """Remove a file; that it is gone already is no error.

        Args:
            name: The file.
            is_durable: Whether it must not be there again after a power failure.
        """
        try:
            self._try("remove", name, lambda: self.fs.rm_file(self.child(name)))
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
        if is_durable and self.sync_files and self.is_local:  # also if another process has only just removed it
            with self._errors("remove", name), suppress(FileNotFoundError):  # it may have removed the directory, too
                sync_directory(self.path)

    def force_names(self) -> None:
        """Force names to disk, of local files: a process that was killed may have put some that are not durable yet."""
        if self.is_local and self.sync_files:
            with self._errors("write", ""):
                sync_directory(self.path)

    @property
    def has_directories(self) -> bool:
        """Whether a directory is there although nothing is in it."""
        return self.is_local

    def remove_directory(self) -> None:
        """Remove the directory if it is empty, where the file system has directories."""
        if self.has_directories:
            with self._errors("remove", ""):
                local_files.remove_empty(self.path)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """A file's bytes, or those from ``start`` to ``stop``; fewer where it is shorter.

        Raises:
            StoreError: It cannot be read; its ``errno`` is ``ENOENT`` where it does not exist.
            DamagedError: It is a link or a pipe where a file should be.
        """
        read = local_files.cat_file if self.is_local else self.fs.cat_file
        try:
            return bytes(self._try("read", name, lambda: read(self.child(name), start=start, end=stop)))
        except StoreError as error:
            # Servers refuse a range behind the end.
            if start is not None and error.errno == errno.EINVAL and (self._size(name) or 0) <= start:
                return b""
            raise

    def read_array(self, name: str, start: int, stop: int, on_piece: Callable[[Bytes], None] = pass_over) -> Bytes:
        """As :meth:`read`, into an array of its own that may be written to; ``on_piece`` is given it as it fills."""
        self.bandwidth.wait(stop - start)
        if self.is_local:
            with self._errors("read", name):
                return local_files.read_array(self.child(name), start, stop, on_piece)
        on_piece(array := np.frombuffer(bytearray(self.read(name, start, stop)), dtype=np.uint8))
        return array

    @contextmanager
    def open_file(self, name: str) -> Iterator[Any]:
        """A file to read from and to seek in; errors are those of :meth:`read`."""
        if self.is_local:
            with self._errors("read", name):
                file: Any = open_plain(self.child(name))
        else:
            num_bytes = int(self._try("read", name, lambda: self._info(self.child(name)))["size"] or 0)
            file = BufferedReader(RangedFile(partial(self.read, name), num_bytes), READ_AHEAD_BYTES)
        with file:
            yield file

    def put(self, name: str, parts: Sequence[Buffer], is_durable: bool = True) -> None:
        """Write a file whose name nobody else uses.

        Raises:
            StoreError: It was not written, or, if it must be durable, not whole.
        """
        self.bandwidth.wait(sum(memoryview(part).nbytes for part in parts))
        if self.is_local:
            with self._errors("write", name), open(self.child(name), "wb") as file:
                for part in parts:
                    file.write(part)
                if is_durable:
                    self._sync(file)
        else:
            self._try("write", name, lambda: self.fs.pipe_file(self.child(name), b"".join(parts)))
        if is_durable:
            self._check_whole(name, sum(memoryview(part).nbytes for part in parts))

    @contextmanager
    def create(self, name: str) -> Iterator[Stream]:
        """Write a file piece by piece, in the place of one of that name.

        A local file has its name once it is whole; elsewhere, one that failed may be there in part.
        """
        is_local, path = self.is_local, self.child(name)
        unfinished = f"{path}.{uuid.uuid4().hex[:16]}.partial"
        with ExitStack() as stack:
            with self._errors("write", name):
                file = open(unfinished, "xb") if is_local else self._upload(name)  # noqa: SIM115 - the stack does
            stack.callback(give_up, file, unfinished if is_local else None)
            stream = Stream(self, name, file, lambda: self._errors("write", name))
            yield stream
            with self._errors("write", name):
                self._sync(file)
                file.close()
                if is_local:
                    os.replace(unfinished, path)
                    if self.sync_files:
                        sync_directory(self.path)
            stack.pop_all()
        self._check_whole(name, stream.num_bytes)

    def _upload(self, name: str) -> Upload:
        path = self.child(name)
        return Upload(
            put=lambda data: self._try("write", name, lambda: self.fs.pipe_file(path, data)),
            begin=lambda: self._try("write", name, lambda: self.fs.open(path, "wb")),
        )

    def put_new(self, name: str, data: bytes, save_id: str) -> bool:
        """Write a file atomically, unless the name exists; returns whether an earlier request may still arrive.

        A local file is written under a name of its own and then linked, or renamed where there are no links. Elsewhere,
        an exclusive create has to do.

        Raises:
            CheckpointExistsError: The name exists, with other bytes: who tries again finds what it has written itself.
            StoreError: It was not written, or not whole.
        """
        is_ours, unanswered = True, list[str]()
        try:
            if self.is_local:
                unlinked, path = self.child(f"{save_id}.{name}"), self.child(name)
                with self._errors("write", name):
                    link_new(path, data, unlinked, self.sync_files)
            else:
                self._try("write", name, lambda: self._create_unless_there(name, data, unanswered))
        except StoreError as error:
            if error.errno not in _REFUSED or not self.exists(name):
                raise
            is_ours = False  # another one's file, too, may be there before its bytes are
        # Of several writers some stores let the last one win, and not every one says so when a write did not happen.
        if (found := _if_there(lambda: self.read(name, 0, len(data) + 1))) == data:
            return bool(unanswered)
        if found is None or (data.startswith(found) and (is_ours or save_id.encode() in found)):
            if found is not None:
                self.remove(name)  # nobody must take it for a damaged one
            raise self._not_whole(name, len(data), None if found is None else len(found))
        raise CheckpointExistsError(f"{self.url}: another save committed here first; save under another checkpoint_id")

    def _create_unless_there(self, name: str, data: bytes, unanswered: list[str]) -> None:
        try:
            self._create_new(name, data)
        except Exception as error:
            if retries.is_unanswered(error):
                unanswered.append(str(error))
            # 409 may tell of others who write just now, which passes, or of one who has written, which does not.
            with suppress(Exception):
                if is_transient(error) and self._info(self.child(name))["type"] == "file":
                    error = FileExistsError(errno.EEXIST, str(error))
            raise error

    def _create_new(self, name: str, data: bytes) -> None:
        # memory:// looks first and creates then; it is one process's own, so that a lock makes it atomic.
        turn: AbstractContextManager[object] = nullcontext() if is_object_store(self.fs) else _one_at_a_time
        with turn, self.fs.open(self.child(name), "xb") as file:
            file.write(data)

    def _sync(self, file: Any) -> None:
        if self.sync_files and self.is_local:
            file.flush()
            os.fsync(file.fileno())

    def _fresh(self) -> Any:
        """The file system, which forgets what it has listed here before."""
        self.fs.invalidate_cache(self.path)
        return self.fs

    def _try(self, action: str, name: str, call: Callable[[], Result]) -> Result:
        """Do something that may be done twice, again and again where it fails by what may pass."""
        with self._errors(action, name):
            return call() if self.is_local else retries.tried_again(call, f"{action} {self.url}/{name}")

    @contextmanager
    def _errors(self, action: str, name: str) -> Iterator[None]:
        """File systems raise whatever they like; callers see one type, with the cause and its errno."""
        try:
            yield
        except CNRError:
            raise
        except Exception as error:  # noqa: BLE001 - raised as another one, which refers to itself if a variable has it
            text = str(error)
            raise self._failure(action, name, error) from (error if without_secrets(text) == text else None)

    def _failure(self, action: str, name: str, error: Exception) -> StoreError:
        where = self.url if not name else f"{self.url}/{name}"
        told = f"cannot {action} {where}: {type(error).__name__}: {without_secrets(str(error))}"
        if is_object_store(self.fs) and retries.is_without_bucket(
            error
        ):  # a typing error, not a file that is not there yet
            return StoreError(f"{told}: {self.path.split('/')[0]!r} is no bucket; make it, or name another one")
        failure = StoreError(told)
        failure.errno = getattr(error, "errno", None) or _ERRNO.get(type(error))
        return failure


def _client_of(name: str) -> tuple[Any, str]:
    """The file system of a path or URL, and the path there."""
    if protocol_of(name) in S3FS and "::" not in name:
        client = fsspec.get_filesystem_class(OWN_S3FS)
        return client(**client._get_kwargs_from_urls(name)), str(client._strip_protocol(name))
    fs, path = fsspec.core.url_to_fs(name)
    return fs, str(path)


def _if_there(look: Callable[[], Result]) -> Result | None:
    """What a look at a store finds; None if the file or directory is not there."""
    try:
        return look()
    except StoreError as error:
        if error.errno in NOT_THERE:
            return None
        raise


def is_clock(name: str) -> bool:
    """Whether a file was written to ask for the time; one of a process that was killed meanwhile is left."""
    return _CLOCK.fullmatch(name) is not None


def read_whole(store: Store, name: str, most_bytes: int) -> bytes:
    """All bytes of a file.

    Raises:
        DamagedError: It has more than ``most_bytes``, or is a link or a pipe.
        StoreError: It cannot be read; its ``errno`` is ``ENOENT`` where it does not exist.
    """
    num_bytes = 0
    if store.is_local:
        with suppress(OSError):  # which is told when it is read
            num_bytes = os.stat(store.child(name), follow_symlinks=False).st_size
    if num_bytes <= most_bytes:
        data = store.read(name, 0, most_bytes + 1)
        if len(data) <= most_bytes:
            return data
    raise DamagedError(f"{store.url}/{name}: more than the {most_bytes} bytes it may have; use another checkpoint")

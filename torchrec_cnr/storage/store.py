"""``Store``: a directory in any fsspec file system that contains checkpoints.

A store writes each file once and as a whole. ``put_new`` is the commit primitive: the name either refers to all bytes,
durably, or does not exist. If several writers compete for a name, one of them wins. Every failure becomes a
``StoreError`` that names the file. ``read_whole`` limits the size of a file, since its content is untrusted.
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
from torchrec_cnr.storage.local_copies import LocalCopies
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

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)  # with ENAMETOOLONG, no file of that name can exist
# s3fs turns a 412 answer into ``FileExistsError`` only if it says which condition failed; many servers do not say that.
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
    """A directory in an fsspec file system.

    Attributes:
        fs: The fsspec file system.
        path: The path of the directory in ``fs``, without the protocol, as ``canonical_path`` spells it.
        sync_files: Whether a write forces local files to disk before it returns.
        bandwidth: The bandwidth limit of ``put`` and ``read_array``.
        row_log: The row log that can hold packs of these checkpoints instead of files, or None.
        copies: Local copies of data files, or None.
    """

    fs: Any
    path: str
    sync_files: bool = True
    bandwidth: Bandwidth = field(default_factory=Bandwidth, compare=False)
    row_log: RowLog | None = field(default=None, compare=False)
    copies: LocalCopies | None = field(default=None, compare=False)

    @classmethod
    def open(
        cls, url: "str | os.PathLike[str] | Store", sync_files: bool = True, row_log: RowLog | None = None
    ) -> "Store":
        """Return the store of a local path or fsspec URL; return a ``Store`` unchanged. Nothing is created.

        Raises:
            ConfigurationError: The URL's protocol is unknown, its package is not installed, or ``checked_url`` or
                ``canonical_path`` refuses the URL.
            StoreError: The file system cannot be opened, for example because its server does not answer.
        """
        if isinstance(url, Store):
            return url
        name = checked_url(url)
        try:
            fs, path = _client_of(name)
        except Exception as error:
            kind = StoreError if isinstance(error, OSError) else ConfigurationError  # an OSError: no connection
            raise kind(f"{name!r}: not a path or URL that fsspec can open ({error})") from error
        return cls(fs, canonical_path(path, isinstance(fs, LocalFileSystem)), sync_files, row_log=row_log)

    @classmethod
    def can_open(cls, url: str | os.PathLike[str]) -> bool:
        """Return whether :meth:`open` would succeed."""
        try:
            cls.open(url)
        except (CNRError, TypeError):
            return False
        return True

    @property
    def url(self) -> str:
        """The full name: a path for a local file system, otherwise a URL with its protocol."""
        return self.path if isinstance(self.fs, LocalFileSystem) else str(self.fs.unstrip_protocol(self.path))

    @property
    def is_local(self) -> bool:
        """Return whether the store is in a local file system."""
        return isinstance(self.fs, LocalFileSystem)

    def at(self, path: str) -> "Store":
        """Return another directory of the same file system, by a path relative to this one."""
        return replace(self, path=posixpath.normpath(posixpath.join(self.path, path)))

    def is_beside(self, other: "Store") -> bool:
        """Return whether both stores are in one file system, so that relative paths lead from one to the other."""
        fs, other_fs = self.fs, other.fs  # fsspec has an instance for each thread, and they do not compare as equal
        same_arguments = (fs.storage_args, fs.storage_options) == (other_fs.storage_args, other_fs.storage_options)
        return same_arguments and (type(fs) is type(other_fs) or self._service == other._service)

    @property
    def _service(self) -> str:
        return without_client(self.url).partition("://")[0]

    def child(self, name: str) -> str:
        """Return the path of a file in this directory."""
        return f"{self.path.rstrip('/')}/{name}"

    def make(self) -> None:
        """Create the directory and its parents, if the file system has directories."""
        if is_object_store(self.fs):
            return
        is_durable = self.is_local and self.sync_files
        with self._errors("create", ""):
            make_directory(self.path) if is_durable else self.fs.makedirs(self.path, exist_ok=True)

    def exists(self, name: str) -> bool:
        """Return whether a file exists.

        Raises:
            StoreError: The file system does not answer. fsspec's own ``exists`` returns False then.
        """
        return self._size(name) is not None

    def _size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""
        info = _if_there(lambda: self._try("look up", name, lambda: self._info(self.child(name))))
        return None if info is None else int(info["size"] or 0)

    def _info(self, path: str) -> dict[str, Any]:
        try:
            return dict(self._fresh().info(path))
        except Exception as error:
            if not self.is_local and retries.is_unexplained(error):
                self.fs.cat_file(path, start=0, end=1)  # its error has a reason; without one, the fault was transient
                raise ConnectionError(f"transient error: {error}") from error
            raise

    def _check_whole(self, name: str, num_bytes: int) -> None:
        """Raise an error unless a written file has its full size: some file systems fail without an error."""
        if (actual_bytes := self._size(name)) != num_bytes:
            raise self._not_whole(name, num_bytes, actual_bytes)

    def _not_whole(self, name: str, num_bytes: int, actual_bytes: int | None) -> StoreError:
        state_text = "the file is missing" if actual_bytes is None else f"the file has {actual_bytes} bytes"
        return StoreError(f"cannot write {self.url}/{name}: wrote {num_bytes} bytes, but {state_text}")

    def is_directory(self) -> bool:
        """Return whether the directory exists. In an object store, it exists if it contains something."""
        return bool(self._try("look up", "", lambda: self._fresh().isdir(self.path)))

    def names(self) -> list[str]:
        """Return the sorted names in the directory; an empty list if the directory does not exist."""
        return self.listing().names

    def listing(self) -> Listing:
        """Return the content of the directory; an empty listing if the directory does not exist."""
        entries = _if_there(lambda: self._try("list", "", lambda: self._fresh().ls(self.path, detail=True)))
        return Listing.of(entries or (), self.path)

    def modified_ns(self, name: str = "") -> int:
        """Return when a file, or the directory itself, was last written, as Unix time in ns by the store's clock."""
        path = self.child(name).rstrip("/")
        return self._try("look up", name, lambda: int(self._fresh().modified(path).timestamp() * 1e9))

    def now_ns(self) -> int:
        """Return the Unix time in ns by the clock that stamps this store's files; if it keeps no times, by our own."""
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
        """Remove a file. A file that does not exist is not an error.

        Args:
            name: Name of the file.
            is_durable: Whether the file must not reappear after a power failure.
        """
        try:
            self._try("remove", name, lambda: self.fs.rm_file(self.child(name)))
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
        if is_durable and self.sync_files and self.is_local:  # even if another process removed the file a moment ago
            with self._errors("remove", name), suppress(FileNotFoundError):  # or the directory
                sync_directory(self.path)

    def force_names(self) -> None:
        """Force the names of local files to disk, because a process that was killed may not have done so."""
        if self.is_local and self.sync_files:
            with self._errors("write", ""):
                sync_directory(self.path)

    def remove_directory(self) -> None:
        """Remove the directory if it is empty, if the file system has directories."""
        if self.is_local:
            with self._errors("remove", ""):
                local_files.remove_empty(self.path)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes of a file, or those from ``start`` to ``stop``. A shorter file returns fewer.

        Raises:
            StoreError: The file cannot be read. ``errno`` is ``ENOENT`` if it does not exist.
            DamagedError: A link or a pipe has the name of the file.
        """
        cat_file = local_files.cat_file if self.is_local else self.fs.cat_file
        try:
            return bytes(self._try("read", name, lambda: cat_file(self.child(name), start=start, end=stop)))
        except StoreError as error:
            # Servers refuse a range that begins after the end of the file.
            if start is not None and error.errno == errno.EINVAL and (self._size(name) or 0) <= start:
                return b""
            raise

    def read_array(self, name: str, start: int, stop: int, on_piece: Callable[[Bytes], None] = pass_over) -> Bytes:
        """Read like :meth:`read`, into a new writable array; call ``on_piece`` for each piece that has arrived."""
        self.bandwidth.wait(stop - start)
        if self.is_local:
            with self._errors("read", name):
                return local_files.read_array(self.child(name), start, stop, on_piece)
        on_piece(array := np.frombuffer(bytearray(self.read(name, start, stop)), dtype=np.uint8))
        return array

    @contextmanager
    def open_file(self, name: str) -> Iterator[Any]:
        """Open a file that can be read and seeked in. Errors are those of :meth:`read`."""
        if self.is_local:
            with self._errors("read", name):
                file: Any = open_plain(self.child(name))
        else:
            num_bytes = int(self._try("read", name, lambda: self._info(self.child(name)))["size"] or 0)
            file = BufferedReader(RangedFile(partial(self.read, name), num_bytes), READ_AHEAD_BYTES)
        with file:
            yield file

    def put(self, name: str, parts: Sequence[Buffer], is_durable: bool = True) -> None:
        """Write a file whose name no other writer uses.

        Raises:
            StoreError: The file was not written or, if it must be durable, not completely.
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
        """Write a file piece by piece. It replaces a file of the same name.

        A local file gets its name when it is complete. Elsewhere, a failed write can leave an incomplete file.
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
        """Write a file atomically, unless the name exists; return whether an earlier request may still arrive.

        A local file is written under a temporary name and then linked, or renamed if the file system has no links.
        Other file systems must support an exclusive create.

        Raises:
            CheckpointExistsError: The name exists, with other bytes. A retry succeeds if its own file is there already.
            StoreError: The file was not written, or not completely.
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
            is_ours = False  # but the name can exist before all bytes of the other writer are in the file
        # In some stores the last of several writers wins, and some report no error for a write that did not happen.
        if (content := _if_there(lambda: self.read(name, 0, len(data) + 1))) == data:
            return bool(unanswered)
        if content is None or (data.startswith(content) and (is_ours or save_id.encode() in content)):
            if content is not None:
                self.remove(name)  # otherwise readers would report a corrupt file
            raise self._not_whole(name, len(data), None if content is None else len(content))
        raise CheckpointExistsError(f"{self.url}: another save committed here first; save under another checkpoint_id")

    def _create_unless_there(self, name: str, data: bytes, unanswered: list[str]) -> None:
        try:
            self._create_new(name, data)
        except Exception as error:
            if retries.is_unanswered(error):
                unanswered.append(str(error))
            # 409 means that others are writing now, which is transient, or that another writer has won, which is not.
            with suppress(Exception):
                if is_transient(error) and self._info(self.child(name))["type"] == "file":
                    error = FileExistsError(errno.EEXIST, str(error))
            raise error

    def _create_new(self, name: str, data: bytes) -> None:
        # memory:// checks first and then creates. It belongs to one process, so a lock makes the two steps atomic.
        lock: AbstractContextManager[object] = nullcontext() if is_object_store(self.fs) else _one_at_a_time
        with lock, self.fs.open(self.child(name), "xb") as file:
            file.write(data)

    def _sync(self, file: Any) -> None:
        if self.sync_files and self.is_local:
            file.flush()
            os.fsync(file.fileno())

    def _fresh(self) -> Any:
        """Return the file system after it has dropped its cached listings of this directory."""
        self.fs.invalidate_cache(self.path)
        return self.fs

    def _try(self, action: str, name: str, call: Callable[[], Result]) -> Result:
        """Run an idempotent operation, retrying on transient errors if the store is not local."""
        with self._errors(action, name):
            return call() if self.is_local else retries.tried_again(call, f"{action} {self.url}/{name}")

    @contextmanager
    def _errors(self, action: str, name: str) -> Iterator[None]:
        """Turn all errors of a file system into ``StoreError``, with the cause and its errno."""
        try:
            yield
        except CNRError:
            raise
        except Exception as error:  # noqa: BLE001 - raised as another one, which refers to itself if a variable has it
            text = str(error)
            raise self._failure(action, name, error) from (error if without_secrets(text) == text else None)

    def _failure(self, action: str, name: str, error: Exception) -> StoreError:
        where = self.url if not name else f"{self.url}/{name}"
        message = f"cannot {action} {where}: {type(error).__name__}: {without_secrets(str(error))}"
        if is_object_store(self.fs) and retries.is_without_bucket(error):  # rather a typo than a file not yet written
            return StoreError(f"{message}: bucket {self.path.split('/')[0]!r} does not exist; create it or use another")
        failure = StoreError(message)
        failure.errno = getattr(error, "errno", None) or _ERRNO.get(type(error))
        return failure


def _client_of(name: str) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path in that file system."""
    if protocol_of(name) in S3FS and "::" not in name:
        client = fsspec.get_filesystem_class(OWN_S3FS)
        return client(**client._get_kwargs_from_urls(name)), str(client._strip_protocol(name))
    fs, path = fsspec.core.url_to_fs(name)
    return fs, str(path)


def _if_there(look_up: Callable[[], Result]) -> Result | None:
    """Return the result of a look-up; None if the file or directory does not exist."""
    try:
        return look_up()
    except StoreError as error:
        if error.errno in NOT_THERE:
            return None
        raise


def is_clock(name: str) -> bool:
    """Return whether a file was written to read the store's clock. A process that was killed may have left it."""
    return _CLOCK.fullmatch(name) is not None


def read_whole(store: Store, name: str, most_bytes: int) -> bytes:
    """Return all bytes of a file.

    Raises:
        DamagedError: The file has more than ``most_bytes``, or is a link or a pipe.
        StoreError: The file cannot be read. ``errno`` is ``ENOENT`` if it does not exist.
    """
    num_bytes = 0
    if store.is_local:
        with suppress(OSError):  # the read below raises the same error
            num_bytes = os.stat(store.child(name), follow_symlinks=False).st_size
    if num_bytes <= most_bytes:
        data = store.read(name, 0, most_bytes + 1)
        if len(data) <= most_bytes:
            return data
    raise DamagedError(f"{store.url}/{name}: expected at most {most_bytes} bytes, got more; use another checkpoint")

"""S3 by obstore, a client in Rust: what URLs that begin with ``s3+obstore://`` are opened by.

A file system of fsspec's, made of obstore's own, which leaves out what a commit needs: a put unless the name exists. It
is registered with fsspec in ``urls``, and takes endpoint, region and credentials from boto3, as s3fs takes them
from botocore: of one bucket, ``s3://`` and ``s3+obstore://`` can be used in turns.
"""

import errno
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import boto3
from fsspec.spec import AbstractBufferedFile
from obstore import open_writer
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.fsspec import FsspecStore
from obstore.store import S3Store

from torchrec_cnr.storage.retries import TRANSIENT_CODES, TRANSIENT_STATUS
from torchrec_cnr.storage.urls import OBSTORE

if TYPE_CHECKING:  # obstore's are not there at runtime
    from obstore.store import ClientConfig, RetryConfig, S3Config

_PART_BYTES = 16 << 20
_ONE_REQUEST_BYTES = 100_000_000
_NUM_PARALLEL_PARTS = 4  # so that a file that is written piece by piece takes 64 MiB of memory

# By default, a whole request has 30 seconds: too few for a pack on a slow network.
_CLIENT: "ClientConfig" = {"connect_timeout": "10s", "read_timeout": "30s", "timeout": "600s", "allow_http": True}
# Callers try again, and tell of it. A file that is written piece by piece cannot be begun anew.
_ONE_ATTEMPT: "RetryConfig" = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
_SOME_ATTEMPTS: "RetryConfig" = {"max_retries": 3, "retry_timeout": timedelta(seconds=60)}

_DUMP = "\n\nDebug source:"  # of what obstore has in memory
_ANSWER = re.compile(r"(.*?status code: (\d{3})[^:]*)(.*)", re.DOTALL)
_REASONS = re.compile(r"<(?:Code|Message)>([^<]*)<")
_ERRNO = {
    FileNotFoundError: errno.ENOENT,
    AlreadyExistsError: errno.EEXIST,
    PermissionDeniedError: errno.EACCES,
    UnauthenticatedError: errno.EACCES,
}
_ERRNO_OF_STATUS = {416: errno.EINVAL}  # a range behind the end


class ObstoreS3(FsspecStore):
    """Buckets of S3, at the endpoint and with the credentials that boto3 finds.

    Raises:
        ValueError: boto3 finds no credentials.
    """

    protocol = OBSTORE

    def __init__(self, **options: Any) -> None:
        super().__init__("s3", **options)  # the protocols that it knows are its own
        self.protocol = OBSTORE
        session = boto3.Session()
        if session.get_credentials() is None:
            raise ValueError("no AWS credentials were found: neither in the environment, nor in ~/.aws, nor a role")
        self._credentials = Boto3CredentialProvider(session)
        client = session.client("s3").meta
        region = client.region_name
        self._bucket_config: S3Config = {"region": region}
        # At Amazon's own, each bucket has a host, which obstore knows; any other is named, VPC endpoints among them.
        if client.endpoint_url not in ("https://s3.amazonaws.com", f"https://s3.{region}.amazonaws.com"):
            self._bucket_config["endpoint"] = client.endpoint_url

    def _construct_store(self, bucket: str, is_patient: bool = False) -> S3Store:
        return S3Store(
            bucket,
            config=self._bucket_config,
            client_options=_CLIENT,
            retry_config=_SOME_ATTEMPTS if is_patient else _ONE_ATTEMPT,
            credential_provider=self._credentials,
        )

    async def _info(self, path: str, **options: Any) -> dict[str, Any]:
        with _plain_errors():
            return await super()._info(path, **options)

    async def _ls(self, path: str, detail: bool = False, **_: Any) -> Any:
        with _plain_errors():
            found = await super()._ls(path, detail=True)
        return found if detail else sorted(entry["name"] for entry in found)

    async def _rm_file(self, path: str, **options: Any) -> None:
        with _plain_errors():
            await super()._rm_file(path, **options)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if end is not None and end <= (start or 0):
            return b""
        with _plain_errors():
            return await super()._cat_file(path, start, end, **options)

    async def _pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        bucket, key = self._split_path(path)
        with _plain_errors():
            await self._construct_store(bucket).put_async(
                key,
                value,
                mode="create" if mode == "create" else "overwrite",
                use_multipart=memoryview(value).nbytes > _ONE_REQUEST_BYTES,
                chunk_size=_PART_BYTES,
                max_concurrency=_NUM_PARALLEL_PARTS,
            )

    def modified(self, path: str) -> datetime:
        """When a file was written last."""
        with _plain_errors():
            return super().modified(path)

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> Any:
        if mode == "rb":
            return _Download(self, path, mode)
        if mode == "xb":
            return _NewObject(self, path)
        if mode != "wb":
            raise ValueError(f"{path}: an object is read, or written as a whole: rb, wb or xb, not {mode}")
        bucket, key = self._split_path(path)
        return _Upload(self._construct_store(bucket, True), key)


class _Download(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    """An object that is read range by range."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start=start, end=end))


class _NewObject(io.BytesIO):
    """An object that is put behind its ``with`` block, unless its name exists."""

    def __init__(self, fs: ObstoreS3, path: str) -> None:
        super().__init__()
        self._fs, self._path = fs, path

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            self._fs.pipe_file(self._path, self.getvalue(), mode="create")
        self.close()


class _Upload:
    """An object that is put part by part, and is there once it is closed."""

    def __init__(self, store: S3Store, key: str) -> None:
        self._writer = open_writer(store, key, buffer_size=_PART_BYTES, max_concurrency=_NUM_PARALLEL_PARTS)
        self._is_open = True

    def write(self, data: Any) -> int:
        """Append bytes; returns how many."""
        with _plain_errors():
            return self._writer.write(data)

    def close(self) -> None:
        """Put what is left."""
        if self._is_open:
            self._is_open = False
            with _plain_errors():
                self._writer.close()

    def discard(self) -> None:
        """Drop the parts that were put."""
        if self._is_open:
            self._is_open = False
            given_up = InterruptedError("given up")
            self._writer.__exit__(type(given_up), given_up, None)  # the only way to tell obstore

    def __enter__(self) -> "_Upload":
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        if raised is None:
            self.close()
        else:
            self.discard()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """obstore's errors as the operating system's; of a server's answer its reasons alone: it may repeat access keys."""
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        raise _plain(error) from None  # kept in a variable, it would refer to itself


def _plain(error: Exception) -> OSError:
    text = str(error).partition(_DUMP)[0]
    number, status = _ERRNO.get(type(error)), 0
    if answer := _ANSWER.fullmatch(text):
        reasons = _REASONS.findall(answer[3])
        status, text = int(answer[2]), ": ".join([answer[1], *reasons])
        if not TRANSIENT_CODES.isdisjoint(reasons):
            return ConnectionError(text)
        number = number or _ERRNO_OF_STATUS.get(status, errno.EIO)
    if number is None or status in TRANSIENT_STATUS:
        return ConnectionError(text)
    return OSError(number, text)

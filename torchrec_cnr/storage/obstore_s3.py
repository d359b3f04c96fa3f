"""The S3 client for URLs with ``s3+obstore://``, based on obstore, which is written in Rust.

It extends obstore's fsspec file system by the operation that a commit needs: write an object unless its name exists.
``urls`` registers it with fsspec. It takes endpoint, region and credentials from boto3, as s3fs takes them from
botocore. So ``s3://`` and ``s3+obstore://`` can be used for the same bucket.
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

if TYPE_CHECKING:  # obstore has these types only in its stubs
    from obstore.store import ClientConfig, RetryConfig, S3Config

_PART_BYTES = 16 << 20
_ONE_REQUEST_BYTES = 100_000_000
_NUM_PARALLEL_PARTS = 4  # so that a file that is written piece by piece takes 64 MiB of memory

# obstore's default limit of 30 seconds for a whole request is too short for a pack on a slow network.
_CLIENT: "ClientConfig" = {"connect_timeout": "10s", "read_timeout": "30s", "timeout": "600s", "allow_http": True}
# ``Store`` retries and logs. Only a file that is written piece by piece cannot be restarted, so its pieces are retried.
_ONE_ATTEMPT: "RetryConfig" = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
_SOME_ATTEMPTS: "RetryConfig" = {"max_retries": 3, "retry_timeout": timedelta(seconds=60)}

_DUMP = "\n\nDebug source:"  # begins a dump of obstore's internal state
_ANSWER = re.compile(r"(.*?status code: (\d{3})[^:]*)(.*)", re.DOTALL)
_REASONS = re.compile(r"<(?:Code|Message)>([^<]*)<")
_ERRNO = {
    FileNotFoundError: errno.ENOENT,
    AlreadyExistsError: errno.EEXIST,
    PermissionDeniedError: errno.EACCES,
    UnauthenticatedError: errno.EACCES,
}
_ERRNO_OF_STATUS = {416: errno.EINVAL}  # a range that begins after the end


class ObstoreS3(FsspecStore):
    """S3 buckets at the endpoint and with the credentials that boto3 finds.

    Raises:
        ValueError: boto3 finds no credentials.
    """

    protocol = OBSTORE

    def __init__(self, **options: Any) -> None:
        super().__init__("s3", **options)  # obstore accepts only its own protocols
        self.protocol = OBSTORE
        session = boto3.Session()
        if session.get_credentials() is None:
            raise ValueError("no AWS credentials were found in the environment, in ~/.aws, or from a role")
        self._credentials = Boto3CredentialProvider(session)
        client = session.client("s3").meta
        region = client.region_name
        self._bucket_config: S3Config = {"region": region}
        # obstore derives the host of each bucket at Amazon's endpoints. Others must be set, such as VPC endpoints.
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
            entries = await super()._ls(path, detail=True)
        return entries if detail else sorted(entry["name"] for entry in entries)

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
        """Return when a file was last written."""
        with _plain_errors():
            return super().modified(path)

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> Any:
        if mode == "rb":
            return _Download(self, path, mode)
        if mode == "xb":
            return _NewObject(self, path)
        if mode != "wb":
            raise ValueError(f"{path}: expected the mode 'rb', 'wb' or 'xb', got {mode!r}")
        bucket, key = self._split_path(path)
        return _Upload(self._construct_store(bucket, True), key)


class _Download(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    """An object that is read range by range."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start=start, end=end))


class _NewObject(io.BytesIO):
    """An object that is uploaded when its ``with`` block ends, unless its name exists."""

    def __init__(self, fs: ObstoreS3, path: str) -> None:
        super().__init__()
        self._fs, self._path = fs, path

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            self._fs.pipe_file(self._path, self.getvalue(), mode="create")
        self.close()


class _Upload:
    """An object that is uploaded part by part, and exists once it is closed."""

    def __init__(self, store: S3Store, key: str) -> None:
        self._writer = open_writer(store, key, buffer_size=_PART_BYTES, max_concurrency=_NUM_PARALLEL_PARTS)
        self._is_open = True

    def write(self, data: Any) -> int:
        """Append bytes; return their number."""
        with _plain_errors():
            return self._writer.write(data)

    def close(self) -> None:
        """Upload the remaining bytes, and create the object."""
        if self._is_open:
            self._is_open = False
            with _plain_errors():
                self._writer.close()

    def discard(self) -> None:
        """Discard the uploaded parts."""
        if self._is_open:
            self._is_open = False
            given_up = InterruptedError("given up")
            self._writer.__exit__(type(given_up), given_up, None)  # obstore has no other way to abort an upload

    def __enter__(self) -> "_Upload":
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        if raised is None:
            self.close()
        else:
            self.discard()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn obstore's errors into ``OSError``, with only the reasons of an answer, which can contain access keys."""
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        raise _plain(error) from None  # a chained error in a variable would refer to itself


def _plain(error: Exception) -> OSError:
    text = str(error).partition(_DUMP)[0]
    error_number, status = _ERRNO.get(type(error)), 0
    if match := _ANSWER.fullmatch(text):
        reasons = _REASONS.findall(match[3])
        status, text = int(match[2]), ": ".join([match[1], *reasons])
        if not TRANSIENT_CODES.isdisjoint(reasons):
            return ConnectionError(text)
        error_number = error_number or _ERRNO_OF_STATUS.get(status, errno.EIO)
    if error_number is None or status in TRANSIENT_STATUS:
        return ConnectionError(text)
    return OSError(error_number, text)

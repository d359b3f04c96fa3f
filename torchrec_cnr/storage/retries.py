"""Retries for stores that are not local, and the classification of transient errors.

Servers throttle, restart and drop connections. Each fsspec file system raises other errors for that, and this package
requires none of their packages. So errors are classified by HTTP status, by errno, and by the names of their types.
Every operation of a store is idempotent: each name is written once, and a writer recognises its own bytes.
"""

import errno
import logging
import random
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torchrec_cnr.storage.urls import OBJECT_STORES, without_secrets

logger = logging.getLogger(__name__)

RETRY_SECS = 60.0
_FIRST_WAIT_SECS, _LONGEST_WAIT_SECS = 0.2, 10.0

TRANSIENT_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})  # 409: others are writing the same name
_TRANSIENT_ERRNO = frozenset(
    {errno.EBUSY, errno.EAGAIN, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH}
)
_TRANSIENT_TYPES = frozenset(
    {
        "botocore.exceptions.HTTPClientError",
        "botocore.exceptions.ConnectionError",
        "botocore.parsers.ResponseParserError",
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "requests.exceptions.ChunkedEncodingError",
        "urllib3.exceptions.ProtocolError",
        "azure.core.exceptions.ServiceRequestError",
        "azure.core.exceptions.ServiceResponseError",
    }
)

# Error codes of a 400 answer that is transient: the server timed out while it waited for the body of the request.
TRANSIENT_CODES = frozenset({"RequestTimeout"})

_BAD_REQUEST = "status code: 400"  # in obstore's messages

# Some clients raise the same error for a missing bucket as for a missing file. Azure calls a bucket a container.
_NO_BUCKET = re.compile(r"\bNoSuchBucket\b|\bContainerNotFound\b|specified (?:bucket|container) does not exist")

Result = TypeVar("Result")


def is_object_store(fs: Any) -> bool:
    """Return whether an fsspec file system is an object store.

    An object store has no directories. Creating one would check for the bucket, or even create it.
    """
    protocols = [fs.protocol] if isinstance(fs.protocol, str) else fs.protocol
    return not OBJECT_STORES.isdisjoint(protocols)


def tried_again(call: Callable[[], Result], what: str) -> Result:
    """Call a function, retrying on transient errors with exponential backoff and full jitter.

    No attempt begins later than ``RETRY_SECS`` after the first.

    Args:
        call: The function; it must be idempotent.
        what: What it does, for the log.

    Raises:
        Exception: The error of the last attempt.
    """
    deadline, longest_secs = time.monotonic() + RETRY_SECS, _FIRST_WAIT_SECS
    while True:
        try:
            return call()
        except Exception as error:
            forget_frames(error)
            wait_secs = random.uniform(0, longest_secs)
            if not is_transient(error) or time.monotonic() + wait_secs > deadline:
                raise
            message = without_secrets(str(error))
            logger.warning("cannot %s, trying again: %s: %s", what, type(error).__name__, message)
        time.sleep(wait_secs)
        longest_secs = min(2 * longest_secs, _LONGEST_WAIT_SECS)


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and its causes.

    Clients of object stores keep an error in a variable and raise it from there. The error and its traceback then refer
    to each other, and keep the callers' objects, such as staged rows, alive until a full garbage collection.
    """
    current: BaseException | None = error
    while current is not None and current.__traceback__ is not None:
        current.__traceback__ = None
        current = current.__cause__ or current.__context__


def is_transient(error: BaseException) -> bool:
    """Return whether an error is transient, judging by its type, status and errno."""
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    status = _status(error)
    if status is not None:
        return status in TRANSIENT_STATUS or _code(error) in TRANSIENT_CODES
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    if any(f"{type_.__module__}.{type_.__name__}" in _TRANSIENT_TYPES for type_ in type(error).__mro__):
        return True
    return error.__cause__ is not None and is_transient(error.__cause__)


def is_unanswered(error: BaseException) -> bool:
    """Return whether a request got no answer, so that the server may still execute it."""
    return is_transient(error) and _status(error) is None


def is_without_bucket(error: BaseException) -> bool:
    """Return whether the error is that the bucket does not exist."""
    if _NO_BUCKET.search(f"{type(error).__name__} {error}"):
        return True
    return error.__cause__ is not None and is_without_bucket(error.__cause__)


def is_unexplained(error: BaseException) -> bool:
    """Return whether the error is a 400 answer. The answer to a look-up has no body, and so no reason."""
    status = _status(error)
    if status is not None:
        return status == 400
    if _BAD_REQUEST in str(error):
        return True
    return error.__cause__ is not None and is_unexplained(error.__cause__)


def _code(error: BaseException) -> str | None:
    """Return botocore's error code of an answer."""
    response = getattr(error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an error of botocore, aiohttp, gcsfs or azure."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        names = ("status", "status_code", "code")
        status = next((value for name in names if isinstance(value := getattr(error, name, None), int)), None)
    return status if isinstance(status, int) else None

"""Files that are not on this machine: tried again where the fault may pass.

Servers throttle, restart and drop connections. What these faults are called differs from one fsspec file system to the
next, and none of their packages is needed here: so they are told by HTTP's status, by errno, and by their types' names.
Every operation of a store may be done twice: names are used once, and who creates a file knows its bytes.
"""

import errno
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

from torchrec_cnr.storage.urls import OBSTORE

logger = logging.getLogger(__name__)

RETRY_SECS = 60.0
_FIRST_WAIT_SECS, _LONGEST_WAIT_SECS = 0.2, 10.0

# Stores of objects have no directories: to "make" one would look for the bucket, and create it where that is allowed.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "r2", OBSTORE})

TRANSIENT_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})  # 409: others write to the same name just now
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

Result = TypeVar("Result")


def is_object_store(fs: Any) -> bool:
    """Whether an fsspec file system is one of objects in buckets."""
    protocols = [fs.protocol] if isinstance(fs.protocol, str) else fs.protocol
    return not _OBJECT_STORES.isdisjoint(protocols)


def tried_again(call: Callable[[], Result], what: str) -> Result:
    """Call until it succeeds, or fails by what will not pass, with random waits that grow (AWS's "full jitter").

    No attempt begins later than ``RETRY_SECS`` after the first.

    Args:
        call: May be called again.
        what: It does, for the log.

    Raises:
        Exception: What the last attempt raised.
    """

    def tell(state: RetryCallState) -> None:
        failure = state.outcome.exception() if state.outcome is not None else None
        logger.warning("cannot %s, trying again: %s: %s", what, type(failure).__name__, failure)

    attempts = Retrying(
        stop=stop_before_delay(RETRY_SECS),
        wait=wait_random_exponential(multiplier=_FIRST_WAIT_SECS, max=_LONGEST_WAIT_SECS),
        retry=retry_if_exception(is_transient),
        before_sleep=tell,
        reraise=True,
    )
    return attempts(call)


def is_transient(error: BaseException) -> bool:
    """Whether a fault may pass by itself, as far as its type and what it tells show."""
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    status = _status(error)
    if status is not None:
        return status in TRANSIENT_STATUS
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    if any(f"{type_.__module__}.{type_.__name__}" in _TRANSIENT_TYPES for type_ in type(error).__mro__):
        return True
    return error.__cause__ is not None and is_transient(error.__cause__)


def _status(error: BaseException) -> int | None:
    """The status of an answer by HTTP: as botocore, aiohttp, gcsfs and azure tell it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        names = ("status", "status_code", "code")
        found = next((value for name in names if isinstance(value := getattr(error, name, None), int)), None)
    return found if isinstance(found, int) else None

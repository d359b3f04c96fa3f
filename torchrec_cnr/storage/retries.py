"""Files that are not on this machine: tried again where the fault may pass.

Servers throttle, restart and drop connections. What these faults are called differs from one fsspec file system to the
next, and none of their packages is needed here: so they are told by HTTP's status, by errno, and by their types' names.
Every operation of a store may be done twice: names are used once, and who creates a file knows its bytes.
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

# What an answer 400 is called that says nothing of the request: the server has waited too long for its body.
TRANSIENT_CODES = frozenset({"RequestTimeout"})

_BAD_REQUEST = "status code: 400"  # as obstore tells it

# Some clients raise of a bucket what they raise of a file; Azure calls it a container.
_NO_BUCKET = re.compile(r"\bNoSuchBucket\b|\bContainerNotFound\b|specified (?:bucket|container) does not exist")

Result = TypeVar("Result")


def is_object_store(fs: Any) -> bool:
    """Whether an fsspec file system is one of objects in buckets.

    It has no directories: to "make" one would look for the bucket, and create it where that is allowed.
    """
    protocols = [fs.protocol] if isinstance(fs.protocol, str) else fs.protocol
    return not OBJECT_STORES.isdisjoint(protocols)


def tried_again(call: Callable[[], Result], what: str) -> Result:
    """Call until it succeeds, or fails by what will not pass, with random waits that grow (AWS's "full jitter").

    No attempt begins later than ``RETRY_SECS`` after the first.

    Args:
        call: May be called again.
        what: It does, for the log.

    Raises:
        Exception: What the last attempt raised.
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
            told = without_secrets(str(error))
            logger.warning("cannot %s, trying again: %s: %s", what, type(error).__name__, told)
        time.sleep(wait_secs)
        longest_secs = min(2 * longest_secs, _LONGEST_WAIT_SECS)


def forget_frames(error: BaseException) -> None:
    """Drop where an error and its causes were raised.

    Clients of object stores keep an error in a variable and raise it from there: it and its traceback then refer to
    each other, and keep what the callers hold, such as staged rows, until a full garbage collection.
    """
    seen: BaseException | None = error
    while seen is not None and seen.__traceback__ is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def is_transient(error: BaseException) -> bool:
    """Whether a fault may pass by itself, as far as its type and what it tells show."""
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
    """Return whether a request got no answer, so that it may still be done."""
    return is_transient(error) and _status(error) is None


def is_without_bucket(error: BaseException) -> bool:
    """Whether it is the bucket that is not there."""
    if _NO_BUCKET.search(f"{type(error).__name__} {error}"):
        return True
    return error.__cause__ is not None and is_without_bucket(error.__cause__)


def is_unexplained(error: BaseException) -> bool:
    """Whether it is an answer 400, which after a look-up comes without a reason."""
    status = _status(error)
    if status is not None:
        return status == 400
    if _BAD_REQUEST in str(error):
        return True
    return error.__cause__ is not None and is_unexplained(error.__cause__)


def _code(error: BaseException) -> str | None:
    """What botocore calls an answer."""
    response = getattr(error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _status(error: BaseException) -> int | None:
    """The status of an answer by HTTP: as botocore, aiohttp, gcsfs and azure tell it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        names = ("status", "status_code", "code")
        found = next((value for name in names if isinstance(value := getattr(error, name, None), int)), None)
    return found if isinstance(found, int) else None

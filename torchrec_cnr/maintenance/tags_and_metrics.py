"""Annotations: the metrics and tags of a checkpoint, which retention rules use.

They are small files next to the manifest, written after the commit. A tag is an empty file. A file is never changed:
each call of ``write_metrics`` writes another one, and the last value of a metric counts. Loads do not read these files.
Their contents are not trusted: everything that is not a metric is skipped.
"""

import json
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping

from torchrec_cnr.arguments import check_type
from torchrec_cnr.errors import CheckpointNotFoundError, ConfigurationError, DamagedError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.storage.store import Store, read_whole

logger = logging.getLogger(__name__)

_METRICS = re.compile(r"metrics-\d{20}-[0-9a-f]{16}\.json")
_TAG = re.compile(r"(?P<tag>[A-Za-z0-9][A-Za-z0-9._-]{0,99})\.tag")
_MAX_NAME_LENGTH = 200
_MAX_BYTES = 1 << 20  # of a file of metrics


def write_metrics(path: str | os.PathLike[str], metrics: Mapping[str, float]) -> None:
    """Store metrics of a checkpoint, for example ``{"auc": 0.8123}``. The rule :class:`Best` uses them.

    Args:
        path: The checkpoint, as a path or fsspec URL.
        metrics: Numbers by name. NaN or infinity removes the value of a metric.

    Raises:
        ConfigurationError: A name is empty, has more than 200 characters or does not print, or a value is not a number.
        CheckpointNotFoundError: Nothing was committed at ``path``.
        StoreError: The metrics cannot be written.

    Examples:
        >>> cnr.write_metrics("run/step-1", {"auc": 0.8123})
        >>> cnr.plan_prune("run", cnr.Keep(last=1, best=cnr.Best("auc"))).stays["step-1"]
        ('best by auc (0.8123)',)
    """
    check_type("metrics", metrics, Mapping, "numbers by name")
    values: dict[str, float | None] = {}
    for name, given_value in metrics.items():
        if not _is_name(name):
            raise ConfigurationError(
                f"the name of a metric must be 1 to {_MAX_NAME_LENGTH} printable characters (got {name!r})"
            )
        try:
            value = float(given_value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(f"metric {name!r} must be a number (got {given_value!r})") from error
        values[name] = value if math.isfinite(value) else None
    data = json.dumps(values).encode()
    if len(data) > _MAX_BYTES:
        raise ConfigurationError(f"{len(values)} metrics take {len(data)} bytes; at most {_MAX_BYTES} are allowed")
    file_id = uuid.uuid4().hex[:16]
    _committed(path).put_new(f"metrics-{time.time_ns():020d}-{file_id}.json", data, file_id)


def tag(path: str | os.PathLike[str], name: str) -> None:
    """Add a tag to a checkpoint, for example ``release``. Do nothing if it already has this tag.

    Args:
        path: The checkpoint, as a path or fsspec URL.
        name: The tag: 1 to 100 letters, digits, ``.``, ``_`` and ``-``, of which the first is a letter or digit.

    Raises:
        ConfigurationError: ``name`` is not a valid tag.
        CheckpointNotFoundError: Nothing was committed at ``path``.
        StoreError: The tag cannot be written.

    Examples:
        >>> cnr.tag("run/step-1", "release")
        >>> cnr.plan_prune("run", cnr.Keep(last=1)).stays["step-1"]
        ("tagged 'release'",)
    """
    _committed(path).put(_tag_file(name), [])


def untag(path: str | os.PathLike[str], name: str) -> None:
    """Remove a tag from a checkpoint. Do nothing if it does not have this tag.

    Args:
        path: The checkpoint, as a path or fsspec URL.
        name: The tag.

    Raises:
        ConfigurationError: ``name`` is not a valid tag; see :func:`tag`.
        StoreError: The tag cannot be removed.

    Examples:
        >>> cnr.tag("run/step-1", "release")
        >>> cnr.untag("run/step-1", "release")
        >>> cnr.plan_prune("run", cnr.Keep(last=1)).stays["step-1"]
        ('needed by step-2',)
    """
    Store.open(path).remove(_tag_file(name), is_durable=True)


def is_annotation(name: str) -> bool:
    """Return whether a file next to a manifest contains metrics, or is a tag."""
    return _METRICS.fullmatch(name) is not None or _TAG.fullmatch(name) is not None


def tags(names: Iterable[str]) -> tuple[str, ...]:
    """Return the tags among a directory's files, sorted."""
    return tuple(sorted(match["tag"] for name in names if (match := _TAG.fullmatch(name))))


def read_metrics(store: Store, files: Mapping[str, int]) -> dict[str, float]:
    """Return the metrics of a checkpoint, only those with a finite value.

    Args:
        store: The directory of the checkpoint.
        files: The sizes in bytes of the files in it, by name.

    Raises:
        StoreError: A file of metrics cannot be read, so that the best checkpoint cannot be determined.
    """
    metrics: dict[str, float | None] = {}
    for name in sorted(name for name in files if _METRICS.fullmatch(name)):
        try:
            metrics |= _parsed(read_whole(store, name, _MAX_BYTES))
        except (ValueError, RecursionError, DamagedError) as error:
            logger.warning("%s/%s: skipped because it contains no metrics: %s", store.url, name, error)
    return {name: value for name, value in metrics.items() if value is not None}


def _parsed(data: bytes) -> dict[str, float | None]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return {name: _finite(number) for name, number in value.items() if _is_name(name)}


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= _MAX_NAME_LENGTH and name.isprintable()


def _tag_file(name: str) -> str:
    file = f"{name}.tag"
    if not _TAG.fullmatch(file):
        raise ConfigurationError(
            f"a tag must be 1 to 100 letters, digits, '.', '_' and '-', the first a letter or digit (got {name!r})"
        )
    return file


def _committed(path: str | os.PathLike[str]) -> Store:
    store = Store.open(path)
    if not store.exists(MANIFEST_FILE):
        raise CheckpointNotFoundError(
            f"{store.url}: no {MANIFEST_FILE}, so there is no committed checkpoint to annotate"
        )
    return store

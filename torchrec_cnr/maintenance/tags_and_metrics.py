"""Annotations: metrics and tags of a checkpoint, from which retention decides.

They are small files beside the manifest, written after the commit. As all files they are written once: metrics that are
written again come into another file, and of each metric the value that was written last counts. A tag is an empty file.
No reader of checkpoints looks at them, and what is in them is not trusted: what is no metric is passed over.
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
    """Note what a checkpoint is worth, such as ``{"auc": 0.8123}``.

    Args:
        path: The checkpoint, a path or fsspec URL.
        metrics: Numbers by name. One that is not finite says that there is no value, also where there was one before.

    Raises:
        ConfigurationError: A name is empty, longer than 200 characters or does not print, or a value is no number.
        CheckpointNotFoundError: Nothing was committed at ``path``.
        StoreError: It cannot be written.
    """
    check_type("metrics", metrics, Mapping, "numbers by name")
    values: dict[str, float | None] = {}
    for name, given in metrics.items():
        if not _is_name(name):
            raise ConfigurationError(f"a metric's name must be 1 to {_MAX_NAME_LENGTH} printable characters: {name!r}")
        try:
            value = float(given)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(f"metric {name!r} must be a number (got {given!r})") from error
        values[name] = value if math.isfinite(value) else None
    data = json.dumps(values).encode()
    if len(data) > _MAX_BYTES:
        raise ConfigurationError(f"{len(values)} metrics take {len(data)} bytes, more than {_MAX_BYTES}")
    id_ = uuid.uuid4().hex[:16]
    _committed(path).put_new(f"metrics-{time.time_ns():020d}-{id_}.json", data, id_)


def tag(path: str | os.PathLike[str], name: str) -> None:
    """Give a checkpoint a tag, such as ``release``; that it has it already is no error.

    Raises:
        ConfigurationError: The tag is not made of 1 to 100 letters, digits, ``.``, ``_`` and ``-``, the first a letter
            or digit.
        CheckpointNotFoundError: Nothing was committed at ``path``.
        StoreError: It cannot be written.
    """
    _committed(path).put(_tag_file(name), [])


def untag(path: str | os.PathLike[str], name: str) -> None:
    """Take a tag away; that it is not there is no error.

    Raises:
        ConfigurationError: There is no such tag, as for :func:`tag`.
        StoreError: It cannot be removed.
    """
    Store.open(path).remove(_tag_file(name), is_durable=True)


def is_annotation(name: str) -> bool:
    """Whether a file beside a manifest holds metrics, or is a tag."""
    return _METRICS.fullmatch(name) is not None or _TAG.fullmatch(name) is not None


def tags(names: Iterable[str]) -> tuple[str, ...]:
    """The tags among a directory's files, sorted."""
    return tuple(sorted(found["tag"] for name in names if (found := _TAG.fullmatch(name))))


def read_metrics(store: Store, files: Mapping[str, int]) -> dict[str, float]:
    """The metrics of a checkpoint, finite ones only.

    Args:
        store: Its directory.
        files: Sizes in bytes of the files in it, by name.

    Raises:
        StoreError: They are there and cannot be read: which checkpoint is the best would be a guess.
    """
    found: dict[str, float | None] = {}
    for name in sorted(name for name in files if _METRICS.fullmatch(name)):
        try:
            found |= _parsed(read_whole(store, name, _MAX_BYTES))
        except (ValueError, RecursionError, DamagedError) as error:
            logger.warning("%s/%s: passed over, it holds no metrics: %s", store.url, name, error)
    return {name: value for name, value in found.items() if value is not None}


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
            f"{store.url}: no {MANIFEST_FILE}: nothing was committed here that could be annotated"
        )
    return store

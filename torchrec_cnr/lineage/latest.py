"""The newest checkpoints directly under a root, by the first bytes of their manifests."""

import errno
import logging
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torchrec_cnr.errors import CheckpointNotFoundError, ConfigurationError, DamagedError, StoreError, VersionError
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.human_text import url_text
from torchrec_cnr.lineage.abandoned import mark_name, mark_of, marked_name
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_checkpoint
from torchrec_cnr.lineage.marker_commit import publish_marked
from torchrec_cnr.storage.fences import is_fence
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import NOT_THERE, Store

logger = logging.getLogger(__name__)

_PASSED_OVER = "skipped while looking for the latest checkpoint: %s"
_LAST_NS = 3 << 60  # in the year 2079; times in a manifest end in 2116
_NUM_THREADS = 16
_START_BYTES = 512  # the beginning of a manifest file, which contains the time of its commit


def latest(root: str | os.PathLike[str], *, row_log: RowLog | None = None) -> str | None:
    """Return the newest committed checkpoint directly under ``root``, by the time of its commit.

    A directory without a manifest is not a checkpoint. A checkpoint whose manifest is corrupt, or may not be read by
    this process, is skipped with a warning. One that a job has abandoned is skipped silently.

    Args:
        root: Path or fsspec URL of a directory of checkpoints.
        row_log: The Kafka topic (``KafkaRows``) of the job's rows, if any. A job that died may have left the commit
            record of its last checkpoint there, without a manifest in ``root``.

    Returns:
        The path or URL of the checkpoint; None if there is none, or if ``root`` does not exist.

    Raises:
        ConfigurationError: ``root`` is a file.
        VersionError: A newer version has written the newest checkpoint. Resuming from an older one would lose work
            silently.
        StoreError: ``root`` cannot be listed.

    Examples:
        >>> cnr.latest("run")
        '/.../run/step-2'
        >>> cnr.latest("empty") is None
        True
    """
    return next((checkpoint.store.url for checkpoint in newest_first(root, row_log)), None)


def newest_first(
    root: str | os.PathLike[str] | Store, row_log: RowLog | None = None, *, with_abandoned: bool = False
) -> Iterator[Checkpoint]:
    """Yield the committed checkpoints directly under ``root``, the newest first; skip the same ones as :func:`latest`.

    Args:
        root: A directory of checkpoints.
        row_log: As in :func:`latest`.
        with_abandoned: Whether to include abandoned checkpoints, and to skip those that a newer version has written.
            For a return to an older checkpoint.

    Raises:
        VersionError: A newer version has written a checkpoint, and ``with_abandoned`` is false.
        StoreError: ``root`` cannot be listed.
    """
    directory = Store.open(root, row_log=row_log)
    refuse_file(directory)
    root_names = directory.names()
    names = [name for name in root_names if not is_fence(name) and marked_name(name) is None]
    starts = _starts(directory, names, logging.WARNING)
    published = publish_marked(directory, [name for name in names if starts[name] is None])
    starts |= _starts(directory, published, logging.WARNING)
    marks = frozenset(root_names)
    for name, start in _newest_first(starts):
        if not with_abandoned and start.is_marked(name, marks):
            continue
        try:
            checkpoint = read_checkpoint(directory.at(name))
        except CheckpointNotFoundError as error:  # a prune has removed it since its manifest was listed
            logger.info(_PASSED_OVER, error)
            continue
        except DamagedError as error:
            logger.warning(_PASSED_OVER, error)
            continue
        except VersionError as error:
            if not with_abandoned:
                raise
            logger.warning(_PASSED_OVER, error)
            continue
        if with_abandoned or mark_of(checkpoint) not in marks:
            yield checkpoint


def refuse_file(root: Store) -> None:
    """Refuse a root that is a file: it would look like a root without checkpoints.

    Raises:
        ConfigurationError: It is a file on a local disk.
    """
    if root.is_local and root.exists("") and not root.is_directory():
        raise ConfigurationError(f"{url_text(root.url)}: a file, not a directory for checkpoints; pass another root")


def newest_ns(root: Store) -> int:
    """Return when a root's newest checkpoint was committed, abandoned or not, as Unix time in ns; 0 if there is none.

    A corrupt manifest must not prevent a job from saving. So a time ahead of this machine's clock counts only if the
    manifest is valid, and if the format has room for later times.

    Raises:
        StoreError: The root cannot be listed, or a manifest cannot be read.
    """
    names = [name for name in root.names() if not is_fence(name) and marked_name(name) is None]
    now_ns = time.time_ns()
    for name, start in _newest_first(_starts(root, names, logging.DEBUG)):
        if start.at_ns <= now_ns or (start.at_ns <= _LAST_NS and _is_valid(root.at(name))):
            return int(start.at_ns)
        logger.warning("ignored a checkpoint with a corrupt or impossible commit time: %s", url_text(root.at(name).url))
    return 0


@dataclass(frozen=True)
class _Start:
    """The commit time and the digest in the first bytes of a manifest, which are not verified.

    Attributes:
        at_ns: The commit time as Unix time in nanoseconds. Infinity if they do not contain it, since it may be that of
            the newest checkpoint, corrupt.
        sha256: The digest of the manifest; None if they do not contain it.
    """

    at_ns: float
    sha256: str | None

    def is_marked(self, name: str, marks: Collection[str]) -> bool:
        """Return whether this is the start of the manifest of an abandoned checkpoint, which need not be read.

        Args:
            name: The name of the checkpoint.
            marks: The names of all files in the root.
        """
        return self.sha256 is not None and math.isfinite(self.at_ns) and mark_name(name, self.sha256) in marks


def _starts(root: Store, names: Collection[str], level: int) -> dict[str, _Start | None]:
    """Return the start of each checkpoint's manifest, as :func:`_start` does; from a remote store, many at a time."""
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="cnr-latest") as threads:  # begins none for local files
        run = map if root.is_local else threads.map
        return dict(zip(names, run(lambda name: _start(root.at(name), level), names), strict=True))


def _newest_first(starts: Mapping[str, _Start | None]) -> list[tuple[str, _Start]]:
    """Return those that were found, with the names of their checkpoints, in the order of their commits."""
    found = [(name, start) for name, start in starts.items() if start is not None]
    return sorted(found, key=lambda item: (item[1].at_ns, item[0]), reverse=True)


def _is_valid(store: Store) -> bool:
    try:
        read_checkpoint(store)
    except (CheckpointNotFoundError, DamagedError, VersionError):
        return False
    return True


def committed_ns(store: Store, level: int) -> float | None:
    """Return the commit time of a checkpoint without reading its whole manifest.

    Returns:
        The Unix time in nanoseconds. Infinity if the manifest does not contain it, since it may be that of the newest
        checkpoint, corrupt. None if there is no manifest, or if it is skipped because this process may not read it, or
        because it is a link or a pipe. A skipped one is logged at ``level``.

    Raises:
        StoreError: The manifest cannot be read for another reason.
    """
    start = _start(store, level)
    return None if start is None else start.at_ns


def _start(store: Store, level: int) -> _Start | None:
    """Return the start of a checkpoint's manifest; None, logged and errors are as of :func:`committed_ns`."""
    try:
        start = store.read(MANIFEST_FILE, 0, _START_BYTES)
    except DamagedError as error:
        logger.log(level, _PASSED_OVER, error)
        return None
    except StoreError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            logger.log(level, _PASSED_OVER, error)
        elif error.errno not in (*NOT_THERE, errno.EISDIR):
            raise
        return None
    at_ns = manifest_json.created_ns(start)
    return _Start(math.inf if at_ns is None else at_ns, manifest_json.stated_digest(start))

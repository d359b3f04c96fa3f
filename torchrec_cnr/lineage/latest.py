"""The newest checkpoints under a root, found from the first bytes of manifests."""

import errno
import logging
import math
import os
import time
from collections.abc import Iterator

from torchrec_cnr.errors import DamagedError, StoreError, VersionError
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.human_text import url_text
from torchrec_cnr.lineage.abandoned import mark_of, marked_name
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_checkpoint
from torchrec_cnr.lineage.marker_commit import publish_marked
from torchrec_cnr.storage.fences import is_fence
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import NOT_THERE, Store

logger = logging.getLogger(__name__)

_PASSED_OVER = "passed over while looking for the latest checkpoint: %s"
_LAST_NS = 3 << 60  # in the year 2079; times in a manifest end in 2116
_START_BYTES = 512  # enough of a manifest file to hold its time of commit


def latest(root: str | os.PathLike[str], *, row_log: RowLog | None = None) -> str | None:
    """The newest committed checkpoint directly under ``root``, by the time of its commit.

    If rows go to a log (``KafkaRows``), pass that: a job that died may have left a marker of its last commit there, but
    no manifest yet.

    Directories without a manifest are no checkpoints; one with a damaged manifest, or that may not be read, is passed
    over with a warning, and one that a job has abandoned, silently.

    Returns:
        Its path or URL, or None where there is none.

    Raises:
        VersionError: The newest was written by a newer version: resuming from an older one would lose work silently.
        StoreError: ``root`` cannot be listed.
    """
    return next((checkpoint.store.url for checkpoint in newest_first(root, row_log)), None)


def newest_first(
    root: str | os.PathLike[str] | Store, row_log: RowLog | None = None, *, with_abandoned: bool = False
) -> Iterator[Checkpoint]:
    """The committed checkpoints directly under ``root``, the newest first; see :func:`latest` for what is passed over.

    Args:
        root: A directory of checkpoints.
        row_log: As in :func:`latest`.
        with_abandoned: For a return to an older checkpoint: those that were abandoned count, and one that was written
            by a newer version is passed over, too.

    Raises:
        VersionError: One was written by a newer version.
        StoreError: ``root`` cannot be listed.
    """
    directory = Store.open(root, row_log=row_log)
    there = directory.names()
    names = [name for name in there if not is_fence(name) and marked_name(name) is None]
    found = {name: committed_ns(directory.at(name), logging.WARNING) for name in names}
    published = publish_marked(directory, [name for name in names if found[name] is None])
    found |= {name: committed_ns(directory.at(name), logging.WARNING) for name in published}
    candidates = [(at_ns, name) for name, at_ns in found.items() if at_ns is not None]
    for _, name in sorted(candidates, reverse=True):
        try:
            newest = read_checkpoint(directory.at(name))
        except DamagedError as error:
            logger.warning(_PASSED_OVER, error)
            continue
        except VersionError as error:
            if not with_abandoned:
                raise
            logger.warning(_PASSED_OVER, error)
            continue
        if with_abandoned or mark_of(newest) not in there:
            yield newest


def newest_ns(root: Store) -> int:
    """When the newest checkpoint of a root was committed, be it abandoned or not; 0 where there is none.

    A time that is ahead of this machine's clock counts only if the manifest is valid, and not if it is so late that the
    format has no room for later ones: a corrupt manifest must not keep a job from saving.

    Raises:
        StoreError: The root cannot be listed, or a manifest cannot be read.
    """
    names = [name for name in root.names() if not is_fence(name) and marked_name(name) is None]
    found = [(committed_ns(root.at(name), logging.DEBUG), name) for name in names]
    now_ns = time.time_ns()
    for at_ns, name in sorted(((at_ns, name) for at_ns, name in found if at_ns is not None), reverse=True):
        if at_ns <= now_ns or (at_ns <= _LAST_NS and _is_valid(root.at(name))):
            return int(at_ns)
        logger.warning("ignored, because it is corrupt or of an impossible time: %s", url_text(root.at(name).url))
    return 0


def _is_valid(store: Store) -> bool:
    try:
        read_checkpoint(store)
    except (DamagedError, VersionError):
        return False
    return True


def committed_ns(store: Store, level: int) -> float | None:
    """When a checkpoint was committed, in Unix nanoseconds, without reading all of its manifest.

    Returns:
        The time; infinity where the manifest does not tell, which may be the newest, damaged; None where there is none,
        or it is passed over, which is logged at ``level``: it may not be read, or is a link or a pipe.

    Raises:
        StoreError: It cannot be read for another reason.
    """
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
    return math.inf if at_ns is None else at_ns

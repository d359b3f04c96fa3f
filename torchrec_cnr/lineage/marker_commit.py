"""Commits by a marker: first the manifest under another name, then the marker, and then the manifest's own name.

A save that dies before the marker has committed nothing. One that dies behind it leaves a checkpoint that is committed
and has no ``manifest.json`` yet; whoever looks next gives it the name.
"""

import errno
import logging
import posixpath
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torchrec_cnr.errors import CheckpointExistsError, DamagedError, StoreError
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import MANIFEST_FILE, UNCOMMITTED_SUFFIX
from torchrec_cnr.storage.row_log import Marker, RowLog, root_id
from torchrec_cnr.storage.store import NOT_THERE, Store, read_whole

logger = logging.getLogger(__name__)

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def uncommitted_name(save_id: str) -> str:
    """What a manifest is called until its marker is there."""
    return f"{save_id}{UNCOMMITTED_SUFFIX}"


def commit_marked(store: Store, row_log: RowLog, marker: Marker, data: bytes, check: Callable[[], None]) -> None:
    """Commit a checkpoint by its marker.

    Args:
        store: The checkpoint.
        row_log: Gets the marker.
        marker: The marker.
        data: The manifest as a file.
        check: Raises if this job may not commit.

    Raises:
        CheckpointExistsError: There is another manifest.
        FencedError: Another job saves there.
        StoreError: Store or log refused.
    """
    if store.exists(MANIFEST_FILE):
        raise CheckpointExistsError(f"{store.url}: another save committed here first; save under another checkpoint_id")
    with store.create(uncommitted_name(marker.save_id)) as file:
        file.write(data)
    row_log.mark(marker, check)
    _publish(store, uncommitted_name(marker.save_id), data, marker.save_id)


def publish_marked(root: Store, names: Iterable[str] | None = None) -> list[str]:
    """Give checkpoints that a marker has committed their manifest's name, where they have none yet.

    The log is read only if a manifest waits for its marker: whatever is wrong with other markers does not matter then.

    Args:
        root: Of the checkpoints.
        names: Directories in it; None for all.

    Returns:
        The names of those that have a manifest now, and had none.

    Raises:
        StoreError: Store or log do not answer.
    """
    if root.row_log is None or not root.row_log.open(may_make=False):
        return []
    if names is None:
        names = root.listing().directories
    waiting = [found for name in names for found in _waiting(root.at(name))]
    if not waiting:
        return []
    marked = root.row_log.marked(root_id(root.url), {found.sha256: found.parent_sha256 for found in waiting})
    return [posixpath.basename(found.store.path) for found in waiting if found.sha256 in marked and found.publish()]


@dataclass(frozen=True)
class _Waiting:
    """A manifest under its first name.

    Attributes:
        store: The checkpoint.
        name: The file's.
        data: Its bytes.
        sha256: The manifest's digest.
        parent_sha256: That of its parent; None for a baseline.
    """

    store: Store
    name: str
    data: bytes
    sha256: str
    parent_sha256: str | None

    def publish(self) -> bool:
        """Several processes may do this at once, each under an id of its own; whether the manifest has its name."""
        try:
            _publish(self.store, self.name, self.data, uuid.uuid4().hex[:16])
        except StoreError as error:
            if error.errno not in _READ_ONLY:
                raise
            logger.info("left to those who may write: %s", error)
            return False
        return True


def _waiting(store: Store) -> Iterator[_Waiting]:
    """The manifests that wait in a checkpoint's directory; several if the first saves of them died."""
    try:
        files = store.listing().files
    except StoreError as error:
        if error.errno not in _READ_ONLY:
            raise
        logger.info("not looked through for what a marker has committed: %s", error)
        return
    if MANIFEST_FILE in files:
        return
    for name in files:
        if not name.endswith(UNCOMMITTED_SUFFIX):
            continue
        try:
            data = read_whole(store, name, manifest_json.MAX_MANIFEST_BYTES)
            manifest, sha256 = manifest_json.loads(data, f"{store.url}/{name}")
        except StoreError as error:
            if error.errno in NOT_THERE:
                continue  # pruned, or another process was faster
            raise
        except DamagedError as error:
            logger.warning("no marker has committed it as it is: %s", error)
            continue
        names = (posixpath.basename(store.path), name)
        if names == (manifest.checkpoint_id, uncommitted_name(manifest.save_id)):  # and no copy under another name
            yield _Waiting(store, name, data, sha256, None if manifest.parent is None else manifest.parent.sha256)


def _publish(store: Store, uncommitted: str, data: bytes, own_id: str) -> None:
    store.put_new(MANIFEST_FILE, data, own_id)
    store.remove(uncommitted)

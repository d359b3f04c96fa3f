"""Commits by a marker, in three steps: write the manifest under a temporary name, write the marker, and rename.

A save that dies before the marker has committed nothing. One that dies after the marker leaves a committed checkpoint
without ``manifest.json``. The next process that looks for it gives the manifest this name.
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
    """Return the name of a manifest before its marker is written."""
    return f"{save_id}{UNCOMMITTED_SUFFIX}"


def commit_marked(store: Store, row_log: RowLog, marker: Marker, data: bytes, check: Callable[[], None]) -> None:
    """Commit a checkpoint by its marker.

    Args:
        store: The checkpoint's directory.
        row_log: The log that the marker is written to.
        marker: The marker.
        data: The content of the manifest file.
        check: Raises an error if this job may not commit.

    Raises:
        CheckpointExistsError: There is another manifest.
        FencedError: Another job saves there.
        StoreError: The store or the log cannot be written to.
    """
    if store.exists(MANIFEST_FILE):
        raise CheckpointExistsError(f"{store.url}: another save committed here first; save under another checkpoint_id")
    with store.create(uncommitted_name(marker.save_id)) as file:
        file.write(data)
    row_log.mark(marker, check)
    _publish(store, uncommitted_name(marker.save_id), data, marker.save_id)


def publish_marked(root: Store, names: Iterable[str] | None = None) -> list[str]:
    """Publish the manifests of checkpoints that a marker has committed and that have no ``manifest.json`` yet.

    The log is read only if a manifest waits for its marker, so that problems with other markers do not matter.

    Args:
        root: Root of the checkpoints.
        names: Names of directories in it; None for all.

    Returns:
        The names of the checkpoints whose manifest was published.

    Raises:
        StoreError: The store or the log does not answer.
    """
    if root.row_log is None or not root.row_log.open(may_make=False):
        return []
    if names is None:
        names = root.listing().directories
    manifests = [manifest for name in names for manifest in _waiting(root.at(name))]
    if not manifests:
        return []
    marked = root.row_log.marked(root_id(root.url), {manifest.sha256: manifest.parent_sha256 for manifest in manifests})
    return [
        posixpath.basename(manifest.store.path)
        for manifest in manifests
        if manifest.sha256 in marked and manifest.publish()
    ]


@dataclass(frozen=True)
class _Waiting:
    """A manifest under its temporary name.

    Attributes:
        store: The checkpoint's directory.
        name: Name of the file.
        data: Content of the file.
        sha256: SHA-256 digest of the manifest.
        parent_sha256: SHA-256 digest of its parent's manifest; None for a baseline.
    """

    store: Store
    name: str
    data: bytes
    sha256: str
    parent_sha256: str | None

    def publish(self) -> bool:
        """Publish the manifest, and return whether that was possible. Several processes may do so at the same time."""
        try:
            _publish(self.store, self.name, self.data, uuid.uuid4().hex[:16])
        except StoreError as error:
            if error.errno not in _READ_ONLY:
                raise
            logger.info("cannot publish a committed manifest without write access: %s", error)
            return False
        return True


def _waiting(store: Store) -> Iterator[_Waiting]:
    """Yield the manifests that wait in a checkpoint's directory; there are several if earlier saves died."""
    try:
        files = store.listing().files
    except StoreError as error:
        if error.errno not in _READ_ONLY:
            raise
        logger.info("cannot look for committed manifests without read access: %s", error)
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
            logger.warning("ignored a corrupt manifest, which no marker can have committed: %s", error)
            continue
        names = (posixpath.basename(store.path), name)
        if names == (manifest.checkpoint_id, uncommitted_name(manifest.save_id)):  # otherwise it is only a copy
            yield _Waiting(store, name, data, sha256, None if manifest.parent is None else manifest.parent.sha256)


def _publish(store: Store, uncommitted: str, data: bytes, own_id: str) -> None:
    store.put_new(MANIFEST_FILE, data, own_id)
    store.remove(uncommitted)

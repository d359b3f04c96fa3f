"""Commits by a marker: first the manifest under another name, then the marker, and then the manifest's own name.

A save that dies before the marker has committed nothing. One that dies behind it leaves a checkpoint that is committed
and has no ``manifest.json`` yet; whoever looks next gives it the name.
"""

import errno
import logging
import uuid
from collections.abc import Callable

from torchrec_cnr.errors import CheckpointExistsError, DamagedError, StoreError
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import MANIFEST_FILE, UNCOMMITTED_SUFFIX
from torchrec_cnr.storage.row_log import Marker, RowLog, root_id
from torchrec_cnr.storage.store import Store, read_whole

logger = logging.getLogger(__name__)

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_NUM_LOOKED_AT = 8  # of the newest markers; a job has one at most whose checkpoint lacks its name


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
    _publish(store, marker, data, marker.save_id)


def publish_marked(root: Store) -> None:
    """Give checkpoints that a marker has committed their manifest's name, where they have none yet.

    Raises:
        StoreError: Store or log do not answer.
    """
    if root.row_log is None:
        return
    for marker in root.row_log.markers(root_id(root.url), _NUM_LOOKED_AT):
        store = root.at(marker.name)
        if store.exists(MANIFEST_FILE):
            continue
        where = f"{store.url}/{uncommitted_name(marker.save_id)}"
        try:
            data = read_whole(store, uncommitted_name(marker.save_id), manifest_json.MAX_MANIFEST_BYTES)
            _, sha256 = manifest_json.loads(data, where)
        except StoreError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                continue  # of another root, or pruned
            raise
        except DamagedError as error:
            logger.warning("committed by a marker, but not as it was: %s", error)
            continue
        if sha256 == marker.sha256:
            try:
                _publish(store, marker, data, uuid.uuid4().hex[:16])
            except StoreError as error:
                if error.errno not in _READ_ONLY:
                    raise
                logger.info("left to those who may write: %s", error)


def _publish(store: Store, marker: Marker, data: bytes, own_id: str) -> None:
    """Several processes may do this at once, each under an id of its own."""
    store.put_new(MANIFEST_FILE, data, own_id)
    store.remove(uncommitted_name(marker.save_id))

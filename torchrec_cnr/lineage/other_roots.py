"""Dependencies on checkpoints of another root.

They arise only if a user saves a delta to another root than its parent's. A prune of the parent's root does not see
this delta. So the save tags the parent, which protects it from pruning until the tag is removed.
"""

import hashlib
import logging
import posixpath
import re
from collections.abc import Iterator

from torchrec_cnr.errors import StoreError
from torchrec_cnr.format.manifest import Manifest, Pack
from torchrec_cnr.storage.store import Store

logger = logging.getLogger(__name__)

NEEDED_TAG = "needed-by-"  # followed by the name of the delta's root, and a digest of its path


def is_in_other_root(path: str) -> bool:
    """Return whether a path relative to a checkpoint leads to a checkpoint of another root."""
    return posixpath.dirname(path) != ".."


def lies_in_other_root(pack: Pack) -> bool:
    """Return whether a pack belongs to a checkpoint of another root."""
    return pack.directory is not None and is_in_other_root(pack.directory)


def needed_of_other_roots(manifest: Manifest) -> tuple[str, ...]:
    """Return the relative paths of the other roots' checkpoints that a manifest names, without their dependencies."""
    return tuple(dict.fromkeys(_named(manifest)))


def _named(manifest: Manifest) -> Iterator[str]:
    if manifest.parent is not None and is_in_other_root(manifest.parent.path):
        yield manifest.parent.path
    yield from (pack.directory or "" for pack in manifest.packs if lies_in_other_root(pack))


def tell_other_root(store: Store, parent: str) -> None:
    """Tag the parent of a checkpoint, given by relative path, if it is in another root, so that no prune removes it."""
    if not is_in_other_root(parent):
        return
    root, parent_store = store.at(".."), store.at(parent)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", posixpath.basename(root.path))[:60]
    tag = f"{NEEDED_TAG}{name}-{hashlib.sha256(root.path.encode()).hexdigest()[:8]}.tag"
    try:
        if not parent_store.exists(tag):
            parent_store.put(tag, [])
    except StoreError as error:
        logger.warning(
            "%s depends on %s, but cannot tag it: a prune of that root does not see the dependency (%s)",
            store.url,
            parent_store.url,
            error,
        )

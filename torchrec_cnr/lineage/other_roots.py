"""Dependencies on checkpoints of another root, the directory that a checkpoint lies in.

Only a delta that a user saves to another root than its parent's makes one. The prune of that root does not see who
depends on it, so the save tells it: by a tag of the parent, which stays as long as the tag does.
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

NEEDED_TAG = "needed-by-"  # a root: its name, and a digest of its path


def is_in_other_root(path: str) -> bool:
    """Whether a path relative to a checkpoint leads to a checkpoint of another root."""
    return posixpath.dirname(path) != ".."


def lies_in_other_root(pack: Pack) -> bool:
    """Whether a pack lies with a checkpoint of another root."""
    return pack.directory is not None and is_in_other_root(pack.directory)


def needed_of_other_roots(manifest: Manifest) -> tuple[str, ...]:
    """The checkpoints of other roots that a manifest names, by relative path; what these need is not among them."""
    return tuple(dict.fromkeys(_named(manifest)))


def _named(manifest: Manifest) -> Iterator[str]:
    if manifest.parent is not None and is_in_other_root(manifest.parent.path):
        yield manifest.parent.path
    yield from (pack.directory or "" for pack in manifest.packs if lies_in_other_root(pack))


def tell_other_root(store: Store, parent: str) -> None:
    """Tag the parent of a checkpoint, by relative path, if it is of another root: a prune must not remove it."""
    if not is_in_other_root(parent):
        return
    root, other = store.at(".."), store.at(parent)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", posixpath.basename(root.path))[:60]
    tag = f"{NEEDED_TAG}{name}-{hashlib.sha256(root.path.encode()).hexdigest()[:8]}.tag"
    try:
        if not other.exists(tag):
            other.put(tag, [])
    except StoreError as error:
        logger.warning(
            "%s depends on %s, and that could not be tagged: who prunes there does not see it (%s)",
            store.url,
            other.url,
            error,
        )

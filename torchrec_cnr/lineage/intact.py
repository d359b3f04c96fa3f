"""Whether a checkpoint and its chain are still there, so that a save can be based on it."""

import posixpath
from collections.abc import Collection, Mapping, Sequence

from torchrec_cnr.errors import LoadError, StoreError
from torchrec_cnr.format.manifest import CheckpointRef, History, own_bytes
from torchrec_cnr.lineage.checkpoint import Checkpoint, Head, Lineage, read_checkpoint, read_lineage
from torchrec_cnr.lineage.recent import KnownChain, recent_checkpoints
from torchrec_cnr.storage.files import Listing
from torchrec_cnr.storage.store import Store

_READ_WHOLE_EVERY = 16  # saves; the others read only the manifests that this process does not know


def intact_chain(
    head: Head, roots: Mapping[str, Listing], newest: Checkpoint | None = None
) -> tuple[tuple[Checkpoint, ...], History] | None:
    """Return the chain of the latest checkpoint, as far as it is known, and its history; None if any of it is lost.

    To limit requests, only one of every ``_READ_WHOLE_EVERY`` saves reads all manifests, and the first one after a
    compaction by this process. The others look whether the latest checkpoint is unchanged, and whether no directory was
    removed from its root.

    Args:
        head: The latest checkpoint.
        roots: The roots that were listed for this save, by URL.
        newest: The latest checkpoint, if it is known to be unchanged.
    """
    if newest is None or newest.ref != head.ref:
        newest = intact_checkpoint(head.ref)
    if newest is None:
        return None
    chain = recent_checkpoints.chain(newest) if not newest.is_compacted else None
    if chain is not None and len(chain.refs) % _READ_WHOLE_EVERY and _has_chain(chain, roots):
        return (*chain.checkpoints, newest), head.history
    try:
        lineage = read_lineage(newest.store)
    except LoadError:
        return None
    recent_checkpoints.add_chain(lineage)
    return (lineage.checkpoints, _history(head, lineage)) if _has_directories(lineage.checkpoints, {}) else None


def _has_chain(chain: KnownChain, roots: Mapping[str, Listing]) -> bool:
    """Return whether the directories of a chain's checkpoints, and those that its baseline uses, are in their roots.

    If a root cannot be listed, this is unknown, and false.
    """
    try:
        return _are_there([Store.open(ref.path) for ref in chain.refs], roots) and _has_directories(
            [chain.baseline], roots
        )
    except StoreError:
        return False


def _has_directories(checkpoints: Sequence[Checkpoint], roots: Mapping[str, Listing]) -> bool:
    """Return whether the other directories are there whose data files a chain uses since it was compacted."""
    directories: dict[str, Store] = {}
    for link in checkpoints:
        for path in {pack.directory for pack in link.manifest.packs if pack.directory is not None and pack.log is None}:
            directory = link.store.at(path)
            directories[directory.url] = directory
    return _are_there(directories.values(), roots)


def _are_there(directories: Collection[Store], roots: Mapping[str, Listing]) -> bool:
    """Return whether directories are in their roots, each of which is listed once."""
    parents = {posixpath.dirname(directory.url): directory.at("..") for directory in directories}
    names = {url: _names(root, roots) for url, root in parents.items()}
    return all(
        posixpath.basename(directory.url) in names[posixpath.dirname(directory.url)] for directory in directories
    )


def _names(root: Store, roots: Mapping[str, Listing]) -> frozenset[str]:
    listing = roots.get(root.url)
    return frozenset(root.names() if listing is None else listing.names)


def _history(head: Head, lineage: Lineage) -> History:
    """Return the history of a chain; if the chain was compacted, it begins with the merged checkpoint."""
    links = lineage.checkpoints
    folded_index = max((number for number, link in enumerate(links) if link.is_compacted), default=None)
    if folded_index is None:
        return head.history
    history = links[folded_index].manifest.history
    later_bytes = [own_bytes(link.manifest.packs) for link in links[folded_index + 1 :]]
    return History(history.baseline_bytes, (*history.delta_bytes, *later_bytes))


def intact_checkpoint(ref: CheckpointRef) -> Checkpoint | None:
    """Return the checkpoint that is referred to, if it exists and is unchanged."""
    try:
        checkpoint = read_checkpoint(ref.path)
    except LoadError:
        return None
    return checkpoint if checkpoint.sha256 == ref.sha256 else None

"""The checkpoints that this process has committed, and the chains that it has read, so that a save need not read them.

A manifest never changes, and the names of its data files contain the id of its save. So a listing of its directory
shows whether a checkpoint is still there, and whether a compaction has replaced its manifest.
"""

import os
import threading
from dataclasses import dataclass

from cachetools import LRUCache

from torchrec_cnr.format.manifest import MANIFEST_FILE, CheckpointRef, replacement_name
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage

_NUM_KEPT = 2  # a larger number helps if a process saves several models alternately; a manifest may take 100 MB
_NUM_TRANSFORMED = 4


@dataclass(frozen=True)
class KnownChain:
    """A chain as it was when it was read, or when its newest checkpoint was committed.

    Attributes:
        baseline: Its baseline.
        refs: Its checkpoints, the baseline first.
        transformed: The newest of them that have transforms of rows, oldest first; a delta may use these.
    """

    baseline: Checkpoint
    refs: tuple[CheckpointRef, ...]
    transformed: tuple[Checkpoint, ...]

    @classmethod
    def of(cls, lineage: Lineage) -> "KnownChain":
        """Return the chain of a lineage."""
        refs = tuple(checkpoint.ref for checkpoint in lineage.checkpoints)
        transformed = tuple(checkpoint for checkpoint in lineage.checkpoints if _has_transforms(checkpoint))
        return cls(lineage.checkpoints[0], refs, transformed[-_NUM_TRANSFORMED:])

    def extended(self, newest: Checkpoint) -> "KnownChain":
        """Return the chain with one more checkpoint."""
        transformed = (*self.transformed, newest) if _has_transforms(newest) else self.transformed
        return KnownChain(self.baseline, (*self.refs, newest.ref), transformed[-_NUM_TRANSFORMED:])

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that are known, without the newest: the baseline, and those with transforms."""
        older = (checkpoint for checkpoint in self.transformed if checkpoint.ref in self.refs[1:-1])
        return (self.baseline, *older) if len(self.refs) > 1 else ()


def _has_transforms(checkpoint: Checkpoint) -> bool:
    tensors = checkpoint.manifest.tensors.values()
    return any(shard.transform is not None for entry in tensors for shard in entry.shards)


def _is_unchanged(checkpoint: Checkpoint) -> bool:
    """Return whether a listing shows a checkpoint of this process, with its data files, and as it was committed.

    Another job may have saved a checkpoint of this name, with a manifest of the same size.
    """
    files = checkpoint.store.listing().files
    own_packs = [pack for pack in checkpoint.manifest.packs if pack.directory is None]
    expected_sizes = {MANIFEST_FILE: checkpoint.manifest_bytes, **{pack.name: pack.num_bytes for pack in own_packs}}
    is_there = len(own_packs) > 0 and expected_sizes.items() <= files.items()
    return is_there and replacement_name(checkpoint.sha256) not in files


class RecentCheckpoints:
    """The checkpoints that this process has committed, and the chains that it has read, the most recent ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._committed = LRUCache[str, Checkpoint](_NUM_KEPT)  # by path
        self._listed = LRUCache[str, Checkpoint](_NUM_KEPT)  # by digest
        self._chains = LRUCache[CheckpointRef, KnownChain](_NUM_KEPT)  # by the newest

    def forget(self) -> None:
        """Forget everything, so that the next save reads its whole chain: after a compaction or a failed load."""
        with self._lock:
            self._committed.clear()
            self._listed.clear()
            self._chains.clear()

    def begin_again(self) -> None:
        """Begin again in a forked child, where a thread that does not exist may hold the lock."""
        self.__init__()  # type: ignore[misc]  # makes a new lock

    def add(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint that this process has committed."""
        with self._lock:
            self._committed[checkpoint.store.url] = checkpoint

    def unchanged(self, path: str, save_id: str) -> Checkpoint | None:
        """Return what a save of this process has committed, if its directory shows it; None if it must be read.

        Raises:
            StoreError: The store does not answer.
        """
        with self._lock:
            checkpoint = self._committed.get(path)
        if checkpoint is None or checkpoint.committed.save_id != save_id:
            return None
        if not _is_unchanged(checkpoint):
            return None
        with self._lock:
            self._listed[checkpoint.sha256] = checkpoint
        return checkpoint

    def begin_save(self, newest: CheckpointRef) -> None:
        """List the latest checkpoint again for a new save, even if a listing has shown it since it was committed."""
        with self._lock:
            self._listed.pop(newest.sha256, None)

    def take_unchanged(self, ref: CheckpointRef) -> Checkpoint | None:
        """Return what this process has committed, if a listing for this save shows it; None if it must be read.

        It is listed here, unless :meth:`unchanged` has done so since :meth:`begin_save`.

        Raises:
            StoreError: The store does not answer.
        """
        with self._lock:
            listed: Checkpoint | None = self._listed.pop(ref.sha256, None)
            checkpoint = self._committed.get(ref.path)
        if listed is not None and listed.ref == ref:
            return listed
        if checkpoint is None or checkpoint.ref != ref:
            return None
        return checkpoint if _is_unchanged(checkpoint) else None

    def add_chain(self, lineage: Lineage) -> None:
        """Keep a chain that was read."""
        with self._lock:
            self._chains[lineage.newest.ref] = KnownChain.of(lineage)

    def chain(self, newest: Checkpoint) -> KnownChain | None:
        """Return the chain of a checkpoint, if it is a baseline or if its parent's chain is known."""
        parent = newest.manifest.parent
        if parent is None:
            chain = KnownChain.of(Lineage((newest,)))
        else:
            parent_ref = CheckpointRef(newest.store.at(parent.path).url, parent.sha256)
            with self._lock:
                own, known = self._chains.get(newest.ref), self._chains.get(parent_ref)
            if own is None and known is not None:
                own = known.extended(newest)
            if own is None:
                return None
            chain = own
        with self._lock:
            self._chains[newest.ref] = chain
        return chain


recent_checkpoints = RecentCheckpoints()
os.register_at_fork(after_in_child=recent_checkpoints.begin_again)

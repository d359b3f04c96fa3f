"""Predecessors: what of earlier checkpoints a save to a log of row blocks must know.

All of it is read from committed manifests. What this process remembers of them it remembers by their digests, so that a
save that failed, here or elsewhere, cannot make it wrong.
"""

import logging
import threading
from collections import OrderedDict

from torchrec_cnr.block_writing import Predecessor
from torchrec_cnr.decisions import Decision
from torchrec_cnr.errors import CNRError, LoadError, SaveError
from torchrec_cnr.lineage import read_checkpoint
from torchrec_cnr.manifest import CheckpointRef, Manifest
from torchrec_cnr.policies import Since
from torchrec_cnr.row_blocks import CommittedBlocks, superseded
from torchrec_cnr.row_logs import RowLog, root_id
from torchrec_cnr.stores import Store

logger = logging.getLogger(__name__)

_MOST_REMEMBERED = 3


class _Remembered:
    """Blocks of the manifests that were read or written last, by their digests and their log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, str], CommittedBlocks] = OrderedDict()

    def get(self, key: tuple[str, str]) -> CommittedBlocks | None:
        """What was put under a key, if it was not long ago."""
        with self._lock:
            return self._blocks.get(key)

    def put(self, key: tuple[str, str], blocks: CommittedBlocks) -> None:
        """Remember, and forget what was put first."""
        with self._lock:
            self._blocks[key] = blocks
            while len(self._blocks) > _MOST_REMEMBERED:
                self._blocks.popitem(last=False)


_remembered = _Remembered()


def predecessor(log: RowLog, decision: Decision) -> Predecessor:
    """What a save goes on from.

    Args:
        log: Where its rows go.
        decision: What it holds.

    Raises:
        LoadError, StoreError: A manifest cannot be read.
        SaveError: It is another than the coordinator read.
    """
    if decision.since is Since.EVER or decision.head is None or decision.parent is None:
        return Predecessor(None, frozenset())
    head = _committed_blocks(log, decision.head)
    used = head.keys
    if decision.newest is not None:
        try:
            used |= _committed_blocks(log, decision.newest).keys
        except LoadError as error:
            logger.warning("cannot be loaded, and is not kept until this save is committed: %s", error)
    return Predecessor(head if head.parent_sha256 == decision.parent.sha256 else None, used)


def forget_superseded(store: Store, log: RowLog, decision: Decision, manifest: Manifest) -> None:
    """Remove what nothing needs any more from the log, after a commit; what is not removed now stays.

    Args:
        store: The checkpoint.
        log: Where its rows lie.
        decision: What it holds.
        manifest: What was committed.
    """
    try:
        refs = [ref for ref in (decision.head, decision.newest) if ref is not None]
        gone = superseded([_committed_blocks(log, ref) for ref in refs], manifest)
        if gone:
            log.forget(root_id(store.at("..").url), gone)
    except CNRError as error:
        logger.warning("rows that nothing needs any more stay in the topic %r: %s", log.topic, error)


def _committed_blocks(log: RowLog, ref: CheckpointRef) -> CommittedBlocks:
    key = (ref.sha256, log.topic)
    found = _remembered.get(key)
    if found is None:
        checkpoint = read_checkpoint(Store.open(ref.path, log=log))
        if checkpoint.sha256 != ref.sha256:
            raise SaveError(f"{ref.path}: it was replaced while a save went on from it; save again")
        found = CommittedBlocks(checkpoint.committed, log.topic)
        _remembered.put(key, found)
    return found

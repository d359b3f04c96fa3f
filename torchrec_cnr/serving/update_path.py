"""Links: the checkpoints that lead from the applied checkpoint of a model to another one.

Checkpoints are recognised by the digest of the manifest that committed them, which a compaction does not change. A path
to the applied checkpoint is searched first in the current manifests, and then in those that were committed, whose packs
may still exist. If there is none, deltas on the same baseline may suffice, if the policy's deltas contain all rows
modified since then. Otherwise the lineage was replaced, and is read completely.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from torchrec_cnr.errors import LoadError, StoreError
from torchrec_cnr.lineage.checkpoint import Lineage, read_lineage
from torchrec_cnr.storage.store import Store

logger = logging.getLogger(__name__)


class UpdateBase(Enum):
    """The state of the model that an update path is based on."""

    APPLIED = "applied"
    """The applied checkpoint."""
    BASELINE = "baseline"
    """The baseline of the applied checkpoint; correct if the links contain all rows that were applied since."""
    NOTHING = "nothing"
    """No earlier state, since the first link is a baseline."""


@dataclass(frozen=True)
class UpdatePath:
    """A path of checkpoints to apply.

    Attributes:
        lineage: The checkpoints (links), each the parent of the next.
        ground: The state that the first link is based on.
    """

    lineage: Lineage
    ground: UpdateBase

    @property
    def is_delta(self) -> bool:
        """Return whether rows that are not in the links keep their values."""
        return self.ground is not UpdateBase.NOTHING


@dataclass(frozen=True)
class AppliedState:
    """The applied checkpoint and its baseline, by the digests of their manifests."""

    head: str
    baseline: str


def read_update_paths(path: str | Store, standing: AppliedState | None) -> Iterator[UpdatePath]:
    """Yield the paths to a checkpoint: the one that reads least first, and its whole lineage last.

    Args:
        path: The checkpoint, or its store.
        standing: The applied checkpoint; None if there is none.

    Raises:
        LoadError, StoreError: The checkpoint or its lineage cannot be read; see ``read_lineage``.
    """
    if standing is None:
        yield UpdatePath(read_lineage(path), UpdateBase.NOTHING)
        return
    lineage = read_lineage(path, since=standing.head)
    if lineage.checkpoints[0].manifest.parent is not None:
        yield UpdatePath(lineage, UpdateBase.APPLIED)
        lineage = read_lineage(path)
    elif any(checkpoint.is_compacted for checkpoint in lineage.checkpoints):
        yield from _as_committed(path, standing)
    baseline, *deltas = lineage.checkpoints
    if deltas and baseline.sha256 == standing.baseline:
        yield UpdatePath(Lineage(tuple(deltas)), UpdateBase.BASELINE)
    yield UpdatePath(lineage, UpdateBase.NOTHING)


def _as_committed(path: str | Store, standing: AppliedState) -> Iterator[UpdatePath]:
    """Yield the path that existed before a compaction, if its manifests still exist."""
    try:
        lineage = read_lineage(path, since=standing.head, is_as_committed=True)
    except (LoadError, StoreError) as error:
        logger.info("%s was compacted, and its original manifests cannot be read: %s", path, error)
        return
    if lineage.checkpoints[0].manifest.parent is not None:
        yield UpdatePath(lineage, UpdateBase.APPLIED)

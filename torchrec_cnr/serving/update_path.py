"""Links: the checkpoints that lead from what a model has to another checkpoint.

Checkpoints are recognised by the digest of the manifest that committed them, which a compaction leaves as it is. A path
to what is applied is sought among the manifests that are in force, then among those that were committed, whose packs
may still be there. Where there is none, deltas may stand on the same baseline, as under policies whose deltas hold all
rows since then; else the lineage was replaced, and all of it is read.
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
    """What links stand on."""

    APPLIED = "applied"
    """The checkpoint that is applied."""
    BASELINE = "baseline"
    """The baseline that it stands on: right if they hold all rows that were applied since."""
    NOTHING = "nothing"
    """The first link is a baseline."""


@dataclass(frozen=True)
class UpdatePath:
    """Checkpoints to apply.

    Attributes:
        lineage: These, each the parent of the next.
        ground: What the first one stands on.
    """

    lineage: Lineage
    ground: UpdateBase

    @property
    def is_delta(self) -> bool:
        """Whether something stays as it is where they hold nothing."""
        return self.ground is not UpdateBase.NOTHING


@dataclass(frozen=True)
class AppliedState:
    """What a model has, by digests of manifests: a checkpoint, and the baseline that it was folded on."""

    head: str
    baseline: str


def read_update_paths(path: str | Store, standing: AppliedState | None) -> Iterator[UpdatePath]:
    """The ways to a checkpoint: what reads least first, and its whole lineage last, if it was not the first.

    Args:
        path: The checkpoint, or its store.
        standing: What is applied, if anything is.

    Raises:
        LoadError, StoreError: As ``read_lineage``.
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
    """A way that was there before a compaction."""
    try:
        lineage = read_lineage(path, since=standing.head, is_as_committed=True)
    except (LoadError, StoreError) as error:
        logger.info("%s was compacted, and what it was committed as is gone: %s", path, error)
        return
    if lineage.checkpoints[0].manifest.parent is not None:
        yield UpdatePath(lineage, UpdateBase.APPLIED)

"""Links: the checkpoints that lead from the one that is applied to another.

Checkpoints are recognised by the digest of the manifest that committed them, which a compaction leaves as it is. So a
path is sought among the manifests that are in force, then among those that were committed, whose packs may still be
there. Where neither leads to what is applied, it was replaced, or is on another branch: the whole lineage is read.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from torchrec_cnr.errors import LoadError, StoreError
from torchrec_cnr.lineage import Lineage, read_lineage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Links:
    """Checkpoints to apply.

    Attributes:
        lineage: These, each the parent of the next.
        is_delta: Whether they stand on what is applied; else the first one is a baseline.
    """

    lineage: Lineage
    is_delta: bool


def read_links(path: str, applied: str | None) -> Iterator[Links]:
    """The ways to a checkpoint: what reads least first, and its whole lineage last, if it was not the first.

    Args:
        path: The checkpoint.
        applied: Digest of what is applied, if anything is.

    Raises:
        LoadError, StoreError: As ``read_lineage``.
    """
    lineage = read_lineage(path, since=applied)
    if lineage.checkpoints[0].manifest.parent is not None:
        yield Links(lineage, is_delta=True)
        lineage = read_lineage(path)
    elif applied is not None and any(checkpoint.is_compacted for checkpoint in lineage.checkpoints):
        try:
            committed = read_lineage(path, since=applied, is_as_committed=True)
        except (LoadError, StoreError) as error:
            logger.info("%s was compacted, and what it was committed as is gone: %s", path, error)
        else:
            if committed.checkpoints[0].manifest.parent is not None:
                yield Links(committed, is_delta=True)
    yield Links(lineage, is_delta=False)

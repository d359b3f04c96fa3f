"""Abandoned checkpoints: a job went back to an older checkpoint and saved again, so that it no longer uses them.

``latest`` and restores skip them. An empty file in the root marks each of them. The name of the file contains the
checkpoint's name and the first digits of its manifest's digest. So one listing of the root shows all marks, and a later
checkpoint of the same name is not affected.
"""

import re
from collections.abc import Collection

from torchrec_cnr.errors import CheckpointNotFoundError
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_lineage
from torchrec_cnr.storage.store import Store

_MARK = re.compile(r"(?P<name>.+)\.[0-9a-f]{16}\.abandoned")


def mark_of(checkpoint: Checkpoint) -> str:
    """Return the name of the file that marks a checkpoint as abandoned."""
    return mark_name(checkpoint.store.path.rpartition("/")[2], checkpoint.sha256)


def mark_name(name: str, sha256: str) -> str:
    """Return the name as :func:`mark_of` does, for a checkpoint's name and the digest of its committed manifest."""
    return f"{name}.{sha256[:16]}.abandoned"


def marked_name(file: str) -> str | None:
    """Return the name of the checkpoint that a file of the root marks as abandoned; None for any other file."""
    match = _MARK.fullmatch(file)
    return match["name"] if match else None


def mark_abandoned(root: Store, checkpoints: Collection[Checkpoint], back_at: Checkpoint | None) -> None:
    """Mark checkpoints as abandoned, and remove the marks of those that the job uses again.

    Args:
        root: Root of the checkpoints.
        checkpoints: The abandoned checkpoints.
        back_at: The checkpoint that the job continues from, if it is in this root. The marks of its chain are removed.

    Raises:
        DamagedError: The chain of ``back_at`` cannot be read.
        StoreError: The root cannot be written to.
    """
    for checkpoint in checkpoints:
        root.put(mark_of(checkpoint), [])
    if back_at is None:
        return
    marks = {name for name in root.names() if marked_name(name) is not None}
    try:
        lineage = read_lineage(back_at.store).checkpoints if marks else ()
    except CheckpointNotFoundError:  # a prune has removed it
        return
    for mark in marks.intersection(map(mark_of, lineage)):
        root.remove(mark)

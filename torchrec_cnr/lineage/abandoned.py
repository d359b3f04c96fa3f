"""Abandoned checkpoints: those that a job has left behind when it went back to an older one and saved again.

Of each, an empty file in the root tells, whose name holds the checkpoint's and the beginning of its manifest's digest:
one listing of the root shows them all, and a later checkpoint of the same name is not meant. ``latest`` and restores
pass them over.
"""

import re
from collections.abc import Collection

from torchrec_cnr.lineage.checkpoint import Checkpoint, read_lineage
from torchrec_cnr.storage.store import Store

_MARK = re.compile(r"(?P<name>.+)\.[0-9a-f]{16}\.abandoned")


def mark_of(checkpoint: Checkpoint) -> str:
    """The name of the file that says that a checkpoint is abandoned."""
    return f"{checkpoint.store.path.rpartition('/')[2]}.{checkpoint.sha256[:16]}.abandoned"


def marked_name(file: str) -> str | None:
    """The checkpoint that a file of the root says is abandoned; None if the file says nothing."""
    found = _MARK.fullmatch(file)
    return found["name"] if found else None


def mark_abandoned(root: Store, checkpoints: Collection[Checkpoint], back_at: Checkpoint | None) -> None:
    """Record that a job has left checkpoints behind.

    Args:
        root: Where they lie.
        checkpoints: Those that it has left.
        back_at: What it goes on from, if that is one of the root: neither this nor what it stands on is abandoned.

    Raises:
        DamagedError: What the job goes on from cannot be read.
        StoreError: The root cannot be written to.
    """
    for checkpoint in checkpoints:
        root.put(mark_of(checkpoint), [])
    if back_at is None:
        return
    marks = {name for name in root.names() if marked_name(name) is not None}
    lineage = read_lineage(back_at.store).checkpoints if marks else ()
    for mark in marks.intersection(map(mark_of, lineage)):
        root.remove(mark)

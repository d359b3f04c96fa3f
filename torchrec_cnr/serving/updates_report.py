"""What a served model tells of itself: what an update did, and how far it is behind."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_cnr.format.manifest import CheckpointKind
from torchrec_cnr.human_text import bytes_text, count_text, number_text, url_text
from torchrec_cnr.serving.commit_sources import Commit


@dataclass(frozen=True)
class Applied:
    """What an update did.

    Attributes:
        path: The checkpoint that the model now has.
        sha256: Digest of the manifest that committed it.
        kind: ``delta`` if its rows went on top of what was applied before, ``baseline`` if everything was replaced.
        num_checkpoints: How many were folded.
        num_rows: Rows of tables that were overwritten in this process.
        num_bytes: Bytes of packs that were read.
        read_secs: To find, read, verify and decode it, while lookups went on.
        apply_secs: To swap it in, while lookups waited.
        committed_to_applied_secs: From its commit, by the clock of who saved it, until lookups saw it.
    """

    path: str
    sha256: str
    kind: CheckpointKind
    num_checkpoints: int
    num_rows: int
    num_bytes: int
    read_secs: float
    apply_secs: float
    committed_to_applied_secs: float

    def __repr__(self) -> str:
        size = f"{count_text(self.num_rows, 'row')}, {bytes_text(self.num_bytes)}"
        secs = f"read in {number_text(self.read_secs)} s, applied in {number_text(self.apply_secs)} s"
        return f"Applied({self.kind}, {size}, {secs}, {url_text(self.path)})"


@dataclass(frozen=True)
class Lag:
    """How far a model is behind, as of the last look at the commits.

    Attributes:
        num_checkpoints: Committed, and not applied.
        waiting_secs: For how long the oldest of these has been committed; 0 if there is none.
        age_secs: Of the commit that is applied; None if none is.
    """

    num_checkpoints: int
    waiting_secs: float
    age_secs: float | None

    def __repr__(self) -> str:
        age = "nothing applied" if self.age_secs is None else f"applied commit is {number_text(self.age_secs)} s old"
        behind = f"{count_text(self.num_checkpoints, 'checkpoint')} behind for {number_text(self.waiting_secs)} s"
        return f"Lag({behind}, {age})"


def lag_of(applied: Commit | None, known: Sequence[Commit]) -> Lag:
    """The lag by the present clock.

    Args:
        applied: What the model has.
        known: All commits, the newest first.
    """
    now_ns = time.time_ns()
    missing = [commit for commit in known if applied is None or commit.created_ns > applied.created_ns]
    if not missing and known and known[0] != applied:
        missing = [known[0]]  # what was applied is gone, and another one is the newest again
    oldest_ns = min((commit.created_ns for commit in missing), default=now_ns)
    age_secs = None if applied is None else (now_ns - applied.created_ns) / 1e9
    return Lag(len(missing), max(0.0, (now_ns - oldest_ns) / 1e9), age_secs)

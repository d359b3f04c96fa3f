"""Reports of a served model: the result of an update, and the lag of the model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_cnr.format.manifest import CheckpointKind
from torchrec_cnr.human_text import bytes_text, count_text, number_text, url_text
from torchrec_cnr.serving.commit_sources import Commit


@dataclass(frozen=True)
class Applied:
    """The result of an update.

    Attributes:
        path: Path or URL of the checkpoint that the model now contains.
        sha256: SHA-256 digest of the manifest that committed it.
        kind: ``delta`` if only modified rows were overwritten, ``baseline`` if everything was replaced.
        num_checkpoints: Number of checkpoints that were merged.
        num_rows: Number of table rows that were overwritten in this process.
        num_bytes: Number of bytes of packs that were read.
        read_secs: Seconds to find, read, verify and decode the update, while lookups ran.
        apply_secs: Seconds to swap it in, while lookups waited.
        committed_to_applied_secs: Seconds from its commit, by the clock of the job that saved it, until lookups saw it.

    Examples:
        >>> served = torch.nn.ModuleDict({"users": torch.nn.EmbeddingBag(1_000, 16)})
        >>> subscriber = cnr.RowSubscriber(served, "run")
        >>> applied = subscriber.update()
        >>> applied.kind, applied.num_checkpoints, applied.num_rows
        ('baseline', 2, 1000)
        >>> subscriber.close()
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
        times_text = f"read in {number_text(self.read_secs)} s, applied in {number_text(self.apply_secs)} s"
        return f"Applied({self.kind}, {size}, {times_text}, {url_text(self.path)})"


@dataclass(frozen=True)
class Lag:
    """The delay of a model, as of the last look at the commits.

    Attributes:
        num_checkpoints: Number of checkpoints that are committed and not applied.
        waiting_secs: Seconds since the oldest of these was committed; 0 if there is none.
        age_secs: Seconds since the applied checkpoint was committed; None if none is applied.

    Examples:
        >>> served = torch.nn.ModuleDict({"users": torch.nn.EmbeddingBag(1_000, 16)})
        >>> with cnr.RowSubscriber(served, "run") as subscriber:
        ...     print(subscriber.lag.num_checkpoints, subscriber.lag.waiting_secs)
        0 0.0
    """

    num_checkpoints: int
    waiting_secs: float
    age_secs: float | None

    def __repr__(self) -> str:
        age = "nothing applied" if self.age_secs is None else f"applied commit is {number_text(self.age_secs)} s old"
        behind_text = f"{count_text(self.num_checkpoints, 'checkpoint')} behind for {number_text(self.waiting_secs)} s"
        return f"Lag({behind_text}, {age})"


def lag_of(applied: Commit | None, known: Sequence[Commit]) -> Lag:
    """Return the lag at this moment.

    Args:
        applied: The applied checkpoint; None if there is none.
        known: All commits, the newest first.
    """
    now_ns = time.time_ns()
    unapplied = [commit for commit in known if applied is None or commit.created_ns > applied.created_ns]
    if not unapplied and known and known[0] != applied:
        unapplied = [known[0]]  # the applied checkpoint was removed, and an older one is now the newest
    oldest_ns = min((commit.created_ns for commit in unapplied), default=now_ns)
    age_secs = None if applied is None else (now_ns - applied.created_ns) / 1e9
    return Lag(len(unapplied), max(0.0, (now_ns - oldest_ns) / 1e9), age_secs)

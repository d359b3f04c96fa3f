"""Progress callbacks, the phases of a save, and the manager's report of each checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torchrec_cnr.human_text import bytes_text, count_text, number_text, url_text

Progress = Callable[[int, int], None]  # called with the amount done and the total


class Count:
    """A counter of the amount done, which reports each change.

    Args:
        total: The total amount.
        progress: The callback to report to, or None.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0

    def add(self, num: int) -> None:
        """Add to the amount done, and report it."""
        self._done += num
        if self._progress is not None:
            self._progress(self._done, self._total)


@dataclass(frozen=True)
class SavePhases:
    """The time and bytes of each phase of a save, on one rank.

    Attributes:
        stage_secs: Seconds in which an asynchronous save copied rows, and training waited.
        staged_bytes: Bytes that an asynchronous save copied.
        plan_secs: Seconds from the beginning of ``dcp.save`` until the first row was read. All ranks plan together.
        encode_secs: Seconds in which rows were gathered and encoded.
        wait_secs: Seconds in which the save waited for uploads and encoded nothing.
        upload_secs: Seconds in which data files were written to the store, summed over all threads. Most of this time
            overlaps with encoding.
        commit_secs: Seconds in which the coordinator checked all results and wrote the manifest.
        num_bytes: Bytes of this rank's data files.
    """

    stage_secs: float = 0.0
    staged_bytes: int = 0
    plan_secs: float = 0.0
    encode_secs: float = 0.0
    wait_secs: float = 0.0
    upload_secs: float = 0.0
    commit_secs: float = 0.0
    num_bytes: int = 0


@dataclass(frozen=True)
class Saved:
    """A report of a checkpoint that was saved.

    Attributes:
        step: The training step after which it was saved.
        path: The path or URL of the checkpoint.
        kind: ``baseline`` or ``delta``.
        num_bytes: Bytes of all its files, and of its rows in a Kafka topic.
        num_rows: Number of table rows that it contains.
        stall_secs: Seconds for which training waited, on this rank, also for the previous save.
        secs: Seconds from the start of the save until it had ended on this rank.
        phases: The time and bytes of each phase, on this rank.
        num_retries: Number of failed attempts before it succeeded.

    Examples:
        >>> manager = cnr.CheckpointManager("managed", tracker)
        >>> saved = manager.save(1, state)
        >>> saved.kind, saved.num_rows, saved.num_retries
        ('baseline', 1000, 0)
        >>> manager.close()
    """

    step: int
    path: str
    kind: Literal["baseline", "delta"]
    num_bytes: int
    num_rows: int
    stall_secs: float
    secs: float
    phases: SavePhases
    num_retries: int

    def __repr__(self) -> str:
        size = f"{count_text(self.num_rows, 'row')}, {bytes_text(self.num_bytes)}"
        return f"Saved(step {self.step}, {self.kind}, {size}, {number_text(self.secs)} s, {url_text(self.path)})"

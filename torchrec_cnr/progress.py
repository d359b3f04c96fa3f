"""Progress of an operation, the phases of a save, and what a manager reports of each checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass

from torchrec_cnr.human_text import bytes_text, count_text, number_text, url_text

Progress = Callable[[int, int], None]  # what is done, of what


class Count:
    """Adds up what is done.

    Args:
        total: What there is to do.
        progress: Whom to tell; None for nobody.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0

    def add(self, num: int) -> None:
        """So much more is done."""
        self._done += num
        if self._progress is not None:
            self._progress(self._done, self._total)


@dataclass(frozen=True)
class SavePhases:
    """What a save took on one rank.

    Attributes:
        stage_secs: To copy rows, of an asynchronous save: training stood still for it.
        staged_bytes: What was copied.
        plan_secs: From the beginning of ``dcp.save`` until rows were read: planning, with all ranks.
        encode_secs: To gather rows and encode them.
        wait_secs: For uploads, when so many were under way that encoding had to wait, or all was encoded.
        upload_secs: To write packs to the store, of all threads together, mostly while others encode.
        commit_secs: To check all results and write the manifest, on the coordinator.
        num_bytes: Of this rank's packs.
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
    """A checkpoint that was taken.

    Attributes:
        step: After which step.
        path: Where.
        kind: ``baseline`` or ``delta``.
        num_bytes: Of all its files, and of what went to a log.
        num_rows: Rows of tables stored.
        stall_secs: How long training stood still for it, on this rank.
        secs: Until it was committed, from the start.
        phases: What took how long, on this rank.
        num_retries: How often it had failed before.
    """

    step: int
    path: str
    kind: str
    num_bytes: int
    num_rows: int
    stall_secs: float
    secs: float
    phases: SavePhases
    num_retries: int

    def __repr__(self) -> str:
        size = f"{count_text(self.num_rows, 'row')}, {bytes_text(self.num_bytes)}"
        return f"Saved(step {self.step}, {self.kind}, {size}, {number_text(self.secs)} s, {url_text(self.path)})"

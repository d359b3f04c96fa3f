"""The settings of a manager's background saves and compaction, and a save that runs in the background."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torchrec_cnr.arguments import check_choice, check_count, check_positive, check_type
from torchrec_cnr.human_text import given_text
from torchrec_cnr.policies import MAX_RATIO, Compacted, Policy
from torchrec_cnr.saving.staging import STAGING_BYTES
from torchrec_cnr.throttling import check_cpu_share

WhenBusy = Literal["wait", "skip", "fail"]


@dataclass(frozen=True)
class Background:
    """The limits on a manager's background work, and what ``async_save`` does while a save is running.

    ``cpu_share`` and ``max_bytes_per_sec`` do not slow down a job that must stop; see ``Preemption``.

    Attributes:
        when_busy: What ``async_save`` does while the previous save is still running on any rank: "wait" for it, "skip"
            this save, whose rows the next one includes, or "fail" with a ``SaveError``.
        cpu_share: The share of one core that a background save may use, above 0 and at most 1; see
            ``CNRStorageWriter``.
        max_bytes_per_sec: Bytes per second that each rank's saves write at most; None for no limit.
        staging_bytes: How many bytes a background save copies at most, by default 8 GiB; see ``CNRStorageWriter``.
        compacts: Whether a thread on the coordinator compacts checkpoint chains. By default, it does so if the policy
            expects it. Pass False if another process runs ``cnr compact``.

    Raises:
        ConfigurationError: A value is out of its range.

    Examples:
        >>> background = cnr.Background(cpu_share=0.5, when_busy="skip")
        >>> manager = cnr.CheckpointManager("run", tracker, background=background)
        >>> background.staging_bytes
        8589934592
    """

    when_busy: WhenBusy = "wait"
    cpu_share: float = 1.0
    max_bytes_per_sec: float | None = None
    staging_bytes: int = STAGING_BYTES
    compacts: bool | None = None

    def __post_init__(self) -> None:
        check_choice("when_busy", self.when_busy, get_args(WhenBusy))
        check_cpu_share(self.cpu_share)
        if self.max_bytes_per_sec is not None:
            check_positive("max_bytes_per_sec", self.max_bytes_per_sec)
        check_count("staging_bytes", self.staging_bytes)
        check_type("compacts", self.compacts, (bool, type(None)), "True, False or None")

    def compaction(self, policy: Policy) -> tuple[bool, float]:
        """Return whether a manager with this policy compacts, and the bytes that a restore may then read per byte."""
        compacts = isinstance(policy, Compacted) if self.compacts is None else self.compacts
        return compacts, policy.max_ratio if isinstance(policy, Compacted) else MAX_RATIO

    def __repr__(self) -> str:
        return given_text(self)


def check_background(background: object) -> None:
    """Raise a ``ConfigurationError`` if ``background`` is neither a ``Background`` nor None."""
    check_type("background", background, (Background, type(None)), "a Background, such as Background(cpu_share=0.5)")


class BackgroundSave:
    """A save that runs in the background.

    Args:
        step: Its step.
        future: Its result.
        began: When training began to wait for it, as ``time.monotonic`` says. It waits no longer.
        started: When the save before it had ended.
        at_end: Called in the thread of the save when it has succeeded. It must not raise.

    Attributes:
        step: Its step.
        future: Its result.
        stall_secs: For how long training waited for it.
    """

    def __init__(
        self, step: int, future: Future[Any], began: float, started: float, at_end: Callable[[], None]
    ) -> None:
        self.step = step
        self.future = future
        self.stall_secs = time.monotonic() - began
        self._started = started
        self._end = _End(at_end)
        future.add_done_callback(self._end)

    def result(self) -> Any:
        """Wait until the save and ``at_end`` are over. Return the result, or raise the error of the save."""
        self._end.is_over.wait()
        try:
            return self.future.result()
        finally:
            del self  # an error would refer to itself by it

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return not self.future.done()

    @property
    def secs(self) -> float:
        """The seconds from its start to its end."""
        return (self._end.ended or time.monotonic()) - self._started


class _End:
    """The end of a background save. The future refers to it, so it does not refer to the future: errors are freed."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        self.ended: float | None = None
        self.is_over = threading.Event()
        self._at_end = at_end

    def __call__(self, future: Future[Any]) -> None:
        self.ended = time.monotonic()
        try:
            if not future.cancelled() and future.exception() is None:
                self._at_end()
        finally:
            self.is_over.set()

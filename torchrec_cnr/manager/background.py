"""How a manager works beside training: the settings of saves in the background and of compaction."""

from dataclasses import dataclass
from typing import Literal, get_args

from torchrec_cnr.arguments import check_choice, check_count, check_type
from torchrec_cnr.human_text import given_text
from torchrec_cnr.saving.staging import STAGING_BYTES
from torchrec_cnr.throttling import check_cpu_share

WhenBusy = Literal["wait", "skip", "fail"]


@dataclass(frozen=True)
class Background:
    """What a manager's work in the background may take, and what gives way to what.

    Attributes:
        when_busy: What ``async_save`` does while the save before is under way on any rank: "wait" for it, "skip" this
            one, whose rows the next one takes, or "fail" with a ``SaveError``.
        cpu_share: Of a core, for saves in the background; see ``CNRStorageWriter``.
        staging_bytes: How much such a save copies; see ``CNRStorageWriter``.
        compacts: Whether lineages are compacted, in a thread on the coordinator. By default they are if the policy
            expects it; pass False where ``cnr compact`` does it elsewhere.

    Raises:
        ConfigurationError: A value cannot work.

    Example:
        >>> Background(cpu_share=0.5, when_busy="skip").staging_bytes
        8589934592
    """

    when_busy: WhenBusy = "wait"
    cpu_share: float = 1.0
    staging_bytes: int = STAGING_BYTES
    compacts: bool | None = None

    def __post_init__(self) -> None:
        check_choice("when_busy", self.when_busy, get_args(WhenBusy))
        check_cpu_share(self.cpu_share)
        check_count("staging_bytes", self.staging_bytes)
        check_type("compacts", self.compacts, (bool, type(None)), "True, False or None")

    def __repr__(self) -> str:
        return given_text(self)


def check_background(background: object) -> None:
    """Raise a ConfigurationError for what is neither a Background nor None."""
    check_type("background", background, (Background, type(None)), "a Background, such as Background(cpu_share=0.5)")

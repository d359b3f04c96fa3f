"""What all ranks of a save must have in common: compared when ranks plan, before anything is written.

Each rank's plan carries it to the coordinator, which refuses the save on all ranks and names what differs. Of the
arguments of writer and planner, those that are not compared may differ: ``thread_count``, ``pack_bytes``,
``max_bytes_per_sec``, ``cpu_share``, ``staging_bytes``, ``timeout_secs`` and ``progress`` change how a rank works, and
not what a checkpoint is. If one of them makes a rank fail, the save fails on all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.human_text import url_text
from torchrec_cnr.saving.decision import RankData
from torchrec_cnr.version import __version__

_MAX_TEXT = 300  # characters of a value in a message


@dataclass(frozen=True)
class RankPlan:
    """What a rank's plan carries besides DCP's, as its ``storage_data``.

    Attributes:
        checkpoint: URL of the checkpoint.
        quantization: How tensors are quantized.
        row_log: Where rows of deltas go.
        sync_files: Whether local files are forced to disk: the manifest must not be there before other ranks' packs.
        is_staged: Whether the save is asynchronous.
        data: What ``CNRSavePlanner`` tells of this rank; None with another planner.
        version: Of this package.
    """

    checkpoint: str
    quantization: str
    row_log: str
    sync_files: bool
    is_staged: bool
    data: RankData | None
    version: str = __version__


_COMPARED: tuple[tuple[str, Callable[[RankPlan], object]], ...] = (
    ("the version of torchrec_cnr", lambda plan: plan.version),
    ("the checkpoint", lambda plan: url_text(plan.checkpoint)),
    ("the function that saves", lambda plan: "dcp.async_save" if plan.is_staged else "dcp.save"),
    ("the planner", lambda plan: "another planner" if plan.data is None else "CNRSavePlanner"),
    ("the planner's tracker", lambda plan: plan.data is not None and ("a tracker" if plan.data.is_tracked else "none")),
    ("the policy", lambda plan: plan.data and plan.data.policy),
    ("the quantization", lambda plan: plan.quantization),
    ("the row log", lambda plan: plan.row_log),
    ("the writer's 'sync_files'", lambda plan: plan.sync_files),
)


def rank_plans(plans: Sequence[SavePlan]) -> list[RankPlan]:
    """What each rank's plan carries.

    Raises:
        ConfigurationError: A rank saves with another storage writer, or ranks do not agree.
    """
    carried: list[Any] = [plan.storage_data for plan in plans]
    for rank, plan in enumerate(carried):
        if not isinstance(plan, RankPlan):
            raise ConfigurationError(
                f"nothing was saved: rank {rank} saves with another storage writer than CNRStorageWriter, or with "
                "another version of it; give all ranks the same"
            )
    for what, value_of in _COMPARED:
        _compare(what, [value_of(plan) for plan in carried])
    return carried


def _compare(what: str, values: Sequence[object]) -> None:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ConfigurationError(
                f"nothing was saved, because ranks do not agree on {what}: rank 0 has {_text(values[0])}, rank {rank} "
                f"has {_text(value)}; give all ranks the same"
            )


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."

"""The values that all ranks of a save must have in common. The coordinator compares it before anything is written.

Each rank's plan carries a ``RankPlan`` to the coordinator. If ranks differ, the coordinator fails the save on all ranks
and names the difference. These arguments of the writer may differ: ``thread_count``, ``pack_bytes``,
``max_bytes_per_sec``, ``cpu_share``, ``staging_bytes``, ``timeout_secs`` and ``progress``. They change how a rank
works, but not what the checkpoint contains. If one of them makes a rank fail, the save fails on all ranks.
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
    """The data that a rank adds to DCP's plan, as its ``storage_data``.

    Attributes:
        checkpoint: URL of the checkpoint.
        quantization: Text of the quantization rules.
        row_log: Text of the Kafka topic for rows of deltas.
        sync_files: Whether local files are forced to disk. If ranks differed, the manifest could be durable before the
            data files of other ranks.
        is_staged: Whether the save is asynchronous.
        data: Report of this rank's ``CNRSavePlanner``; None with another planner.
        version: Version of this package.
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
    ("the Kafka topic", lambda plan: plan.row_log),
    ("the writer's 'sync_files'", lambda plan: plan.sync_files),
)


def rank_plans(plans: Sequence[SavePlan]) -> list[RankPlan]:
    """Return what each rank's plan carries.

    Raises:
        ConfigurationError: A rank saves with another storage writer, or ranks do not agree.
    """
    storage_data: list[Any] = [plan.storage_data for plan in plans]
    for rank, plan in enumerate(storage_data):
        if not isinstance(plan, RankPlan):
            raise ConfigurationError(
                f"nothing was saved, because rank {rank} uses another storage writer than CNRStorageWriter, or another "
                "version of it: use the same on all ranks"
            )
    for what, value_of in _COMPARED:
        _compare(what, [value_of(plan) for plan in storage_data])
    return storage_data


def _compare(what: str, values: Sequence[object]) -> None:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ConfigurationError(
                f"nothing was saved, because ranks do not agree on {what}: rank 0 has {_text(values[0])}, rank {rank} "
                f"has {_text(value)}; use the same on all ranks"
            )


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."

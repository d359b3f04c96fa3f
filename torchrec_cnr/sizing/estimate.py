"""The estimate: what the checkpoints of a model cost, and what those of plain DCP cost."""

import math
from dataclasses import dataclass
from functools import partial

from torchrec_cnr.policies import Full
from torchrec_cnr.sizing.checkpoint_bytes import (
    CheckpointBytes,
    checkpoint_bytes,
    compacted_row_number_bytes,
    num_files,
)
from torchrec_cnr.sizing.inputs import Sizing
from torchrec_cnr.sizing.rank_memory import RankMemory, rank_memory
from torchrec_cnr.sizing.runs import Run, run_of
from torchrec_cnr.storage.pack_writer import PACK_BYTES

_HOUR_SECS, _DAY_SECS = 3600, 86400


@dataclass(frozen=True)
class Costs:
    """The bytes that the checkpoints of a run take, by this library or by plain DCP.

    Attributes:
        bytes_per_save: The bytes written per save, with compaction, as an average over the run.
        bytes_per_hour: The bytes written per hour.
        bytes_per_day: The bytes written per day.
        bytes_per_sec: The average bandwidth of all ranks, in bytes per second.
        bytes_per_sec_of_rank: The average bandwidth of one rank, without compaction.
        compaction_bytes_per_day: Those of ``bytes_per_day`` that compaction writes.
        compaction_bytes_per_sec: The average bandwidth of compaction, which one process does for all ranks. It writes
            this much, and reads at least as much.
        baseline_bytes_per_sec: The bandwidth of all ranks that writes a baseline within ``save_secs``.
        baseline_bytes_per_sec_of_rank: The same of one rank.
        delta_bytes_per_sec: The bandwidth of all ranks that writes the largest delta within ``save_secs``; 0 if there
            are no deltas.
        delta_bytes_per_sec_of_rank: The same of one rank.
        kept_bytes: The most bytes in the store after old checkpoints were removed.
        peak_bytes: The most bytes in the store while a new checkpoint exists, and the one that it replaces still does.
        restore_bytes: The most bytes that a restore reads.
        uncompacted_restore_bytes: The most bytes that it reads if the newest checkpoint is not compacted yet.
        restore_requests: The number of requests with which it reads them, if each reads a whole data file.
    """

    bytes_per_save: int
    bytes_per_hour: int
    bytes_per_day: int
    bytes_per_sec: int
    bytes_per_sec_of_rank: int
    compaction_bytes_per_day: int
    compaction_bytes_per_sec: int
    baseline_bytes_per_sec: int
    baseline_bytes_per_sec_of_rank: int
    delta_bytes_per_sec: int
    delta_bytes_per_sec_of_rank: int
    kept_bytes: int
    peak_bytes: int
    restore_bytes: int
    uncompacted_restore_bytes: int
    restore_requests: int


@dataclass(frozen=True)
class Estimate:
    """The estimate for a model. Sizes are in bytes.

    Attributes:
        full_fp32_bytes: The bytes of a full checkpoint in fp32, with the optimizer state.
        baseline: The bytes of a baseline.
        delta: The bytes of a delta that contains the rows modified in one interval; None if there are no deltas.
        largest_delta_bytes: The bytes of the largest delta of the run; 0 if there are no deltas.
        baseline_files: The number of data files of a baseline, over all ranks.
        delta_files: The number of data files of the largest delta; 0 if there are no deltas.
        costs: What the run writes, keeps and reads.
        plain_dcp: The same by plain DCP, which saves a full fp32 checkpoint each time.
        plain_dcp_staging: The bytes that ``dcp.async_save`` of plain DCP stages on one rank.
        memory: The memory of one rank.
    """

    full_fp32_bytes: int
    baseline: CheckpointBytes
    delta: CheckpointBytes | None
    largest_delta_bytes: int
    baseline_files: int
    delta_files: int
    costs: Costs
    plain_dcp: Costs
    plain_dcp_staging: int
    memory: RankMemory


def estimate(sizing: Sizing) -> Estimate:
    """Estimate what the checkpoints of a model cost.

    Args:
        sizing: The model, and how its checkpoints are saved.

    Examples:
        >>> found = estimate(Sizing((Table(1_000_000, 64),)))
        >>> found.full_fp32_bytes
        260000000
    """
    full, baseline = sizing.value_bytes, checkpoint_bytes(sizing)

    def delta_bytes(num_intervals: int) -> int:
        return checkpoint_bytes(sizing, sizing.modified_in(num_intervals)).num_bytes

    run_with = partial(run_of, delta=delta_bytes, num_saves=sizing.num_saves, keep_last=sizing.keep_last)
    run = run_with(sizing.policy, baseline.num_bytes, compacted_row_number_bytes(sizing))
    largest_share = sizing.modified_in(run.most_intervals) if run.most_intervals else 0.0
    return Estimate(
        full_fp32_bytes=full,
        baseline=baseline,
        delta=checkpoint_bytes(sizing, sizing.modified) if run.most_intervals else None,
        largest_delta_bytes=run.largest_delta,
        baseline_files=num_files(sizing),
        delta_files=num_files(sizing, largest_share) if run.most_intervals else 0,
        costs=_costs(sizing, baseline.num_bytes, run),
        plain_dcp=_costs(sizing, full, run_with(Full(), full, 0)),
        plain_dcp_staging=round(full / sizing.num_ranks),
        memory=rank_memory(sizing, largest_share),
    )


def _costs(sizing: Sizing, baseline: int, run: Run) -> Costs:
    per_sec, copied_per_sec = run.written / sizing.interval_secs, run.copied / sizing.interval_secs
    baseline_per_sec, delta_per_sec = baseline / sizing.save_secs, run.largest_delta / sizing.save_secs
    return Costs(
        bytes_per_save=run.written,
        bytes_per_hour=round(per_sec * _HOUR_SECS),
        bytes_per_day=round(per_sec * _DAY_SECS),
        bytes_per_sec=round(per_sec),
        bytes_per_sec_of_rank=round((per_sec - copied_per_sec) / sizing.num_ranks),
        compaction_bytes_per_day=round(copied_per_sec * _DAY_SECS),
        compaction_bytes_per_sec=round(copied_per_sec),
        baseline_bytes_per_sec=round(baseline_per_sec),
        baseline_bytes_per_sec_of_rank=round(baseline_per_sec / sizing.num_ranks),
        delta_bytes_per_sec=round(delta_per_sec),
        delta_bytes_per_sec_of_rank=round(delta_per_sec / sizing.num_ranks),
        kept_bytes=run.kept,
        peak_bytes=run.peak,
        restore_bytes=run.restore,
        uncompacted_restore_bytes=run.uncompacted_restore,
        restore_requests=math.ceil(run.restore / PACK_BYTES),
    )

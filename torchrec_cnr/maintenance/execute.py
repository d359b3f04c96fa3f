"""Execution: what a plan says is done. Plans are values; until they come here, nothing was changed."""

from typing import overload

from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.maintenance.compaction.compact import run_compaction
from torchrec_cnr.maintenance.compaction.plan import CompactionPlan
from torchrec_cnr.maintenance.pruning.execute import PruneResult, run_prune
from torchrec_cnr.maintenance.pruning.plan import PrunePlan
from torchrec_cnr.progress import Progress
from torchrec_cnr.storage.leases import leased


@overload
def execute(plan: PrunePlan, *, progress: Progress | None = None) -> PruneResult: ...


@overload
def execute(plan: CompactionPlan, *, progress: Progress | None = None) -> Checkpoint: ...


def execute(plan: PrunePlan | CompactionPlan, *, progress: Progress | None = None) -> PruneResult | Checkpoint:
    """Do what a plan says, as far as it is still right.

    Args:
        plan: From :func:`plan_prune` or :func:`plan_compaction`.
        progress: Told how much of how much is done: files that go, or bytes that are copied.

    Returns:
        What was removed and what could not be; or the checkpoint with its new manifest.

    Raises:
        CheckpointExistsError: Another compaction of the same checkpoint was faster; nothing was changed.
        LoadError: What is to be copied is damaged, or somebody has removed it; nothing was changed.
        StoreError: The store refused before anything was changed.
    """
    if isinstance(plan, PrunePlan):
        return run_prune(plan, progress=progress)
    with leased(plan.newest.store, "compact") as lease:
        return run_compaction(plan, lease, progress=progress)

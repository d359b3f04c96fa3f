"""``execute``, which executes a plan of a prune or a compaction. A plan alone changes nothing."""

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
    """Execute a plan of a prune or a compaction.

    Right before each removal, a prune checks again that nothing needs the checkpoint by now.

    Args:
        plan: A plan from :func:`plan_prune` or :func:`plan_compaction`.
        progress: Called with the amount done and the total: files that are removed, or bytes that are copied.

    Returns:
        What was removed and what could not be removed; or the checkpoint with its new manifest.

    Raises:
        CheckpointExistsError: Another compaction of the same checkpoint was faster. Nothing was changed.
        LoadError: Data to copy is corrupt or was removed. Nothing was changed.
        StoreError: The store failed before anything was changed.

    Examples:
        >>> checkpoint = cnr.compact("run/step-2", self_contained=True)
        >>> plan = cnr.plan_prune("run", cnr.Keep(last=1))
        >>> cnr.execute(plan).removed
        ('step-1',)
    """
    if isinstance(plan, PrunePlan):
        return run_prune(plan, progress=progress)
    with leased(plan.newest.store, "compact") as lease:
        return run_compaction(plan, lease, progress=progress)

"""The save planner: decides WHAT a checkpoint contains, which rows, and on which parent they are based.

The calls of one ``dcp.save``, in order, and the ranks on which DCP makes them:

    1. set_up_planner      all ranks    wait for the previous save, learn its outcome, then freeze the modified rows (in
                                        an asynchronous save, the writer has done all this when it staged the rows)
    2. create_local_plan   all ranks    DCP's plan, plus the checkpoint that this rank's modified rows relate to
    3. create_global_plan  coordinator  decide: baseline or delta, and of which parent; send the decision to every rank
    4. finish_plan         all ranks    receive the decision; from now on the save is pending
    5. resolve_data        all ranks    return the values of a tracked shard and the mask of rows to store

No collective reports to the ranks how a save ended, and none is needed. When the next save begins, each rank checks
whether the store contains the manifest of its pending save. A save that failed before step 4 has no manifest.

All calls of one save come from one thread. They share the ``PlannedSave`` of that save.
"""

import io
import logging
import re
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from torchrec_cnr.errors import SaveError
from torchrec_cnr.policies import Full, Intermittent, Policy, check_policy
from torchrec_cnr.saving.cut import Cuts
from torchrec_cnr.saving.encoding import kernel_warm_ups
from torchrec_cnr.saving.planned_save import PlannedSave, PlannerOptions
from torchrec_cnr.saving.plug_in_messages import CNRStorageMeta, ShardData
from torchrec_cnr.tracking.tracked_tables import TrackedRows, check_tracker

logger = logging.getLogger(__name__)

_FUSED_STATE = re.compile(r"\.(\w+)\.weight\.\1\.\w+$")  # TorchRec's names of fused optimizer state


class CNRSavePlanner(SavePlanner):
    """Save planner that plans baselines and deltas. Use it with ``CNRStorageWriter``.

    Args:
        tracker: Tracker of the modified rows. Without one, each save is a baseline.
        policy: Decides whether a save is a baseline or a delta, and which rows a delta contains. The default is
            ``Intermittent()`` with a tracker, and ``Full()`` without.

    Raises:
        ConfigurationError: An argument is invalid. Or, while saving, the writer is not a ``CNRStorageWriter``, or the
            state dict does not contain the storage of a tracked table, because another stager copied it, for example.
        UntrackedRowsError: While saving, if the tracker verifies that all modified rows are marked, and some are not.

    Examples:
        >>> planner = cnr.CNRSavePlanner(tracker)
        >>> train()
        >>> metadata = dcp.save(state, checkpoint_id="run/step-3", storage_writer=writer, planner=planner)
        >>> cnr.read_checkpoint("run/step-3").num_rows
        100
    """

    def __init__(self, tracker: TrackedRows | None = None, *, policy: Policy | None = None) -> None:
        super().__init__()
        if tracker is not None:
            check_tracker(tracker)
        policy = policy if policy is not None else Intermittent() if tracker is not None else Full()
        check_policy(policy)
        cuts = Cuts.of(tracker, policy, self) if tracker is not None else None
        if tracker is not None:
            kernel_warm_ups.planner_made(tracker)
        self._options = PlannerOptions(policy, cuts, id(tracker) if tracker is not None else 0)
        self._threads = threading.local()
        self._were_rates_checked = False

    def __repr__(self) -> str:
        options = self._options
        tracker = "with a tracker" if options.is_tracked else "no tracker"
        return f"CNRSavePlanner({tracker}, policy={options.policy!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the planner without its tracker. In another process, the copy can still save what was staged here."""
        return _received, (self._options.policy, self._options.tracker_id)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Learn the outcome of the previous save and take a snapshot, or use the one that was taken at staging."""
        self._threads.save = None
        meta = storage_meta if isinstance(storage_meta, CNRStorageMeta) else None
        with torch.inference_mode(False):  # a tensor made in inference mode could not be changed outside of it
            self._threads.save = PlannedSave(self._options, meta, state_dict, is_coordinator)

    def resolve_last_save(self) -> None:
        """Read from the store how the last save ended, and commit its rows or mark them again.

        Every save begins with this. Call it yourself if ``tracker.num_modified`` should count since the last save. It
        waits for an asynchronous save.

        Raises:
            SaveError: An asynchronous save does not end.
            StoreError: The store does not answer; try again.
        """
        if self._options.cuts is not None:
            with torch.inference_mode(False):
                self._options.cuts.resolve_last_save()

    def create_local_plan(self) -> SavePlan:
        """Return DCP's own plan of full shard regions, with what this rank reports to the coordinator."""
        plan = self._save.create_local_plan()
        if not self._were_rates_checked:
            self._were_rates_checked = True
            _warn_of_missing_rates([item.index.fqn for item in plan.items])
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Decide for all ranks whether the checkpoint is a baseline or a delta, and of which parent."""
        return self._save.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Receive the coordinator's decision."""
        return self._save.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO | ShardData:  # type: ignore[override]
        """Return the data of one item; for a tracked shard, also which of its rows to store."""
        with torch.inference_mode(False):
            return self._save.resolve_data(write_item)

    def end_save(self) -> None:
        """Release what this thread has saved. The writer calls this when it has all data, because DCP does not."""
        self._threads.save = None

    @property
    def _save(self) -> PlannedSave:
        save: PlannedSave | None = getattr(self._threads, "save", None)
        if save is None:
            raise SaveError("no save has begun in this thread: call set_up_planner first, as DCP does")
        return save


def _warn_of_missing_rates(fqns: Sequence[str]) -> None:
    """Warn if a scheduler is saved without the rates that it has set, which TorchRec's optimizers leave out."""
    schedulers = [fqn for fqn in fqns if fqn.endswith("._last_lr")]
    has_fused = any(_FUSED_STATE.search(fqn) for fqn in fqns)
    have_rates = any("param_groups" in fqn.split(".")[: -1 if has_fused else None] for fqn in fqns)
    if schedulers and not have_rates:
        logger.warning(
            "the state has a learning rate scheduler (%s), but no 'param_groups'%s: if it sets their rate, the first "
            "step after a restore uses the rate of a new optimizer; for TorchRec's, also save ParamGroups(optimizer)",
            schedulers[0].removesuffix("._last_lr"),
            " of the fused optimizers" if has_fused else " of an optimizer",
        )


def _received(policy: Policy, tracker_id: int) -> CNRSavePlanner:
    """Return the planner that another process receives."""
    planner = CNRSavePlanner(policy=policy)
    planner._options = PlannerOptions(policy, None, tracker_id)
    return planner

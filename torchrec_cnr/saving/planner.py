"""The save planner: WHAT a checkpoint holds. Which rows, and on top of which parent.

Who calls what, on which rank, in one ``dcp.save``:

    1. set_up_planner      all ranks    wait for the save before, settle its fate, then cut: freeze all marks (of an
                                        asynchronous save, the writer has done all this when it staged the rows)
    2. create_local_plan   all ranks    DCP's plan, plus the checkpoint that this rank's marks relate to
    3. create_global_plan  coordinator  decide: baseline or delta, of which parent; tell every rank
    4. finish_plan         all ranks    take the decision; from here on the save is pending
    5. resolve_data        all ranks    a tracked shard resolves to its values and the mask of rows to store

No collective tells the ranks how a save ended, and none is needed: at the next cut each looks whether the manifest of
its pending save is in the store. A save that failed before step 4 has no manifest anyway.

All calls of one save come from one thread. What they share is in that save's ``PlannedSave``.
"""

import io
import threading
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


class CNRSavePlanner(SavePlanner):
    """Plans baselines and deltas; to be used with ``CNRStorageWriter``.

    Args:
        tracker: Knows the modified rows. Without one, each save is a baseline.
        policy: Decides what each delta holds.

    Raises:
        ConfigurationError: While saving, if the writer is not a ``CNRStorageWriter``, or a tracked table is not in the
            state dict with its own memory (it is missing, or was copied by a foreign stager).
        UntrackedRowsError: While saving, if the tracker verifies that all modified rows are marked, and some are not.
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

    def __repr__(self) -> str:
        options = self._options
        tracker = "with a tracker" if options.is_tracked else "no tracker"
        return f"CNRSavePlanner({tracker}, policy={options.policy!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it knows what was staged, but not the tracker."""
        return _received, (self._options.policy, self._options.tracker_id)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Settle the save before, and cut; or take the cut that was made when rows were staged."""
        self._threads.save = None
        meta = storage_meta if isinstance(storage_meta, CNRStorageMeta) else None
        with torch.inference_mode(False):  # tensors that are made in it cannot be changed outside of it
            self._threads.save = PlannedSave(self._options, meta, state_dict, is_coordinator)

    def resolve_last_save(self) -> None:
        """Learn from the store how the last save ended: commit its rows, or mark them again.

        Every save begins with this; call it yourself to have ``tracker.head`` up to date. Waits for an asynchronous
        save.

        Raises:
            SaveError: An asynchronous save does not end.
            StoreError: The store does not answer; try again.
        """
        if self._options.cuts is not None:
            with torch.inference_mode(False):
                self._options.cuts.resolve_last_save()

    def create_local_plan(self) -> SavePlan:
        """DCP's own plan of full boxes, and what this rank tells the coordinator."""
        return self._save.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Decide for all ranks."""
        return self._save.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take the coordinator's decision."""
        return self._save.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO | ShardData:  # type: ignore[override]
        """The data of one item; tracked shards come with the rows to store of them."""
        with torch.inference_mode(False):
            return self._save.resolve_data(write_item)

    def end_save(self) -> None:
        """Drop what was saved in this thread. The writer calls this once it has all data; DCP does not tell."""
        self._threads.save = None

    @property
    def _save(self) -> PlannedSave:
        save: PlannedSave | None = getattr(self._threads, "save", None)
        if save is None:
            raise SaveError("no save was begun in this thread: call set_up_planner first, as DCP does")
        return save


def _received(policy: Policy, tracker_id: int) -> CNRSavePlanner:
    """A planner as it arrives in another process."""
    planner = CNRSavePlanner(policy=policy)
    planner._options = PlannerOptions(policy, None, tracker_id)
    return planner

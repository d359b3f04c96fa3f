"""The planner's part of one save on one rank: its snapshot, its plan, and the coordinator's decision."""

import io
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.gc_pause import paused_gc
from torchrec_cnr.lineage.latest import newest_ns
from torchrec_cnr.policies import Policy, Since, policy_text
from torchrec_cnr.saving.agreement import rank_plans
from torchrec_cnr.saving.cut import Cut, Cuts, StagedRows, TrackedItem
from torchrec_cnr.saving.decision import (
    Base,
    Decision,
    RankData,
    RowTensor,
    agree,
    choose_base,
    newest_baseline,
    policy_of_all,
    ranks_of_shards,
    refuse_missing_rows,
    refuse_unsharded_state,
    stored_whole,
    transforms_of,
)
from torchrec_cnr.saving.plug_in_messages import (
    STAGED,
    CNRStorageMeta,
    SaveMetadata,
    ShardData,
    StagedSave,
    StagedTensor,
)
from torchrec_cnr.saving.sinks import FILES, Captured, RowDestination
from torchrec_cnr.saving.staged_values import StagedCodes
from torchrec_cnr.sharding import ShardKey, is_replicated, shard_key
from torchrec_cnr.tracking.modified_rows import SelectedRows
from torchrec_cnr.tracking.tracked_tables import Pending

_Rows = tuple[tuple[SelectedRows, ...] | None, Captured | None]  # the rows to store (None for all), and their capture
_SINCES = (Since.HEAD, Since.BASELINE)
_MAX_CHOICES = 2  # of a checkpoint to base a save on


@dataclass(frozen=True, eq=False)
class PlannerOptions:
    """The arguments of a planner.

    Attributes:
        policy: Decides what each delta contains.
        cuts: Snapshots of the tracker's tables; None without a tracker, and in processes that do not have the tracker.
        tracker_id: Identifies the tracker; 0 without one.
    """

    policy: Policy
    cuts: Cuts | None
    tracker_id: int

    @property
    def is_tracked(self) -> bool:
        """Whether there is a tracker."""
        return self.tracker_id != 0


class PlannedSave(DefaultSavePlanner):
    """The planner's part of one save.

    Args:
        options: The planner's arguments.
        meta: What the writer sent; None if the writer is not a ``CNRStorageWriter``.
        state_dict: The state dict, or what was staged of it.
        is_coordinator: Whether this rank decides.

    Raises:
        ConfigurationError: The writer is not a ``CNRStorageWriter``, or the state dict lacks tracked tables.
        SaveError: The previous save does not end.
        StoreError: The store does not answer.
        Exception: The error with which staging failed.
    """

    def __init__(
        self, options: PlannerOptions, meta: CNRStorageMeta | None, state_dict: dict[str, Any], is_coordinator: bool
    ) -> None:
        super().__init__()
        self._options = options
        self._meta = meta
        self._selected: dict[int, _Rows] = {}
        self._decision: Decision | None = None
        staged_save = state_dict.get(STAGED)
        self.set_up_planner({key: value for key, value in state_dict.items() if key != STAGED}, meta, is_coordinator)
        self.cut = self._cut_of(staged_save if isinstance(staged_save, StagedSave) else None)

    @property
    def _destination(self) -> RowDestination:
        return self._meta.destination if self._meta is not None else FILES

    def _cut_of(self, staged_save: StagedSave | None) -> Cut:
        options, meta = self._options, self._meta
        untracked = Cut(options.policy, None, 0, {}, Pending())
        if staged_save is not None:
            if meta is not None:
                meta.writing.take(staged_save)
            staged_save.raise_failure()
        if meta is None:
            raise ConfigurationError(
                "a CNRSavePlanner needs a CNRStorageWriter, which stores only some rows: pass one as storage_writer"
            )
        running = meta.writing.begin()
        self._destination.refuse_policy(options.policy)
        if staged_save is not None and staged_save.cut is not None:
            if staged_save.tracker_id != options.tracker_id or staged_save.cut.policy != options.policy:
                raise ConfigurationError(
                    "the rows were staged for another planner: pass dcp.async_save the planner that was made last with "
                    "the tracker of these tables"
                )
            return staged_save.cut
        if options.cuts is None:
            return untracked
        timeout_secs = meta.writing.timeout_secs
        return options.cuts.cut(self.state_dict, running, options.policy, self._destination, timeout_secs)

    def create_local_plan(self) -> SavePlan:
        """Return DCP's own plan of full shard regions, with this rank's report to the coordinator."""
        plan = super().create_local_plan()
        items = self.cut.items
        data = RankData(
            is_tracked=self._options.is_tracked,
            policy=policy_text(self._options.policy),
            head=self.cut.head.ref if self.cut.head else None,
            baseline=self.cut.head.baseline if self.cut.head else None,
            num_links=len(self.cut.head.lineage) if self.cut.head else 0,
            staged=self.cut.staged,
            tensors={
                item.fqn: RowTensor(item.dtype, item.is_table, item.table if item.is_row_wise else None)
                for item in items.values()
            },
            whole=frozenset(key for key, item in items.items() if item.rows is None),
            replaced={
                since: frozenset(key for key, item in items.items() if since in item.replaced_since)
                for since in _SINCES
            },
            partial=frozenset(key for key, item in items.items() if item.is_partial),
            marks={
                (key, since): digest
                for key, item in items.items()
                if self._is_replicated(key[0])
                for since, digest in item.digests().items()
            },
            of_own_rows=frozenset(
                key
                for key, item in items.items()
                if self._is_replicated(item.fqn) and not self._is_replicated(item.table)
            ),
        )
        return replace(plan, storage_data=data)

    def _is_replicated(self, fqn: str) -> bool:
        value = self.state_dict[fqn]
        is_one_of_many = value.is_replicated if isinstance(value, StagedTensor) else is_replicated(value)
        return dist.is_initialized() and dist.get_world_size() > 1 and is_one_of_many

    def _after_ns(self) -> int:
        """Return the time that the commit must be later than, so that the checkpoint is the newest of its root.

        Clocks of machines differ, so the time of the commit alone would not ensure it.
        """
        if self.cut.head is not None:
            return self.cut.head.created_ns
        return newest_ns(self._meta.store.at("..")) if self._meta is not None and self._options.is_tracked else 0

    def _protected_base(self, policy: Policy, data: list[RankData]) -> Base | None:
        """Return what the save is based on, protected from pruning by a lease; None if the save is a baseline."""
        meta, heads = self._meta, [rank.head for rank in data]
        store = meta.store if meta is not None else None
        root, latest = (meta.writing.root, meta.writing.latest) if meta is not None else (None, None)
        for _ in range(_MAX_CHOICES):
            base = choose_base(policy, self.cut.head, heads, newest_baseline(data), store, root, latest)
            if base is None or meta is None or meta.writing.protect_bases(base.used):
                return base
            root = latest = None  # a prune has changed them since they were listed
        return None  # each was pruned after it was chosen, and before the lease

    @paused_gc()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Decide for all ranks whether the checkpoint is a baseline or a delta, and of which parent."""
        data = self._data_of(all_plans)
        ranks_of = ranks_of_shards(all_plans)
        refuse_unsharded_state(ranks_of, data)
        plans, metadata = super().create_global_plan(all_plans)
        head, meta, destination = self.cut.head, self._meta, self._destination
        store, head_ref = meta.store if meta is not None else None, head.ref if head is not None else None
        decision = Decision(
            save_id=str(meta.save_id) if meta else "",
            since=Since.EVER,
            policy=type(self._options.policy).__name__,
            after_ns=self._after_ns(),
            num_restores=self.cut.num_restores,
            head=head_ref,
            loadable_besides=destination.loadable_besides(store, head_ref) if store is not None else None,
        )
        base = self._protected_base(policy_of_all(self._options.policy, data), data)
        if base is not None:
            # A delta of the latest checkpoint may have rows since the baseline, and the latest another tensor's values.
            replaced_since = {base.since, Since.HEAD} if base.parent.ref == head_ref else {base.since}
            tensors = {fqn: tensor for rank in data for fqn, tensor in rank.tensors.items()}
            new_fqns = stored_whole(tensors, metadata, base.parent.manifest)
            whole_keys = frozenset(key for key in ranks_of if key[0] in new_fqns).union(
                *(rank.whole for rank in data), *(rank.replaced[since] for rank in data for since in replaced_since)
            )
            # Only one of a shard's replicas stores it. If they did not modify the same rows, it must store all rows.
            whole_keys |= {
                key
                for key, ranks in ranks_of.items()
                for since in {base.since, *destination.compared}
                if not agree(key, since, [data[r] for r in ranks])
            }
            decision = replace(
                decision,
                since=base.since,
                parent=base.parent.ref,
                history=base.history,
                whole=whole_keys,
                transforms=transforms_of(base, store) if store is not None else {},
            )
        refuse_missing_rows(decision, ranks_of, data)
        metadata = SaveMetadata(metadata.state_dict_metadata, planner_data=metadata.planner_data, decision=decision)
        return [replace(plan, planner_data=decision) for plan in plans], metadata

    def _data_of(self, plans: list[SavePlan]) -> list[RankData]:
        """Return the reports of all ranks. If this rank has a ``CNRSavePlanner``, all of them do."""
        storage_data: list[Any] = [plan.storage_data for plan in plans]
        if self._meta is not None:
            storage_data = [plan.data for plan in rank_plans(plans)]
        return storage_data

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Receive the coordinator's decision, and announce the save: from now on it is pending."""
        self._decision = new_plan.planner_data
        if self._decision is not None and self._meta is not None:
            self.cut.pending.announce(self._meta.store.url, self._decision.save_id)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO | ShardData:  # type: ignore[override]
        """Return the data of one item; for a tracked shard, also which of its rows to store."""
        key = shard_key(write_item)
        item = self.cut.items.get(key)
        if item is None:
            value = self.state_dict[key[0]]
            if isinstance(value, StagedTensor):
                return value.tensor(key[1])
            data: Tensor | io.BytesIO = super().resolve_data(write_item)
            return data
        if self._decision is None:
            raise SaveError("data was asked for before the plan was finished")
        rows, captured = self._rows_of(item, key, self._decision)
        return ShardData(
            values=item.values if isinstance(item.values, Tensor) else item.values.tensor(),
            rows=rows,
            is_table=item.is_table,
            table=item.table if item.is_row_wise else None,
            table_box=item.table_box if item.is_row_wise else None,
            num_restores=self._decision.num_restores,
            group=item.group,
            codes=item.values if isinstance(item.values, StagedCodes) else None,
            captured=captured,
        )

    def _rows_of(self, item: TrackedItem, key: ShardKey, decision: Decision) -> _Rows:
        if decision.since is Since.EVER or key in decision.whole or item.rows is None:
            return None, None
        if isinstance(item.rows, StagedRows):
            return item.rows.parts, item.rows.captured
        if item.group not in self._selected:
            parts = item.rows.select_parts(decision.since, self.cut.is_by_heat(decision.since))
            self._selected[item.group] = parts, self.cut.captured(item, item.rows)
        return self._selected[item.group]

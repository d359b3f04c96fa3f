"""The save planner: WHAT a checkpoint holds. Which rows, and on top of which parent.

Who calls what, on which rank, in one ``dcp.save``:

    1. set_up_planner      all ranks    settle the fate of the save before, then cut: freeze all marks (of a save in
                                        the background, the writer has done both when it staged the rows)
    2. create_local_plan   all ranks    DCP's plan, plus the checkpoint that this rank's marks relate to
    3. create_global_plan  coordinator  decide: baseline or delta, of which parent; tell every rank
    4. finish_plan         all ranks    take the decision; from here on the save is pending
    5. resolve_data        all ranks    a tracked shard resolves to its values and the mask of rows to store

No collective tells the ranks how a save ended, and none is needed: at the next cut each looks whether the manifest of
its pending save is in the store. A save that failed before step 4 has no manifest anyway.
"""

import io
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.gc_pause import paused_gc
from torchrec_cnr.policies import Full, Intermittent, Policy, Since
from torchrec_cnr.saving.cut import Cut, Cuts, StagedRows, TrackedItem
from torchrec_cnr.saving.decision import (
    Decision,
    RankData,
    RowTensor,
    agree,
    choose_base,
    policy_of_all,
    ranks_of_shards,
    refuse_missing_rows,
    refuse_unsharded_state,
    stored_whole,
)
from torchrec_cnr.saving.plug_in_messages import CNRStorageMeta, SaveMetadata, ShardData, StagedTensor
from torchrec_cnr.saving.sinks import FILES, Captured, RowDestination
from torchrec_cnr.saving.staged_values import StagedCodes
from torchrec_cnr.sharding import ShardKey, is_replicated, shard_key
from torchrec_cnr.tracking.modified_rows import SelectedRows
from torchrec_cnr.tracking.tracked_tables import Pending, TrackedRows

_Rows = tuple[tuple[SelectedRows, ...] | None, Captured | None]  # those to store, None for all, and what was captured


class CNRSavePlanner(DefaultSavePlanner):
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
        self._policy: Policy = policy if policy is not None else Intermittent() if tracker is not None else Full()
        self._cuts = Cuts.of(tracker, self._policy) if tracker is not None else None
        self._sent: Cut | None = None
        self._cut = self._untracked()
        self._meta: CNRStorageMeta | None = None
        self._selected: dict[int, _Rows] = {}
        self._decision: Decision | None = None

    def __repr__(self) -> str:
        return f"CNRSavePlanner({'no tracker' if self._cuts is None else 'with a tracker'}, policy={self._policy!r})"

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Settle the save before, and cut; or take the cut that was made when rows were staged."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._decision = None
        self._selected = {}
        self._meta = storage_meta if isinstance(storage_meta, CNRStorageMeta) else None
        destination = self._destination
        destination.refuse_policy(self._policy)
        self._cut = self._staged() or self._untracked()
        if self._cut.staged is None and self._cuts is not None:
            if self._meta is None:
                raise ConfigurationError(
                    "CNRSavePlanner(tracker) saves only some rows: pass a CNRStorageWriter as storage_writer"
                )
            self._cuts.destination = destination
            self._cut = self._cuts.cut(self.state_dict)

    @property
    def _destination(self) -> RowDestination:
        return self._meta.destination if self._meta is not None else FILES

    def _untracked(self) -> Cut:
        """A cut of nothing that is tracked, which a baseline is made of."""
        return Cut(0, self._policy, None, 0, {}, Pending())

    def _staged(self) -> Cut | None:
        """The cut whose rows are in the state dict, if these were staged."""
        cuts = {value.cut for value in self.state_dict.values() if isinstance(value, StagedTensor)}
        cut = self._sent or (self._cuts.staged if self._cuts is not None else None)
        if not cuts:
            return None
        if cut is None or cuts != {cut.number} or cut.policy is not self._policy:
            raise ConfigurationError(
                "what was staged is not for this planner: pass dcp.async_save the one that was made last with the "
                "tracker of these tables"
            )
        if cut.background_save is not None and cut is not self._sent:
            cut.background_save.started()
        return cut

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it knows the cut, but no tracker."""
        cut = self._cuts.staged if self._cuts is not None else None
        if cut is not None and cut.background_save is not None and not cut.is_complete:
            cut.background_save.started()
            raise ConfigurationError(
                "rows of the largest tables exceed the writer's 'staging_bytes' and were not staged, so that no other "
                "process can save them: raise 'staging_bytes', or let a thread save (AsyncCheckpointerType.THREAD)"
            )
        return _sent, (self._policy, cut)

    def resolve_last_save(self) -> None:
        """Learn from the store how the last save ended: commit its rows, or mark them again.

        Every save begins with this; call it yourself to have ``tracker.head`` up to date. Waits for a save in the
        background.

        Raises:
            SaveError: A save in the background does not end.
            StoreError: The store does not answer; try again.
        """
        if self._cuts is not None:
            self._cuts.resolve_last_save()

    def create_local_plan(self) -> SavePlan:
        """DCP's own plan of full boxes, and this rank's head."""
        plan = super().create_local_plan()
        items = self._cut.items
        data = RankData(
            paths=self.mappings,
            head=self._cut.head.ref if self._cut.head else None,
            staged=self._cut.staged,
            tensors={
                item.fqn: RowTensor(item.dtype, item.is_table, item.table if item.is_row_wise else None)
                for item in items.values()
            },
            whole=frozenset(key for key, item in items.items() if item.is_replaced or item.rows is None),
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
        return replace(plan, planner_data=data)

    def _is_replicated(self, fqn: str) -> bool:
        value = self.state_dict[fqn]
        is_one_of_many = value.is_replicated if isinstance(value, StagedTensor) else is_replicated(value)
        return dist.is_initialized() and dist.get_world_size() > 1 and is_one_of_many

    @paused_gc()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Decide for all ranks."""
        data: list[RankData] = [plan.planner_data for plan in all_plans]
        ranks_of = ranks_of_shards(all_plans)
        refuse_unsharded_state(ranks_of, data)
        plans = [replace(plan, planner_data=rank.paths) for plan, rank in zip(all_plans, data, strict=True)]
        plans, metadata = super().create_global_plan(plans)
        head, meta, destination = self._cut.head, self._meta, self._destination
        store, head_ref = meta.store if meta is not None else None, head.ref if head is not None else None
        decision = Decision(
            save_id=str(meta.save_id) if meta else "",
            since=Since.EVER,
            policy=type(self._policy).__name__,
            after_ns=head.created_ns if head else 0,
            num_restores=self._cut.num_restores,
            head=head_ref,
            loadable_besides=destination.loadable_besides(store, head_ref) if store is not None else None,
        )
        policy = policy_of_all(self._policy, data)
        base = choose_base(policy, head, [rank.head for rank in data], store)
        if base is not None:
            tensors = {fqn: tensor for rank in data for fqn, tensor in rank.tensors.items()}
            new = stored_whole(tensors, metadata, base.parent.manifest)
            whole = frozenset(key for key in ranks_of if key[0] in new).union(*(rank.whole for rank in data))
            # Only one of the ranks that hold one and the same shard stores it: the modified rows must be the same.
            whole |= {
                key
                for key, ranks in ranks_of.items()
                for since in {base.since, *destination.compared}
                if not agree(key, since, [data[r] for r in ranks])
            }
            decision = replace(decision, since=base.since, parent=base.parent.ref, history=base.history, whole=whole)
        refuse_missing_rows(decision, ranks_of, data)
        metadata = SaveMetadata(metadata.state_dict_metadata, planner_data=metadata.planner_data, decision=decision)
        return [replace(plan, planner_data=decision) for plan in plans], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take the coordinator's decision."""
        self._decision = new_plan.planner_data
        if self._decision is not None and self._meta is not None:
            self._cut.pending.announce(self._meta.store.url, self._decision.save_id)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO | ShardData:  # type: ignore[override]
        """The data of one item; tracked shards come with the rows to store of them."""
        key = shard_key(write_item)
        item = self._cut.items.get(key)
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
            parts = item.rows.select_parts(decision.since, self._cut.is_by_heat(decision.since))
            self._selected[item.group] = parts, self._cut.captured(item, item.rows)
        return self._selected[item.group]


def _sent(policy: Policy, cut: Cut | None) -> CNRSavePlanner:
    """A planner as it arrives in another process."""
    planner = CNRSavePlanner(policy=policy)
    planner._sent = cut
    return planner

"""The save planner: WHAT a checkpoint holds. Which rows, and on top of which parent.

Who calls what, on which rank, in one ``dcp.save``:

    1. set_up_planner      all ranks    settle the fate of the save before, then cut: freeze all marks (a stager has
                                        done both already, if there is one)
    2. create_local_plan   all ranks    DCP's plan, plus the checkpoint that this rank's marks relate to
    3. create_global_plan  coordinator  decide: baseline or delta, of which parent; tell every rank
    4. finish_plan         all ranks    take the decision; from here on the save is pending
    5. resolve_data        all ranks    a tracked shard resolves to its values and the mask of rows to store

No collective tells the ranks how a save ended, and none is needed: at the next ``set_up_planner`` each looks whether
the manifest of its pending save is in the store. A save that failed before step 4 has no manifest anyway.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import ReferenceType, ref

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torchrec_cnr.agreement import RankData, agree, ranks_of_shards, refuse_unsharded_state, shard_key
from torchrec_cnr.decisions import Decision, RowTensor, ShardKey, choose_base, stored_whole
from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.handover import CNRStorageMeta, SaveMetadata, ShardData
from torchrec_cnr.head import Head
from torchrec_cnr.lineage import Checkpoint, committed
from torchrec_cnr.modified import RowMask, Since
from torchrec_cnr.policies import Compacted, Full, Intermittent, Policy
from torchrec_cnr.shards import MemoryKey, dtype_name, is_replicated, local_shards, memory_key
from torchrec_cnr.tracked import Pending, TrackedRows, TrackedShard


@dataclass(frozen=True, eq=False)
class _TrackedItem:
    """A shard in the state dict that the tracker knows: a table's, or its optimizer state's."""

    shard: TrackedShard
    values: Tensor
    fqn: str
    table: str
    is_replaced: bool = False

    @property
    def is_table(self) -> bool:
        return self.fqn == self.table

    @property
    def is_row_wise(self) -> bool:
        """Whether it is optimizer state with one value a row."""
        return not self.is_table and self.values.dim() == 1


class CNRSavePlanner(DefaultSavePlanner):
    """Plans baselines and deltas; to be used with ``CNRStorageWriter``.

    Args:
        tracker: Knows the modified rows. Without one, each save is a baseline.
        policy: Decides what each delta holds.

    Attributes:
        staged: Of a state dict that was copied when it was cut: where each copy lies, and where what it is a copy of.

    Raises:
        ConfigurationError: While saving, if the writer is not a ``CNRStorageWriter``, or a tracked table is not in the
            state dict with its own memory (it is missing, or was copied by a foreign stager).
        UntrackedRowsError: While saving, if the tracker verifies that all modified rows are marked, and some are not.
    """

    def __init__(self, tracker: TrackedRows | None = None, *, policy: Policy | None = None) -> None:
        super().__init__()
        self._tracker = tracker if tracker is not None else TrackedRows(())
        self._is_tracking = tracker is not None
        self._policy: Policy = policy if policy is not None else Intermittent() if tracker is not None else Full()
        self._meta: CNRStorageMeta | None = None
        self._items: dict[ShardKey, _TrackedItem] = {}
        self._masks: dict[int, tuple[RowMask, ...]] = {}
        self._decision: Decision | None = None
        self.staged: Mapping[MemoryKey, MemoryKey] = {}
        self._frozen_states: dict[ShardKey, ReferenceType[Tensor]] = {}
        self._committed_states: dict[ShardKey, ReferenceType[Tensor]] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Settle the save before, and cut."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._decision = None
        self._meta = storage_meta if isinstance(storage_meta, CNRStorageMeta) else None
        if not self._is_tracking:
            return
        if self._meta is None:
            raise ConfigurationError(
                "CNRSavePlanner(tracker) saves only some rows: pass a CNRStorageWriter as storage_writer"
            )
        staged, self.staged = self.staged, {}
        tensors = (shard.tensor for value in self.state_dict.values() for shard in local_shards(value))
        if not any(memory_key(tensor) in staged for tensor in tensors):
            self.cut(self.state_dict)
        self._items = self._find_tracked(self.state_dict, staged)

    def cut(self, state_dict: Mapping[str, Any]) -> None:
        """Settle the save before, and freeze all marks.

        Args:
            state_dict: What will be saved, flattened. Tables that it lacks are refused before anything is frozen.
        """
        self.settle()
        self._find_tracked(state_dict, {})
        self._tracker.freeze()

    def settle(self) -> None:
        """Learn from the store how the last save ended: commit its rows, or mark them again.

        Every save begins with this; call it yourself to have ``tracker.head`` up to date.

        Raises:
            StoreError: The store does not answer; try again.
        """
        pending = self._tracker.pending
        checkpoint = committed(pending.path, pending.save_id) if pending else None
        if checkpoint is None:
            self._tracker.rollback()
            return
        self._tracker.commit(self._head_of(checkpoint))
        self._committed_states = self._frozen_states

    def _head_of(self, checkpoint: Checkpoint) -> Head:
        """The head that a committed save of this planner is, on top of the head before."""
        head, parent = self._tracker.head, checkpoint.manifest.parent
        below = () if head is None or parent is None else head.lineage
        sha256s = [ref.sha256 for ref in below]
        length = sha256s.index(parent.sha256) + 1 if parent is not None and parent.sha256 in sha256s else 0
        return checkpoint.head(below[:length])

    def create_local_plan(self) -> SavePlan:
        """DCP's own plan of full boxes, and this rank's head."""
        plan = super().create_local_plan()
        head = self._tracker.head.ref if self._tracker.head else None
        tensors = {
            item.fqn: RowTensor(dtype_name(item.values), item.is_table, item.table if item.is_row_wise else None)
            for item in self._items.values()
        }
        replaced = frozenset(key for key, item in self._items.items() if item.is_replaced)
        marks = {
            (key, since): item.shard.rows.select(since).digest()
            for key, item in self._items.items()
            for since in (Since.HEAD, Since.BASELINE)
            if self._is_replicated(key[0])
        }
        of_own_rows = frozenset(
            key
            for key, item in self._items.items()
            if self._is_replicated(item.fqn) and not self._is_replicated(item.table)
        )
        data = RankData(self.mappings, head, tensors, replaced, marks, of_own_rows)
        return replace(plan, planner_data=data)

    def _is_replicated(self, fqn: str) -> bool:
        return dist.is_initialized() and dist.get_world_size() > 1 and is_replicated(self.state_dict[fqn])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Decide for all ranks."""
        data: list[RankData] = [plan.planner_data for plan in all_plans]
        ranks_of = ranks_of_shards(all_plans)
        refuse_unsharded_state(ranks_of, data)
        plans = [replace(plan, planner_data=rank.paths) for plan, rank in zip(all_plans, data, strict=True)]
        plans, metadata = super().create_global_plan(plans)
        head, meta = self._tracker.head, self._meta
        decision = Decision(
            save_id=str(meta.save_id) if meta else "",
            since=Since.EVER,
            policy=type(self._policy).__name__,
            after_ns=head.created_ns if head else 0,
            num_restores=self._tracker.num_restores,
        )
        base = choose_base(self._policy, head, [rank.head for rank in data], meta.store if meta else None)
        if base is not None:
            tensors = {fqn: tensor for rank in data for fqn, tensor in rank.tensors.items()}
            new = stored_whole(tensors, metadata, base.parent)
            whole = frozenset(key for key in ranks_of if key[0] in new).union(*(rank.replaced for rank in data))
            # Only one of the ranks that hold one and the same shard stores it: the modified rows must be the same.
            whole |= {key for key, ranks in ranks_of.items() if not agree(key, base.since, [data[r] for r in ranks])}
            decision = replace(decision, since=base.since, parent=base.ref, history=base.history, whole=whole)
        metadata = SaveMetadata(metadata.state_dict_metadata, planner_data=metadata.planner_data, decision=decision)
        return [replace(plan, planner_data=decision) for plan in plans], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take the coordinator's decision."""
        self._decision = new_plan.planner_data
        if self._is_tracking and self._decision is not None and self._meta is not None and self._meta.store is not None:
            self._tracker.pending = Pending(self._meta.store.url, self._decision.save_id)
            self._masks = {}
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO | ShardData:  # type: ignore[override]
        """The data of one item; tracked shards come with the rows to store of them."""
        item = self._items.get(shard_key(write_item))
        if item is None:
            data: Tensor | io.BytesIO = super().resolve_data(write_item)
            return data
        if self._decision is None:
            raise SaveError("data was asked for before the plan was finished")
        return ShardData(
            values=item.values,
            rows=self._rows_of(item.shard, shard_key(write_item), self._decision),
            is_table=item.is_table,
            table=item.table if item.is_row_wise else None,
            table_box=item.shard.rows.box if item.is_row_wise else None,
            num_restores=self._decision.num_restores,
            group=id(item.shard),
        )

    def _rows_of(self, shard: TrackedShard, key: ShardKey, decision: Decision) -> tuple[RowMask, ...] | None:
        if decision.since is Since.EVER or key in decision.whole:
            return None
        if id(shard) not in self._masks:
            rows, is_by_heat = shard.rows, isinstance(self._policy, Compacted) and decision.since is Since.HEAD
            self._masks[id(shard)] = rows.select_by_heat() if is_by_heat else (rows.select(decision.since),)
        return self._masks[id(shard)]

    def _find_tracked(
        self, state_dict: Mapping[str, Any], staged: Mapping[MemoryKey, MemoryKey]
    ) -> dict[ShardKey, _TrackedItem]:
        """Recognise tracked tables, and the optimizer state of their rows, by the memory they lie in.

        Args:
            state_dict: Flattened.
            staged: Where tensors lie that the state dict has copies of, by where these lie.
        """
        shards = {
            (fqn, shard.box.offsets): shard.tensor for fqn, value in state_dict.items() for shard in local_shards(value)
        }
        by_memory: dict[Any, list[ShardKey]] = {}
        for key, tensor in shards.items():
            place = memory_key(tensor)
            by_memory.setdefault(place if place is None else staged.get(place, place), []).append(key)
        found: dict[ShardKey, _TrackedItem] = {}
        self._frozen_states = {}
        for shard in self._tracker.shards:
            if shard.rows.box.num_rows == 0:
                continue
            aliases = by_memory.get(memory_key(shard.weight), [])
            if not aliases:
                raise ConfigurationError(
                    f"table {shard.rows.name!r} is tracked, but the state dict does not hold its memory: it is "
                    "missing, or was copied (as cpu_offload does, and dcp.async_save without async_stager="
                    "CNRStager(planner)); pass the live state dict, or a tracker of a smaller model"
                )
            found |= {key: _TrackedItem(shard, shards[key].detach(), key[0], key[0]) for key in aliases}
            for state in shard.state():
                for key in by_memory.get(memory_key(state), []):
                    committed_state = self._committed_states.get(key)
                    is_same = committed_state is not None and committed_state() is state
                    is_replaced = shard.is_state_replaceable and not is_same
                    self._frozen_states[key] = ref(state)
                    found[key] = _TrackedItem(shard, shards[key].detach(), key[0], aliases[0][0], is_replaced)
        return found

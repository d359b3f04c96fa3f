"""The load planner: fits a checkpoint to a state dict, strictly, and starts the tracker on what was loaded.

It does what DCP's planner does, and three things more:

- a tensor or object that is missing on either side is an error, unless a partial load was asked for;
- row-wise optimizer state loads under another column sharding, although its size changes with the sharding;
- the tracker learns which rows the lineage's deltas held, so that the next save continues the lineage.
"""

import io
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from torchrec_cnr.decisions import ShardKey
from torchrec_cnr.errors import ConfigurationError, StateMismatchError
from torchrec_cnr.handover import InferenceReadItem, LoadMetadata, RowStateReadItem
from torchrec_cnr.inference_tables import TargetTables
from torchrec_cnr.lineage import Lineage
from torchrec_cnr.modified import TrackedRows, TrackedShard
from torchrec_cnr.shards import local_shards, memory_key


@dataclass(frozen=True)
class _LocalKeys:
    """The FQNs that one rank's state dict has, and whether the checkpoint has them all."""

    fqns: frozenset[str]
    is_complete: bool


class CNRLoadPlanner(DefaultLoadPlanner):
    """Plans strict loads; to be used with ``CNRStorageReader``.

    Args:
        tracker: Starts anew on the loaded checkpoint: the next save may be a delta of it.
        inference: The tables of a quantized model (``InferenceTables``), which take rows of the checkpoint's float
            tables of the same FQNs. No tracker takes part in such a load.
        allow_partial_load: Accept FQNs that only the checkpoint or only the state dict has, but for tables of
            ``inference``, which must all be loaded. After a load that left anything out, the next save is a baseline.

    Raises:
        StateMismatchError: While loading, if an FQN, shape or dtype does not fit.
        ConfigurationError: Both ``tracker`` and ``inference`` are given; or, while loading, the reader is not a
            ``CNRStorageReader``.
    """

    def __init__(
        self,
        tracker: TrackedRows | None = None,
        *,
        inference: TargetTables | None = None,
        allow_partial_load: bool = False,
    ) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        if tracker is not None and inference is not None:
            raise ConfigurationError(
                "a quantized model is not trained: load it without the tracker, in a load of its own"
            )
        self._tracker = tracker
        self._inference = TargetTables(()) if inference is None else inference
        self._lineage: Lineage | None = None
        self._tracked: dict[ShardKey, TrackedShard] = {}
        self._restored: set[ShardKey] = set()
        self._is_complete = False

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Learn the target."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if not isinstance(metadata, LoadMetadata):
            raise ConfigurationError("CNRLoadPlanner needs a CNRStorageReader; pass one as storage_reader")
        self._lineage = metadata.lineage

    def create_local_plan(self) -> LoadPlan:
        """A read for every shard of every tensor that both sides have."""
        if self._lineage is None:
            return LoadPlan([], planner_data=_LocalKeys(frozenset(), is_complete=False))
        if self._tracker is not None:
            self._tracker.forget()
            self._start_tracking(self._tracker)
        items: list[ReadItem] = []
        for fqn, value in self.state_dict.items():
            items += self._read_items(self._lineage, fqn, value)
        fqns = frozenset(self.state_dict)
        known = self.metadata.state_dict_metadata if self.metadata else {}
        return LoadPlan(items, planner_data=_LocalKeys(fqns, is_complete=fqns <= set(known)))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks together want what the checkpoint has: a rank need not hold every tensor."""
        wanted = frozenset[str]().union(*(plan.planner_data.fqns for plan in global_plan))
        is_complete = all(plan.planner_data.is_complete for plan in global_plan)
        if self._lineage is not None:
            manifest = self._lineage.newest.manifest
            unexpected = sorted((set(manifest.tensors) | set(manifest.objects)) - wanted)
            is_complete = is_complete and not unexpected
            if unexpected and not self.allow_partial_load:
                raise StateMismatchError(
                    f"{len(unexpected)} items of the checkpoint are not in the state dict: {_some(unexpected)}; "
                    "add them, or pass CNRLoadPlanner(allow_partial_load=True)"
                )
        return super().create_global_plan([replace(plan, planner_data=is_complete) for plan in global_plan])

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Learn whether everything is loaded, on all ranks."""
        self._is_complete = bool(new_plan.planner_data)
        return super().finish_plan(new_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object in its place, unpickled without running code."""
        fqn = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[fqn], torch.load(value, weights_only=True))

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where a read goes: for a quantized table its whole rows, of which the state dict may have a part."""
        if isinstance(read_item, InferenceReadItem):
            table = self._inference.find(self.state_dict[read_item.dest_index.fqn])
            if table is not None:
                return table.rows
        found: Tensor = super().resolve_tensor(read_item)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """A region was loaded."""
        self._restored.add(_key(read_item))

    def restore_rows(self, item: ReadItem, rows: Tensor) -> None:
        """Rows of a table came from a delta: they were modified since the baseline."""
        shard = self._tracked.get(_key(item))
        if shard is not None:
            since = shard.rows.since_baseline
            since.index_fill_(0, rows.to(since.device) + int(item.dest_offsets[0]), True)

    def finish_restore(self) -> None:
        """Everything was read: the tracker stands on the loaded checkpoint, if nothing was left out."""
        if self._tracker is None or self._lineage is None:
            return
        loaded = {id(shard) for key, shard in self._tracked.items() if key in self._restored}
        if self._is_complete and loaded == {id(shard) for shard in self._tracker.shards if shard.rows.box.num_rows}:
            self._tracker.restore(self._lineage.head)
        else:
            self._tracker.restore_partly(self._lineage.head)

    def _start_tracking(self, tracker: TrackedRows) -> None:
        self._restored = set()
        by_memory = {memory_key(shard.weight): shard for shard in tracker.shards}
        self._tracked = {}
        for fqn, value in self.state_dict.items():
            for local in local_shards(value):
                shard = by_memory.get(memory_key(local.tensor))
                if shard is not None and local.box.num_rows:
                    self._tracked[fqn, local.box.offsets] = shard
        for shard in tracker.shards:
            shard.rows.restore()

    def _read_items(self, lineage: Lineage, fqn: str, value: Any) -> list[ReadItem]:
        metadata = self.metadata.state_dict_metadata.get(fqn) if self.metadata else None
        url = lineage.newest.store.url
        if metadata is None:
            if self._inference.find(value) is not None:
                raise StateMismatchError(
                    f"quantized table {fqn!r} is in the state dict but not in {url}; put it under the key that it was "
                    "trained under, or leave it out"
                )
            if self.allow_partial_load:
                return []
            raise StateMismatchError(
                f"{fqn!r} is in the state dict but not in {url}; remove it, or pass "
                "CNRLoadPlanner(allow_partial_load=True)"
            )
        if isinstance(metadata, TensorStorageMetadata) != isinstance(value, Tensor):
            raise StateMismatchError(f"{fqn!r} is a tensor on one side only, in {url} or in the state dict")
        if isinstance(metadata, TensorStorageMetadata):
            table = lineage.newest.manifest.tensors[fqn].table
            if table is not None and table in self.state_dict:
                return self._row_state_items(lineage, fqn, value, table)
            if value.dtype is torch.uint8 and metadata.properties.dtype.is_floating_point:
                return [self._inference.read_item(fqn, value, metadata, url)]
            if metadata.size != value.size():
                raise StateMismatchError(
                    f"{fqn!r} has size {list(metadata.size)} in {url} and {list(value.size())} in the state dict"
                )
        return _create_read_items(fqn, metadata, value)

    def _row_state_items(self, lineage: Lineage, fqn: str, value: Any, table: str) -> list[ReadItem]:
        """Reads of row-wise state: the i-th local shard belongs to the i-th local shard of its table."""
        own, tables = local_shards(value), local_shards(self.state_dict[table])
        saved = lineage.newest.manifest.tensors[table].size
        if [shard.box.num_rows for shard in own] != [shard.box.num_rows for shard in tables]:
            raise StateMismatchError(f"{fqn!r} is not sharded as its table {table!r} is in the state dict")
        if tuple(self.state_dict[table].size()) != saved:
            raise StateMismatchError(
                f"{table!r} has size {list(saved)} in the checkpoint and {list(self.state_dict[table].size())} in the "
                "state dict"
            )
        return [
            RowStateReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(fqn, shard.box.offsets, index),
                dest_offsets=torch.Size((0,)),
                storage_index=MetadataIndex(fqn),
                storage_offsets=torch.Size((0,)),
                lengths=torch.Size(shard.box.sizes),
                table_box=table_shard.box,
            )
            for index, (shard, table_shard) in enumerate(zip(own, tables, strict=True))
            if shard.box.num_rows
        ]


def _key(item: ReadItem) -> ShardKey:
    return item.dest_index.fqn, tuple(item.dest_index.offset or ())


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")

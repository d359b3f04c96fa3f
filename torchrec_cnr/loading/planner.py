"""The load planner: fits a checkpoint to a state dict, strictly, and starts the tracker on what was loaded.

It does what DCP's planner does, and four things more:

- a tensor or object that is missing on either side is an error, unless a partial load was asked for, and a report
  says what was done with every name;
- ranks that would load different checkpoints, because each has looked for the newest by itself, are refused;
- optimizer state of tables loads under another sharding, although its names and sizes change with it;
- the tracker learns which rows the lineage's deltas held, so that the next save continues the lineage.

Who calls what, on which rank, in one ``dcp.load``:

    1. set_up_planner      all ranks    learn the target
    2. create_local_plan   all ranks    tell the coordinator what this rank wants; nothing is read yet
    3. create_global_plan  coordinator  fit it all to the checkpoint: one report for all ranks, or an error
    4. finish_plan         all ranks    a read for every shard of what the report says is loaded
    5. resolve_tensor, commit_tensor, load_bytes, restore_rows, finish_restore  all ranks  from the reader
"""

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from torchrec_cnr.errors import ConfigurationError, LoadError
from torchrec_cnr.format.manifest import CheckpointRef
from torchrec_cnr.format.safe_pickle import unpickling_error
from torchrec_cnr.lineage.checkpoint import Lineage
from torchrec_cnr.loading.fitting import Fit, LoadReport, Wanted, fit, saved_by_others
from torchrec_cnr.loading.read_items import LoadMetadata, SameLayout, SavedItem, TargetTables
from torchrec_cnr.sharding import ShardKey, local_shards, memory_key
from torchrec_cnr.storage.fences import restored_from
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard, check_tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _OfRank:
    """What a rank tells the coordinator.

    Attributes:
        wanted: Its part of the target.
        checkpoint: The one that it reads.
    """

    wanted: frozenset[Wanted]
    checkpoint: CheckpointRef


@dataclass(frozen=True)
class _Decision:
    """What the coordinator tells all ranks.

    Attributes:
        report: What is loaded.
        sources: By FQN, from where.
        ranked: By FQN, the objects of all ranks that saved, where these were more or fewer.
        is_complete: Whether a job that loaded it stands on the checkpoint, so that its next save may be a delta.
    """

    report: LoadReport
    sources: Mapping[str, SavedItem]
    ranked: Mapping[str, tuple[str, ...]]
    is_complete: bool


class CNRLoadPlanner(DefaultLoadPlanner):
    """Plans strict loads; to be used with ``CNRStorageReader``.

    Args:
        tracker: Starts anew on the loaded checkpoint: the next save may be a delta of it. DCP calls
            ``load_state_dict`` of ``Stateful`` objects after that, and does not tell the planner how it ends. If one
            raises, tables that the state dict shares memory with hold the checkpoint already; for a baseline, as after
            ``restore_newest`` in this case, call ``tracker.forget()``.
        inference: The tables of a quantized model (``InferenceTables``), which take rows of the checkpoint's float
            tables of the same FQNs. No tracker takes part in such a load.
        allow_partial_load: Accept FQNs that only the checkpoint or only the state dict has, but for tables of
            ``inference``, which must all be loaded. What was left out is in the report, and logged as a warning. After
            such a load, the next save is a baseline.

    Raises:
        LoadError: While loading, if ranks read different checkpoints.
        StateMismatchError: While loading, if FQNs, sizes or dtypes do not fit; the message names all that do not.
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
        if tracker is not None:
            check_tracker(tracker)
        if tracker is not None and inference is not None:
            raise ConfigurationError(
                "a quantized model is not trained: load it without the tracker, in a load of its own"
            )
        self._tracker = tracker
        self._loading: LoadMetadata | None = None
        self._decision: _Decision | None = None
        self._inference = TargetTables(()) if inference is None else inference
        self._tracked: dict[ShardKey, TrackedShard] = {}
        self._restored: set[ShardKey] = set()
        self._ranked: dict[str, Any] = {}
        self._report: LoadReport | None = None

    def __repr__(self) -> str:
        parts = ["no tracker" if self._tracker is None else "with a tracker"]
        if self._inference.tables:
            parts.append(f"inference={self._inference!r}")
        if self.allow_partial_load:
            parts.append("allow_partial_load=True")
        return f"CNRLoadPlanner({', '.join(parts)})"

    @property
    def report(self) -> LoadReport:
        """What the last load did, the same on all ranks.

        Raises:
            LoadError: There was none, or it did not come to its end.
        """
        if self._report is None:
            raise LoadError("nothing was loaded completely with this planner, so there is no report")
        return self._report

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Learn the target."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._decision = self._report = None
        if not isinstance(metadata, LoadMetadata):
            raise ConfigurationError("CNRLoadPlanner needs a CNRStorageReader; pass one as storage_reader")
        self._loading = metadata

    def create_local_plan(self) -> LoadPlan:
        """What this rank wants."""
        items = self.state_dict.items()
        wanted = frozenset(Wanted.of(fqn, value, self.mappings[fqn], self._inference) for fqn, value in items)
        return LoadPlan([], planner_data=_OfRank(wanted, self._lineage.newest.ref))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Decide for all ranks: a rank need not hold every tensor."""
        ranks: list[_OfRank] = [plan.planner_data for plan in global_plan]
        _refuse_different([rank.checkpoint for rank in ranks])
        wanted = frozenset[Wanted]().union(*(rank.wanted for rank in ranks))
        newest = self._lineage.newest
        ranked = {item.fqn: names for item in wanted if (names := saved_by_others(item.fqn, newest.manifest.objects))}
        wanted = frozenset(item for item in wanted if item.fqn not in ranked).union(
            Wanted(name, name) for names in ranked.values() for name in names
        )
        fitted = fit(wanted, newest.manifest, newest.store.url, allow_partial=self.allow_partial_load)
        if fitted.report.missing or fitted.report.unexpected:
            text = str(fitted.report).replace("\n", "; ")
            logger.warning("not everything is loaded, and the planner's report names all of it: %s", text)
        decision = _Decision(fitted.report, fitted.sources, ranked, _is_complete(fitted, self._lineage))
        return [replace(plan, planner_data=decision) for plan in global_plan]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """A read for every shard of what is loaded."""
        decision: _Decision = new_plan.planner_data
        self._decision = decision
        if self._tracker is not None:
            self._tracker.forget()
            self._start_tracking(self._tracker)
        items: list[ReadItem] = []
        for fqn, source in decision.sources.items():
            if fqn in self.state_dict:
                table = self._inference.find(self.state_dict[fqn])
                layout = source.layout if table is None else table.layout
                items += layout.read_items(fqn, source.fqn, self.state_dict, self._opened)
        for fqn in decision.ranked.keys() & self.state_dict.keys():
            for name in decision.ranked[fqn]:
                items += SameLayout().read_items(fqn, name, self.state_dict, self._opened)
        self._ranked = {}
        return replace(new_plan, items=items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object in its place, unpickled without running code; of one that each rank saved, a list of all."""
        fqn = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except Exception as error:  # what a pickle names may be named otherwise when it is pickled again
            raise unpickling_error(f"object {fqn!r}", error) from error
        names = self._decision.ranked.get(fqn, ()) if self._decision is not None else ()
        if names:
            self._ranked[read_item.storage_index.fqn] = loaded
            if not all(name in self._ranked for name in names):
                return
            loaded = [self._ranked[name] for name in names]
        _put(self.original_state_dict, self.mappings[fqn], loaded)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where a read goes: for a quantized table its whole rows, of which the state dict may have a part."""
        table = self._inference.find(self.state_dict[read_item.dest_index.fqn])
        target: Tensor = super().resolve_tensor(read_item) if table is None else table.rows
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """A region was loaded."""
        self._restored.add(_key(read_item))

    def restore_rows(self, item: ReadItem, rows: Tensor) -> None:
        """Rows of a table, int64 [k] within the item's target, came from a delta: modified since the baseline."""
        shard = self._tracked.get(_key(item))
        if shard is not None:
            shard.rows.restore_rows(rows + int(item.dest_offsets[0]))

    def finish_restore(self) -> None:
        """Everything was read: the tracker stands on the loaded checkpoint, if nothing was left out."""
        if self._decision is None:
            return
        self._report = self._decision.report
        if self._tracker is None:
            return
        if self.is_coordinator:
            restored_from(self._lineage.newest.store)
        loaded = {id(shard) for key, shard in self._tracked.items() if key in self._restored}
        tracked = {id(shard) for shard in self._tracker.shards if shard.rows.box.num_rows}
        if self._decision.is_complete and loaded == tracked:
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

    @property
    def _opened(self) -> LoadMetadata:
        if self._loading is None:
            raise LoadError("a load was planned before its checkpoint was read; call dcp.load")
        return self._loading

    @property
    def _lineage(self) -> Lineage:
        lineage = self._opened.lineage
        if lineage is None:
            raise LoadError("a load was planned although its checkpoint could not be read; call dcp.load")
        return lineage


def _put(state_dict: dict[str, Any], path: Sequence[str | int], value: Any) -> None:
    """Put an object in the place of the one that DCP found at a path of keys, written as strings."""
    container: Any = state_dict
    for key in path[:-1]:
        container = container[_own_key(container, key)]
    container[_own_key(container, path[-1])] = value


def _own_key(container: Any, key: str | int) -> Any:
    """The key of a container that DCP writes as ``key``; optimizers number their parameters."""
    if not isinstance(container, Mapping) or key in container:
        return key
    number = int(key) if str(key).isdecimal() else None
    return number if number in container and str(number) == key else next(own for own in container if str(own) == key)


def _key(item: ReadItem) -> ShardKey:
    return item.dest_index.fqn, tuple(item.dest_index.offset or ())


def _refuse_different(checkpoints: Sequence[CheckpointRef]) -> None:
    """Parts of two checkpoints are no model that ever was. One may lie at several paths, as ranks see them."""
    paths = {checkpoint.sha256: checkpoint.path for checkpoint in checkpoints}
    if len(paths) > 1:
        raise LoadError(
            f"ranks load different checkpoints ({', '.join(sorted(paths.values()))}), as it happens if each looks for "
            "the newest by itself while another one is committed: have one rank look, and give all of them what it "
            "found, or call restore_newest on all ranks"
        )


def _is_complete(fitted: Fit, lineage: Lineage) -> bool:
    """Whether deltas may follow: nothing was left out, and what was renamed or is new is stored whole in the next one.

    It is where no checkpoint of the lineage has the name, since a delta may be one of any of them.
    """
    new = {*fitted.report.renamed, *fitted.report.missing}
    known = (fqn for checkpoint in lineage.checkpoints for fqn in checkpoint.manifest.tensors)
    return not fitted.left_out and new.isdisjoint(known)

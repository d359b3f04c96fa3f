"""The load planner: fits a checkpoint to a state dict, strictly, and restores the tracker after the load.

It does what DCP's planner does, and four more things:

- It raises an error if a tensor or object is missing on either side, unless the caller allows a partial load. A report
  lists what was done with every name.
- It refuses to load different checkpoints on different ranks, which happens if each rank looks for the newest itself.
- It loads optimizer state of tables under another sharding, although its names and sizes change with the sharding.
- It tells the tracker which rows the chain's deltas contain, so that the next save extends the chain.

The calls of one ``dcp.load``, in order, and the ranks on which DCP makes them:

    1. set_up_planner      all ranks    learn the state dict to load into
    2. create_local_plan   all ranks    report to the coordinator what this rank wants; nothing is read yet
    3. create_global_plan  coordinator  fit all of it to the checkpoint: one report for all ranks, or an error
    4. finish_plan         all ranks    plan a read for every shard of what is loaded according to the report
    5. resolve_tensor, commit_tensor, load_bytes, restore_rows, finish_restore  all ranks  called by the reader
"""

import io
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from torchrec_cnr.errors import ConfigurationError, LoadError, StateMismatchError
from torchrec_cnr.format.manifest import CheckpointRef
from torchrec_cnr.format.safe_pickle import unpickling_error
from torchrec_cnr.human_text import given_text
from torchrec_cnr.lineage.checkpoint import Lineage
from torchrec_cnr.loading.fitting import Fit, Wanted, saved_by_others
from torchrec_cnr.loading.load_report import LoadReport
from torchrec_cnr.loading.opened_chain import OpenedChain
from torchrec_cnr.loading.read_items import LoadMetadata, SameLayout, SavedItem, TargetTables
from torchrec_cnr.loading.row_maps import checked_resize
from torchrec_cnr.loading.warm_start import WarmStart
from torchrec_cnr.sharding import ShardKey, local_shards, memory_key
from torchrec_cnr.storage.fences import restored_from
from torchrec_cnr.tracking.id_map_buffers import IdMapBuffer
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard, check_tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _OfRank:
    """The report of a rank to the coordinator.

    Attributes:
        wanted: The items of its state dict.
        checkpoint: The checkpoint that it reads.
        warm_start: The rules that it was given.
    """

    wanted: frozenset[Wanted]
    checkpoint: CheckpointRef
    warm_start: WarmStart


@dataclass(frozen=True)
class _Decision:
    """The answer of the coordinator to all ranks.

    Attributes:
        report: What is loaded.
        sources: By FQN, the source of each item.
        ranked: By FQN, the names of one object of each rank that saved, where their number differs from that of the
            ranks.
        is_complete: Whether the next save may be a delta of the checkpoint.
    """

    report: LoadReport
    sources: Mapping[str, SavedItem]
    ranked: Mapping[str, tuple[str, ...]]
    is_complete: bool


class CNRLoadPlanner(DefaultLoadPlanner):
    """Load planner for strict loads. Use it with ``CNRStorageReader``.

    Args:
        tracker: Tracker to restore: after the load, the next save may be a delta of the loaded checkpoint. DCP calls
            ``load_state_dict`` of ``Stateful`` objects later, and does not report to the planner how that ends. If one
            raises, tables that share memory with the state dict already contain the checkpoint. Then call
            ``tracker.forget()`` to make the next save a baseline; ``restore_newest`` does so itself.
        inference: Tables of a quantized model (``InferenceTables``). They receive the rows of the checkpoint's float
            tables with the same FQNs. Such a load cannot have a tracker.
        allow_partial_load: Whether to accept FQNs that only the checkpoint or only the state dict has. Tables of
            ``inference`` must still all be loaded. The report lists what was left out, and a warning is logged. After
            such a load, the next save is a baseline.
        rename: For a warm start of another model: patterns of FQNs in the state dict, and the FQNs in the checkpoint.
            A pattern may contain ``*``, and its value as many of them, which stand for the same texts.
        resize: Patterns of tensors in the state dict that may have more or fewer rows than the saved ones: tables, and
            their optimizer state. The rows that both have are loaded, and further rows keep their values. It can be a
            mapping of such patterns to row maps: int64 [rows], the saved row of each row, or -1 for none.
        only: Patterns of what is loaded. All else in the state dict keeps its values, and the checkpoint may have more.
            After a load with any of these three, the next save is a baseline.

    Raises:
        LoadError: While loading, if ranks read different checkpoints.
        StateMismatchError: While loading, if FQNs, sizes or dtypes do not fit; the message lists the mismatches.
        ConfigurationError: An argument is invalid, or both ``tracker`` and ``inference`` are given; or, while loading,
            the reader is not a ``CNRStorageReader``.

    Examples:
        >>> planner = cnr.CNRLoadPlanner(tracker)
        >>> dcp.load(state, storage_reader=cnr.CNRStorageReader(cnr.latest("run")), planner=planner)
        >>> planner.report.missing, planner.report.unexpected
        ((), ())
    """

    def __init__(
        self,
        tracker: TrackedRows | None = None,
        *,
        inference: TargetTables | None = None,
        allow_partial_load: bool = False,
        rename: Mapping[str, str] | None = None,
        resize: Sequence[str] | Mapping[str, Tensor | None] | None = None,
        only: Sequence[str] | None = None,
    ) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        if tracker is not None:
            check_tracker(tracker)
        if tracker is not None and inference is not None:
            raise ConfigurationError("a quantized model is not trained: load it without a tracker, in a separate load")
        self._tracker = tracker
        patterns, self._row_maps = checked_resize(resize)
        self._warm_start = WarmStart.of(rename, patterns, only)
        self._loading: LoadMetadata | None = None
        self._decision: _Decision | None = None
        self._inference = TargetTables(()) if inference is None else inference
        self._tracked: dict[ShardKey, TrackedShard] = {}
        self._buffers: dict[ShardKey, IdMapBuffer] = {}
        self._restored: set[ShardKey] = set()
        self._ranked: dict[str, Any] = {}
        self._report: LoadReport | None = None

    def __repr__(self) -> str:
        parts = ["no tracker" if self._tracker is None else "with a tracker"]
        if self._inference.tables:
            parts.append(f"inference={self._inference!r}")
        if self.allow_partial_load:
            parts.append("allow_partial_load=True")
        parts += [given for given in (given_text(self._warm_start),) if self._warm_start]
        return f"CNRLoadPlanner({', '.join(parts)})"

    @property
    def report(self) -> LoadReport:
        """The report of the last load, the same on all ranks.

        Raises:
            LoadError: There was no load, or it did not complete.
        """
        if self._report is None:
            raise LoadError("this planner has no report, because it has completed no load: call dcp.load first")
        return self._report

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Learn the state dict to load into."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._decision = self._report = None
        if not isinstance(metadata, LoadMetadata):
            raise ConfigurationError("CNRLoadPlanner needs a CNRStorageReader; pass one as storage_reader")
        self._loading = replace(metadata, row_maps=self._row_maps)

    def create_local_plan(self) -> LoadPlan:
        """Report to the coordinator what this rank wants."""
        items = self.state_dict.items()
        wanted = frozenset(Wanted.of(fqn, value, self.mappings[fqn], self._inference) for fqn, value in items)
        return LoadPlan([], planner_data=_OfRank(wanted, self._chain.newest.ref, self._warm_start))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Decide for all ranks what is loaded, because one rank need not have every tensor."""
        ranks: list[_OfRank] = [plan.planner_data for plan in global_plan]
        _refuse_different([rank.checkpoint for rank in ranks])
        if len({rank.warm_start for rank in ranks}) > 1:
            raise ConfigurationError("'rename', 'resize' and 'only' must be the same on all ranks")
        wanted = frozenset[Wanted]().union(*(rank.wanted for rank in ranks))
        newest = self._chain.newest
        ranked = {
            item.fqn: names
            for item in wanted
            if self._warm_start.loads(item.fqn) and (names := saved_by_others(item.fqn, newest.manifest.objects))
        }
        self._refuse_renamed(ranked)
        wanted = frozenset(item for item in wanted if item.fqn not in ranked).union(
            Wanted(name, name) for names in ranked.values() for name in names
        )
        url, partial = newest.store.url, self.allow_partial_load
        fitted = self._warm_start.fit(wanted, newest.manifest, url, allow_partial=partial, ranked=ranked)
        if fitted.report.missing or fitted.report.unexpected:
            text = str(fitted.report).replace("\n", "; ")
            logger.warning("not everything is loaded, and the planner's report lists all names: %s", text)
        is_complete = not self._warm_start and _is_complete(fitted, self._chain.read())
        decision = _Decision(fitted.report, fitted.sources, ranked, is_complete)
        return [replace(plan, planner_data=decision) for plan in global_plan]

    def _refuse_renamed(self, ranked: Mapping[str, tuple[str, ...]]) -> None:
        """Refuse to rename objects of each rank if another number of ranks saved them: it is unknown which is meant."""
        renamed = [fqn for fqn in sorted(ranked) if self._warm_start.renames(fqn)]
        if renamed:
            raise StateMismatchError(
                f"{renamed[0]!r} cannot be renamed, because another number of ranks saved it: remove it from 'rename'"
            )

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Plan a read for every shard of what is loaded."""
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
        """Unpickle an object without running code, and put it into the state dict.

        If each rank has saved such an object, the state dict gets a list of all of them.
        """
        fqn = read_item.dest_index.fqn
        try:
            loaded_value = torch.load(value, weights_only=True)
        except Exception as error:  # unpickling can raise any error
            raise unpickling_error(f"object {fqn!r}", error) from error
        names = self._decision.ranked.get(fqn, ()) if self._decision is not None else ()
        if names:
            self._ranked[read_item.storage_index.fqn] = loaded_value
            if not all(name in self._ranked for name in names):
                return
            loaded_value = [self._ranked[name] for name in names]
        _put(self.original_state_dict, self.mappings[fqn], loaded_value)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the target of a read. For a quantized table it has whole rows, even if the state dict has a part."""
        table = self._inference.find(self.state_dict[read_item.dest_index.fqn])
        if table is not None:
            return table.shards[read_item.dest_index.index or 0].rows
        target: Tensor = super().resolve_tensor(read_item)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Record that a region was loaded."""
        self._restored.add(_key(read_item))

    def tracks(self, item: ReadItem) -> bool:
        """Return whether the rows of an item that came from a delta are to be recorded."""
        return _key(item) in self._tracked or _key(item) in self._buffers

    def restore_rows(self, item: ReadItem, rows: Tensor) -> None:
        """Record rows that came from a delta and so were modified since the baseline, int64 [k] within the target."""
        key = _key(item)
        tracked = self._tracked[key] if key in self._tracked else self._buffers[key]
        tracked.rows.restore_rows(rows + int(item.dest_offsets[0]))

    def finish_restore(self, unordered: Collection[str]) -> None:
        """Restore the tracker after everything was read. If something was left out, the next save is a baseline.

        Args:
            unordered: Tensors of id maps whose rows in the checkpoint are not those of a next delta.
        """
        if self._decision is None:
            return
        self._report = self._decision.report
        if self._tracker is None:
            return
        if self.is_coordinator:
            restored_from(self._chain.newest.store)
        loaded_ids = {id(shard) for key, shard in self._tracked.items() if key in self._restored}
        tracked_ids = {id(shard) for shard in self._tracker.shards if shard.rows.box.num_rows}
        if self._decision.is_complete and loaded_ids == tracked_ids:
            known = [key for key in self._buffers.keys() & self._restored if key[0] not in unordered]
            self._tracker.restore(self._chain.read().head, {id(self._buffers[key]) for key in known})
        else:
            self._tracker.restore_partly(self._chain.read().head)

    def _start_tracking(self, tracker: TrackedRows) -> None:
        self._restored = set()
        by_memory = {memory_key(shard.weight): shard for shard in tracker.shards}
        keys = {
            (fqn, local.box.offsets): memory_key(local.tensor)
            for fqn, value in self.state_dict.items()
            for local in local_shards(value)
            if local.box.num_rows
        }
        self._tracked = {key: by_memory[memory] for key, memory in keys.items() if memory in by_memory}
        buffers = {
            memory_key(buffer.live): buffer for module in tracker.id_map_modules for buffer in module.refreshed()
        }
        self._buffers = {key: buffers[memory] for key, memory in keys.items() if memory in buffers}
        for rows in tracker.all_rows:
            rows.restore()

    @property
    def _opened(self) -> LoadMetadata:
        if self._loading is None:
            raise LoadError("the load was planned before its checkpoint was read; call dcp.load")
        return self._loading

    @property
    def _chain(self) -> OpenedChain:
        chain = self._opened.chain
        if chain is None:
            raise LoadError("the load was planned although its checkpoint could not be read; call dcp.load")
        return chain


def _put(state_dict: dict[str, Any], path: Sequence[str | int], value: Any) -> None:
    """Replace the object that DCP found at a path of keys, which are written as strings."""
    container: Any = state_dict
    for key in path[:-1]:
        container = container[_own_key(container, key)]
    container[_own_key(container, path[-1])] = value


def _own_key(container: Any, key: str | int) -> Any:
    """Return the key of a container that DCP writes as ``key``; optimizers number their parameters."""
    if not isinstance(container, Mapping) or key in container:
        return key
    number = int(key) if str(key).isdecimal() else None
    return (
        number
        if number in container and str(number) == key
        else next(own_key for own_key in container if str(own_key) == key)
    )


def _key(item: ReadItem) -> ShardKey:
    return item.dest_index.fqn, tuple(item.dest_index.offset or ())


def _refuse_different(checkpoints: Sequence[CheckpointRef]) -> None:
    """Raise an error if ranks load different checkpoints. The same one may have several paths, as ranks see them."""
    paths = {checkpoint.sha256: checkpoint.path for checkpoint in checkpoints}
    if len(paths) > 1:
        raise LoadError(
            f"ranks load different checkpoints ({', '.join(sorted(paths.values()))}); this happens if each rank looks "
            "for the newest by itself while another one is committed: look on one rank and pass the result to all, or "
            "call restore_newest on all ranks"
        )


def _is_complete(fitted: Fit, lineage: Lineage) -> bool:
    """Return whether the next save may be a delta.

    It may if nothing was left out, and the next delta stores renamed and new items whole. It does so if no checkpoint
    of the chain has their names, because the delta can be based on any of them.
    """
    new_fqns = {*fitted.report.renamed, *fitted.report.missing}
    known_fqns = (fqn for checkpoint in lineage.checkpoints for fqn in checkpoint.manifest.tensors)
    return not fitted.left_out and new_fqns.isdisjoint(known_fqns)

"""Cuts: the moment that a save is of. All marks are frozen, and what they are of is found in the state dict.

A cut settles the save before it: its manifest is in the store, and its rows are committed, or it is not, and they are
marked again. Of an asynchronous save, rows are copied in the same moment (``staging``); the cut with the copies is then
all that planning needs, in whatever thread or process it happens.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ReferenceType, WeakSet, ref

from torch import Tensor

from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import Checkpoint, Head, committed
from torchrec_cnr.policies import Compacted, Policy, Since
from torchrec_cnr.saving.running_saves import RunningSave
from torchrec_cnr.saving.sinks import FILES, Captured, RowDestination
from torchrec_cnr.saving.staged_values import StagedValue
from torchrec_cnr.sharding import ShardKey, local_shards, memory_key, wait_for_devices
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.modified_rows import ModifiedRows, RowList, SelectedRows
from torchrec_cnr.tracking.tracked_tables import Pending, TrackedRows, TrackedShard

TIMEOUT_SECS = 1800.0


@dataclass(frozen=True, eq=False)
class StagedRows:
    """The rows of a shard that were copied, or of one that was copied whole, those that a delta holds.

    Attributes:
        since: What they were modified since.
        parts: By their heat, if the policy divides them by it.
        digest: Tells whether another rank, which has the same shard, has the same rows.
        captured: What the sink must know besides.
    """

    since: Since
    parts: tuple[SelectedRows, ...]
    digest: bytes
    captured: Captured | None = None


@dataclass(frozen=True, eq=False)
class TrackedItem:
    """A shard in the state dict that the tracker knows: a table's, or its optimizer state's.

    Attributes:
        fqn: Its tensor.
        table: The tensor that its table is.
        table_box: The box of its table's shard.
        group: A number that a table's shard and its state have in common.
        values: [num_rows, ...], shared with the model; or what was staged: all rows, or those of ``rows`` only.
        rows: The modified ones; None if all were staged and must be stored.
        replaced_since: It took the place of what these hold, so that all its rows must be stored in a delta of one.
        table_row_bytes: Of the values of a row of its table.
        live_state: For optimizer state, the optimizer's own tensor.
    """

    fqn: str
    table: str
    table_box: Box
    group: int
    values: StagedValue
    rows: ModifiedRows | StagedRows | None
    replaced_since: frozenset[Since] = frozenset()
    table_row_bytes: int = 0
    live_state: Tensor | None = None

    @property
    def is_table(self) -> bool:
        """Whether it is a table, rather than its optimizer state."""
        return self.fqn == self.table

    @property
    def is_row_wise(self) -> bool:
        """Whether it is optimizer state with one value a row."""
        return not self.is_table and len(self.values.shape) == 1

    @property
    def is_partial(self) -> bool:
        """Whether only the modified rows are at hand."""
        return isinstance(self.rows, StagedRows) and any(isinstance(part, RowList) for part in self.rows.parts)

    @property
    def dtype(self) -> str:
        """As manifests name it."""
        return str(self.values.dtype).removeprefix("torch.")

    def digests(self) -> Mapping[Since, bytes]:
        """Of its modified rows, by what they may be a delta of."""
        match self.rows:
            case ModifiedRows() as rows:
                return {since: rows.select(since).digest() for since in (Since.HEAD, Since.BASELINE)}
            case StagedRows() as rows:
                return {rows.since: rows.digest}
            case None:
                return {}


@dataclass(frozen=True, eq=False)
class Cut:
    """What a save is of.

    Attributes:
        policy: Decides what it is a delta of, or has decided already if rows were staged.
        head: The checkpoint that the marks relate to.
        num_restores: Restores from a checkpoint that the tables have been through.
        items: What the tracker knows of the state dict.
        pending: Learns where the checkpoint goes.
        staged: What the save can be a delta of with what was staged; None if the state dict is live.
        destination: Where the rows of a delta go.
    """

    policy: Policy
    head: Head | None
    num_restores: int
    items: Mapping[ShardKey, TrackedItem]
    pending: Pending
    staged: frozenset[Since] | None = None
    destination: RowDestination = FILES

    def captured(self, item: TrackedItem, modified: ModifiedRows) -> Captured | None:
        """What the sink must know of an item, besides its modified rows."""
        return self.destination.capture(item.table, item.table_box, item.table_row_bytes, modified)

    def is_by_heat(self, since: Since) -> bool:
        """Whether rows of different heat are kept apart."""
        return isinstance(self.policy, Compacted) and since is Since.HEAD


_States = Mapping[ShardKey, ReferenceType[Tensor]]


@dataclass(frozen=True, eq=False)
class PendingSave:
    """A save whose rows are frozen, until its outcome is read from the store.

    Attributes:
        pending: Learns where its checkpoint goes.
        running: Tells when it has ended.
        policy: Of the save.
        destination: If it is a log, markers in it say what was committed.
        states: The optimizer state that was saved.
        staged: What it could be a delta of with what was staged; None if nothing was.
    """

    pending: Pending
    running: RunningSave
    policy: Policy
    destination: RowDestination
    states: _States
    staged: frozenset[Since] | None

    def checkpoint(self) -> Checkpoint | None:
        """What it has committed; None if nothing."""
        place = self.pending.place
        if place is None:
            return None
        return committed(Store.open(place[0], row_log=self.destination.row_log), place[1])


@dataclass(eq=False)
class Cuts:
    """The cuts of one tracker's tables: one save after the other, whoever makes them.

    Attributes:
        tracker: The tracker.
        policy: That of the planner that was made last.
        planners: Those that exist.
    """

    tracker: TrackedRows
    policy: Policy
    planners: WeakSet[object] = field(default_factory=WeakSet)
    _last: PendingSave | None = None
    _is_baseline_due: bool = False
    _states: dict[Since, _States] = field(default_factory=dict)  # what checkpoints of the head's lineage hold
    _head: Head | None = None
    # Held from the outcome of one save to the cut of the next: threads without a process group save at the same time.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        _cuts_of_process.add(self)

    @classmethod
    def of(cls, tracker: TrackedRows, policy: Policy, planner: object) -> "Cuts":
        """The one of a tracker, which serves this policy from now on."""
        cuts = tracker.saves if isinstance(tracker.saves, cls) else cls(tracker, policy)
        cuts.policy = policy
        cuts.planners.add(planner)
        tracker.saves = cuts
        return cuts

    @property
    def has_planner(self) -> bool:
        """Whether there is a planner whose saves these are the cuts of."""
        return len(self.planners) > 0

    def cut(
        self,
        live: Mapping[str, Any],
        running: RunningSave,
        policy: Policy,
        destination: RowDestination,
        timeout_secs: float,
        is_staged: bool = False,
    ) -> Cut:
        """Settle the save before, and freeze all marks.

        Args:
            live: What will be saved, flattened. Tables that it lacks are refused before anything is frozen.
            running: The save.
            policy: Decides what it is a delta of.
            destination: Where its rows go.
            timeout_secs: How long to wait for the save before.
            is_staged: Whether rows will be staged.

        Raises:
            ConfigurationError: A tracked table is not in it with its own memory.
            StoreError: The store does not answer.
            SaveError: The save before does not end.
        """
        with self._alone(timeout_secs):
            self._resolve_last_save(timeout_secs)
            if self.tracker.head is not self._head:  # restored: what that holds was loaded into whatever state there is
                self._states.clear()
            items = self._find(live)
            wait_for_devices(live.values())  # which training has written to, and marked rows of, in any stream
            with self._before_and_after_training():
                self.tracker.freeze()
            pending = self.tracker.pending
            assert pending is not None  # frozen just now
            states = {key: ref(item.live_state) for key, item in items.items() if item.live_state is not None}
            staged = self._next_staged(policy) if is_staged else None
            self._last = PendingSave(pending, running, policy, destination, states, staged)
            return Cut(
                policy,
                self.tracker.head,
                self.tracker.num_restores,
                items,
                pending,
                staged=staged,
                destination=destination,
            )

    def _next_staged(self, policy: Policy) -> frozenset[Since]:
        """What the next save should be a delta of, as far as this rank knows: all ranks alike.

        After one whose rows turned out to be too few, it may be a baseline as well. Not all ranks may have noticed.
        """
        head = self.tracker.head
        if head is None:
            return frozenset({Since.EVER})
        wanted = policy.decide(head.history)
        return frozenset({wanted, Since.EVER}) if self._is_baseline_due else frozenset({wanted})

    def resolve_last_save(self, timeout_secs: float = TIMEOUT_SECS) -> None:
        """Wait until the last save has ended, then commit its rows, or mark them again.

        Raises:
            SaveError: It does not end in time.
            StoreError: The store does not answer.
        """
        with self._alone(timeout_secs):
            self._resolve_last_save(timeout_secs)

    @contextmanager
    def _alone(self, timeout_secs: float) -> Iterator[None]:
        """One thread at a time: of two, the second would commit marks that belong to the save of the first."""
        lock = self._lock
        if not lock.acquire(timeout=timeout_secs):
            raise SaveError(
                f"another thread has waited for the save before for more than {timeout_secs:g} s: save again"
            )
        try:
            yield
        finally:
            lock.release()

    def forget_threads(self) -> None:
        """In a forked child, no other thread has its turn: the one that had it in the parent is not there."""
        self._lock = threading.RLock()

    def _resolve_last_save(self, timeout_secs: float) -> None:
        last, pending = self._last, self.tracker.pending
        if last is None or pending is not last.pending:  # a restore has made an end of it
            with self._before_and_after_training():
                self.tracker.rollback()
            return
        last.running.wait(timeout_secs)
        checkpoint = last.checkpoint()
        with self._before_and_after_training():
            self._end(last, pending, checkpoint)
        self._last = None

    @contextmanager
    def _before_and_after_training(self) -> Iterator[None]:
        """Change marks after those of all streams so far, and before those that come next."""
        marks = [shard.rows.marked for shard in self.tracker.shards]
        wait_for_devices(marks)
        yield
        wait_for_devices(marks)

    def _end(self, last: PendingSave, pending: Pending, checkpoint: Checkpoint | None) -> None:
        """The last save has committed a checkpoint, or none."""
        if checkpoint is not None:
            head = self._head_of(checkpoint)
            self.tracker.commit(head, has_heat=isinstance(last.policy, Compacted))
            if len(head.lineage) == 1:
                self._states[Since.BASELINE] = last.states
            self._states[Since.HEAD], self._head = last.states, head
            self._is_baseline_due = False
        else:
            # What was staged may have been too little, which shows when ranks plan; they can tell nobody in time.
            has_staged_rows = last.staged is not None and Since.EVER not in last.staged
            if pending.place is None and has_staged_rows:
                self._is_baseline_due = True
            self.tracker.rollback()

    def _head_of(self, checkpoint: Checkpoint) -> Head:
        """The head that a committed save is, on top of the head before."""
        head, parent = self.tracker.head, checkpoint.manifest.parent
        below = () if head is None or parent is None else head.lineage
        sha256s = [link.sha256 for link in below]
        length = sha256s.index(parent.sha256) + 1 if parent is not None and parent.sha256 in sha256s else 0
        return checkpoint.head(below[:length])

    def _find(self, live: Mapping[str, Any]) -> dict[ShardKey, TrackedItem]:
        """Recognise tracked tables, and the optimizer state of their rows, by the memory they lie in."""
        shards = {
            (fqn, shard.box.offsets): shard.tensor for fqn, value in live.items() for shard in local_shards(value)
        }
        by_memory: dict[Any, list[ShardKey]] = {}
        for key, tensor in shards.items():
            by_memory.setdefault(memory_key(tensor), []).append(key)
        found: dict[ShardKey, TrackedItem] = {}
        for shard in self.tracker.shards:
            if 0 in shard.rows.box.sizes:
                continue
            aliases = by_memory.get(memory_key(shard.weight), [])
            if not aliases:
                raise ConfigurationError(
                    f"table {shard.rows.name!r} is tracked, but the state dict does not hold its memory: it is "
                    "missing, or was copied (by cpu_offload, or by a stager other than the CNRStorageWriter that is "
                    "passed to dcp.async_save); pass the live state dict, no async_stager, or a tracker of a smaller "
                    "model"
                )
            found |= {key: _item(shard, key, aliases[0], shards[key]) for key in aliases}
            for state in shard.state():
                for key in by_memory.get(memory_key(state), []):
                    item = _item(shard, key, aliases[0], shards[key])
                    replaced = self._replaced_since(key, state) if shard.is_state_replaceable else frozenset()
                    found[key] = replace(item, replaced_since=replaced, live_state=state)
        return found

    def _replaced_since(self, key: ShardKey, state: Tensor) -> frozenset[Since]:
        """Which of the checkpoints that a delta may be based on hold another tensor's values, or none."""
        saved = {since: self._states.get(since, {}).get(key) for since in (Since.HEAD, Since.BASELINE)}
        return frozenset(since for since, other in saved.items() if other is None or other() is not state)


_cuts_of_process: WeakSet[Cuts] = WeakSet()


def _forget_threads() -> None:
    for cuts in list(_cuts_of_process):
        cuts.forget_threads()


os.register_at_fork(after_in_child=_forget_threads)


def _item(shard: TrackedShard, key: ShardKey, table: ShardKey, values: Tensor) -> TrackedItem:
    rows, row_bytes = shard.rows, shard.rows.box.num_cols * shard.weight.element_size()
    return TrackedItem(key[0], table[0], rows.box, id(shard), values.detach(), rows, table_row_bytes=row_bytes)

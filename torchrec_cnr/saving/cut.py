"""Cuts: the moment that a save is of. All marks are frozen, and what they are of is found in the state dict.

A cut settles the save before it: its manifest is in the store, and its rows are committed, or it is not, and they are
marked again. Of a save that runs in the background, rows are copied in the same moment (``staging``); the cut with the
copies is then all that planning needs, in whatever thread or process it happens.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import Checkpoint, Head, committed
from torchrec_cnr.policies import Compacted, Policy, Since
from torchrec_cnr.saving.sinks import FILES, Captured, RowDestination
from torchrec_cnr.saving.staged_values import StagedValue
from torchrec_cnr.sharding import ShardKey, local_shards, memory_key
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.modified_rows import ModifiedRows, RowList, SelectedRows
from torchrec_cnr.tracking.tracked_tables import Pending, TrackedRows, TrackedShard, trackers

TIMEOUT_SECS = 1800.0
_LOOK_SECS = 0.5  # between two looks into the store
_BEGIN_SECS = 120.0  # until a save begins: it may have to start a process first; what begins later is refused


class BackgroundSave:
    """The save that was staged last: whether it still runs. DCP tells only who holds its future.

    Until it has ended, nothing may be staged again: its rows would be overwritten in memory, and its marks settled too
    early. DCP runs each asynchronous save in a thread of its own, which ends with it. With threads that is where the
    planner is set up; with a process it is the thread that sends the save there and waits for the answer, and so the
    one that pickles this. If DCP fails before that, no thread is left that is younger than the staging. A checkpoint
    that is committed tells as well, for executors of other kinds.

    Args:
        timeout_secs: How long to wait for its end.
    """

    def __init__(self, timeout_secs: float) -> None:
        self.timeout_secs = timeout_secs
        self._began = threading.Event()
        self._began.set()
        self._thread: threading.Thread | None = None
        self._older: frozenset[threading.Thread] = frozenset()

    def staged(self) -> None:
        """From now on a save is in flight, although DCP may not have begun it yet."""
        self._began.clear()
        self._thread = None
        self._older = frozenset(threading.enumerate())

    def started(self) -> None:
        """The save runs, in the thread that calls this."""
        self._thread = threading.current_thread()
        self._began.set()

    def finished(self) -> None:
        """Nothing of it runs any more."""
        self._thread = None
        self._began.set()

    @property
    def has_finished(self) -> bool:
        """Whether nothing of it runs any more."""
        if self._began.is_set():
            return self._thread is None or not self._thread.is_alive()
        return self._older.issuperset(threading.enumerate()) and not self._began.is_set()

    def wait(self, is_committed: Callable[[], bool]) -> None:
        """Wait for its end.

        Args:
            is_committed: Whether its checkpoint is in the store.

        Raises:
            SaveError: That took too long.
        """
        began = look = time.monotonic()
        while not self.has_finished and self._thread is not threading.current_thread():
            now = time.monotonic()
            if now > look + _LOOK_SECS:
                if is_committed():
                    break
                look = now
            if self._thread is None and now > began + _BEGIN_SECS:
                break
            if now > began + self.timeout_secs:
                raise SaveError(
                    f"the save before has not ended within {self.timeout_secs:g} s, so that no other can be staged: "
                    "wait for the future that dcp.async_save returned, or give the writer a longer 'timeout_secs'"
                )
            if self._thread is None:
                self._began.wait(0.01)
            else:
                self._thread.join(0.01)
        self.finished()

    def __reduce__(self) -> tuple[Any, ...]:
        self.started()
        return BackgroundSave, (self.timeout_secs,)


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
        is_replaced: Whether it took the place of what the head holds, so that all its rows must be stored.
        table_row_bytes: Of the values of a row of its table.
    """

    fqn: str
    table: str
    table_box: Box
    group: int
    values: StagedValue
    rows: ModifiedRows | StagedRows | None
    is_replaced: bool = False
    table_row_bytes: int = 0

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
        number: Tells the cuts of a tracker apart.
        policy: Decides what it is a delta of, or has decided already if rows were staged.
        head: The checkpoint that the marks relate to.
        num_restores: Restores from a checkpoint that the tables have been through.
        items: What the tracker knows of the state dict.
        pending: Learns where the checkpoint goes.
        staged: What the save can be a delta of with what was staged; None if the state dict is live.
        background_save: Of a save whose rows were staged.
        is_complete: Whether all of them were staged, rather than some left to be written first.
        destination: Where the rows of a delta go.
    """

    number: int
    policy: Policy
    head: Head | None
    num_restores: int
    items: Mapping[ShardKey, TrackedItem]
    pending: Pending
    staged: frozenset[Since] | None = None
    background_save: BackgroundSave | None = None
    is_complete: bool = True
    destination: RowDestination = FILES

    def captured(self, item: TrackedItem, modified: ModifiedRows) -> Captured | None:
        """What the sink must know of an item, besides its modified rows."""
        return self.destination.capture(item.table, item.table_box, item.table_row_bytes, modified)

    def is_by_heat(self, since: Since) -> bool:
        """Whether rows of different heat are kept apart."""
        return isinstance(self.policy, Compacted) and since is Since.HEAD


@dataclass(eq=False)
class Cuts:
    """The cuts of one tracker's tables, one save at a time.

    Attributes:
        tracker: The tracker.
        policy: That of its planner.
        background_save: The save in the background, if there is one.
        staged: The last cut whose rows were staged.
        destination: That of the writer; if it is a log, markers in it say what was committed.
    """

    tracker: TrackedRows
    policy: Policy
    background_save: BackgroundSave = field(default_factory=lambda: BackgroundSave(TIMEOUT_SECS))
    staged: Cut | None = None
    destination: RowDestination = FILES
    _num_cuts: int = 0
    _is_baseline_due: bool = False
    _frozen_states: dict[ShardKey, ReferenceType[Tensor]] = field(default_factory=dict)
    _committed_states: dict[ShardKey, ReferenceType[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, tracker: TrackedRows, policy: Policy) -> "Cuts":
        """The one of a tracker, which serves this policy from now on."""
        cuts = trackers.planned(tracker, cls) or cls(tracker, policy)
        cuts.policy = policy
        trackers.plan(tracker, cuts)
        return cuts

    def cut(self, live: Mapping[str, Any]) -> Cut:
        """Settle the save before, and freeze all marks.

        Args:
            live: What will be saved, flattened. Tables that it lacks are refused before anything is frozen.

        Raises:
            ConfigurationError: A tracked table is not in it with its own memory.
            StoreError: The store does not answer.
            SaveError: A save in the background does not end.
        """
        self.resolve_last_save()
        items = self._find(live)
        self.tracker.freeze()
        pending = self.tracker.pending
        assert pending is not None  # frozen just now
        self._num_cuts += 1
        head, num_restores = self.tracker.head, self.tracker.num_restores
        return Cut(self._num_cuts, self.policy, head, num_restores, items, pending, destination=self.destination)

    def next_staged(self) -> frozenset[Since]:
        """What the next save should be a delta of, as far as this rank knows: all ranks alike.

        After one whose rows turned out to be too few, it may be a baseline as well. Not all ranks may have noticed.
        """
        head = self.tracker.head
        if head is None:
            return frozenset({Since.EVER})
        wanted = self.policy.decide(head.history)
        return frozenset({wanted, Since.EVER}) if self._is_baseline_due else frozenset({wanted})

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            SaveError: It does not end in time.
        """
        self.background_save.wait(lambda: self._landed() is not None)

    def resolve_last_save(self) -> None:
        """Wait for a save in the background, then commit its rows, or mark them again."""
        self.wait()
        checkpoint, pending = self._landed(), self.tracker.pending
        if checkpoint is not None:
            self.tracker.commit(self._head_of(checkpoint), has_heat=isinstance(self.policy, Compacted))
            self._committed_states = self._frozen_states
            self._is_baseline_due = False
        else:
            # What was staged may have been too little, which shows when ranks plan; they can tell nobody in time.
            has_staged_rows = self.staged is not None and Since.EVER not in (self.staged.staged or ())
            if pending is not None and pending.place is None and has_staged_rows:
                self._is_baseline_due = True
            self.tracker.rollback()
        self.staged = None

    def _landed(self) -> Checkpoint | None:
        """What the pending save has committed."""
        place = self.tracker.pending.place if self.tracker.pending is not None else None
        if place is None:
            return None
        return committed(Store.open(place[0], row_log=self.destination.row_log), place[1])

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
        self._frozen_states = {}
        for shard in self.tracker.shards:
            if shard.rows.box.num_rows == 0:
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
                    found[key] = replace(item, is_replaced=self._is_replaced(shard, key, state))
                    self._frozen_states[key] = ref(state)
        return found

    def _is_replaced(self, shard: TrackedShard, key: ShardKey, state: Tensor) -> bool:
        committed_state = self._committed_states.get(key)
        is_same = committed_state is not None and committed_state() is state
        return shard.is_state_replaceable and not is_same


def _item(shard: TrackedShard, key: ShardKey, table: ShardKey, values: Tensor) -> TrackedItem:
    rows, row_bytes = shard.rows, shard.rows.box.num_cols * shard.weight.element_size()
    return TrackedItem(key[0], table[0], rows.box, id(shard), values.detach(), rows, table_row_bytes=row_bytes)

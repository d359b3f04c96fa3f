"""Consistent snapshots (cuts). Freezing the set of modified rows defines the moment that a save captures.

The tracked tables are then located in the state dict by their storage. A snapshot first learns the outcome of the
previous save. If its manifest is in the store, its rows are committed. If not, they are marked again.

An asynchronous save copies rows at the same moment (``staging``). The snapshot with these copies is then all that
planning needs, whichever thread or process does it.
"""

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import Checkpoint, Head, committed
from torchrec_cnr.lineage.recent import recent_checkpoints
from torchrec_cnr.policies import Policy, Since, separates_heat
from torchrec_cnr.saving.running_saves import RunningSave
from torchrec_cnr.saving.sinks import FILES, Captured, RowDestination
from torchrec_cnr.saving.staged_values import StagedValue
from torchrec_cnr.sharding import LocalShard, ShardKey, local_shards, memory_key, wait_for_devices
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.id_map_buffers import LocatedBuffer
from torchrec_cnr.tracking.modified_rows import ModifiedRows, RowList, RowMask, SelectedRows, numbers_of
from torchrec_cnr.tracking.tracked_tables import Pending, TrackedRows, TrackedShard

TIMEOUT_SECS = 1800.0


@dataclass(frozen=True, eq=False)
class StagedRows:
    """The rows of a shard that were staged. If the shard was copied whole: the rows that a delta contains.

    Attributes:
        since: What the rows were modified since.
        parts: The rows, divided by heat if the policy asks for that.
        digest: Digest that is equal on two ranks if both have staged the same rows of the same shard.
        captured: What else the sink must know.
    """

    since: Since
    parts: tuple[SelectedRows, ...]
    digest: bytes
    captured: Captured | None = None


@dataclass(frozen=True, eq=False)
class TrackedItem:
    """A shard in the state dict that the tracker knows: of a table, or of its optimizer state.

    Attributes:
        fqn: FQN of the shard's tensor.
        table: FQN of its table in the state dict.
        table_box: Region of the table's shard.
        group: Number that a table's shard and its optimizer state share.
        values: [num_rows, ...], shared with the model; or what was staged: all rows, or only those of ``rows``.
        rows: The modified rows; None if all rows were staged and must be stored.
        replaced_since: Checkpoints that hold the values of another tensor under this FQN, or none. A delta that is
            based on one of them must store all rows.
        table_row_bytes: Bytes of one row of the table.
        live_state: For optimizer state, the optimizer's own tensor.
        is_of_id_map: Whether it is a buffer of an id map. It is handled like a table of its own.
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
    is_of_id_map: bool = False

    @property
    def is_table(self) -> bool:
        """Whether the item is a table, rather than optimizer state or a buffer of an id map."""
        return self.fqn == self.table and not self.is_of_id_map

    @property
    def is_row_wise(self) -> bool:
        """Whether the item is optimizer state with one value per row."""
        return self.fqn != self.table and len(self.values.shape) == 1

    @property
    def is_partial(self) -> bool:
        """Whether only the modified rows were staged."""
        return isinstance(self.rows, StagedRows) and any(isinstance(part, RowList) for part in self.rows.parts)

    @property
    def dtype(self) -> str:
        """The dtype's name in manifests."""
        return str(self.values.dtype).removeprefix("torch.")

    def digests(self) -> Mapping[Since, bytes]:
        """Return digests of the modified rows, by what a delta can be based on."""
        match self.rows:
            case ModifiedRows() as rows:
                return {since: self.digest_of(rows.select(since)) for since in (Since.HEAD, Since.BASELINE)}
            case StagedRows() as rows:
                return {rows.since: rows.digest}
            case None:
                return {}

    def digest_of(self, rows: RowMask) -> bytes:
        """Return a digest that is equal on two ranks with the same modified rows, and values of them in an id map."""
        if not self.is_of_id_map or not isinstance(self.values, Tensor):
            return rows.digest()
        values = self.values.index_select(0, numbers_of(rows.mask)).cpu().contiguous().view(torch.uint8)
        return rows.digest() + hashlib.blake2b(values.numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True, eq=False)
class Cut:
    """The consistent snapshot that a save captures.

    Attributes:
        policy: Decides what the save is based on. If rows were staged, it has already decided.
        head: The checkpoint that the modified rows relate to.
        num_restores: Number of restores from a checkpoint in the history of the tables.
        items: The tracked items of the state dict.
        pending: Records the destination of the checkpoint.
        staged: What the save can be based on with the staged rows; None if nothing was staged.
        destination: Destination for the rows of a delta.
    """

    policy: Policy
    head: Head | None
    num_restores: int
    items: Mapping[ShardKey, TrackedItem]
    pending: Pending
    staged: frozenset[Since] | None = None
    destination: RowDestination = FILES

    def captured(self, item: TrackedItem, modified: ModifiedRows) -> Captured | None:
        """Return what else the sink must know of an item, in addition to its modified rows."""
        return self.destination.capture(item.table, item.table_box, item.table_row_bytes, modified)

    def is_whole(self, item: TrackedItem, since: Since) -> bool:
        """Return whether a delta stores all rows of an item: what it is based on has other values or none.

        Args:
            item: The item.
            since: What the modified rows are modified since. A delta may turn out to be based on the latest checkpoint
                instead, if its baseline was pruned.
        """
        head, bases = self.head, {since, Since.HEAD}
        if head is None or since is Since.EVER or not item.replaced_since.isdisjoint(bases):
            return True
        kind = item.dtype, item.is_table, item.table if item.is_row_wise else None
        kinds = {Since.HEAD: head.kinds, Since.BASELINE: head.baseline_kinds}
        return any(kinds[base].get(item.fqn) != kind for base in bases)

    def is_by_heat(self, since: Since) -> bool:
        """Return whether rows of different heat are stored separately."""
        return separates_heat(self.policy) and since is Since.HEAD


_States = Mapping[ShardKey, ReferenceType[Tensor]]


@dataclass(frozen=True, eq=False)
class PendingSave:
    """A save whose rows are frozen, until its outcome is read from the store.

    Attributes:
        pending: Records the destination of its checkpoint.
        running: Reports when the save has ended.
        policy: Policy of the save.
        destination: Destination of its rows. In a Kafka topic, commit records show what was committed.
        states: The optimizer state that was saved.
        staged: What the save can be based on with the staged rows; None if nothing was staged.
    """

    pending: Pending
    running: RunningSave
    policy: Policy
    destination: RowDestination
    states: _States
    staged: frozenset[Since] | None

    def checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint that the save has committed, or None."""
        place = self.pending.place
        if place is None:
            return None
        row_log = self.destination.row_log
        known = recent_checkpoints.unchanged(*place) if row_log is None else None
        return known or committed(Store.open(place[0], row_log=row_log), place[1])


@dataclass(eq=False)
class Cuts:
    """The snapshots of one tracker's tables, one save after the other, by any planner.

    Attributes:
        tracker: The tracker.
        policy: Policy of the planner that was made last.
        planners: The existing planners.
    """

    tracker: TrackedRows
    policy: Policy
    planners: WeakSet[object] = field(default_factory=WeakSet)
    _last: PendingSave | None = None
    _is_baseline_due: bool = False
    _states: dict[Since, _States] = field(default_factory=dict)  # the optimizer state that these checkpoints contain
    _head: Head | None = None
    # Held from the outcome of one save to the snapshot of the next: without a process group, threads save in parallel.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        _cuts_of_process.add(self)

    @classmethod
    def of(cls, tracker: TrackedRows, policy: Policy, planner: object) -> "Cuts":
        """Return the snapshots of a tracker, which use this policy from now on."""
        cuts = tracker.saves if isinstance(tracker.saves, cls) else cls(tracker, policy)
        cuts.policy = policy
        cuts.planners.add(planner)
        tracker.saves = cuts
        return cuts

    @property
    def has_planner(self) -> bool:
        """Whether a planner exists whose saves take these snapshots."""
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
        """Learn the outcome of the previous save, and freeze all modified rows.

        Args:
            live: The flattened state dict. If tables are missing in it, nothing is frozen.
            running: The save.
            policy: Decides what the save is based on.
            destination: Destination of its rows.
            timeout_secs: Seconds to wait for the previous save.
            is_staged: Whether rows will be staged.

        Raises:
            ConfigurationError: The state dict does not contain the storage of a tracked table.
            StoreError: The store does not answer.
            SaveError: The previous save does not end.
        """
        with self._alone(timeout_secs):
            if self.tracker.head is not None:
                recent_checkpoints.begin_save(self.tracker.head.ref)
            self._resolve_last_save(timeout_secs)
            if self.tracker.head is not self._head:  # after a restore, no tensor of the state was saved yet
                self._states.clear()
            self.tracker.check_model()
            items = self._find(live)
            wait_for_devices(live.values())  # training may have written to them and marked their rows in any stream
            with self._before_and_after_training():
                self.tracker.freeze()
            items |= self._find_id_maps(live)
            pending = self.tracker.pending
            assert pending is not None  # ``freeze`` has set it
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
        """Return what the next save should be based on; all ranks must come to the same result.

        If a save failed because too few rows were staged, the next one can be a baseline, too. Not all ranks may have
        noticed that failure.
        """
        head = self.tracker.head
        if head is None:
            return frozenset({Since.EVER})
        since = policy.decide(head.history)
        return frozenset({since, Since.EVER}) if self._is_baseline_due else frozenset({since})

    def resolve_last_save(self, timeout_secs: float = TIMEOUT_SECS) -> None:
        """Wait until the last save has ended, then commit its rows or mark them again.

        Raises:
            SaveError: The save does not end in time.
            StoreError: The store does not answer.
        """
        with self._alone(timeout_secs):
            self._resolve_last_save(timeout_secs)

    @contextmanager
    def _alone(self, timeout_secs: float) -> Iterator[None]:
        """Let one thread at a time continue: a second one would commit modified rows of the first one's save."""
        lock = self._lock
        if not lock.acquire(timeout=timeout_secs):
            raise SaveError(
                f"another thread has waited for the previous save for more than {timeout_secs:g} s: save again"
            )
        try:
            yield
        finally:
            lock.release()

    def forget_threads(self) -> None:
        """Replace the lock in a forked child: the thread that held it in the parent does not exist there."""
        self._lock = threading.RLock()

    def _resolve_last_save(self, timeout_secs: float) -> None:
        last_save, pending = self._last, self.tracker.pending
        if last_save is None or pending is not last_save.pending:  # a restore has replaced what it saved
            with self._before_and_after_training():
                self.tracker.rollback()
            return
        last_save.running.wait(timeout_secs)
        checkpoint = last_save.checkpoint()
        with self._before_and_after_training():
            self._end(last_save, pending, checkpoint)
        self._last = None

    @contextmanager
    def _before_and_after_training(self) -> Iterator[None]:
        """Change the marks after all streams have set theirs, and before they set the next ones."""
        marks = [rows.marked for rows in self.tracker.all_rows]
        wait_for_devices(marks)
        yield
        wait_for_devices(marks)

    def _end(self, last_save: PendingSave, pending: Pending, checkpoint: Checkpoint | None) -> None:
        """Commit or roll back the last save, which has committed a checkpoint or none."""
        if checkpoint is not None:
            head = self._head_of(checkpoint)
            self._is_baseline_due = self._has_lost_baseline(last_save, checkpoint)
            self.tracker.commit(head, has_heat=separates_heat(last_save.policy))
            if len(head.lineage) == 1:
                self._states[Since.BASELINE] = last_save.states
            self._states[Since.HEAD], self._head = last_save.states, head
        else:
            # The ranks may have found while planning that too few rows were staged, too late to stage more.
            has_staged_rows = last_save.staged is not None and Since.EVER not in last_save.staged
            if pending.place is None and has_staged_rows:
                self._is_baseline_due = True
            self.tracker.rollback()

    def _has_lost_baseline(self, last_save: PendingSave, checkpoint: Checkpoint) -> bool:
        """Return whether rows that were staged since the baseline were saved on top of another checkpoint.

        The baseline was pruned then. The next save should be one, as the policy bases its deltas on it.
        """
        head, parent = self.tracker.head, checkpoint.committed.parent
        if head is None or parent is None or last_save.staged != frozenset({Since.BASELINE}):
            return False
        return parent.sha256 != head.baseline.sha256

    def _head_of(self, checkpoint: Checkpoint) -> Head:
        """Return the head for a committed checkpoint: the checkpoint, and the chain that it extends."""
        head, parent = self.tracker.head, checkpoint.manifest.parent
        ancestors = () if head is None or parent is None else head.lineage
        sha256s = [link.sha256 for link in ancestors]
        length = sha256s.index(parent.sha256) + 1 if parent is not None and parent.sha256 in sha256s else 0
        return checkpoint.head(ancestors[:length], head.baseline_kinds if head is not None and length else None)

    def _find(self, live: Mapping[str, Any]) -> dict[ShardKey, TrackedItem]:
        """Locate tracked tables and their optimizer state in the state dict, by the memory that they share."""
        shards, by_memory = _by_memory(live)
        items: dict[ShardKey, TrackedItem] = {}
        for shard in self.tracker.shards:
            if 0 in shard.rows.box.sizes:
                continue
            aliases = by_memory.get(memory_key(shard.weight), [])
            if not aliases:
                raise ConfigurationError(
                    f"table {shard.rows.name!r} is tracked, but the state dict does not share its memory: the table is "
                    "missing, or was copied (by cpu_offload, or by a stager other than the CNRStorageWriter that is "
                    "passed to dcp.async_save); pass the live state dict, no async_stager, or a tracker of a smaller "
                    "model"
                )
            items |= {key: _item(shard, key, aliases[0], shards[key].tensor) for key in aliases}
            for state in shard.state():
                for key in by_memory.get(memory_key(state), []):
                    item = _item(shard, key, aliases[0], shards[key].tensor)
                    replaced = self._replaced_since(key, state) if shard.is_state_replaceable else frozenset()
                    items[key] = replace(item, replaced_since=replaced, live_state=state)
        return items

    def _find_id_maps(self, live: Mapping[str, Any]) -> dict[ShardKey, TrackedItem]:
        """Locate the buffers of id maps in the state dict, with the values that a save stores."""
        modules = self.tracker.id_map_modules
        shards, by_memory = _by_memory(live) if modules else ({}, {})
        located = (buffer for module in modules for buffer in module.locate(by_memory))
        return {each.key: _id_map_item(each, shards[each.key].box) for each in located}

    def _replaced_since(self, key: ShardKey, state: Tensor) -> frozenset[Since]:
        """Return the checkpoints that a delta may be based on, and that hold the values of another tensor, or none."""
        saved_states = {since: self._states.get(since, {}).get(key) for since in (Since.HEAD, Since.BASELINE)}
        return frozenset(
            since for since, saved_state in saved_states.items() if saved_state is None or saved_state() is not state
        )


_cuts_of_process: WeakSet[Cuts] = WeakSet()


def _forget_threads() -> None:
    for cuts in list(_cuts_of_process):
        cuts.forget_threads()


os.register_at_fork(after_in_child=_forget_threads)


def _by_memory(live: Mapping[str, Any]) -> tuple[Mapping[ShardKey, LocalShard], Mapping[Any, list[ShardKey]]]:
    """Return this rank's shards of a state dict, and their keys by the memory of their values."""
    shards = {(fqn, shard.box.offsets): shard for fqn, value in live.items() for shard in local_shards(value)}
    by_memory: dict[Any, list[ShardKey]] = {}
    for key, shard in shards.items():
        by_memory.setdefault(memory_key(shard.tensor), []).append(key)
    return shards, by_memory


def _item(shard: TrackedShard, key: ShardKey, table: ShardKey, values: Tensor) -> TrackedItem:
    rows, row_bytes = shard.rows, shard.rows.box.num_cols * shard.weight.element_size()
    return TrackedItem(key[0], table[0], rows.box, id(shard), values.detach(), rows, table_row_bytes=row_bytes)


def _id_map_item(located: LocatedBuffer, box: Box) -> TrackedItem:
    (fqn, _), buffer = located.key, located.buffer
    values, rows, row_bytes = buffer.values, buffer.rows, box.num_cols * buffer.values.element_size()
    return TrackedItem(fqn, fqn, box, id(rows), values, rows, table_row_bytes=row_bytes, is_of_id_map=True)

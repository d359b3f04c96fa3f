"""Staging: the cut of an asynchronous save, and the copy of the rows that go with it, in one moment.

``dcp.async_save`` copies the state and saves the copy in the background. Were the marks taken there, a row that is
trained in between would count as saved, with the value it had before. So whoever copies cuts: the writer is its own
stager, freezes the marks, and copies what the save will hold: modified rows, and all that is not tracked.

Each rank works out by itself what that is, from the lineage as it knows it; no rank waits for another while training
does. The coordinator checks it when ranks plan. What exceeds the budget is not copied: the save writes it first, and
training waits for that (in ``synchronize_staging``) rather than for memory.
"""

import copy
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem

from torchrec_cnr.arena import Arena
from torchrec_cnr.cuts import Cut, Cuts
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.handover import StagedTensor
from torchrec_cnr.kernels.gathering import gather_rows
from torchrec_cnr.manifest import DTYPES
from torchrec_cnr.packs import BLOCK_BYTES
from torchrec_cnr.phases import SavePhases
from torchrec_cnr.row_logs import RowLog
from torchrec_cnr.schemes import SchemeRules
from torchrec_cnr.shards import ShardKey, copied, dtype_name, is_replicated, local_shards
from torchrec_cnr.staged_codes import Staged, stage_codes
from torchrec_cnr.staging_plan import ShardCopy, plan_staging
from torchrec_cnr.tracked import all_tracked, tracking

STAGING_BYTES = 8 << 30


class Staging:
    """What a writer stages; one save at a time.

    Attributes:
        live: Shards of the last save that were not copied.

    Args:
        rules: How rows will be quantized.
        staging_bytes: Copy no more than that.
        timeout_secs: How long to wait for the save before.
    """

    def __init__(
        self, rules: SchemeRules, staging_bytes: int, timeout_secs: float, phases: SavePhases | None = None
    ) -> None:
        self._rules = rules
        self.live: frozenset[ShardKey] = frozenset()
        self._phases = phases
        self._staging_bytes = staging_bytes
        self._timeout_secs = timeout_secs
        self._arena = Arena()
        self._cuts: Cuts | None = None
        self._released = threading.Event()

    def wait(self, live: Mapping[str, Any], log: RowLog | None) -> None:
        """Wait for the save before.

        Args:
            live: What will be saved, flattened.
            log: That of the writer.

        Raises:
            ConfigurationError: It holds tables of several trackers.
            SaveError: The save before has not ended in time.
        """
        self._cuts, self.live = _cuts_of(live), frozenset()
        if self._cuts is not None:
            self._cuts.log = log
            self._cuts.flight.timeout_secs = self._timeout_secs
            self._cuts.wait()

    def stage(self, live: Mapping[str, Any]) -> dict[str, Any]:
        """Cut, and copy what the save will hold: flattened values that are saved in the place of the live ones."""
        if self._cuts is None:
            return {fqn: copied(value) for fqn, value in live.items()}
        return self._stage(live, self._cuts)

    def _stage(self, live: Mapping[str, Any], cuts: Cuts) -> dict[str, Any]:
        cut, began = cuts.cut(live), time.monotonic()
        cut = replace(cut, staged=cuts.next_staged(), flight=cuts.flight)
        copies = plan_staging(live, cut, self._rules, self._staging_bytes)
        self.live = frozenset(wanted.key for wanted in copies if wanted.is_live)
        values = self._copied([wanted for wanted in copies if not wanted.is_live])
        values |= {wanted.key: wanted.source for wanted in copies if wanted.is_live}
        items = {
            wanted.key: replace(cut.items[wanted.key], values=values[wanted.key], rows=wanted.rows)
            for wanted in copies
            if wanted.key in cut.items
        }
        self._released.clear()
        cuts.staged = replace(cut, items=items, is_complete=not self.live)
        cuts.flight.is_staged()
        self._phases = SavePhases(time.monotonic() - began, self._arena.taken_bytes)
        return _stand_ins(live, values, cuts.staged)

    def _copied(self, copies: Sequence[ShardCopy]) -> dict[ShardKey, Staged]:
        """Copies of everything, each memory once."""
        by_memory: dict[object, Staged] = {}
        unique: dict[object, ShardCopy] = {}
        for wanted in copies:
            unique.setdefault(wanted.memory, wanted)
        is_on_device = any(wanted.source.device.type == "cuda" for wanted in unique.values())
        self._arena.clear(sum(wanted.num_bytes for wanted in unique.values()), is_pinned=is_on_device)
        for memory, wanted in unique.items():
            by_memory[memory] = self._copy(wanted)
        if is_on_device:
            torch.cuda.synchronize()
        return {wanted.key: by_memory[wanted.memory] for wanted in copies}

    def _copy(self, wanted: ShardCopy) -> Staged:
        source, numbers = wanted.source, wanted.numbers
        if source.layout is not torch.strided or dtype_name(source) not in DTYPES:
            return source.to("cpu", copy=True)  # which the writer will refuse, by name
        if wanted.scheme is not None:
            return stage_codes(source, numbers, wanted.scheme, self._arena.take)
        taken = self._arena.take(wanted.shape, source.dtype)
        target = taken.tensor()
        if numbers is None:
            target.copy_(source, non_blocking=True)
        elif source.device.type == "cpu":
            gather_rows(source, numbers, target)
        else:
            block_rows = max(1, BLOCK_BYTES // max(1, source[:1].nbytes))
            for place, rows in zip(target.split(block_rows), numbers.split(block_rows), strict=True):
                place.copy_(source.index_select(0, rows), non_blocking=True)
        return taken

    def take_phases(self) -> SavePhases | None:
        """What the copy of rows took, told once: to the save that it was made for; None if no rows were staged."""
        phases, self._phases = self._phases, None
        return phases

    def release(self) -> None:
        """All that was not copied is written: training may go on."""
        self.live = frozenset()
        self._released.set()

    def synchronize(self) -> None:
        """Wait until training may go on: until all that was not copied is written, or the save has failed."""
        if self._cuts is not None and self.live:
            while not (self._released.wait(0.01) or self._cuts.flight.has_ended):
                pass

    def close(self) -> None:
        """Give the memory back."""
        self._arena.free()

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process nothing is staged."""
        return Staging, (self._rules, self._staging_bytes, self._timeout_secs, self.take_phases())


def _cuts_of(live: Mapping[str, Any]) -> Cuts | None:
    """Of the tracker whose tables are in a state dict; None if there is no such tracker with a planner.

    Raises:
        ConfigurationError: There are several.
    """
    found = [tracked for tracked in tracking(_tensors(live)) if tracked.cuts is not None]
    if not found:  # a rank may have no shard of any table
        found = [tracked for tracked in all_tracked() if tracked.cuts is not None and not tracked.has_rows]
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} trackers with a planner know tables of this state dict, and dcp.async_save does not say "
            "which of them it is for: close the others, or track all tables by one"
        )
    cuts: Cuts | None = found[0].cuts if found else None
    return cuts


def _tensors(live: Mapping[str, Any]) -> Iterable[Tensor]:
    return (shard.tensor for value in live.values() for shard in local_shards(value))


def _stand_ins(live: Mapping[str, Any], values: Mapping[ShardKey, Staged], cut: Cut) -> dict[str, Any]:
    """The state dict, with what was staged in the place of its tensors."""
    tensors = {fqn: value for fqn, value in live.items() if isinstance(value, Tensor)}
    write_items: dict[str, list[WriteItem]] = {}
    for item in create_default_local_save_plan(tensors, is_coordinator=False).items:
        write_items.setdefault(item.index.fqn, []).append(item)
    staged: dict[str, Any] = {}
    for fqn, value in live.items():
        if fqn not in tensors:
            staged[fqn] = copy.deepcopy(value)
            continue
        keys = [(fqn, shard.box.offsets) for shard in local_shards(value)]
        shards = {key[1]: values[key] for key in keys if key not in cut.items}
        staged[fqn] = StagedTensor(cut.number, tuple(write_items.get(fqn, ())), is_replicated(value), shards)
    return staged

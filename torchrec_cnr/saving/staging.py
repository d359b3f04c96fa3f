"""Staging: the snapshot of an asynchronous save, and the copy of its rows, in one moment.

``dcp.async_save`` copies the state and saves the copy in the background. If the modified rows were taken there, a row
that is trained in between would count as saved, with the value it had before. So the copy takes the snapshot: the
writer is its own stager, freezes the marks, and copies what the save will hold: modified rows, and all that is not
tracked.

Each rank plans by itself which shards need copies, and of which rows, from the lineage as it knows it; no rank waits
for another while training does. The coordinator checks this when ranks plan. What exceeds the budget is not copied: the
save writes it first, and training waits for that (in ``synchronize_staging``) rather than for memory.
"""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem
from torch.profiler import record_function

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.manifest import DTYPES
from torchrec_cnr.kernels.cpu.gather_rows import gather_rows
from torchrec_cnr.policies import Since
from torchrec_cnr.progress import SavePhases
from torchrec_cnr.quantization import SchemeRules
from torchrec_cnr.quantization.scheme import DeviceScheme
from torchrec_cnr.saving.cut import Cut, Cuts, StagedRows, TrackedItem
from torchrec_cnr.saving.encoding import choose_scheme
from torchrec_cnr.saving.plug_in_messages import STAGED, StagedSave, StagedTensor
from torchrec_cnr.saving.running_saves import running_saves
from torchrec_cnr.saving.sinks import RowDestination
from torchrec_cnr.saving.staged_values import (
    DEVICE_BLOCK_BYTES,
    StagedValue,
    StagingBuffer,
    StagingBuffers,
    finish_codes,
    has_kernel,
    is_quantized_first,
    padded_bytes,
    start_codes,
)
from torchrec_cnr.sharding import (
    ShardKey,
    copied,
    dtype_name,
    is_replicated,
    local_shards,
    memory_key,
    wait_for_devices,
)
from torchrec_cnr.tracking.modified_rows import ModifiedRows, RowList, RowMask
from torchrec_cnr.tracking.tracked_tables import TrackedRows, trackers


@dataclass(frozen=True, eq=False)
class ShardCopy:
    """A shard that is to be staged.

    Attributes:
        key: The shard.
        source: Its values, live.
        numbers: int64 [k], on the host, as those of all tables take much memory: the rows to copy; None for all.
        rows: The modified ones, as they lie in the copy; None if all must be stored.
        scheme: What they are encoded by first; None if values are copied.
        is_live: Whether it is not copied, for want of room, but written before training goes on.
    """

    key: ShardKey
    source: Tensor
    numbers: Tensor | None
    rows: StagedRows | None
    scheme: DeviceScheme | None = None
    is_live: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the copy."""
        sizes = tuple(self.source.shape)
        return sizes if self.numbers is None else (len(self.numbers), *sizes[1:])

    @property
    def num_bytes(self) -> int:
        """Of the copy, but for rows that codes cannot represent."""
        if self.scheme is None:
            return padded_bytes(self.shape, self.source.dtype)
        row_bytes = self.scheme.row_bytes(self.shape[1], self.source.dtype)
        return padded_bytes((self.shape[0], row_bytes), torch.uint8)

    @property
    def memory(self) -> object:
        """The same for shards that are one memory under several names."""
        return memory_key(self.source) or self.key, id(self.numbers), self.scheme


def plan_staging(live: Mapping[str, Any], cut: Cut, rules: SchemeRules, max_bytes: int) -> list[ShardCopy]:
    """What a save needs of a state dict.

    Args:
        live: The state dict, flattened.
        cut: What is known of it.
        rules: How rows will be quantized.
        max_bytes: Copies take no more than that; the largest tables stay live instead.
    """
    copies = [replace(wanted, scheme=_scheme_of(wanted, cut, rules)) for wanted in _copies(live, cut)]
    over = _over(max_bytes, copies, cut)
    masks: dict[int, StagedRows] = {}
    return [_live(wanted, cut, masks) if wanted.key in over else wanted for wanted in copies]


def _copies(live: Mapping[str, Any], cut: Cut) -> list[ShardCopy]:
    selected: dict[int, tuple[Tensor | None, StagedRows]] = {}
    copies = []
    since = _since(cut)
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    for fqn, value in live.items():
        for shard in local_shards(value):
            key, source = (fqn, shard.box.offsets), shard.tensor.detach()
            item = cut.items.get(key)
            if (
                item is None
                or since in item.replaced_since
                or since is Since.EVER
                or not isinstance(item.rows, ModifiedRows)
            ):
                copies.append(ShardCopy(key, source, None, None))
                continue
            if item.group not in selected:
                # Ranks may disagree about the modified rows of what they all hold, and must then store all.
                is_whole = Since.EVER in (cut.staged or ()) or (is_replicated(value) and not is_alone)
                select = _host_masks if is_whole else _lists
                selected[item.group] = select(item, item.rows, cut)
            copies.append(ShardCopy(key, source, *selected[item.group]))
    return copies


def _since(cut: Cut) -> Since:
    """What the rows of a delta were modified since; ``EVER`` if it can be a baseline only."""
    return next((since for since in cut.staged or () if since is not Since.EVER), Since.EVER)


def _masks(item: TrackedItem, modified: ModifiedRows, cut: Cut) -> tuple[None, StagedRows]:
    """Modified rows among all rows."""
    since, captured = _since(cut), cut.captured(item, modified)
    parts = modified.select_parts(since, cut.is_by_heat(since))
    digest = RowMask.union(parts).digest() + (captured.digest() if captured is not None else b"")
    return None, StagedRows(since, parts, digest, captured)


def _host_masks(item: TrackedItem, modified: ModifiedRows, cut: Cut) -> tuple[None, StagedRows]:
    """The same beside the copies of all rows, which are in host memory, and may go to another process."""
    _, rows = _masks(item, modified, cut)
    masks = (RowMask(part.mask.cpu()) for part in rows.parts if isinstance(part, RowMask))
    return None, replace(rows, parts=tuple(masks))


def _lists(item: TrackedItem, modified: ModifiedRows, cut: Cut) -> tuple[Tensor, StagedRows]:
    """Modified rows as they will lie one behind the other, and where."""
    since, captured = _since(cut), cut.captured(item, modified)
    parts = modified.select_numbers(since, cut.is_by_heat(since))
    lists, first = [], 0
    for numbers in parts:
        lists.append(RowList(numbers, first))
        first += len(numbers)
    return torch.cat(parts) if len(parts) > 1 else parts[0], StagedRows(since, tuple(lists), b"", captured)


def _over(max_bytes: int, copies: Sequence[ShardCopy], cut: Cut) -> frozenset[ShardKey]:
    """What exceeds the budget: the largest tables, each with its state."""
    groups: dict[object, list[ShardCopy]] = {}
    for wanted in copies:
        item = cut.items.get(wanted.key)
        groups.setdefault(wanted.key if item is None else item.group, []).append(wanted)
    over: set[ShardKey] = set()
    sizes = [(sum(wanted.num_bytes for wanted in group), group) for group in groups.values()]
    num_bytes = sum(size for size, _ in sizes)
    for size, group in sorted(sizes, key=lambda sized: -sized[0]):
        if num_bytes <= max_bytes:
            break
        over.update(wanted.key for wanted in group)
        num_bytes -= size
    return frozenset(over)


def _live(wanted: ShardCopy, cut: Cut, masks: dict[int, StagedRows]) -> ShardCopy:
    """A shard that is not copied has its modified rows where they are."""
    rows, item = wanted.rows, cut.items.get(wanted.key)
    if wanted.numbers is not None and item is not None and isinstance(item.rows, ModifiedRows):
        if item.group not in masks:
            _, masks[item.group] = _masks(item, item.rows, cut)
        rows = masks[item.group]
    return replace(wanted, numbers=None, rows=rows, scheme=None, is_live=True)


def _scheme_of(wanted: ShardCopy, cut: Cut, rules: SchemeRules) -> DeviceScheme | None:
    """What rows of a tracked shard are encoded by before they are copied, if they are."""
    source, item = wanted.source, cut.items.get(wanted.key)
    is_table = source.dim() == 2 and source.stride(1) == 1 and math.prod(wanted.shape) > 0
    if item is None or not is_table or not is_quantized_first(source):
        return None
    scheme = choose_scheme(rules, item.fqn, item.is_table, source, wanted.numbers, cut.num_restores)
    return scheme if has_kernel(scheme) else None


STAGING_BYTES = 8 << 30


@dataclass(frozen=True)
class StagingOptions:
    """How a writer stages.

    Attributes:
        rules: How rows will be quantized.
        max_bytes: Copy no more than that.
        timeout_secs: How long to wait for the saves before.
        destination: Where rows go.
    """

    rules: SchemeRules
    max_bytes: int
    timeout_secs: float
    destination: RowDestination


def stage(state_dict: Mapping[str, Any], options: StagingOptions, buffers: StagingBuffers) -> dict[str, Any]:
    """Cut, and copy what an asynchronous save will hold; waits for the saves before.

    What fails, the save raises when ranks plan: were it raised here, the other ranks would wait for this one.

    Returns:
        What is saved in the place of the state dict, with its ``StagedSave``.
    """
    staged = StagedSave(running_saves.add(has_begun=False))
    try:
        staged.running.wait_for_earlier(options.timeout_secs)
        live, paths = flatten_state_dict(dict(state_dict))
        # Tensors that are made in inference mode cannot be changed outside of it.
        with record_function("torchrec_cnr.stage"), torch.inference_mode(False):
            values = _staged(live, staged, options, buffers)
        return {**unflatten_state_dict(values, paths), STAGED: staged}
    except Exception as error:  # noqa: BLE001 - raised by the save, on all ranks
        staged.failure = error.with_traceback(None)  # which would keep all that is copied here
        return {STAGED: staged}


def _staged(
    live: Mapping[str, Any], staged: StagedSave, options: StagingOptions, buffers: StagingBuffers
) -> dict[str, Any]:
    """Flattened values that are saved in the place of the live ones."""
    tracker = _tracker_of(live)
    if tracker is None or not isinstance(tracker.saves, Cuts):
        wait_for_devices(live.values())
        return {fqn: copied(value) for fqn, value in live.items()}
    cuts = tracker.saves
    cut = cuts.cut(live, staged.running, cuts.policy, options.destination, options.timeout_secs, is_staged=True)
    began = time.monotonic()
    copies = plan_staging(live, cut, options.rules, options.max_bytes)
    to_copy = [wanted for wanted in copies if not wanted.is_live]
    unique = {wanted.memory: wanted for wanted in to_copy}
    is_on_device = any(wanted.source.device.type == "cuda" for wanted in to_copy)
    buffer = buffers.take(sum(wanted.num_bytes for wanted in unique.values()), is_on_device, staged.running)
    try:
        by_memory = _copied(unique, buffer)
    finally:  # what has begun writes to the buffer, which the next save takes, and reads numbers of rows
        wait_for_devices(wanted.source for wanted in to_copy)
    values: dict[ShardKey, StagedValue] = {wanted.key: by_memory[wanted.memory] for wanted in to_copy}
    values |= {wanted.key: wanted.source for wanted in copies if wanted.is_live}
    items = {
        wanted.key: replace(cut.items[wanted.key], values=values[wanted.key], rows=wanted.rows, live_state=None)
        for wanted in copies
        if wanted.key in cut.items
    }
    staged.cut, staged.tracker_id = replace(cut, items=items), id(tracker)
    staged.live = frozenset(wanted.key for wanted in copies if wanted.is_live)
    staged.phases = SavePhases(time.monotonic() - began, buffer.taken_bytes)
    return _stand_ins(live, values, staged.cut)


def _copied(unique: Mapping[object, ShardCopy], buffer: StagingBuffer) -> dict[object, StagedValue]:
    """Copies of what lies in each memory, still under way perhaps. All codes are begun before any is waited for."""
    started = {
        memory: start_codes(wanted.source, wanted.numbers, wanted.scheme, buffer.take)
        for memory, wanted in unique.items()
        if wanted.scheme is not None
    }
    copies = {memory: _copy(wanted, buffer) for memory, wanted in unique.items() if memory not in started}
    return {**copies, **dict(zip(started, finish_codes(list(started.values())), strict=True))}


def _copy(wanted: ShardCopy, buffer: StagingBuffer) -> StagedValue:
    """The values of a shard, or of some of its rows."""
    source, numbers = wanted.source, wanted.numbers
    if source.layout is not torch.strided or dtype_name(source) not in DTYPES:
        return source.to("cpu", copy=True)  # which the writer will refuse, by name
    taken = buffer.take(wanted.shape, source.dtype)
    target = taken.tensor()
    if numbers is None:
        target.copy_(source, non_blocking=True)
    elif source.device.type == "cpu":
        gather_rows(source, numbers, target)
    else:
        block_rows = max(1, DEVICE_BLOCK_BYTES // max(1, source[:1].nbytes))
        for place, rows in zip(target.split(block_rows), numbers.split(block_rows), strict=True):
            block = rows.to(source.device, non_blocking=True)
            place.copy_(source.index_select(0, block), non_blocking=True)
    return taken


def _tracker_of(live: Mapping[str, Any]) -> TrackedRows | None:
    """The tracker whose tables are in a state dict; None if there is no such tracker with a planner.

    Raises:
        ConfigurationError: There are several.
    """
    found = trackers.planned_for(shard.tensor for value in live.values() for shard in local_shards(value))
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} trackers with a planner know tables of this state dict, and dcp.async_save does not say "
            "which of them it is for: close the others, or track all tables by one"
        )
    return found[0] if found else None


def _stand_ins(live: Mapping[str, Any], values: Mapping[ShardKey, StagedValue], cut: Cut) -> dict[str, Any]:
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
        staged[fqn] = StagedTensor(tuple(write_items.get(fqn, ())), is_replicated(value), shards)
    return staged

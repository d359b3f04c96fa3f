"""Staging: take the snapshot of an asynchronous save, and copy its rows at the same moment.

``dcp.async_save`` copies the state and saves the copy in the background. If the save took its snapshot later, a row
that is trained in between would count as saved, although the copy has its earlier value. So the copy takes the
snapshot. The writer is its own stager: it freezes the modified rows, and copies what the save will store. That is the
modified rows, and everything that is not tracked.

Each rank plans by itself which rows of which shards to copy, from the checkpoint chain as it knows it. No rank waits
for another here, because training waits, too. The coordinator checks the result during planning. Rows that exceed
``staging_bytes`` are not copied. The save writes them first, and training waits until then (in
``synchronize_staging``), so that memory stays limited.
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
    """A shard to stage.

    Attributes:
        key: The shard.
        source: Its live values.
        numbers: int64 [k], the rows to copy, or None for all. On the host, because those of all tables take much
            memory.
        rows: The modified rows, by their positions in the copy; None if all rows must be stored.
        scheme: Scheme by which the device encodes rows before the copy; None if values are copied.
        is_live: Whether the shard is not copied, because it exceeds the limit, but written before training continues.
    """

    key: ShardKey
    source: Tensor
    numbers: Tensor | None
    rows: StagedRows | None
    scheme: DeviceScheme | None = None
    is_live: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The copy's shape."""
        sizes = tuple(self.source.shape)
        return sizes if self.numbers is None else (len(self.numbers), *sizes[1:])

    @property
    def num_bytes(self) -> int:
        """The copy's size in bytes, without rows that codes cannot represent."""
        if self.scheme is None:
            return padded_bytes(self.shape, self.source.dtype)
        row_bytes = self.scheme.row_bytes(self.shape[1], self.source.dtype)
        return padded_bytes((self.shape[0], row_bytes), torch.uint8)

    @property
    def memory(self) -> object:
        """A key that is equal for shards that need the same copy: the same memory under several names."""
        return memory_key(self.source) or self.key, id(self.numbers), self.scheme


def plan_staging(live: Mapping[str, Any], cut: Cut, rules: SchemeRules, max_bytes: int) -> list[ShardCopy]:
    """Return what a save needs of a state dict.

    Args:
        live: The flattened state dict.
        cut: Its snapshot.
        rules: The quantization rules.
        max_bytes: Bytes that copies take at most; the largest tables are not copied if they exceed it.
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
                # Replicas may turn out to have different modified rows, and must then store all rows.
                is_whole = Since.EVER in (cut.staged or ()) or (is_replicated(value) and not is_alone)
                select = _host_masks if is_whole else _lists
                selected[item.group] = select(item, item.rows, cut)
            copies.append(ShardCopy(key, source, *selected[item.group]))
    return copies


def _since(cut: Cut) -> Since:
    """Return what the rows of a delta were modified since; ``EVER`` if the save can only be a baseline."""
    return next((since for since in cut.staged or () if since is not Since.EVER), Since.EVER)


def _masks(item: TrackedItem, modified: ModifiedRows, cut: Cut) -> tuple[None, StagedRows]:
    """Return the modified rows as masks over all rows."""
    since, captured = _since(cut), cut.captured(item, modified)
    parts = modified.select_parts(since, cut.is_by_heat(since))
    digest = RowMask.union(parts).digest() + (captured.digest() if captured is not None else b"")
    return None, StagedRows(since, parts, digest, captured)


def _host_masks(item: TrackedItem, modified: ModifiedRows, cut: Cut) -> tuple[None, StagedRows]:
    """Return the masks in host memory, where the copies of all rows are, too; another process can receive them."""
    _, rows = _masks(item, modified, cut)
    masks = (RowMask(part.mask.cpu()) for part in rows.parts if isinstance(part, RowMask))
    return None, replace(rows, parts=tuple(masks))


def _lists(item: TrackedItem, modified: ModifiedRows, cut: Cut) -> tuple[Tensor, StagedRows]:
    """Return the numbers of the modified rows to copy, and the same rows by their positions in the copy."""
    since, captured = _since(cut), cut.captured(item, modified)
    parts = modified.select_numbers(since, cut.is_by_heat(since))
    lists, first = [], 0
    for numbers in parts:
        lists.append(RowList(numbers, first))
        first += len(numbers)
    return torch.cat(parts) if len(parts) > 1 else parts[0], StagedRows(since, tuple(lists), b"", captured)


def _over(max_bytes: int, copies: Sequence[ShardCopy], cut: Cut) -> frozenset[ShardKey]:
    """Return the shards that exceed the limit: the largest tables, each with its optimizer state."""
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
    """Return the plan for a shard that is not copied; its modified rows keep their own numbers."""
    rows, item = wanted.rows, cut.items.get(wanted.key)
    if wanted.numbers is not None and item is not None and isinstance(item.rows, ModifiedRows):
        if item.group not in masks:
            _, masks[item.group] = _masks(item, item.rows, cut)
        rows = masks[item.group]
    return replace(wanted, numbers=None, rows=rows, scheme=None, is_live=True)


def _scheme_of(wanted: ShardCopy, cut: Cut, rules: SchemeRules) -> DeviceScheme | None:
    """Return the scheme by which rows of a tracked shard are encoded before the copy; None if values are copied."""
    source, item = wanted.source, cut.items.get(wanted.key)
    is_table = source.dim() == 2 and source.stride(1) == 1 and math.prod(wanted.shape) > 0
    if item is None or not is_table or not is_quantized_first(source):
        return None
    scheme = choose_scheme(rules, item.fqn, item.is_table, source, wanted.numbers, cut.num_restores)
    return scheme if has_kernel(scheme) else None


STAGING_BYTES = 8 << 30


@dataclass(frozen=True)
class StagingOptions:
    """The options for staging of a writer.

    Attributes:
        rules: The quantization rules.
        max_bytes: Bytes that copies take at most.
        timeout_secs: Seconds to wait for previous saves.
        destination: Destination of the rows.
    """

    rules: SchemeRules
    max_bytes: int
    timeout_secs: float
    destination: RowDestination


def stage(state_dict: Mapping[str, Any], options: StagingOptions, buffers: StagingBuffers) -> dict[str, Any]:
    """Wait for previous saves, take a snapshot, and copy what an asynchronous save will store.

    If this fails, the save raises the error during planning. An error raised here would leave the other ranks waiting.

    Returns:
        The state dict to save instead of the live one, with its ``StagedSave``.
    """
    staged = StagedSave(running_saves.add(has_begun=False))
    try:
        staged.running.wait_for_earlier(options.timeout_secs)
        live, paths = flatten_state_dict(dict(state_dict))
        # A tensor made in inference mode could not be changed outside of it.
        with record_function("torchrec_cnr.stage"), torch.inference_mode(False):
            values = _staged(live, staged, options, buffers)
        return {**unflatten_state_dict(values, paths), STAGED: staged}
    except Exception as error:  # noqa: BLE001 - raised by the save, on all ranks
        staged.failure = error.with_traceback(None)  # a traceback would keep the copies alive
        return {STAGED: staged}


def _staged(
    live: Mapping[str, Any], staged: StagedSave, options: StagingOptions, buffers: StagingBuffers
) -> dict[str, Any]:
    """Return the flattened values that are saved instead of the live ones."""
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
    finally:  # copies that have begun read the row numbers, and write to the buffer, which the next save may use
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
    """Return copies by memory, some of them still in progress. All encoding begins before any wait."""
    started = {
        memory: start_codes(wanted.source, wanted.numbers, wanted.scheme, buffer.take)
        for memory, wanted in unique.items()
        if wanted.scheme is not None
    }
    copies = {memory: _copy(wanted, buffer) for memory, wanted in unique.items() if memory not in started}
    return {**copies, **dict(zip(started, finish_codes(list(started.values())), strict=True))}


def _copy(wanted: ShardCopy, buffer: StagingBuffer) -> StagedValue:
    """Copy the values of a shard, or of some of its rows."""
    source, numbers = wanted.source, wanted.numbers
    if source.layout is not torch.strided or dtype_name(source) not in DTYPES:
        return source.to("cpu", copy=True)  # the writer will refuse it, with its name in the message
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
    """Return the tracker whose tables are in a state dict; None if no such tracker has a planner.

    Raises:
        ConfigurationError: There are several.
    """
    found = trackers.planned_for(shard.tensor for value in live.values() for shard in local_shards(value))
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} trackers that have a planner track tables of this state dict, and dcp.async_save does not "
            "say which of them to use: close the others, or track all tables by one"
        )
    return found[0] if found else None


def _stand_ins(live: Mapping[str, Any], values: Mapping[ShardKey, StagedValue], cut: Cut) -> dict[str, Any]:
    """Return the state dict with what was staged instead of its tensors."""
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

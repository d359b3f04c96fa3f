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
from itertools import accumulate, chain
from typing import Any
from weakref import WeakSet

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
from torchrec_cnr.quantization import SchemeRules, TransformCoded
from torchrec_cnr.quantization.row_transform import RowTransform
from torchrec_cnr.quantization.scheme import DeviceScheme
from torchrec_cnr.saving.cut import Cut, Cuts, StagedRows, TrackedItem
from torchrec_cnr.saving.encoding import LEARNING_ROWS, SAMPLE_ROWS, choose_scheme, sampled_rows
from torchrec_cnr.saving.plug_in_messages import STAGED, StagedSave, StagedTensor
from torchrec_cnr.saving.running_saves import running_saves
from torchrec_cnr.saving.sinks import RowDestination
from torchrec_cnr.saving.staged_values import (
    DEVICE_BLOCK_BYTES,
    Copies,
    StagedValue,
    StagingBuffer,
    StagingBuffers,
    finish_codes,
    has_kernel,
    is_quantized_first,
    number_blocks,
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
from torchrec_cnr.tracking.modified_rows import DeviceRows, ModifiedRows, RowList, RowMask
from torchrec_cnr.tracking.tracked_tables import TrackedRows, trackers


@dataclass(frozen=True, eq=False)
class ShardCopy:
    """A shard to stage.

    Attributes:
        key: The shard.
        source: Its live values.
        numbers: The rows to copy, or None for all: int64 [k] on the host; or, for a table on another device, the
            rows there, whose numbers are copied to the host with their values.
        rows: The modified rows, by their positions in the copy; None if all rows must be stored. Its parts are missing
            until the numbers are on the host.
        scheme: Scheme by which the device encodes rows before the copy; None if values are copied.
        is_live: Whether the shard is not copied, because it exceeds the limit, but written before training continues.
    """

    key: ShardKey
    source: Tensor
    numbers: Tensor | DeviceRows | None
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


def plan_staging(live: Mapping[str, Any], cut: Cut, options: "StagingOptions") -> list[ShardCopy]:
    """Return what a save needs of a state dict.

    Args:
        live: The flattened state dict.
        cut: Its snapshot.
        options: The options; the largest tables are not copied if copies would take more than ``max_bytes``.
    """
    copies = [replace(shard_copy, scheme=_scheme_of(shard_copy, cut, options)) for shard_copy in _copies(live, cut)]
    excess_keys = _over(options.max_bytes, copies, cut)
    masks: dict[int, StagedRows] = {}
    return [_live(shard_copy, cut, masks) if shard_copy.key in excess_keys else shard_copy for shard_copy in copies]


def _copies(live: Mapping[str, Any], cut: Cut) -> list[ShardCopy]:
    selected: dict[int, tuple[Tensor | DeviceRows | None, StagedRows]] = {}
    copies = []
    since = _since(cut)
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    for fqn, value in live.items():
        for shard in local_shards(value):
            key, source = (fqn, shard.box.offsets), shard.tensor.detach()
            item = cut.items.get(key)
            if item is not None and item.is_of_id_map and isinstance(item.values, Tensor):
                source = item.values  # in the order of rows
            if item is None or not isinstance(item.rows, ModifiedRows) or cut.is_whole(item, since):
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
    digest = item.digest_of(RowMask.union(parts)) + (captured.digest() if captured is not None else b"")
    return None, StagedRows(since, parts, digest, captured)


def _host_masks(item: TrackedItem, modified: ModifiedRows, cut: Cut) -> tuple[None, StagedRows]:
    """Return the masks in host memory, where the copies of all rows are, too; another process can receive them."""
    _, rows = _masks(item, modified, cut)
    masks = (RowMask(part.mask.cpu()) for part in rows.parts if isinstance(part, RowMask))
    return None, replace(rows, parts=tuple(masks))


def _lists(item: TrackedItem, modified: ModifiedRows, cut: Cut) -> tuple[Tensor | DeviceRows, StagedRows]:
    """Return the modified rows to copy, and the same rows by their positions in the copy."""
    since, captured = _since(cut), cut.captured(item, modified)
    if is_quantized_first(modified.marked):
        return modified.select_on_device(since, cut.is_by_heat(since)), StagedRows(since, (), b"", captured)
    parts = modified.select_numbers(since, cut.is_by_heat(since))
    return torch.cat(parts) if len(parts) > 1 else parts[0], StagedRows(since, _in_turn(parts), b"", captured)


def _in_turn(parts: Sequence[Tensor]) -> tuple[RowList, ...]:
    """Return the rows of parts that are copied one after another."""
    firsts = accumulate(map(len, parts), initial=0)
    return tuple(RowList(numbers, first) for numbers, first in zip(parts, firsts, strict=False))


def _over(max_bytes: int, copies: Sequence[ShardCopy], cut: Cut) -> frozenset[ShardKey]:
    """Return the shards that exceed the limit: the largest tables, each with its optimizer state."""
    groups: dict[object, list[ShardCopy]] = {}
    for shard_copy in copies:
        item = cut.items.get(shard_copy.key)
        groups.setdefault(shard_copy.key if item is None else item.group, []).append(shard_copy)
    excess_keys: set[ShardKey] = set()
    sizes = [(sum(shard_copy.num_bytes for shard_copy in group), group) for group in groups.values()]
    num_bytes = sum(size for size, _ in sizes)
    for size, group in sorted(sizes, key=lambda size_and_group: -size_and_group[0]):
        if num_bytes <= max_bytes:
            break
        excess_keys.update(shard_copy.key for shard_copy in group)
        num_bytes -= size
    return frozenset(excess_keys)


def _live(shard_copy: ShardCopy, cut: Cut, masks: dict[int, StagedRows]) -> ShardCopy:
    """Return the plan for a shard that is not copied; its modified rows keep their own numbers."""
    rows, item = shard_copy.rows, cut.items.get(shard_copy.key)
    if shard_copy.numbers is not None and item is not None and isinstance(item.rows, ModifiedRows):
        if item.group not in masks:
            _, masks[item.group] = _masks(item, item.rows, cut)
        rows = masks[item.group]
    return replace(shard_copy, numbers=None, rows=rows, scheme=None, is_live=True)


def _scheme_of(shard_copy: ShardCopy, cut: Cut, options: "StagingOptions") -> DeviceScheme | None:
    """Return the scheme by which rows of a tracked shard are encoded before the copy; None if values are copied.

    A transform is used if it is known. To learn one takes tenths of a second, for which training would wait. So values
    are copied then, and the save learns a transform while training continues.
    """
    source, item = shard_copy.source, cut.items.get(shard_copy.key)
    is_table = source.dim() == 2 and source.stride(1) == 1 and math.prod(shard_copy.shape) > 0
    if item is None or not is_table or not is_quantized_first(source):
        return None
    rows = RowMask(numbers.mask) if isinstance(numbers := shard_copy.numbers, DeviceRows) else numbers
    rule = options.rules.rule_for(item.fqn, source.dtype, item.is_table)
    if isinstance(rule, TransformCoded):
        known = options.transforms.get(shard_copy.key)
        if known is None:
            return None
        sample = sampled_rows(source, rows, LEARNING_ROWS)
        other = rule.error_of.choose(lambda: sample[:SAMPLE_ROWS], cut.num_restores)
        return rule.choose_known(sample, other, known)
    selected = [rows] if isinstance(rows, RowMask) else rows
    scheme = choose_scheme(options.rules, item.fqn, item.is_table, source, selected, cut.num_restores)
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
        transforms: The transforms that saves of this process have learned last, by shard.
    """

    rules: SchemeRules
    max_bytes: int
    timeout_secs: float
    destination: RowDestination
    transforms: Mapping[ShardKey, RowTransform]


def stage(
    state_dict: Mapping[str, Any],
    options: StagingOptions,
    used: WeakSet[StagingBuffers],
    tracker: TrackedRows | None = None,
) -> dict[str, Any]:
    """Wait for previous saves, take a snapshot, and copy what an asynchronous save will store.

    If this fails, the save raises the error during planning. An error raised here would leave the other ranks waiting.

    Args:
        state_dict: The live state.
        options: The writer's options.
        used: The staging buffers that the writer has used; those of the tracker are added.
        tracker: The tracker, if the writer knows it.

    Returns:
        The state dict to save instead of the live one, with its ``StagedSave``.
    """
    staged_save = StagedSave(running_saves.add(has_begun=False))
    try:
        staged_save.running.wait_for_earlier(options.timeout_secs)
        live, paths = flatten_state_dict(dict(state_dict))
        # A tensor made in inference mode could not be changed outside of it.
        with record_function("torchrec_cnr.stage"), torch.inference_mode(False):
            values = _staged(live, staged_save, options, used, tracker)
        return {**unflatten_state_dict(values, paths), STAGED: staged_save}
    except Exception as error:  # noqa: BLE001 - raised by the save, on all ranks
        staged_save.failure = error.with_traceback(None)  # a traceback would keep the copies alive
        return {STAGED: staged_save}


def _staged(
    live: Mapping[str, Any],
    staged_save: StagedSave,
    options: StagingOptions,
    used: WeakSet[StagingBuffers],
    tracker: TrackedRows | None,
) -> dict[str, Any]:
    """Return the flattened values that are saved instead of the live ones."""
    tracker = _tracker_of(live) if tracker is None else tracker
    if tracker is None or not isinstance(tracker.saves, Cuts):
        wait_for_devices(live.values())
        return {fqn: copied(value) for fqn, value in live.items()}
    cuts = tracker.saves
    cut = cuts.cut(live, staged_save.running, cuts.policy, options.destination, options.timeout_secs, is_staged=True)
    began = time.monotonic()
    copies = plan_staging(live, cut, options)
    to_copy = [shard_copy for shard_copy in copies if not shard_copy.is_live]
    copies_by_memory = {shard_copy.memory: shard_copy for shard_copy in to_copy}
    on_devices = {id(rows): rows for rows in (each.numbers for each in to_copy) if isinstance(rows, DeviceRows)}
    is_on_device = any(shard_copy.source.device.type == "cuda" for shard_copy in to_copy)
    num_bytes = sum(padded_bytes((len(rows),), torch.int64) for rows in on_devices.values())
    num_bytes += sum(shard_copy.num_bytes for shard_copy in copies_by_memory.values())
    used.add(buffers := StagingBuffers.of(tracker))
    buffer = buffers.take(num_bytes, is_on_device, staged_save.running)
    numbers = {key: buffer.take((len(rows),), torch.int64).tensor() for key, rows in on_devices.items()}
    try:
        by_memory = _copied(copies_by_memory, on_devices, numbers, buffer)
    finally:  # copies that have begun write to the buffer, which the next save may use
        wait_for_devices(chain((each.source for each in to_copy), (rows.mask for rows in on_devices.values())))
    values: dict[ShardKey, StagedValue] = {shard_copy.key: by_memory[shard_copy.memory] for shard_copy in to_copy}
    values |= {shard_copy.key: shard_copy.source for shard_copy in copies if shard_copy.is_live}
    rows_by_id = {
        id(rows): replace(rows, parts=_in_turn(numbers[id(on_device)].split(on_device.part_sizes)))
        for rows, on_device in ((shard_copy.rows, shard_copy.numbers) for shard_copy in to_copy)
        if rows is not None and isinstance(on_device, DeviceRows)
    }
    items = {
        shard_copy.key: replace(
            cut.items[shard_copy.key],
            values=values[shard_copy.key],
            rows=rows_by_id.get(id(shard_copy.rows), shard_copy.rows),
            live_state=None,
        )
        for shard_copy in copies
        if shard_copy.key in cut.items
    }
    staged_save.cut, staged_save.tracker_id = replace(cut, items=items), id(tracker)
    staged_save.live = frozenset(shard_copy.key for shard_copy in copies if shard_copy.is_live)
    staged_save.phases = SavePhases(time.monotonic() - began, buffer.taken_bytes)
    return _stand_ins(live, values, staged_save.cut)


def _copied(
    copies_by_memory: Mapping[object, ShardCopy],
    on_devices: Mapping[int, DeviceRows],
    numbers: Mapping[int, Tensor],
    buffer: StagingBuffer,
) -> dict[object, StagedValue]:
    """Return copies by memory, some of them still in progress. All encoding begins before any wait.

    Args:
        copies_by_memory: The shards to copy.
        on_devices: Rows on devices, by their id.
        numbers: Where to copy their numbers.
        buffer: The staging buffer.
    """
    devices = {shard_copy.source.device for shard_copy in copies_by_memory.values()}
    devices.update(rows.mask.device for rows in on_devices.values())
    copies = {device: Copies(device) for device in devices}
    for key, rows in on_devices.items():
        start = 0
        for block in rows.blocks(len(rows)):
            copies[rows.mask.device].begin(numbers[key][start : start + len(block)], block)
            start += len(block)
    started_codes = {}
    for memory, shard_copy in copies_by_memory.items():
        if shard_copy.scheme is not None:
            source, rows_to_copy = shard_copy.source, shard_copy.numbers
            on_host = numbers[id(rows_to_copy)] if isinstance(rows_to_copy, DeviceRows) else rows_to_copy
            row_bytes = shard_copy.scheme.row_bytes(source.shape[1], source.dtype)
            codes = buffer.take((shard_copy.shape[0], row_bytes), torch.uint8)
            started_codes[memory] = start_codes(
                source, rows_to_copy, on_host, shard_copy.scheme, codes, copies[source.device]
            )
    values = {
        memory: _copy(shard_copy, buffer, copies[shard_copy.source.device])
        for memory, shard_copy in copies_by_memory.items()
        if memory not in started_codes
    }

    def wait() -> None:
        for device_copies in copies.values():
            device_copies.wait()

    return {**values, **dict(zip(started_codes, finish_codes(list(started_codes.values()), wait), strict=True))}


def _copy(shard_copy: ShardCopy, buffer: StagingBuffer, copies: Copies) -> StagedValue:
    """Copy the values of a shard, or of some of its rows."""
    source, rows = shard_copy.source, shard_copy.numbers
    if source.layout is not torch.strided or dtype_name(source) not in DTYPES:
        return source.to("cpu", copy=True)  # the writer will refuse it, with its name in the message
    buffer_tensor = buffer.take(shard_copy.shape, source.dtype)
    target = buffer_tensor.tensor()
    if rows is None:
        copies.begin(target, source)
    elif isinstance(rows, Tensor) and source.device.type == "cpu":
        gather_rows(source, rows, target)
    else:
        start = 0
        block_rows = max(1, DEVICE_BLOCK_BYTES // max(1, source[:1].nbytes))
        for block in number_blocks(rows, len(source), block_rows, source.device):
            copies.begin(target[start : start + len(block)], source.index_select(0, block))
            start += len(block)
    return buffer_tensor


def _tracker_of(live: Mapping[str, Any]) -> TrackedRows | None:
    """Return the tracker whose tables are in a state dict; None if no such tracker has a planner.

    Raises:
        ConfigurationError: There are several, or the model was resharded.
    """
    planned_trackers = trackers.planned_for(shard.tensor for value in live.values() for shard in local_shards(value))
    if len(planned_trackers) > 1:
        raise ConfigurationError(
            f"{len(planned_trackers)} trackers that have a planner track tables of this state dict, and dcp.async_save "
            "does not say which of them to use: close the others, track all tables by one, or pass "
            "CNRStorageWriter(tracker=...)"
        )
    for tracker in () if planned_trackers else trackers.planned():
        tracker.check_model()
    return planned_trackers[0] if planned_trackers else None


def _stand_ins(live: Mapping[str, Any], values: Mapping[ShardKey, StagedValue], cut: Cut) -> dict[str, Any]:
    """Return the state dict with what was staged instead of its tensors."""
    tensors = {fqn: value for fqn, value in live.items() if isinstance(value, Tensor)}
    write_items: dict[str, list[WriteItem]] = {}
    for item in create_default_local_save_plan(tensors, is_coordinator=False).items:
        write_items.setdefault(item.index.fqn, []).append(item)
    stand_ins: dict[str, Any] = {}
    for fqn, value in live.items():
        if fqn not in tensors:
            stand_ins[fqn] = copy.deepcopy(value)
            continue
        keys = [(fqn, shard.box.offsets) for shard in local_shards(value)]
        shards = {key[1]: values[key] for key in keys if key not in cut.items}
        stand_ins[fqn] = StagedTensor(tuple(write_items.get(fqn, ())), is_replicated(value), shards)
    return stand_ins

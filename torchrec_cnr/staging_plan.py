"""Staging plans: which shards a save needs copies of, and of which rows. Nothing is copied yet."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_cnr.arena import padded_bytes
from torchrec_cnr.choosing import chosen_scheme, sampled_rows
from torchrec_cnr.cuts import Cut, StagedRows, TrackedItem
from torchrec_cnr.modified import ModifiedRows, RowList, RowMask
from torchrec_cnr.policies import Since
from torchrec_cnr.schemes import NoQuantization, Scheme, SchemeRules
from torchrec_cnr.shards import ShardKey, is_replicated, local_shards, memory_key
from torchrec_cnr.staged_codes import has_kernel, is_quantized_first


@dataclass(frozen=True, eq=False)
class ShardCopy:
    """A shard that is to be staged.

    Attributes:
        key: The shard.
        source: Its values, live.
        numbers: int64 [k], on the source's device: the rows to copy; None for all.
        rows: The modified ones, as they lie in the copy; None if all must be stored.
        scheme: What they are encoded by first; None if values are copied.
        is_live: Whether it is not copied, for want of room, but written before training goes on.
    """

    key: ShardKey
    source: Tensor
    numbers: Tensor | None
    rows: StagedRows | None
    scheme: Scheme | None = None
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
            if item is None or item.is_replaced or since is Since.EVER or not isinstance(item.rows, ModifiedRows):
                copies.append(ShardCopy(key, source, None, None))
                continue
            if item.group not in selected:
                # Ranks may disagree about the modified rows of what they all hold, and must then store all.
                is_whole = Since.EVER in (cut.staged or ()) or (is_replicated(value) and not is_alone)
                selected[item.group] = (None, _masks(item, cut)) if is_whole else _lists(item, cut)
            copies.append(ShardCopy(key, source, *selected[item.group]))
    return copies


def _since(cut: Cut) -> Since:
    """What the rows of a delta were modified since; ``EVER`` if it can be a baseline only."""
    return next((since for since in cut.staged or () if since is not Since.EVER), Since.EVER)


def _masks(item: TrackedItem, cut: Cut) -> StagedRows:
    """Modified rows among all rows."""
    since, touched = _since(cut), item.touched()
    parts = _modified(item).select_parts(since, cut.is_by_heat(since))
    digest = RowMask.union(parts).digest() + (touched.digest() if touched is not None else b"")
    return StagedRows(since, parts, digest, touched)


def _lists(item: TrackedItem, cut: Cut) -> tuple[Tensor, StagedRows]:
    """Modified rows as they will lie one behind the other, and where."""
    since = _since(cut)
    parts = _modified(item).select_numbers(since, cut.is_by_heat(since))
    lists, first = [], 0
    for numbers in parts:
        lists.append(RowList(numbers.cpu(), first))
        first += len(numbers)
    return torch.cat(parts) if len(parts) > 1 else parts[0], StagedRows(since, tuple(lists), b"", item.touched())


def _modified(item: TrackedItem) -> ModifiedRows:
    assert isinstance(item.rows, ModifiedRows)  # else no rows are selected
    return item.rows


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
    rows = wanted.rows
    if wanted.numbers is not None:
        item = cut.items[wanted.key]
        rows = masks.get(item.group) or _masks(item, cut)
        masks[item.group] = rows
    return replace(wanted, numbers=None, rows=rows, scheme=None, is_live=True)


def _scheme_of(wanted: ShardCopy, cut: Cut, rules: SchemeRules) -> Scheme | None:
    """What rows of a tracked shard are encoded by before they are copied, if they are."""
    source, item = wanted.source, cut.items.get(wanted.key)
    is_table = source.dim() == 2 and source.stride(1) == 1 and math.prod(wanted.shape) > 0
    if item is None or not is_table or not is_quantized_first(source):
        return None
    rule = rules.rule_for(item.fqn, source.dtype, item.is_table)
    if isinstance(rule, NoQuantization):
        return None
    scheme = chosen_scheme(rule, sampled_rows(source, wanted.numbers), cut.num_restores)
    return scheme if has_kernel(scheme) else None

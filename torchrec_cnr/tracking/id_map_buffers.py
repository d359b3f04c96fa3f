"""The buffers of id maps: which of their values have changed since the last snapshot, found by comparison.

A managed-collision module has buffers with one value for each row of its table: the raw id of the row, counts, times.
No hook shows which of them a step has changed. So each snapshot compares them with a copy of what the last one saw. A
copy of such a value is as small as a digest of it.

``MCHManagedCollisionModule`` keeps its buffers sorted by raw id, and has the row of each id in one more buffer. One new
id moves all values behind it. So a snapshot brings these buffers into the order of the rows: the n-th value is that of
the n-th row, and the buffer of rows becomes 0, 1, 2, ... Then a new id changes the values of its row alone. A load
sorts the buffers again (``loading.id_maps``). A snapshot that a stable sort would not bring back exactly is not
reordered, and stored whole.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.sharding import MemoryKey, ShardKey, memory_key
from torchrec_cnr.tracking.modified_rows import ModifiedRows

SORTED_IDS, ROW_NUMBERS, SORTED_PREFIX = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_mch_"
_NOT_OF_ROWS = "_output_segments_tensor"  # its size does not depend on the table, but may be equal
_BLOCK_ROWS, _DEVICE_BLOCK_ROWS = 1 << 17, 1 << 24  # on the host, 1 MiB of int64; on a device, fewer launches
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class IdMapBuffer:
    """A buffer on this rank with one value, or one tuple of values, for each row of a shard of a table.

    Attributes:
        name: Its name in its module.
        rows: The rows whose values have changed.
        live: The module's own tensor, at the last snapshot.
        values: What a save stores, [num_rows, ...]. The next snapshot overwrites it, so the save must have ended then.
    """

    def __init__(self, name: str, live: Tensor) -> None:
        self.name = name
        self.live = self.values = live
        self.rows = ModifiedRows(name, Box.whole(tuple(live.shape)), live.device)
        self._is_known = self._has_values = False

    def take(self, positions: Tensor | None, is_known: bool) -> None:
        """Mark the values that have changed since the last snapshot, or all if that snapshot is not comparable.

        Args:
            positions: Where the value of each row is, int64 [num_rows]; None if the values are in order.
            is_known: Whether the order of the values is that of the last snapshot.
        """
        live, last_values = self.live, self.values
        if (last_values.shape, last_values.device) != (live.shape, live.device):
            self.rows = ModifiedRows(self.name, Box.whole(tuple(live.shape)), live.device)
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (last_values, live)]
        if not self._has_values or kinds[0] != kinds[1]:
            self.values = torch.empty_like(live, memory_format=torch.contiguous_format)
            self._has_values, self._is_known = True, False
        is_compared, bits = self._is_known and is_known, _BITS[live.element_size()]
        # Block by block, because new memory for all values would cost more time than their comparison.
        block_rows = _BLOCK_ROWS if live.device.type == "cpu" else _DEVICE_BLOCK_ROWS
        for start in range(0, len(live), block_rows):
            rows = slice(start, start + block_rows)
            new = (live[rows] if positions is None else live.index_select(0, positions[rows])).contiguous()
            if is_compared:
                is_changed = new.view(bits) != self.values[rows].view(bits)
                self.rows.marked[rows] |= is_changed if live.dim() == 1 else is_changed.flatten(1).any(1)
            self.values[rows] = new
        if not is_compared:
            self.rows.mark_all()
        self._is_known = True

    def forget(self) -> None:
        """Mark all values at the next snapshot."""
        self._is_known = False


@dataclass(frozen=True, eq=False)
class LocatedBuffer:
    """A buffer in a state dict.

    Attributes:
        key: Its FQN, and the offsets of its shard.
        buffer: The buffer.
    """

    key: ShardKey
    buffer: IdMapBuffer


class IdMapModule:
    """The buffers of one managed-collision module on this rank.

    Args:
        module: The module.
        num_rows: Rows of its shard of the table.
        metadata: Names of its metadata, which it sorts by raw id with the ids; None if it sorts nothing.

    Attributes:
        buffers: Its buffers.
    """

    def __init__(self, module: nn.Module, num_rows: int, metadata: Collection[str] | None) -> None:
        self._module = module
        self._metadata = metadata
        self.buffers = tuple(
            IdMapBuffer(name, value.detach())
            for name, value in module.state_dict().items()
            if name != _NOT_OF_ROWS
            and "." not in name  # a buffer of a module inside it
            and value.dim()
            and len(value) == num_rows
            and value.numel()
            and value.element_size() in _BITS
        )
        self._has_row_order: bool | None = None

    @property
    def sorted_names(self) -> frozenset[str]:
        """The names of the buffers that are sorted by raw id in the module; none if it has no order of ids."""
        if self._metadata is None:
            return frozenset()
        names = frozenset(buffer.name for buffer in self.buffers if buffer.name.startswith(SORTED_PREFIX))
        known = {SORTED_IDS, ROW_NUMBERS, *(f"{SORTED_PREFIX}{name}" for name in self._metadata)}
        return names if names == known else frozenset()  # a buffer of a subclass may not be sorted with the others

    def take(self) -> None:
        """Take a snapshot of the buffers, and mark the rows whose values have changed since the last one."""
        live = {buffer.name: buffer.live for buffer in self.refreshed()}
        names = self.sorted_names
        positions = positions_of_rows(live[SORTED_IDS], live[ROW_NUMBERS]) if names else None
        is_known = self._has_row_order == (positions is not None)
        for buffer in self.buffers:
            if positions is not None and buffer.name in names:
                buffer.take(positions, is_known)
            else:
                # Without an order of rows, one new id moves all values, and their numbers would cost bytes.
                buffer.take(None, is_known and not buffer.name.startswith(SORTED_PREFIX))
        self._has_row_order = positions is not None

    def refreshed(self) -> Sequence[IdMapBuffer]:
        """Return the buffers, after looking for the module's present tensors."""
        for buffer in self.buffers:
            buffer.live = getattr(self._module, buffer.name).detach()
        return self.buffers

    def restored(self, known: Collection[int]) -> None:
        """Take a snapshot after a load, as the last checkpoint has it.

        Args:
            known: The ids of the buffers whose rows in the checkpoint are those of the snapshot.
        """
        self.take()
        names = self.sorted_names
        is_map_known = bool(self._has_row_order) and all(
            id(buffer) in known for buffer in self.buffers if buffer.name in names
        )
        for buffer in self.buffers:
            if is_map_known if buffer.name in names else id(buffer) in known:
                buffer.rows.marked.zero_()
            else:
                buffer.forget()

    def locate(self, keys_by_memory: Mapping[MemoryKey | None, Collection[ShardKey]]) -> Iterator[LocatedBuffer]:
        """Yield the buffers in a state dict, after :meth:`take`. Those that are missing there are forgotten.

        A load knows by their names which buffers to sort. If they have others, the state dict is saved as it is.
        """
        names = self.sorted_names if self._has_row_order else frozenset()
        found = {buffer.name: keys_by_memory.get(memory_key(buffer.live), ()) for buffer in self.buffers}
        prefixes = {name: {fqn.removesuffix(f".{name}") for fqn, _ in found[name]} for name in names}
        fqns = {fqn for keys in found.values() for fqn, _ in keys}
        is_sorted_by_loads = all(
            of_name == prefixes[SORTED_IDS] and of_name.isdisjoint(fqns) for of_name in prefixes.values()
        )
        for buffer in self.buffers:
            if found[buffer.name] and (buffer.name not in names or is_sorted_by_loads):
                yield from (LocatedBuffer(key, buffer) for key in found[buffer.name])
            else:
                buffer.forget()


def positions_of_rows(ids: Tensor, row_numbers: Tensor) -> Tensor | None:
    """Return where the value of each row is, int64 [num_rows]; None if a stable sort by id would not restore the order.

    Args:
        ids: int64 [num_rows], sorted. Rows without an id have the largest one.
        row_numbers: int64 [num_rows], a permutation of consecutive numbers.
    """
    first, last, num_rows = int(row_numbers.min()), int(row_numbers.max()), len(row_numbers)
    if last - first != num_rows - 1:
        return None
    rows = row_numbers - first if first else row_numbers
    positions = torch.full_like(rows, -1).scatter_(0, rows, torch.arange(num_rows, device=rows.device))
    is_ordered = (ids[:-1] < ids[1:]) | ((ids[:-1] == ids[1:]) & (rows[:-1] < rows[1:]))
    return positions if bool((positions >= 0).all()) and bool(is_ordered.all()) else None

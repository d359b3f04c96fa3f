"""Modified rows: which rows of the shards on this rank have changed, and since which checkpoint.

The life of a modified row::

    mark ──> marked ──freeze──> frozen ──commit──> modified since the baseline
               ^                   │
               └─────rollback──────┘

``freeze`` takes the snapshot of a save: rows marked later belong to the next one. ``commit`` follows when the save's
manifest is in the store, ``rollback`` when it is not.

Marks are one bool per row on the table's own device, so marking is one ``index_fill_``. Every other representation was
much slower, and a set of row numbers grows without bound. The other two sets are ``RowBits``: a bit per row on the
host, and a bool per row on devices. Every snapshot reads all sets while training waits, so their size costs time.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.kernels.cpu.bitsets import Words, num_words, numbers_of_bits, pack, selected, set_bits, unpacked
from torchrec_cnr.policies import Since


@dataclass(frozen=True, eq=False)
class RowBits:
    """A set of rows.

    Attributes:
        num_rows: Number of rows of the shard.
        held: On the host int64 [num_rows / 64], the words of ``kernels.cpu.bitsets``; on a device bool [num_rows].
    """

    num_rows: int
    held: Tensor

    @classmethod
    def none_of(cls, num_rows: int, device: torch.device) -> "RowBits":
        """Return an empty set, for a shard whose table is on ``device``."""
        is_packed = device.type == "cpu"
        size, dtype = (num_words(num_rows), torch.int64) if is_packed else (num_rows, torch.bool)
        return cls(num_rows, torch.zeros(size, dtype=dtype, device=device))

    @property
    def _is_packed(self) -> bool:
        return self.held.dtype is torch.int64

    @property
    def _words(self) -> Words:
        return self.held.numpy().view(np.uint64)

    def mask(self) -> Tensor:
        """Return the set as bool [num_rows]; on a device this shares the set's memory."""
        return torch.from_numpy(unpacked(self._words, self.num_rows)) if self._is_packed else self.held

    def numbers(self) -> Tensor:
        """Return the members of a set on the host, int64 [k], in increasing order."""
        return torch.from_numpy(numbers_of_bits(self._words))

    def take(self, marked: Tensor) -> None:
        """Replace the set by the marked rows, bool [num_rows], and clear the marks."""
        if self._is_packed:
            pack(marked.numpy(), self._words, clears=True)
        else:
            self.held.copy_(marked)
            marked.zero_()

    def put(self, mask: Tensor) -> None:
        """Replace the set by the rows of a mask, bool [num_rows]."""
        if self._is_packed:
            pack(mask.contiguous().numpy(), self._words, clears=False)
        else:
            self.held.copy_(mask)

    def add(self, other: "RowBits") -> None:
        """Add the rows of another set of the shard."""
        self.held.bitwise_or_(other.held)

    def add_numbers(self, rows: Tensor) -> None:
        """Add rows, int64 [k], in any order, with or without repeats; not from several threads at once.

        Raises:
            IndexError: The shard has no such row.
        """
        if not self._is_packed:
            self.held.index_fill_(0, rows, True)
        elif len(rows):
            if rows.min() < 0 or rows.max() >= self.num_rows:
                raise IndexError(
                    f"expected rows of a shard of {self.num_rows} rows, got rows {int(rows.min())} to {int(rows.max())}"
                )
            set_bits(self._words, rows.contiguous().numpy())

    def union(self, other: "RowBits") -> "RowBits":
        """Return the union of both sets."""
        return RowBits(self.num_rows, self.held | other.held)

    def clear(self) -> None:
        """Remove all rows."""
        self.held.zero_()


def numbers_of(mask: Tensor) -> Tensor:
    """Return the positions where a mask is true, int64 [k] on its device."""
    if mask.device.type == "cpu":
        return torch.from_numpy(selected(mask.numpy()))
    return mask.nonzero().squeeze(1)


def count_rows(masks: Iterable[Tensor]) -> int:
    """Return the total number of rows in masks. Waits once for each device."""
    counts: dict[torch.device, Tensor] = {}
    for mask in masks:
        count = mask.count_nonzero()
        counts[mask.device] = counts[mask.device] + count if mask.device in counts else count
    return sum(map(int, counts.values()))


MAX_HEAT = 3
_WINDOW_ROWS = 1 << 22  # rows whose numbers are computed in one step: 32 MiB as int64


class ModifiedRows:
    """The modified rows of one shard of a table.

    Attributes:
        name: FQN of the table in its model, for messages.
        box: The shard's region of the table.
        marked: bool [num_rows], the rows modified since the last snapshot.
        heat: int8 [num_rows], or None if no policy uses it. Each commit adds one to the rows that it contains and
            subtracts one from the others, within 0 and ``MAX_HEAT``.

    Args:
        marked: Part of the marks of several tables, if given; nothing is marked yet.
    """

    def __init__(self, name: str, box: Box, device: torch.device, marked: Tensor | None = None) -> None:
        self.name = name
        self.box = box
        self.marked = marked if marked is not None else torch.zeros(box.num_rows, dtype=torch.bool, device=device)
        self.heat: Tensor | None = None
        self._frozen: RowBits | None = None
        self._since_baseline = RowBits.none_of(box.num_rows, device)
        self._spare: RowBits | None = None  # an earlier frozen set, kept because new memory costs more than a copy

    @property
    def frozen(self) -> Tensor | None:
        """The rows that were frozen for the save in progress, bool [num_rows]; None if there is none."""
        return self._frozen.mask() if self._frozen is not None else None

    @property
    def since_baseline(self) -> Tensor:
        """The rows in committed deltas since the baseline, bool [num_rows]."""
        return self._since_baseline.mask()

    def mark(self, rows: Tensor) -> None:
        """Mark rows, int [N], numbered within the shard, in any order, with or without repeats."""
        self.marked.index_fill_(0, rows.long(), True)

    def mark_where(self, mask: Tensor) -> None:
        """Mark the rows of a mask, bool [num_rows]."""
        self.marked |= mask

    def mark_all(self) -> None:
        """Mark every row."""
        self.marked.fill_(True)

    def freeze(self) -> None:
        """Move all marked rows to the frozen set."""
        row_bits = self._spare if self._spare is not None else RowBits.none_of(self.box.num_rows, self.marked.device)
        row_bits.take(self.marked)
        self._frozen, self._spare = row_bits, None

    def commit(self, is_baseline: bool, has_heat: bool = True) -> None:
        """Record that the frozen rows are in a committed checkpoint.

        Args:
            is_baseline: Whether that is a baseline.
            has_heat: Whether to record heat, because rows of different heat will be stored separately.
        """
        if self._frozen is None:
            return
        if is_baseline:
            self._since_baseline.clear()
        else:
            self._since_baseline.add(self._frozen)
        if not has_heat:
            self.heat = None
        elif self.heat is None:
            self.heat = self._frozen.mask().to(torch.int8)
        else:
            self.heat.sub_(1).add_(self._frozen.mask(), alpha=2).clamp_(0, MAX_HEAT)
        self._spare, self._frozen = self._frozen, None

    def rollback(self) -> None:
        """Mark the frozen rows again, because they are in no checkpoint. Rows marked since then remain marked."""
        if self._frozen is not None:
            self.marked |= self._frozen.mask()
            self._spare, self._frozen = self._frozen, None

    def restore(self) -> None:
        """Record that the table was overwritten from a checkpoint: no row is modified."""
        self._frozen = self.heat = None
        self.marked.zero_()
        self._since_baseline.clear()

    def restore_rows(self, rows: Tensor) -> None:
        """Record rows that came from a delta of that checkpoint, int64 [k], numbered within the shard."""
        self._since_baseline.add_numbers(rows.to(self.marked.device))

    def unite(self, since_baseline: Tensor, frozen: Tensor) -> None:
        """Replace the sets by the union over all replicas, masks bool [num_rows].

        A save may have begun or ended on other replicas only. Then rows that are frozen there are marked here.
        """
        self._since_baseline.put(since_baseline)
        if self._frozen is not None:
            self._frozen.put(frozen)
        else:
            self.mark_where(frozen)

    def select(self, since: Since) -> "RowMask":
        """Return the frozen rows, with those in deltas since the baseline if ``since`` asks for them.

        Raises:
            ConfigurationError: Nothing is frozen.
        """
        return RowMask(self._selected(since).mask())

    def _selected(self, since: Since) -> RowBits:
        if self._frozen is None:
            raise ConfigurationError(f"table {self.name!r}: no save is in progress")
        return self._frozen if since is Since.HEAD else self._frozen.union(self._since_baseline)

    def select_parts(self, since: Since, is_by_heat: bool) -> "tuple[RowMask, ...]":
        """Return the rows of :meth:`select`, in one part or in one for each heat.

        Raises:
            ConfigurationError: Nothing is frozen.
        """
        rows, heat = self.select(since), self.heat
        if not is_by_heat or heat is None:
            return (rows,)
        return tuple(RowMask(rows.mask & (heat == value)) for value in range(MAX_HEAT + 1))

    def select_on_device(self, since: Since, is_by_heat: bool) -> "DeviceRows":
        """Return the rows of :meth:`select_parts`. Waits for the device once, to learn how many rows there are."""
        return DeviceRows.of(self._selected(since).mask(), self.heat if is_by_heat else None)

    def select_numbers(self, since: Since, is_by_heat: bool) -> tuple[Tensor, ...]:
        """Return the row numbers of :meth:`select_parts`, int64 [k], of a shard on the host."""
        numbers = self._selected(since).numbers()
        if not is_by_heat or self.heat is None:
            return (numbers,)
        heat = self.heat.index_select(0, numbers)
        return tuple(numbers[heat == value] for value in range(MAX_HEAT + 1))


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Rows of one shard on a device, whose numbers are computed window by window, without waiting for the device.

    All numbers at a time would take more memory than a device may have left: 8 bytes for each modified row.

    Attributes:
        mask: bool [num_rows].
        heat: int8 [num_rows], if the rows are divided into parts, one for each heat; otherwise there is one part.
        counts: For each part, the number of its rows in each window.
    """

    mask: Tensor
    heat: Tensor | None
    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mask: Tensor, heat: Tensor | None) -> "DeviceRows":
        """Count the rows, and return them; waits for the device once."""
        rows = cls(mask, heat, ())
        num_parts = 1 if heat is None else MAX_HEAT + 1
        counts = [rows._members(part, start).count_nonzero() for part in range(num_parts) for start in rows._windows]
        per_part = torch.stack(counts).view(num_parts, -1).tolist() if counts else [[]] * num_parts
        return cls(mask, heat, tuple(map(tuple, per_part)))

    def __len__(self) -> int:
        return sum(self.part_sizes)

    @property
    def part_sizes(self) -> list[int]:
        """The number of rows of each part."""
        return [sum(counts) for counts in self.counts]

    def blocks(self, max_rows: int) -> Iterator[Tensor]:
        """Yield the numbers of the rows, int64 [at most max_rows] on the device: part by part, increasing in each."""
        for part, counts in enumerate(self.counts):
            for start, count in zip(self._windows, counts, strict=True):
                if count:
                    numbers = torch.nonzero_static(self._members(part, start), size=count).squeeze(1) + start
                    yield from numbers.split(max_rows)

    @property
    def _windows(self) -> range:
        return range(0, len(self.mask), _WINDOW_ROWS)

    def _members(self, part: int, start: int) -> Tensor:
        window = slice(start, start + _WINDOW_ROWS)
        return self.mask[window] if self.heat is None else self.mask[window] & (self.heat[window] == part)


@dataclass(frozen=True, eq=False)
class RowMask:
    """A set of rows of one shard.

    Attributes:
        mask: bool [num_rows].
    """

    mask: Tensor

    @classmethod
    def union(cls, masks: "tuple[RowMask, ...]") -> "RowMask":
        """Return the rows of all masks of one shard."""
        if len(masks) == 1:
            return masks[0]
        mask = masks[0].mask.clone()
        for other in masks[1:]:
            mask |= other.mask
        return cls(mask)

    def __len__(self) -> int:
        return int(self.mask.count_nonzero())

    def between(self, start: int, stop: int) -> tuple[Tensor, int | None]:
        """Return the members from ``start`` to before ``stop``, int64 [k], and None, since rows keep their numbers."""
        return numbers_of(self.mask[start:stop]) + start, None

    def digest(self) -> bytes:
        """Return a digest that is equal on two ranks if they have the same rows of the same shard."""
        return hashlib.blake2b(self.mask.cpu().numpy().tobytes(), digest_size=16).digest()

    def blocks(self, block_rows: int) -> Iterator[Tensor]:
        """Yield the members in increasing order, as int64 [block_rows] on the mask's device; the last may be shorter.

        Row numbers are computed window by window, so that memory is limited whatever the size of the shard.
        """
        remaining = torch.empty(0, dtype=torch.int64, device=self.mask.device)
        for start in range(0, len(self.mask), _WINDOW_ROWS):
            members = numbers_of(self.mask[start : start + _WINDOW_ROWS]) + start
            remaining = torch.cat((remaining, members)) if len(remaining) else members
            num_whole = len(remaining) // block_rows * block_rows
            yield from remaining[:num_whole].split(block_rows) if num_whole else ()
            remaining = remaining[num_whole:]
        if len(remaining):
            yield remaining


@dataclass(frozen=True, eq=False)
class RowList:
    """A set of rows of one shard that were copied out of it.

    Attributes:
        numbers: int64 [k], increasing, on the host: their numbers in the shard.
        first: Index of the first row among the copied rows; the others follow it.
    """

    numbers: Tensor
    first: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def blocks(self, block_rows: int) -> Iterator[Tensor]:
        """Yield the members in increasing order, as int64 [block_rows]; the last may be shorter."""
        yield from self.numbers.split(block_rows) if len(self.numbers) else ()

    def between(self, start: int, stop: int) -> tuple[Tensor, int | None]:
        """Return the members from ``start`` to before ``stop``, int64 [k], and the index of the first copy."""
        start_index, stop_index = torch.searchsorted(self.numbers, torch.tensor([start, stop], device="cpu")).tolist()
        return self.numbers[start_index:stop_index], self.first + start_index


SelectedRows = RowMask | RowList

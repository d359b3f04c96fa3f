"""Modified rows: which rows of the shards on this rank have changed, and since which checkpoint.

The life of a modified row::

    mark ──> marked ──freeze──> frozen ──commit──> modified since the baseline
               ^                   │
               └─────rollback──────┘

``freeze`` takes the snapshot of a save: rows marked later belong to the next one. ``commit`` follows when the save's
manifest is in the store, ``rollback`` when it is not.

Marks are one bool per row on the table's own device: marking is then one ``index_fill_``, which no other representation
came near (a set of row numbers grows without bound). The other two sets are ``RowBits``, a bit per row on the host and
a bool per row on devices: all of them are read at every snapshot, while training waits, so their size is time.
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
        num_rows: Rows of the shard.
        held: On the host int64 [num_rows / 64], the words of ``kernels.cpu.bitsets``; on a device bool [num_rows].
    """

    num_rows: int
    held: Tensor

    @classmethod
    def none_of(cls, num_rows: int, device: torch.device) -> "RowBits":
        """No row of a shard whose table lies on ``device``."""
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
        """The set as bool [num_rows]; on a device it is the set's own memory."""
        return torch.from_numpy(unpacked(self._words, self.num_rows)) if self._is_packed else self.held

    def numbers(self) -> Iterator[Tensor]:
        """The members in increasing order, int64, in parts that bound the memory that they take on a device."""
        if self._is_packed:
            yield torch.from_numpy(numbers_of_bits(self._words))
            return
        for start in range(0, max(1, self.num_rows), _WINDOW_ROWS):
            yield numbers_of(self.held[start : start + _WINDOW_ROWS]) + start

    def take(self, marked: Tensor) -> None:
        """Be what is marked, bool [num_rows], and have nothing marked."""
        if self._is_packed:
            pack(marked.numpy(), self._words, clears=True)
        else:
            self.held.copy_(marked)
            marked.zero_()

    def put(self, mask: Tensor) -> None:
        """Be the rows of a mask, bool [num_rows]."""
        if self._is_packed:
            pack(mask.contiguous().numpy(), self._words, clears=False)
        else:
            self.held.copy_(mask)

    def add(self, other: "RowBits") -> None:
        """Add the rows of another set of the shard."""
        self.held.bitwise_or_(other.held)

    def add_numbers(self, rows: Tensor) -> None:
        """Add rows, int64 [k], any order, repeats allowed; not from several threads at once.

        Raises:
            IndexError: The shard has no such row.
        """
        if not self._is_packed:
            self.held.index_fill_(0, rows, True)
        elif len(rows):
            if rows.min() < 0 or rows.max() >= self.num_rows:
                raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} are added, of {self.num_rows}")
            set_bits(self._words, rows.contiguous().numpy())

    def union(self, other: "RowBits") -> "RowBits":
        """The rows of either."""
        return RowBits(self.num_rows, self.held | other.held)

    def clear(self) -> None:
        """Have no rows."""
        self.held.zero_()


def numbers_of(mask: Tensor) -> Tensor:
    """Where a mask is true, int64 [k] on its device."""
    if mask.device.type == "cpu":
        return torch.from_numpy(selected(mask.numpy()))
    return mask.nonzero().squeeze(1)


def count_rows(masks: Iterable[Tensor]) -> int:
    """How many rows masks have in all. Waits once for each device."""
    counts: dict[torch.device, Tensor] = {}
    for mask in masks:
        count = mask.count_nonzero()
        counts[mask.device] = counts[mask.device] + count if mask.device in counts else count
    return sum(map(int, counts.values()))


MAX_HEAT = 3
_WINDOW_ROWS = 1 << 22  # rows whose numbers are worked out at once: 32 MiB as int64


class ModifiedRows:
    """The modified rows of one shard of a table.

    Attributes:
        name: FQN of the table in its model, for messages.
        box: The shard's place in the table.
        marked: bool [num_rows]. Modified since the last cut.
        heat: int8 [num_rows], or None where nobody asks for it. How often each row was in commits lately: one more for
            each that it was part of, one less for each other, from 0 to ``MAX_HEAT``.

    Args:
        marked: Lies in the marks of several tables, if given; nothing is marked yet.
    """

    def __init__(self, name: str, box: Box, device: torch.device, marked: Tensor | None = None) -> None:
        self.name = name
        self.box = box
        self.marked = marked if marked is not None else torch.zeros(box.num_rows, dtype=torch.bool, device=device)
        self.heat: Tensor | None = None
        self._frozen: RowBits | None = None
        self._since_baseline = RowBits.none_of(box.num_rows, device)
        self._spare: RowBits | None = None  # what was frozen before: new memory costs more than a copy

    @property
    def frozen(self) -> Tensor | None:
        """What was cut off for the save in flight, if there is one: bool [num_rows]."""
        return self._frozen.mask() if self._frozen is not None else None

    @property
    def since_baseline(self) -> Tensor:
        """What is in committed deltas since the baseline: bool [num_rows]."""
        return self._since_baseline.mask()

    def mark(self, rows: Tensor) -> None:
        """Mark rows, numbered within the box; int [N], any order, repeats allowed."""
        self.marked.index_fill_(0, rows.long(), True)

    def mark_where(self, mask: Tensor) -> None:
        """Mark the rows of a mask, bool [num_rows]."""
        self.marked |= mask

    def mark_all(self) -> None:
        """Mark every row."""
        self.marked.fill_(True)

    def freeze(self) -> None:
        """Cut: what is marked becomes frozen, and nothing is marked."""
        spare = self._spare if self._spare is not None else RowBits.none_of(self.box.num_rows, self.marked.device)
        spare.take(self.marked)
        self._frozen, self._spare = spare, None

    def commit(self, is_baseline: bool, has_heat: bool = True) -> None:
        """The frozen rows are in a committed checkpoint.

        Args:
            is_baseline: Which is one.
            has_heat: Whether rows of different heat will be kept apart.
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
        """The frozen rows are in no checkpoint: they are marked again, beside those marked meanwhile."""
        if self._frozen is not None:
            self.marked |= self._frozen.mask()
            self._spare, self._frozen = self._frozen, None

    def restore(self) -> None:
        """The table was overwritten from a checkpoint: nothing is modified."""
        self._frozen = self.heat = None
        self.marked.zero_()
        self._since_baseline.clear()

    def restore_rows(self, rows: Tensor) -> None:
        """Rows came from a delta of that checkpoint, int64 [k], numbered within the box."""
        self._since_baseline.add_numbers(rows.to(self.marked.device))

    def unite(self, since_baseline: Tensor, frozen: Tensor) -> None:
        """Have the rows that any replica has, masks bool [num_rows].

        A save may have begun or ended on other replicas only: then what is frozen there is marked here.
        """
        self._since_baseline.put(since_baseline)
        if self._frozen is not None:
            self._frozen.put(frozen)
        else:
            self.mark_where(frozen)

    def select(self, since: Since) -> "RowMask":
        """The frozen rows modified since then.

        Raises:
            ConfigurationError: Nothing is frozen.
        """
        return RowMask(self._selected(since).mask())

    def _selected(self, since: Since) -> RowBits:
        if self._frozen is None:
            raise ConfigurationError(f"table {self.name!r}: no save is in flight")
        return self._frozen if since is Since.HEAD else self._frozen.union(self._since_baseline)

    def select_parts(self, since: Since, is_by_heat: bool) -> "tuple[RowMask, ...]":
        """The frozen rows modified since then, in one part or in one for each heat.

        Raises:
            ConfigurationError: Nothing is frozen.
        """
        rows, heat = self.select(since), self.heat
        if not is_by_heat or heat is None:
            return (rows,)
        return tuple(RowMask(rows.mask & (heat == value)) for value in range(MAX_HEAT + 1))

    def select_numbers(self, since: Since, is_by_heat: bool) -> tuple[Tensor, ...]:
        """The numbers of what :meth:`select_parts` returns, int64 [k] on the host."""
        heat = self.heat if is_by_heat else None
        parts: list[list[Tensor]] = [[] for _ in range(1 if heat is None else MAX_HEAT + 1)]
        for numbers in self._selected(since).numbers():
            if heat is None:
                parts[0].append(numbers.cpu())
                continue
            of_numbers = heat.index_select(0, numbers)
            for value, part in enumerate(parts):
                part.append(numbers[of_numbers == value].cpu())
        return tuple(part[0] if len(part) == 1 else torch.cat(part) for part in parts)


@dataclass(frozen=True, eq=False)
class RowMask:
    """A set of rows of one shard.

    Attributes:
        mask: bool [num_rows].
    """

    mask: Tensor

    @classmethod
    def union(cls, masks: "tuple[RowMask, ...]") -> "RowMask":
        """The rows of all masks of one shard."""
        return masks[0] if len(masks) == 1 else cls(torch.stack([rows.mask for rows in masks]).any(dim=0))

    def __len__(self) -> int:
        return int(self.mask.count_nonzero())

    def between(self, start: int, stop: int) -> tuple[Tensor, int | None]:
        """The members from one number to before another, int64 [k]; they lie at their own numbers."""
        return numbers_of(self.mask[start:stop]) + start, None

    def digest(self) -> bytes:
        """Tells whether another rank, which has the same shard, has the same rows."""
        return hashlib.blake2b(self.mask.cpu().numpy().tobytes(), digest_size=16).digest()

    def blocks(self, block_rows: int) -> Iterator[Tensor]:
        """The members in increasing order, as int64 [block_rows] on the mask's device; the last may be shorter.

        Row numbers are worked out window by window, so that memory is bounded whatever the size of the shard.
        """
        rest = torch.empty(0, dtype=torch.int64, device=self.mask.device)
        for start in range(0, len(self.mask), _WINDOW_ROWS):
            found = numbers_of(self.mask[start : start + _WINDOW_ROWS]) + start
            rest = torch.cat((rest, found)) if len(rest) else found
            num_whole = len(rest) // block_rows * block_rows
            yield from rest[:num_whole].split(block_rows) if num_whole else ()
            rest = rest[num_whole:]
        if len(rest):
            yield rest


@dataclass(frozen=True, eq=False)
class RowList:
    """A set of rows of one shard that were copied out of it.

    Attributes:
        numbers: int64 [k], increasing, on the host: their numbers in the shard.
        first: Where the first one lies among the rows that were copied; the others follow it.
    """

    numbers: Tensor
    first: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def blocks(self, block_rows: int) -> Iterator[Tensor]:
        """The members in increasing order, as int64 [block_rows]; the last may be shorter."""
        yield from self.numbers.split(block_rows) if len(self.numbers) else ()

    def between(self, start: int, stop: int) -> tuple[Tensor, int | None]:
        """The members from one number to before another, int64 [k], and where the first lies among the copies."""
        first, last = torch.searchsorted(self.numbers, torch.tensor([start, stop], device="cpu")).tolist()
        return self.numbers[first:last], self.first + first


SelectedRows = RowMask | RowList

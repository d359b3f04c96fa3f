"""Modified rows: which rows of the shards on this rank have changed, and since which checkpoint.

The life of a modified row::

    mark ──> marked ──freeze──> frozen ──commit──> modified since the baseline
               ^                   │
               └─────rollback──────┘

``freeze`` is the cut of a save: rows marked later belong to the next one. ``commit`` follows when the save's manifest
is in the store, ``rollback`` when it is not. One bool a row for each of the three sets, on the table's own device:
marking is then one ``index_fill_``, which no other representation came near (a set of row numbers grows without bound).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.kernels.selecting import selected
from torchrec_cnr.rows import Box

MAX_HEAT = 3
_WINDOW_ROWS = 1 << 22  # rows whose numbers are worked out at once: 32 MiB as int64


class Since(Enum):
    """What the rows of a save were modified since, and so what its checkpoint is a delta of."""

    EVER = "ever"
    BASELINE = "baseline"
    HEAD = "head"


class ModifiedRows:
    """The modified rows of one shard of a table.

    Attributes:
        name: FQN of the table in its model, for messages.
        box: The shard's place in the table.
        marked: bool [num_rows]. Modified since the last cut.
        frozen: bool [num_rows], or None. Cut off for the save in flight.
        since_baseline: bool [num_rows]. In committed deltas since the baseline.
        heat: int8 [num_rows], or None where nobody asks for it. How often each row was in commits lately: one more for
            each that it was part of, one less for each other, from 0 to ``MAX_HEAT``.

    Args:
        marked: Lies in the marks of several tables, if given; nothing is marked yet.
    """

    def __init__(self, name: str, box: Box, device: torch.device, marked: Tensor | None = None) -> None:
        self.name = name
        self.box = box
        self.marked = marked if marked is not None else self._empty(device)
        self.frozen: Tensor | None = None
        self.since_baseline = self._empty(device)
        self.heat: Tensor | None = None
        self._spare: Tensor | None = None  # what was frozen before: new memory costs more than a copy

    def _empty(self, device: torch.device) -> Tensor:
        return torch.zeros(self.box.num_rows, dtype=torch.bool, device=device)

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
        self.frozen = self._empty(self.marked.device) if self._spare is None else self._spare
        self._spare = None
        self.frozen.copy_(self.marked)
        self.marked.zero_()

    def commit(self, is_baseline: bool, has_heat: bool = True) -> None:
        """The frozen rows are in a committed checkpoint.

        Args:
            is_baseline: Which is one.
            has_heat: Whether rows of different heat will be kept apart.
        """
        if self.frozen is None:
            return
        if is_baseline:
            self.since_baseline.zero_()
        else:
            self.since_baseline |= self.frozen
        if not has_heat:
            self.heat = None
        elif self.heat is None:
            self.heat = self.frozen.to(torch.int8)
        else:
            self.heat.sub_(1).add_(self.frozen, alpha=2).clamp_(0, MAX_HEAT)
        self._spare, self.frozen = self.frozen, None

    def rollback(self) -> None:
        """The frozen rows are in no checkpoint: they are marked again, beside those marked meanwhile."""
        if self.frozen is not None:
            self.marked |= self.frozen
            self._spare, self.frozen = self.frozen, None

    def restore(self) -> None:
        """The table was overwritten from a checkpoint: nothing is modified."""
        self.frozen = self.heat = None
        self.marked.zero_()
        self.since_baseline.zero_()

    def select(self, since: Since) -> "RowMask":
        """The frozen rows modified since then.

        Raises:
            ConfigurationError: Nothing is frozen.
        """
        if self.frozen is None:
            raise ConfigurationError(f"table {self.name!r}: no save is in flight")
        return RowMask(self.frozen if since is Since.HEAD else self.frozen | self.since_baseline)

    def select_parts(self, since: Since, is_by_heat: bool) -> "tuple[RowMask, ...]":
        """The frozen rows modified since then, in one part or in one for each heat."""
        return self.select_by_heat() if is_by_heat else (self.select(since),)

    def select_numbers(self, since: Since, is_by_heat: bool) -> tuple[Tensor, ...]:
        """The numbers of what :meth:`select_parts` returns, int64 [k] on the device."""
        numbers = numbers_of(self.select(since).mask)
        if not is_by_heat or self.heat is None:
            return (numbers,)
        heat = self.heat.index_select(0, numbers)
        return tuple(numbers[heat == value] for value in range(MAX_HEAT + 1))

    def select_by_heat(self) -> "tuple[RowMask, ...]":
        """The frozen rows since the head, those of each heat apart.

        Raises:
            ConfigurationError: Nothing is frozen.
        """
        rows, heat = self.select(Since.HEAD), self.heat
        if heat is None:
            return (rows,)
        return tuple(RowMask(rows.mask & (heat == value)) for value in range(MAX_HEAT + 1))


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


Rows = RowMask | RowList


def numbers_of(mask: Tensor) -> Tensor:
    """Where a mask is true, int64 [k] on its device."""
    if mask.device.type == "cpu":
        return torch.from_numpy(selected(mask.numpy()))
    return mask.nonzero().squeeze(1)

"""Row bits: a set of rows of one shard that is kept from save to save, a bit for each row on the host.

All of them are read at every cut, while training waits, so that what they take is time. Marks are bytes all the same,
since whoever marks rows writes to them one by one. On devices there is a bool for each row, as PyTorch has it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr.kernels.selecting import Words, num_words, numbers_of_bits, pack, selected, set_bits, unpacked


@dataclass(frozen=True, eq=False)
class RowBits:
    """A set of rows.

    Attributes:
        num_rows: Rows of the shard.
        held: On the host int64 [num_rows / 64], the words of ``kernels.selecting``; on a device bool [num_rows].
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

    def numbers(self) -> Tensor:
        """The members in increasing order, int64 [k]."""
        if self._is_packed:
            return torch.from_numpy(numbers_of_bits(self._words))
        return numbers_of(self.held)

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

"""The arena: memory that rows are staged in, one piece of it, which every save takes again.

New memory costs more than the copy: each of its pages is made when it is first written to. One piece is also one file
descriptor where it is shared with another process, however many tensors lie in it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: a line of the cache
_SLACK = 1.25  # rows modified differ from save to save


@dataclass(frozen=True, eq=False)
class ArenaTensor:
    """A tensor in an arena.

    Attributes:
        memory: uint8, the arena.
        first_byte: Where it begins.
        shape: Of the tensor.
        dtype: Of the tensor.
    """

    memory: Tensor
    first_byte: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """The tensor; shares the arena's memory."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return self.memory[self.first_byte : self.first_byte + num_bytes].view(self.dtype).view(self.shape)


def padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What a tensor takes in an arena."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Arena:
    """Hands out tensors in one piece of host memory.

    Attributes:
        taken_bytes: What was handed out.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.taken_bytes = 0

    def clear(self, num_bytes: int, is_pinned: bool) -> None:
        """Take back all that was handed out, and have room for so much; pinned, so that devices copy to it at once."""
        self.taken_bytes = 0
        if len(self._memory) < num_bytes:
            self.free()
            self._memory = torch.empty(round(_SLACK * num_bytes), dtype=torch.uint8, pin_memory=is_pinned)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> ArenaTensor:
        """A tensor that nobody else has."""
        taken = ArenaTensor(self._memory, self.taken_bytes, shape, dtype)
        self.taken_bytes += padded_bytes(shape, dtype)
        return taken

    def free(self) -> None:
        """Give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)

"""Pinned host memory, to which GPUs copy directly, in exactly the requested size, and freed with its last tensor.

Torch rounds the size of its own pinned memory up to a power of two, and never unpins it.
"""

import mmap
import weakref
from collections.abc import Callable

import torch

from torchrec_cnr.errors import ConfigurationError


class PinnedMemory:
    """Pinned memory, which is unpinned when the tensor and all its views are deleted.

    Attributes:
        memory: The memory, uint8 [num_bytes].

    Args:
        num_bytes: Size of the memory in bytes, at least one.

    Raises:
        ConfigurationError: The system cannot pin this many bytes.
    """

    def __init__(self, num_bytes: int) -> None:
        pages = mmap.mmap(-1, num_bytes)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        self._address = self.memory.data_ptr()
        self._end = self._pin(pages)

    def settle(self) -> None:
        """Pin the memory again if its address has changed, which happens if it is shared with another process."""
        if self.memory.data_ptr() != self._address:
            self._end()
            self._address = self.memory.data_ptr()
            self._end = self._pin(None)

    def _pin(self, pages: mmap.mmap | None) -> Callable[[], object]:
        num_bytes = self.memory.nbytes
        result = torch.cuda.cudart().cudaHostRegister(self._address, num_bytes, 0)
        if int(result) != 0:
            raise ConfigurationError(
                f"{num_bytes} bytes of host memory cannot be pinned ({result}): lower 'staging_bytes', or raise the "
                "limit of locked memory"
            )
        return weakref.finalize(self.memory, _unpin, self._address, pages)  # keeps the pages alive until then


def _unpin(address: int, pages: mmap.mmap | None) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)

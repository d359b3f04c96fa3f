"""Host memory that devices copy to directly, in exactly the size that is asked for, and given back when it is dropped.

Torch's own pinned memory is a power of two in size, and stays pinned for as long as the process lives.
"""

import mmap
import weakref
from collections.abc import Callable

import torch

from torchrec_cnr.errors import ConfigurationError


class PinnedMemory:
    """Pinned memory, which is unpinned when the tensor and its views are dropped.

    Attributes:
        memory: uint8 [num_bytes].

    Args:
        num_bytes: At least one.

    Raises:
        ConfigurationError: So much cannot be pinned.
    """

    def __init__(self, num_bytes: int) -> None:
        pages = mmap.mmap(-1, num_bytes)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        self._address = self.memory.data_ptr()
        self._end = self._pin(pages)

    def settle(self) -> None:
        """Pin it where it lies now: it has been moved if it was shared with another process."""
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
        return weakref.finalize(self.memory, _unpin, self._address, pages)  # the pages stay until then


def _unpin(address: int, pages: mmap.mmap | None) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)

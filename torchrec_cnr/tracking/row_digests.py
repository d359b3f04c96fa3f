"""Digests of rows: 8 bytes that show whether a bit of a row has changed.

The bytes of a row are read as words ``w``, integers of 4 bytes, or of 2 or 1 if the row's size is no multiple. The
digest is the multilinear hash

    m[0] * w[0] + m[1] * w[1] + ...   modulo 2^64

with random odd multipliers ``m``, one for each position in a row, which are always the same. Two rows that differ

- in one word have different digests: an odd number times a difference below 2^32 is no multiple of 2^64;
- in several words have the same digest with a probability of at most 2^-(63 - b), over the multipliers. Bit b is the
  lowest that differs in any word. The probability is 2^-63 if the last bit of an fp32 value has changed, and 2^-32 at
  worst, if only signs of fp32 values have.

The digest is of bits, not of values: 0.0 and -0.0 differ, and a NaN equals itself.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_WORD_DTYPES = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
_BLOCK_WORDS = 1 << 18  # 2 MiB as int64: fits into a core's cache
_ACCELERATOR_BLOCK_WORDS = 1 << 24  # 128 MiB as int64: fewer launches
_SEED = 0x0DD


def digest_rows(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the digests of all rows, block by block, so that memory is limited whatever the size of the tensor.

    Args:
        tensor: [num_rows, ...], of any dtype, on any device, contiguous or not.

    Yields:
        Consecutive rows, and their digests: int64 [n], on the tensor's device.
    """
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    word_bytes = next(num_bytes for num_bytes in _WORD_DTYPES if row_bytes % num_bytes == 0)
    multipliers = _multipliers(row_bytes // word_bytes).to(tensor.device)
    block_words = _BLOCK_WORDS if tensor.device.type == "cpu" else _ACCELERATOR_BLOCK_WORDS
    block_rows = max(1, block_words // max(1, len(multipliers)))
    for start in range(0, len(tensor), block_rows):
        block = tensor.detach()[start : start + block_rows]
        words = _bytes_as(_WORD_DTYPES[word_bytes], block).view(len(block), len(multipliers))
        yield slice(start, start + len(block)), words.to(torch.int64).mul_(multipliers).sum(dim=1)


def _multipliers(num_words: int) -> Tensor:
    """Return odd multipliers, int64 [num_words], the same at every call."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.empty(num_words, dtype=torch.int64, device="cpu").random_(-(2**63), None, generator=generator) | 1


def _bytes_as(dtype: torch.dtype, block: Tensor) -> Tensor:
    """Return all bytes of a tensor, in one dimension, as this dtype.

    ``Tensor.view`` of another dtype checks the strides even of dimensions of size 1, so the strides are replaced first.
    """
    flat = block.contiguous().as_strided((block.numel(),), (1,))
    is_aligned = flat.storage_offset() * flat.element_size() % dtype.itemsize == 0
    return (flat if is_aligned else flat.clone()).view(dtype)

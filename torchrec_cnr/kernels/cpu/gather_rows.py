"""Gathering of scattered rows of a table into contiguous memory, while training waits.

Rows are far apart in memory, so each is a cache miss, and in a large table a TLB miss, too. The processor itself
prefetches only few rows. With explicit prefetches, more rows and their pages are in the second-level cache in time.
"""

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.kernels.cpu.compiling import Kernel, in_parallel
from torchrec_cnr.kernels.cpu.lanes import LANES
from torchrec_cnr.kernels.cpu.memory import CACHE_LINE_BYTES, load_words, prefetch_far, store

_WORD_BYTES = 4
_LINE_WORDS = CACHE_LINE_BYTES // _WORD_BYTES
_LINES_AHEAD = 96
_CHUNK_WORDS = 1 << 16  # a thread copies this many words in about the time of waking another thread


def _copy_rows(words, stride, numbers, row_words, target):
    """Copy ``target[i * row_words :] = words[numbers[i] * stride :]``, int32, ``row_words`` words of each row."""
    num_rows, num_lines = len(numbers), (row_words - 1) // _LINE_WORDS + 1
    num_rows_ahead, whole_words = max(1, _LINES_AHEAD // num_lines), row_words // LANES * LANES
    for index in range(num_rows):
        prefetch_offset = numbers[min(index + num_rows_ahead, num_rows - 1)] * stride
        for line in range(num_lines):
            prefetch_far(words, prefetch_offset + line * _LINE_WORDS)
        source_offset, target_offset = numbers[index] * stride, index * row_words
        for word in range(0, whole_words, LANES):
            store(target, target_offset + word, load_words(words, source_offset + word))
        for word in range(whole_words, row_words):
            target[target_offset + word] = words[source_offset + word]


def _copy_words(words, stride, numbers, target):
    """Copy rows of one word each, such as row-wise optimizer state."""
    num_ahead = max(0, len(numbers) - _LINES_AHEAD)
    for index in range(num_ahead):
        prefetch_far(words, numbers[index + _LINES_AHEAD] * stride)
        target[index] = words[np.uint64(numbers[index] * stride)]
    for index in range(num_ahead, len(numbers)):
        target[index] = words[np.uint64(numbers[index] * stride)]


copy_rows, copy_words = Kernel(_copy_rows), Kernel(_copy_words)


def gather_rows(source: Tensor, numbers: Tensor, target: Tensor) -> None:
    """Do the same as ``torch.index_select(source, 0, numbers, out=target)`` on the host, in less time.

    Args:
        source: The table, [num_rows, ...].
        numbers: The numbers of the rows, int64 [k]. Rows that are close together take less time.
        target: The tensor to write to, [k, ...] of the same dtype, contiguous.

    Raises:
        ConfigurationError: The target has another shape or dtype.
        IndexError: A row does not exist.
    """
    if target.shape != (len(numbers), *source.shape[1:]) or target.dtype is not source.dtype:
        raise ConfigurationError(
            f"{len(numbers)} rows of {source.dtype} {list(source.shape)} do not go to {target.dtype} "
            f"{list(target.shape)}"
        )
    if target.numel() == 0:
        return
    # If nearly every cache line is read anyway, the processor prefetches by itself.
    is_dense = source.nbytes <= CACHE_LINE_BYTES * len(numbers)
    is_laid_out = source[0].is_contiguous() and target.is_contiguous() and _has_words(source) and _has_words(target)
    if is_dense or not is_laid_out:
        torch.index_select(source, 0, numbers, out=target)
        return
    rows = numbers.contiguous().numpy()
    if rows.view(np.uint64).max() >= len(source):  # as uint64, negative numbers are large
        raise IndexError(f"rows {rows.min()} to {rows.max()} are asked for, of {len(source)}")
    row_words = source[0].nbytes // _WORD_BYTES
    stride = source.stride(0) * source.itemsize // _WORD_BYTES
    span = (len(source) - 1) * source.stride(0) + source[0].numel()
    words = torch.as_strided(source.detach(), (span,), (1,)).view(torch.int32).numpy()
    target_words = target.view(-1).view(torch.int32).numpy()

    def copy(start: int, stop: int) -> None:
        chunk = target_words[start * row_words : stop * row_words]
        if row_words == 1:
            copy_words(words, stride, rows[start:stop], chunk)
        else:
            copy_rows(words, stride, rows[start:stop], row_words, chunk)

    in_parallel(copy, len(rows), max(1, _CHUNK_WORDS // row_words))


def _has_words(tensor: Tensor) -> bool:
    """Return whether the rows of a tensor consist of whole words that are aligned."""
    is_aligned = all(
        offset * tensor.itemsize % _WORD_BYTES == 0 for offset in (tensor.storage_offset(), tensor.stride(0))
    )
    is_numeric = tensor.dtype.is_floating_point or tensor.dtype in (torch.int32, torch.int64)
    return is_aligned and is_numeric and tensor[0].nbytes % _WORD_BYTES == 0 and tensor.stride(0) >= 0

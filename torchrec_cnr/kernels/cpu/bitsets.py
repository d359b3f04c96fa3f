"""Sets of rows with one bit per row, made from masks with one byte per row, and read as row numbers.

Rows are processed 64 at a time. A mask is read once, and only words with set rows are cleared. The bits take an eighth
of its memory. Row numbers are written four at a time: the number of set bits in one word is random, and the processor
would mispredict a branch on it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from torchrec_cnr.kernels.cpu.compiling import Kernel, in_parallel
from torchrec_cnr.kernels.cpu.lanes import BIT, BYTE, LONG, pointer_to

WORD_ROWS = 64
_BLOCK_WORDS = 512  # words whose bits are counted together
_CHUNK_WORDS = 1 << 14  # a mask of 1 MiB: a thread reads it in about the time of waking another thread
_CHUNK_BLOCKS = 32
_BYTES = ir.VectorType(BYTE, WORD_ROWS)

Words = npt.NDArray[np.uint64]


@intrinsic
def lowest_bit(typing: Any, word: Any) -> Any:
    """Return the number of the lowest set bit, or 64 if none is set."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(BIT, 0))

    return types.int64(types.uint64), emit


@intrinsic
def num_bits(typing: Any, word: Any) -> Any:
    """Return the number of set bits."""
    return types.int64(types.uint64), lambda context, builder, sig, args: builder.ctpop(args[0])


@intrinsic
def word_of(typing: Any, mask: Any, index: Any) -> Any:
    """Return a word with one bit for each byte of ``mask[index : index + 64]``, set if the byte is not 0."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        values = builder.load(pointer_to(context, builder, _BYTES, sig.args[0], *args), align=1)
        return builder.bitcast(builder.icmp_unsigned("!=", values, ir.Constant(_BYTES, None)), LONG)

    return types.uint64(mask, index), emit


@intrinsic
def clear_word(typing: Any, mask: Any, index: Any) -> Any:
    """Set ``mask[index : index + 64] = 0``."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, _BYTES, sig.args[0], *args)
        builder.store(ir.Constant(_BYTES, None), pointer, align=1)
        return context.get_dummy_value()

    return types.void(mask, index), emit


def _pack_mask(mask, words, clears):
    """Write the bits of a mask, uint8, into words, and clear the mask if ``clears`` is true."""
    num_whole = len(mask) // 64
    for index in range(num_whole):
        word = word_of(mask, index * 64)
        words[index] = word
        if clears and word != 0:
            clear_word(mask, index * 64)
    last_word = np.uint64(0)
    for position in range(num_whole * 64, len(mask)):
        if mask[position] != 0:
            last_word |= np.uint64(1) << np.uint64(position % 64)
        if clears:
            mask[position] = 0
    if num_whole < len(words):
        words[num_whole] = last_word


def _count_bits(words, block_words, counts):
    """Count the set bits in each block of words."""
    for block in range(len(counts)):
        count = 0
        for index in range(block * block_words, min(len(words), (block + 1) * block_words)):
            count += num_bits(words[index])
        counts[block] = count


def _put_numbers(words, first, numbers):
    """Write the numbers of all set bits, in order, counted from ``first``; ``numbers`` must have exactly this size.

    If there is room for four numbers, four are written; the numbers of the next word overwrite the invalid ones.
    """
    num_found = 0
    for index in range(len(words)):
        word, start = words[index], first + index * 64
        if num_found + 4 <= len(numbers):
            num_left = num_bits(word)
            for offset in range(4):
                numbers[num_found + offset] = start + lowest_bit(word)
                word &= word - np.uint64(1)
            num_found += min(num_left, 4)
        while word != 0:
            numbers[num_found] = start + lowest_bit(word)
            word &= word - np.uint64(1)
            num_found += 1


def _set_bits(words, numbers):
    """Set the bits of these numbers."""
    for number in numbers:
        words[number // 64] |= np.uint64(1) << np.uint64(number % 64)


pack_mask, count_bits, put_numbers, set_bits = (
    Kernel(function) for function in (_pack_mask, _count_bits, _put_numbers, _set_bits)
)


def num_words(num_rows: int) -> int:
    """Return the number of words for one bit per row."""
    return -(-num_rows // WORD_ROWS)


def pack(mask: npt.NDArray[np.bool_], words: Words, *, clears: bool) -> None:
    """Write the bits of a mask into words, and optionally clear the mask.

    Args:
        mask: The mask, bool [num_rows], contiguous.
        words: The words to write to, uint64 [num_words(num_rows)]: row r is bit r % 64 of word r // 64.
        clears: Whether to set the mask to false.
    """
    content = mask.view(np.uint8)

    def pack_words(start: int, stop: int) -> None:
        pack_mask(content[start * WORD_ROWS : stop * WORD_ROWS], words[start:stop], clears)

    in_parallel(pack_words, len(words), _CHUNK_WORDS)


def unpacked(words: Words, num_rows: int) -> npt.NDArray[np.bool_]:
    """Return the mask with these bits, bool [num_rows]."""
    return np.unpackbits(words.view(np.uint8), count=num_rows, bitorder="little").view(np.bool_)


def numbers_of_bits(words: Words) -> npt.NDArray[np.int64]:
    """Return the numbers of all set bits, increasing."""
    counts = np.empty(-(-len(words) // _BLOCK_WORDS), np.int64)
    count_bits(words, _BLOCK_WORDS, counts)
    offsets = [0, *np.cumsum(counts).tolist()]
    numbers = np.empty(offsets[-1], dtype=np.int64)

    def put_blocks(start: int, stop: int) -> None:
        start_word, stop_word = start * _BLOCK_WORDS, stop * _BLOCK_WORDS
        put_numbers(words[start_word:stop_word], start_word * WORD_ROWS, numbers[offsets[start] : offsets[stop]])

    in_parallel(put_blocks, len(counts), _CHUNK_BLOCKS)
    return numbers


def selected(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the positions at which a mask is true, increasing, several times faster than ``numpy.flatnonzero``."""
    words = np.empty(num_words(len(mask)), np.uint64)
    pack(np.ascontiguousarray(mask), words, clears=False)
    return numbers_of_bits(words)

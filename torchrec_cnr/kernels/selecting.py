"""Selecting: the numbers of the rows of a mask, 64 rows at a time, by the bits that are set."""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from torchrec_cnr.kernels.compiling import Kernel
from torchrec_cnr.kernels.llvm import BIT


@intrinsic
def lowest_bit(typing: Any, word: Any) -> Any:
    """The number of the lowest bit that is set."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(BIT, 1))

    return types.int64(types.uint64), emit


def _put_numbers(words, numbers):
    """The numbers of all bits, in order."""
    num_found = 0
    for index in range(len(words)):
        word = words[index]
        while word != 0:
            numbers[num_found] = index * 64 + lowest_bit(word)
            word &= word - np.uint64(1)
            num_found += 1


put_numbers = Kernel(_put_numbers)


def selected(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Where a mask is true, increasing: as ``numpy.flatnonzero``, which takes twice as long, and PyTorch ten times."""
    bits = np.packbits(mask, bitorder="little")
    words = np.zeros(-(-len(bits) // 8), dtype="<u8")
    words.view(np.uint8)[: len(bits)] = bits
    numbers = np.empty(np.count_nonzero(mask), dtype=np.int64)
    put_numbers(words, numbers)
    return numbers

"""The tables of frequencies with which transformed rows are entropy-coded. They are part of the format.

Each table is of numbers that are distributed about zero with some spread: by Laplace or by Gauss, in steps of a fourth
of an octave. All are computed by decimal arithmetic, whose results are the same on every machine.
"""

from decimal import Context, Decimal, localcontext
from functools import cache

import numpy as np
import numpy.typing as npt

from torchrec_cnr.kernels.cpu.symbol_coder import ESCAPE, SCALE_BITS, ZERO_DIGIT, SymbolTables

NUM_SPREADS = 64
NUM_TABLES = 2 * NUM_SPREADS  # Laplace's, then Gauss's
_STEPS_PER_OCTAVE = 4
_FIRST_OCTAVE = -4  # the least spread is 1/16
_DIGIT_OCTAVES = 4  # numbers of a larger spread than 2^4 have low bits, so that their digits have at most this spread
_WIDTH = 7  # digits further than this many spreads from zero are escapes
_CONTEXT = Context(prec=30)


def spreads() -> npt.NDArray[np.float64]:
    """Return the standard deviation of each table of either kind, float64 [64], increasing."""
    return np.exp2(np.arange(NUM_SPREADS) / _STEPS_PER_OCTAVE + _FIRST_OCTAVE)


@cache
def symbol_tables() -> SymbolTables:
    """Return all tables: 64 of Laplace's distribution by increasing spread, then 64 of Gauss's."""
    frequencies, low_bits = [], []
    for kind in (_laplace, _gauss):
        for number in range(NUM_SPREADS):
            octave = number // _STEPS_PER_OCTAVE + _FIRST_OCTAVE
            own_low_bits = max(0, octave + 1 - _DIGIT_OCTAVES)
            with localcontext(_CONTEXT):
                spread = Decimal(2) ** (Decimal(number) / _STEPS_PER_OCTAVE + _FIRST_OCTAVE - own_low_bits)
                width = min(ZERO_DIGIT, int(spread * _WIDTH) + 2)
                weights = kind(spread, width)
                frequencies.append(_frequencies(weights))
            low_bits.append(own_low_bits)
    return SymbolTables.of(np.stack(frequencies), np.array(low_bits, np.uint8))


def _laplace(spread: Decimal, width: int) -> list[Decimal]:
    """Return the probabilities of 0 to ``width``, each of the interval of length 1 about it."""
    rate = Decimal(2).sqrt() / spread
    half, ratio = (-rate / 2).exp(), (-rate).exp()
    first = (1 / half - half) / 2 * ratio
    return [1 - half, *(first * ratio**number for number in range(width))]


def _gauss(spread: Decimal, width: int) -> list[Decimal]:
    """Return values that are proportional to the densities at 0 to ``width``."""
    base = (-1 / (2 * spread * spread)).exp()
    return [base ** (number * number) for number in range(width + 1)]


def _frequencies(weights: list[Decimal]) -> npt.NDArray[np.uint16]:
    """Return frequencies that add up to 4096: at least 1 for each digit and the escape; 0 has what is left."""
    width, total = len(weights) - 1, weights[0] + 2 * sum(weights[1:])
    left = (1 << SCALE_BITS) - 2 * width - 2
    sides = [1 + int(left * weight / total) for weight in weights[1:]]
    table = np.zeros(256, np.uint16)
    table[ZERO_DIGIT + 1 : ZERO_DIGIT + 1 + width] = sides
    table[ZERO_DIGIT - width : ZERO_DIGIT] = sides[::-1]
    table[ESCAPE] = 1
    table[ZERO_DIGIT] = (1 << SCALE_BITS) - 1 - 2 * sum(sides)
    return table


def class_tables(frequencies: npt.NDArray[np.uint16]) -> SymbolTables:
    """Return the table of the classes of rows, whose frequencies, uint16 [16], add up to 4096."""
    table = np.zeros((1, 256), np.uint16)
    table[0, : len(frequencies)] = frequencies
    return SymbolTables.of(table, np.zeros(1, np.uint8))

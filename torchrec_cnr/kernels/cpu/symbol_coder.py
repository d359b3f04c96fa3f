"""An entropy coder of whole numbers: interleaved rANS with fixed tables of frequencies.

A range asymmetric numeral system (Duda, "Asymmetric numeral systems", arXiv 1311.2540) is as dense as arithmetic coding
and decodes with one multiplication for each number. Four rows are coded at once, each with a state of its own, so that
a processor can work on all of them. They share one stream of 16-bit words (Giesen, "Interleaved entropy coders",
arXiv 1402.3392).

A state is at least 2^15 and below 2^31. Frequencies add up to 2^12. Encoding runs backwards, from the last number to
the first, so that decoding runs forwards.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from torchrec_cnr.kernels.cpu.compiling import Kernel
from torchrec_cnr.kernels.cpu.memory import CACHE_LINE_BYTES, prefetch

SCALE_BITS = 12  # the frequencies of a table add up to 1 << SCALE_BITS
NUM_STATES = 4
NUM_CLASSES = 16
LEAST_STATE = 1 << 15
ESCAPE = 255  # the digit that says that a number follows as 16 raw bits
ZERO_DIGIT = 127  # digits 0 to 254 are -127 to 127

_WORD_BITS = 16
_STATE_BITS = 31
_SLOT_MASK = (1 << SCALE_BITS) - 1
_SHIFT_AT, _ADDED_MASK = 13, (1 << 13) - 1
_DIGITS = 260  # from a table to the next, not 256: the digits that are used most would share the sets of a cache
_CHUNK_COLS = 64  # of four rows, whose digits are found at once
_ROWS_AHEAD = 16  # rows are prefetched while this many after them are encoded


class SymbolTables(NamedTuple):
    """The tables of frequencies as the kernels take them.

    Attributes:
        low_bits: uint8 [tables], the raw bits of a number below its digit.
        frequencies: uint16 [tables, 256], of each digit; 0 for digits that the table does not have.
        limits: int32 [tables], the largest absolute value up to which all numbers are a digit without raw bits; -1 if
            the table has raw bits.
        encoding: uint32 [tables * 260 * 4], four values for each digit: the least state from which encoding writes a
            word, 0 for digits that the table does not have; a reciprocal, with which a state is divided by the digit's
            frequency; 4096 less the frequency; and 13 bits that are added, and a shift above them. The 13 bits are the
            sum of the frequencies of smaller digits, and 4095 more if the frequency is 1.
        slots: uint32 [tables * 4096], for each remainder of a state: the digit, and 8 bits higher its frequency, and 20
            bits higher how far the remainder is from the digit's start.
    """

    low_bits: npt.NDArray[np.uint8]
    frequencies: npt.NDArray[np.uint16]
    limits: npt.NDArray[np.int32]
    encoding: npt.NDArray[np.uint32]
    slots: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, frequencies: npt.NDArray[np.uint16], low_bits: npt.NDArray[np.uint8]) -> "SymbolTables":
        """Prepare tables for the kernels.

        Args:
            frequencies: uint16 [tables, 256]; each table adds up to 4096, and has the escape and at least one digit.
            low_bits: uint8 [tables].
        """
        wide = frequencies.astype(np.int64)
        starts = wide.cumsum(1) - wide
        # Alverson, "Integer division using reciprocals" (1991): exact for states below 2^31. Division by 1 gives one
        # less, for which the term that is added makes up.
        shifts = np.ceil(np.log2(np.maximum(wide, 2))).astype(np.int64)
        reciprocals = np.where(wide >= 2, ((1 << (shifts + 31)) + wide - 1) // np.maximum(wide, 2), (1 << 32) - 1)
        added = starts + np.where(wide == 1, _SLOT_MASK, 0)
        shift_terms = np.where(wide >= 2, shifts - 1, 0) << _SHIFT_AT
        full_states = wide << (_STATE_BITS - SCALE_BITS)
        encoding = np.zeros((len(wide), _DIGITS, 4), np.uint32)
        encoding[:, :256] = np.stack((full_states, reciprocals, (1 << SCALE_BITS) - wide, added | shift_terms), axis=2)
        has_digit = wide > 0
        has_both = has_digit[:, ZERO_DIGIT:ESCAPE] & has_digit[:, ZERO_DIGIT::-1]
        limits = np.where(low_bits == 0, np.logical_and.accumulate(has_both, axis=1).sum(1) - 1, -1)
        digits = np.stack([np.repeat(np.arange(256), row) for row in wide])
        numbers = np.arange(len(wide))[:, None]
        distances = np.arange(1 << SCALE_BITS) - starts[numbers, digits]
        slots = digits | wide[numbers, digits] << 8 | distances << 20
        return cls(
            low_bits=low_bits,
            frequencies=frequencies,
            limits=limits.astype(np.int32),
            encoding=encoding.reshape(-1),
            slots=slots.reshape(-1).astype(np.uint32),
        )


@njit
def _put_raw(state, value, bits, words, place):
    """Push raw bits on a state; return it, and the place of the last word that was written."""
    if state >= np.uint64(1) << np.uint64(_STATE_BITS - bits):
        place -= 1
        words[np.uint64(place)] = state & np.uint64(0xFFFF)
        state >>= np.uint64(_WORD_BITS)
    return state << np.uint64(bits) | np.uint64(value), place


@njit
def _place_of(table, number, num_bits):
    """Return a place in a table, without a sign: numba then does not ask whether it counts from the end."""
    return np.uint64(table) << np.uint64(num_bits) | np.uint64(number)


@njit
def _number_of(table, digit):
    """Return the number of a digit among those of all tables, with which ``_put_digit`` finds it."""
    return np.int64(table) * _DIGITS + digit


@njit
def _put_digit(state, digit, encoding, words, place):
    """Push a digit on a state; return it, and the place of the last word that was written.

    Whether a word is written depends on the data, so there is no branch on it, which a processor could not predict.

    Args:
        state: The state.
        digit: The number of the digit among those of all tables, see ``_number_of``.
        encoding: See ``SymbolTables``.
        words: The words.
        place: The place of the last word that was written.
    """
    first = np.uint64(digit) << np.uint64(2)
    full_state, reciprocal = np.uint64(encoding[first]), np.uint64(encoding[first + np.uint64(1)])
    factor, added = np.uint64(encoding[first + np.uint64(2)]), np.uint64(encoding[first + np.uint64(3)])
    is_full = state >= full_state
    words[np.uint64(place - 1)] = state & np.uint64(0xFFFF)
    place -= np.int64(is_full)
    state = state >> np.uint64(_WORD_BITS) if is_full else state
    quotient = state * reciprocal >> np.uint64(32) >> (added >> np.uint64(_SHIFT_AT))
    return state + quotient * factor + (added & np.uint64(_ADDED_MASK)), place


@njit
def _put_number(state, number, table, tables, words, place):
    """Push a number of 16 bits on a state: its low bits and then its digit, or all of it and then an escape."""
    low_bits, value = np.int64(tables.low_bits[np.uint64(table)]), np.int64(number)
    digit = np.int64(ZERO_DIGIT) + (value >> low_bits)
    if digit < 0 or digit >= ESCAPE or tables.encoding[np.uint64(4 * _number_of(table, digit))] == 0:
        whole = np.uint64(value & 0xFFFF)
        state, place = _put_raw(state, whole & np.uint64(0xFF), 8, words, place)
        state, place = _put_raw(state, whole >> np.uint64(8), 8, words, place)
        digit = np.int64(ESCAPE)
    elif low_bits > 0:
        state, place = _put_raw(state, value & ((1 << low_bits) - 1), low_bits, words, place)
    return _put_digit(state, _number_of(table, digit), tables.encoding, words, place)


@njit
def _class_of(numbers, start, num_cols, first_class):
    """Return the class of a row: the bits of the sum of its squared numbers, less ``first_class``, from 0 to 15."""
    own, energy = numbers[start : start + num_cols], np.int64(0)
    for column in range(num_cols):
        number = np.int64(own[column])
        energy += np.int64(np.uint32(number * number))
    num_bits = np.int64(energy > 0)
    for half in (32, 16, 8, 4, 2, 1):
        if energy >> np.int64(half) > 0:
            energy >>= np.int64(half)
            num_bits += half
    return min(max(num_bits - first_class, 0), NUM_CLASSES - 1)


@njit
def _find_digits(numbers, start, choice, num_cols, plan, target):
    """Write the digits of numbers of a row. Slices, with places from 0, let LLVM vectorise this."""
    own, limits = numbers[start : start + num_cols], plan.limits[choice : choice + num_cols]
    zeros, digits = plan.zeros[choice : choice + num_cols], plan.digits[target : target + num_cols]
    for column in range(num_cols):
        number = np.int32(own[column])
        digits[column] = zeros[column] + number if abs(number) <= limits[column] else np.int32(-1)


@njit
def _encode_four(numbers, num_cols, choices, first_class, class_tables, tables, words, states, first, place, plan):
    """Encode four rows, whose states are in registers meanwhile; return the place of the last word."""
    state_0, state_1 = np.uint64(states[0]), np.uint64(states[1])
    state_2, state_3 = np.uint64(states[2]), np.uint64(states[3])
    row_0 = first * num_cols
    row_1, row_2, row_3 = row_0 + num_cols, row_0 + 2 * num_cols, row_0 + 3 * num_cols
    for column in range(0, NUM_STATES * num_cols, CACHE_LINE_BYTES // numbers.itemsize):
        prefetch(numbers, max(row_0 - _ROWS_AHEAD * num_cols + column, 0))
    class_0 = _class_of(numbers, row_0, num_cols, first_class)
    class_1 = _class_of(numbers, row_1, num_cols, first_class)
    class_2 = _class_of(numbers, row_2, num_cols, first_class)
    class_3 = _class_of(numbers, row_3, num_cols, first_class)
    choice_0, choice_1 = class_0 * num_cols, class_1 * num_cols
    choice_2, choice_3 = class_2 * num_cols, class_3 * num_cols
    digits, encoding = plan.digits, tables.encoding
    for chunk in range((num_cols - 1) // _CHUNK_COLS, -1, -1):
        first_col = chunk * _CHUNK_COLS
        count = min(_CHUNK_COLS, num_cols - first_col)
        _find_digits(numbers, row_0 + first_col, choice_0 + first_col, count, plan, 0)
        _find_digits(numbers, row_1 + first_col, choice_1 + first_col, count, plan, _CHUNK_COLS)
        _find_digits(numbers, row_2 + first_col, choice_2 + first_col, count, plan, 2 * _CHUNK_COLS)
        _find_digits(numbers, row_3 + first_col, choice_3 + first_col, count, plan, 3 * _CHUNK_COLS)
        for index in range(count - 1, -1, -1):
            column = first_col + index
            digit_0, digit_1 = digits[np.uint64(index)], digits[np.uint64(_CHUNK_COLS + index)]
            digit_2, digit_3 = digits[np.uint64(2 * _CHUNK_COLS + index)], digits[np.uint64(3 * _CHUNK_COLS + index)]
            if digit_0 | digit_1 | digit_2 | digit_3 >= 0:
                state_3, place = _put_digit(state_3, digit_3, encoding, words, place)
                state_2, place = _put_digit(state_2, digit_2, encoding, words, place)
                state_1, place = _put_digit(state_1, digit_1, encoding, words, place)
                state_0, place = _put_digit(state_0, digit_0, encoding, words, place)
            else:
                table = choices[np.uint64(choice_3 + column)]
                state_3, place = _put_number(state_3, numbers[np.uint64(row_3 + column)], table, tables, words, place)
                table = choices[np.uint64(choice_2 + column)]
                state_2, place = _put_number(state_2, numbers[np.uint64(row_2 + column)], table, tables, words, place)
                table = choices[np.uint64(choice_1 + column)]
                state_1, place = _put_number(state_1, numbers[np.uint64(row_1 + column)], table, tables, words, place)
                table = choices[np.uint64(choice_0 + column)]
                state_0, place = _put_number(state_0, numbers[np.uint64(row_0 + column)], table, tables, words, place)
    state_3, place = _put_digit(state_3, class_3, class_tables.encoding, words, place)
    state_2, place = _put_digit(state_2, class_2, class_tables.encoding, words, place)
    state_1, place = _put_digit(state_1, class_1, class_tables.encoding, words, place)
    state_0, place = _put_digit(state_0, class_0, class_tables.encoding, words, place)
    states[0], states[1], states[2], states[3] = state_0, state_1, state_2, state_3
    return place


@njit
def _encode_few(numbers, num_cols, choices, first_class, class_tables, tables, words, states, first, place):
    """Encode fewer than four rows; return the place of the last word."""
    num_lanes = len(numbers) // num_cols - first
    row_classes = np.int64(0)  # four bits for each row
    for lane in range(num_lanes):
        row_classes |= _class_of(numbers, (first + lane) * num_cols, num_cols, first_class) << (4 * lane)
    for column in range(num_cols - 1, -1, -1):
        for lane in range(num_lanes - 1, -1, -1):
            table = choices[(row_classes >> (4 * lane) & 15) * num_cols + column]
            number = numbers[(first + lane) * num_cols + column]
            state, place = _put_number(np.uint64(states[lane]), number, table, tables, words, place)
            states[lane] = state
    for lane in range(num_lanes - 1, -1, -1):
        state, row_class = np.uint64(states[lane]), row_classes >> (4 * lane) & 15
        state, place = _put_digit(state, row_class, class_tables.encoding, words, place)
        states[lane] = state
    return place


class EncodingPlan(NamedTuple):
    """Working memory of ``encode``, and what it finds out about each class and column.

    Attributes:
        limits: int32 [16 * num_cols], the limit of the table; see ``SymbolTables``.
        zeros: int32 [16 * num_cols], the digit of the number 0 in the table, see ``_number_of``.
        digits: int32 [4 * 64], the digits of 64 columns of four rows; -1 for a number that takes raw bits.
    """

    limits: npt.NDArray[np.int32]
    zeros: npt.NDArray[np.int32]
    digits: npt.NDArray[np.int32]

    @classmethod
    def empty(cls, num_cols: int) -> "EncodingPlan":
        """Make the memory for rows of so many columns."""
        per_class = NUM_CLASSES * num_cols
        return cls(
            np.empty(per_class, np.int32), np.empty(per_class, np.int32), np.empty(NUM_STATES * _CHUNK_COLS, np.int32)
        )


@Kernel
def encode(numbers, num_cols, choices, first_class, class_tables, tables, plan, words, states, used):
    """Encode rows of whole numbers as words.

    Args:
        numbers: The numbers, int16 [n * num_cols].
        num_cols: Numbers in a row.
        choices: The table of each class and column, uint8 [16 * num_cols].
        first_class: The bits of the sum of squares of a row of the first class.
        class_tables: ``SymbolTables`` with one table, whose digits are the classes.
        tables: ``SymbolTables`` of the numbers.
        plan: An ``EncodingPlan``, overwritten.
        words: uint16 [``most_words`` + 1], filled from its end.
        states: uint32 [4], the states with which decoding begins, written.
        used: int64 [1], how many words were written.
    """
    for place in range(len(choices)):
        table = np.int64(choices[place])
        plan.limits[place] = tables.limits[table]
        plan.zeros[place] = _number_of(table, ZERO_DIGIT)
    place = len(words)
    num_rows = len(numbers) // num_cols
    for lane in range(NUM_STATES):
        states[lane] = LEAST_STATE
    for group in range(-(-num_rows // NUM_STATES) - 1, -1, -1):
        first = group * NUM_STATES
        encode_rows = (numbers, num_cols, choices, first_class, class_tables, tables, words, states, first, place)
        place = _encode_four(*encode_rows, plan) if num_rows - first >= NUM_STATES else _encode_few(*encode_rows)
    used[0] = len(words) - place


@njit
def _refilled(state, words, place):
    """Return a state that took a word if it is too small, and the place of the next word. There is no branch."""
    word = np.uint64(words[np.uint64(min(place, len(words) - 1))])
    is_low = state < np.uint64(LEAST_STATE)
    return state << np.uint64(_WORD_BITS) | word if is_low else state, place + np.int64(is_low)


@njit
def _taken(state, table, tables, words, place):
    """Take a digit from a state: return it, the state, and the place of the next word."""
    slot = tables.slots[_place_of(table, state & np.uint64(_SLOT_MASK), SCALE_BITS)]
    frequency, distance = np.uint64(slot >> np.uint32(8) & np.uint32(_SLOT_MASK)), np.uint64(slot >> np.uint32(20))
    state = frequency * (state >> np.uint64(SCALE_BITS)) + distance
    state, place = _refilled(state, words, place)
    return np.int64(slot & np.uint32(0xFF)), state, place


@njit
def _taken_number(state, table, tables, words, place):
    """Take a number of 16 bits from a state: return it, the state, and the place of the next word."""
    digit, state, place = _taken(state, table, tables, words, place)
    low_bits = np.int64(tables.low_bits[np.uint64(table)])
    if digit == ESCAPE:
        high, state = state & np.uint64(0xFF), state >> np.uint64(8)
        state, place = _refilled(state, words, place)
        low, state = state & np.uint64(0xFF), state >> np.uint64(8)
        state, place = _refilled(state, words, place)
        return np.int64(np.int16(np.uint16(high << np.uint64(8) | low))), state, place
    number = digit - ZERO_DIGIT
    if low_bits > 0:
        number = (number << low_bits) + np.int64(state & np.uint64((1 << low_bits) - 1))
        state, place = _refilled(state >> np.uint64(low_bits), words, place)
    return number, state, place


@njit
def _decode_four(words, states, num_cols, choices, class_tables, tables, numbers, first, place):
    """Decode four rows, whose states are in registers meanwhile; return the place of the next word."""
    state_0, state_1 = np.uint64(states[0]), np.uint64(states[1])
    state_2, state_3 = np.uint64(states[2]), np.uint64(states[3])
    class_0, state_0, place = _taken(state_0, 0, class_tables, words, place)
    class_1, state_1, place = _taken(state_1, 0, class_tables, words, place)
    class_2, state_2, place = _taken(state_2, 0, class_tables, words, place)
    class_3, state_3, place = _taken(state_3, 0, class_tables, words, place)
    choice_0, choice_1 = (class_0 & 15) * num_cols, (class_1 & 15) * num_cols
    choice_2, choice_3 = (class_2 & 15) * num_cols, (class_3 & 15) * num_cols
    target = first * num_cols
    for column in range(num_cols):
        number, state_0, place = _taken_number(state_0, choices[np.uint64(choice_0 + column)], tables, words, place)
        numbers[np.uint64(target + column)] = number
        number, state_1, place = _taken_number(state_1, choices[np.uint64(choice_1 + column)], tables, words, place)
        numbers[np.uint64(target + num_cols + column)] = number
        number, state_2, place = _taken_number(state_2, choices[np.uint64(choice_2 + column)], tables, words, place)
        numbers[np.uint64(target + 2 * num_cols + column)] = number
        number, state_3, place = _taken_number(state_3, choices[np.uint64(choice_3 + column)], tables, words, place)
        numbers[np.uint64(target + 3 * num_cols + column)] = number
    states[0], states[1], states[2], states[3] = state_0, state_1, state_2, state_3
    return place


@njit
def _decode_few(words, states, num_cols, choices, class_tables, tables, numbers, first, place):
    """Decode fewer than four rows; return the place of the next word."""
    num_lanes = len(numbers) // num_cols - first
    row_classes = np.int64(0)  # four bits for each row
    for lane in range(num_lanes):
        row_class, state, place = _taken(np.uint64(states[lane]), 0, class_tables, words, place)
        states[lane] = state
        row_classes |= (row_class & 15) << (4 * lane)
    for column in range(num_cols):
        for lane in range(num_lanes):
            table = choices[(row_classes >> (4 * lane) & 15) * num_cols + column]
            number, state, place = _taken_number(np.uint64(states[lane]), table, tables, words, place)
            states[lane] = state
            numbers[(first + lane) * num_cols + column] = number
    return place


@Kernel
def decode(words, states, num_cols, choices, class_tables, tables, numbers, is_right):
    """Decode rows of whole numbers. Whatever the words are, it reads and writes only within the arrays.

    Args:
        words: uint16 [words + 1], in the order of decoding, and one more, whose value does not matter.
        states: uint32 [4], overwritten.
        num_cols: Numbers in a row.
        choices: The table of each class and column, uint8 [16 * num_cols].
        class_tables: ``SymbolTables`` with the table of the classes.
        tables: ``SymbolTables``.
        numbers: int16 [n * num_cols], written.
        is_right: bool [1], written: whether all words were used and the states are those with which encoding began.
    """
    place = 0
    num_rows = len(numbers) // num_cols
    for first in range(0, num_rows, NUM_STATES):
        if num_rows - first >= NUM_STATES:
            place = _decode_four(words, states, num_cols, choices, class_tables, tables, numbers, first, place)
        else:
            place = _decode_few(words, states, num_cols, choices, class_tables, tables, numbers, first, place)
    right = place == len(words) - 1
    for lane in range(NUM_STATES):
        right = right and states[lane] == LEAST_STATE
    is_right[0] = right


def most_words(num_rows: int, num_cols: int) -> int:
    """Return the most words that rows can take: a digit of frequency 1 and 16 raw bits for each number."""
    return num_rows * (2 * num_cols + 1) + NUM_STATES

"""Transformed rows as docs/reference/format.md describes them, in plain NumPy, for ``reader``."""

import hashlib
import struct
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.golden.refusals import check

Array = npt.NDArray[Any]
STRIP_ROWS = 4096


@cache
def tables() -> tuple[Array, list[int]]:
    """The frequencies of all tables, [128, 256], and their numbers of raw bits."""
    frequencies, raw_bits = np.zeros((128, 256), np.int64), []
    for number in range(128):
        i = number % 64
        r = max(0, i // 4 - 7)
        with localcontext(Context(prec=30)):
            s = Decimal(2) ** (Decimal(i) / 4 - 4 - r)
            w = min(127, int(7 * s) + 2)
            if number < 64:
                a = Decimal(2).sqrt() / s
                h, q = (-a / 2).exp(), (-a).exp()
                weights = [1 - h, *((1 / h - h) / 2 * q * q ** (m - 1) for m in range(1, w + 1))]
            else:
                g = (-1 / (2 * s * s)).exp()
                weights = [g ** (m * m) for m in range(w + 1)]
            total = weights[0] + 2 * sum(weights[1:])
            for m in range(1, w + 1):
                frequencies[number, 127 + m] = frequencies[number, 127 - m] = 1 + int(
                    (4094 - 2 * w) * weights[m] / total
                )
        frequencies[number, 255] = 1
        frequencies[number, 127] = 4096 - frequencies[number].sum()
        raw_bits.append(r)
    return frequencies, raw_bits


@dataclass(frozen=True)
class Transform:
    """A transform with its basis."""

    step: float
    frequencies: Array
    choices: Array
    basis: Array | None

    @classmethod
    def of(cls, data: bytes, basis: bytes | None, digest: str, basis_digest: str | None, cols: int) -> "Transform":
        """From the content of its frame, and the bytes of its basis."""
        check(len(data) == 77 + 16 * cols, "a transform of another size")
        version, has_basis, own_cols, step, first_class, own_digest = struct.unpack_from("<BBHdb32s", data)
        check(hashlib.sha256(data).hexdigest() == digest, "another transform")
        check(version == 1 and own_cols == cols and 0 < step < np.inf and first_class >= 0, "an invalid transform")
        check(
            has_basis == (basis is not None) and (basis is None) == (basis_digest is None), "no basis, or one too many"
        )
        components = None
        if basis is None:
            check(own_digest == bytes(32), "the digest of no basis")
        else:
            check(len(basis) == 4 * cols * cols, "a basis of another size")
            check(hashlib.sha256(basis).digest() == own_digest and own_digest.hex() == basis_digest, "another basis")
            components = np.frombuffer(basis, "<f4").astype(np.float64).reshape(cols, cols)
            check(bool(np.isfinite(components).all()), "a basis that is not finite")
        frequencies = np.frombuffer(data, "<u2", 16, 45).astype(np.int64)
        check(bool((frequencies > 0).all()) and int(frequencies.sum()) == 4096, "frequencies of classes")
        choices = np.frombuffer(data, np.uint8, 16 * cols, 77).reshape(16, cols)
        check(bool((choices < 128).all()), "a table that there is not")
        return cls(step, frequencies, choices, components)

    def rows(self, numbers: Array) -> Array:
        """The values of rows of numbers, as binary32."""
        if self.basis is None:
            values = numbers.astype(np.float64)
        else:
            values = np.zeros(numbers.shape)
            for component, direction in enumerate(self.basis):
                values += numbers[:, component, None] * direction
        return (values * self.step).astype("<f4")


class _Words:
    """The words of a strip, and its states."""

    def __init__(self, words: Array, states: Array) -> None:
        self.words, self.states, self.place = [int(word) for word in words], [int(state) for state in states], 0

    def _refill(self, lane: int) -> None:
        if self.states[lane] < 2**15:
            check(self.place < len(self.words), "too few words")
            self.states[lane] = 65536 * self.states[lane] + self.words[self.place]
            self.place += 1

    def symbol(self, lane: int, ends: Array) -> int:
        """A symbol, given the sums of frequencies up to each."""
        x = self.states[lane]
        found = int(np.searchsorted(ends, x % 4096, side="right"))
        start = int(ends[found - 1]) if found else 0
        self.states[lane] = (int(ends[found]) - start) * (x // 4096) + x % 4096 - start
        self._refill(lane)
        return found

    def raw(self, lane: int, num_bits: int) -> int:
        """Raw bits."""
        found = self.states[lane] % 2**num_bits
        self.states[lane] //= 2**num_bits
        self._refill(lane)
        return found


def fits(num_bytes: int, rows: int, cols: int) -> bool:
    """Whether so many bytes may be those of rows of numbers: a class is a word at most, and a number two."""
    num_words, rest = divmod(num_bytes - 20 * -(-rows // STRIP_ROWS), 2)
    return rest == 0 and 0 <= num_words <= rows * (2 * cols + 1) + 4


def decode(data: bytes, rows: int, cols: int, transform: Transform) -> tuple[Array, int]:
    """The numbers of a blob, [rows, cols], and how many bytes they take."""
    num_strips = -(-rows // STRIP_ROWS)
    head = np.frombuffer(data[: 20 * num_strips], "<u4")
    frequencies, raw_bits = tables()
    ends, class_ends = frequencies.cumsum(1), transform.frequencies.cumsum()
    numbers, place = np.zeros((rows, cols), np.int64), 20 * num_strips
    for strip, (num_words, *states) in enumerate(head.reshape(num_strips, 5).tolist()):
        words = _Words(np.frombuffer(data[place : place + 2 * num_words], "<u2"), np.array(states))
        check(len(words.words) == num_words, "too few bytes")
        place += 2 * num_words
        stop = min(rows, (strip + 1) * STRIP_ROWS)
        for first in range(strip * STRIP_ROWS, stop, 4):
            lanes = range(min(4, stop - first))
            classes = [words.symbol(lane, class_ends) for lane in lanes]
            for column in range(cols):
                for lane in lanes:
                    table = int(transform.choices[classes[lane], column])
                    digit = words.symbol(lane, ends[table])
                    if digit == 255:
                        value = 256 * words.raw(lane, 8) + words.raw(lane, 8)
                        numbers[first + lane, column] = value - 65536 * (value >= 32768)
                    else:
                        bits = raw_bits[table]
                        numbers[first + lane, column] = (digit - 127) * 2**bits + words.raw(lane, bits)
        check(words.place == num_words and words.states == [2**15] * 4, "words that do not end")
    return numbers, place

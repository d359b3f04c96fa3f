"""The transform of a table's rows: a basis, a step, and the tables by which the components are entropy-coded.

Trained tables of recommendation models occupy few directions ("On the Embedding Collapse When Scaling up Recommendation
Models", ICML 2024, arXiv 2310.04400). In the basis of their principal components most components are small. They are
rounded to multiples of one step for all rows, and coded by their entropy ("Transform Coding", Goyal, IEEE Signal
Processing Magazine 18(5), 2001). With an orthonormal basis, the error of a row is at most half a step times the root of
its number of columns.
"""

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.kernels.cpu import Floats, Numbers
from torchrec_cnr.kernels.cpu.symbol_coder import ESCAPE, NUM_CLASSES, SCALE_BITS, ZERO_DIGIT, SymbolTables
from torchrec_cnr.quantization.symbol_tables import NUM_SPREADS, NUM_TABLES, class_tables, spreads, symbol_tables

_HEADER = struct.Struct("<BBHdb32s")  # version, whether there is a basis, columns, step, first class, basis's SHA-256
_VERSION = 1
_PRIOR_ROWS = 16  # how many rows the spread that is expected of a class counts as, beside its rows in the sample
_NEAR_SPREADS = 3  # how many tables on either side of the expected one are tried
_SEARCH_ROUNDS = 24
_MARGIN = 0.985  # of the mean error that is asked, so that rows outside of the sample meet it, and those of later saves


@dataclass(frozen=True, eq=False)
class Basis:
    """An orthonormal basis of the rows of a table. It changes slowly, so it is stored once and used by many saves.

    Attributes:
        components: float32 [num_cols, num_cols], whose rows are the components.
    """

    components: npt.NDArray[np.float32]

    @cached_property
    def data(self) -> bytes:
        """The basis as it is stored."""
        return self.components.astype("<f4").tobytes()

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of :attr:`data`."""
        return hashlib.sha256(self.data).digest()

    @classmethod
    def parsed(cls, data: bytes, num_cols: int, where: str) -> "Basis":
        """Return a basis from the bytes that were stored.

        Raises:
            DamagedError: They are not a basis of so many columns.
        """
        if len(data) != basis_bytes(num_cols):
            raise DamagedError(f"{where}: corrupt: not a basis of {num_cols} columns; use another checkpoint")
        components = np.frombuffer(data, "<f4").astype(np.float32).reshape(num_cols, num_cols)
        if not np.isfinite(components).all():
            raise DamagedError(f"{where}: corrupt: a basis that is not finite; use another checkpoint")
        return cls(components)


@dataclass(frozen=True, eq=False)
class RowTransform:
    """The transform of a table's rows into whole numbers that take few bits, and back.

    Attributes:
        num_cols: Columns of the table.
        step: The distance of two neighbouring values of a component.
        basis: The basis; None for the columns themselves.
        first_class: The class of a row is the number of bits of the sum of its squared numbers less this, from 0 to 15.
        class_frequencies: uint16 [16], which add up to 4096.
        choices: uint8 [16, num_cols], the table of each class and component; see ``symbol_tables``.
        bits_per_value: How many bits a value took when the transform was learned; 0 if that is not known.
    """

    num_cols: int
    step: float
    basis: Basis | None
    first_class: int
    class_frequencies: npt.NDArray[np.uint16]
    choices: npt.NDArray[np.uint8]
    bits_per_value: float = 0.0

    @property
    def digests(self) -> set[str]:
        """The digests of the transform and of its basis, in hexadecimal."""
        return {self.digest} if self.basis is None else {self.digest, self.basis.digest.hex()}

    @cached_property
    def class_tables(self) -> SymbolTables:
        """The table of the classes, for the kernels."""
        return class_tables(self.class_frequencies)

    @cached_property
    def data(self) -> bytes:
        """The transform as it is stored, without its basis."""
        digest = bytes(32) if self.basis is None else self.basis.digest
        header = _HEADER.pack(_VERSION, self.basis is not None, self.num_cols, self.step, self.first_class, digest)
        return header + self.class_frequencies.astype("<u2").tobytes() + self.choices.tobytes()

    @classmethod
    def parsed(cls, data: bytes, basis: Basis | None, where: str) -> "RowTransform":
        """Return a transform from the bytes that were stored, and from its basis.

        Raises:
            DamagedError: They are not a transform of this version of the format.
        """
        try:
            version, has_basis, num_cols, step, first_class, digest = _HEADER.unpack_from(data)
            frequencies = np.frombuffer(data, "<u2", NUM_CLASSES, _HEADER.size).astype(np.uint16)
            place = _HEADER.size + 2 * NUM_CLASSES
            choices = np.frombuffer(data, np.uint8, NUM_CLASSES * num_cols, place).reshape(NUM_CLASSES, num_cols)
        except (struct.error, ValueError) as error:
            raise DamagedError(f"{where}: corrupt: not a transform ({error}); use another checkpoint") from error
        is_valid = (
            (version, has_basis) in ((_VERSION, 0), (_VERSION, 1))
            and len(data) == transform_bytes(num_cols)
            and digest == (bytes(32) if basis is None else basis.digest)
            and (has_basis == 1) == (basis is not None)
            and num_cols > 0
            and 0 < step < np.inf
            and first_class >= 0
            and frequencies.min() > 0
            and frequencies.sum(dtype=np.int64) == 1 << SCALE_BITS
            and choices.max() < NUM_TABLES
        )
        if not is_valid:
            raise DamagedError(f"{where}: corrupt: not a transform of this format version; use another checkpoint")
        return cls(num_cols, step, basis, first_class, frequencies, choices)

    @cached_property
    def wide_basis(self) -> Floats:
        """The basis for the kernels: float64 [num_cols, num_cols], or [0, 0] for the columns themselves."""
        return np.empty((0, 0)) if self.basis is None else self.basis.components.astype(np.float64)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of :attr:`data`, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    def num_bits(self, numbers: Numbers) -> float:
        """Return the bits that rows of numbers, int16 [n, num_cols], take, without those of streams' beginnings."""
        classes = _classes(numbers, self.first_class)
        bits = -np.log2(self.class_frequencies[classes].astype(np.float64) / (1 << SCALE_BITS)).sum()
        tables = self.choices[classes]
        return float(bits + _bits_of(numbers, tables).sum())


def transform_bytes(num_cols: int) -> int:
    """Return the bytes of a stored transform, without its basis."""
    return _HEADER.size + 2 * NUM_CLASSES + NUM_CLASSES * num_cols


def basis_bytes(num_cols: int) -> int:
    """Return the bytes of a stored basis."""
    return 4 * num_cols * num_cols


def principal_components(rows: Floats) -> Basis:
    """Return the eigenvectors of the second moments of rows, float64 [n, num_cols], the largest first."""
    _, vectors = np.linalg.eigh(rows.T @ rows)
    return Basis(np.ascontiguousarray(vectors.T[::-1]).astype(np.float32))


def learned(rows: Floats, mean_error: float, basis: Basis | None) -> RowTransform:
    """Return a transform for rows like those of a sample.

    Args:
        rows: float64 [n, num_cols], finite; n >= 1.
        mean_error: The mean l2 norm of the rows' errors that is wanted, above 0.
        basis: The basis; None for the columns themselves.
    """
    num_cols = rows.shape[1]
    components = rows if basis is None else rows @ basis.components.astype(np.float64).T
    step = _largest_step(components, mean_error * _MARGIN)
    numbers = np.clip(np.rint(components / step), -32767, 32767).astype(np.int16)
    first_class = _first_class(numbers)
    classes = _classes(numbers, first_class)
    return RowTransform(num_cols, step, basis, first_class, _class_frequencies(classes), _choices(numbers, classes))


def _largest_step(components: Floats, mean_error: float) -> float:
    """Return the largest step, of those that a search tries, at which the mean error is not larger than this."""
    norms = np.linalg.norm(components, axis=1)
    low, high = mean_error / np.sqrt(components.shape[1]), 2 * max(mean_error, float(norms.max()))
    for _ in range(_SEARCH_ROUNDS):
        middle = float(np.sqrt(low * high))
        errors = components - np.rint(components / middle) * middle
        if np.linalg.norm(errors, axis=1).mean() <= mean_error:
            low = middle
        else:
            high = middle
    return float(low)


def _energies(numbers: Numbers) -> npt.NDArray[np.int64]:
    wide = numbers.astype(np.int64)
    energies: npt.NDArray[np.int64] = np.einsum("rc,rc->r", wide, wide)
    return energies


def _num_bits(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many bits each value has, 0 for 0."""
    exponents: npt.NDArray[np.int64] = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    return exponents


def _classes(numbers: Numbers, first_class: int) -> npt.NDArray[np.uint8]:
    return np.clip(_num_bits(_energies(numbers)) - first_class, 0, NUM_CLASSES - 1).astype(np.uint8)


def _first_class(numbers: Numbers) -> int:
    """Return the first class such that the classes of the sample are in the middle, or begin with that of 0."""
    bits = _num_bits(_energies(numbers))
    return max(0, int(np.median(bits)) - NUM_CLASSES // 2)


def _class_frequencies(classes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Return frequencies that add up to 4096, at least 1 each."""
    counts = np.bincount(classes, minlength=NUM_CLASSES)
    frequencies = 1 + ((1 << SCALE_BITS) - NUM_CLASSES) * counts // counts.sum()
    frequencies[frequencies.argmax()] += (1 << SCALE_BITS) - frequencies.sum()
    result: npt.NDArray[np.uint16] = frequencies.astype(np.uint16)
    return result


def _choices(numbers: Numbers, classes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the table of each class and component, uint8 [16, num_cols].

    The spread of a component in a class is that of the class's rows in the sample, and of what all rows let expect. Of
    the tables about this spread, that with the fewest bits for the sample is taken.
    """
    squares = numbers.astype(np.float64) ** 2
    energies = squares.sum(1)
    shares = squares.sum(0) / max(1.0, energies.sum())
    known = np.flatnonzero(np.bincount(classes, minlength=NUM_CLASSES))
    choices = np.zeros((NUM_CLASSES, numbers.shape[1]), np.uint8)
    for number in range(NUM_CLASSES):
        nearest = int(known[np.abs(known - number).argmin()])
        own = classes == nearest
        count, factor = int(own.sum()), 2.0 ** (number - nearest)
        expected = shares * energies[own].mean() * factor
        variances = (squares[own].sum(0) * factor + _PRIOR_ROWS * expected) / (count + _PRIOR_ROWS)
        places = _nearest_spreads(np.sqrt(variances))
        sample = numbers[own] if number == nearest else numbers[:0]
        choices[number] = _best_near(sample, places)
    return choices


def _nearest_spreads(wanted: Floats) -> npt.NDArray[np.int64]:
    known = np.log2(spreads())
    distances = np.abs(np.log2(np.maximum(wanted, 1e-9))[:, None] - known)
    places: npt.NDArray[np.int64] = distances.argmin(1)
    return places


def _best_near(numbers: Numbers, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return for each component the table that takes the fewest bits, of those near a spread."""
    offsets = range(-_NEAR_SPREADS, _NEAR_SPREADS + 1)
    tables = [kind + np.clip(places + offset, 0, NUM_SPREADS - 1) for kind in (0, NUM_SPREADS) for offset in offsets]
    if not len(numbers):
        return places.astype(np.uint8)
    costs = [_bits_of(numbers, np.broadcast_to(table, numbers.shape)).sum(0) for table in tables]
    # A component that is 0 in the whole sample fits all small spreads alike; the expected one is not the least.
    best = np.argmin([cost + 0.5 * abs(offset) for cost, offset in zip(costs, [*offsets, *offsets], strict=True)], 0)
    chosen: npt.NDArray[np.uint8] = np.stack(tables)[best, np.arange(len(places))].astype(np.uint8)
    return chosen


def _bits_of(numbers: Numbers, tables: npt.NDArray[np.integer]) -> Floats:
    """Return the bits of each number by its table."""
    known = symbol_tables()
    low_bits = known.low_bits[tables].astype(np.int64)
    digits = (numbers.astype(np.int64) >> low_bits) + ZERO_DIGIT
    in_table = (digits >= 0) & (digits < ESCAPE)
    frequencies = known.frequencies[tables, np.where(in_table, digits, ESCAPE)]
    is_escape = ~in_table | (frequencies == 0)
    bits = SCALE_BITS - np.log2(np.where(is_escape, 1, frequencies).astype(np.float64))
    result: Floats = bits + np.where(is_escape, 16, low_bits)
    return result

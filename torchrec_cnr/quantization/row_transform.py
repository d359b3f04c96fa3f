"""The transform of a table's rows: a basis, a step, and the tables by which the components are entropy-coded.

Rows of trained recommendation models are close to a subspace of few dimensions ("On the Embedding Collapse When Scaling
up Recommendation Models", ICML 2024, arXiv 2310.04400). In the basis of their principal components most components are
small. They are rounded to multiples of one step for all rows, and coded by their entropy ("Transform Coding", Goyal,
IEEE Signal Processing Magazine 18(5), 2001).
"""

import hashlib
import struct
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt
import torch

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.kernels.cpu import Floats, Numbers
from torchrec_cnr.kernels.cpu.symbol_coder import ESCAPE, NUM_CLASSES, SCALE_BITS, ZERO_DIGIT, SymbolTables
from torchrec_cnr.quantization.symbol_tables import NUM_TABLES, class_tables, symbol_tables

_HEADER = struct.Struct("<BBHdb32s")  # version, whether there is a basis, columns, step, first class, basis's SHA-256
_VERSION = 1


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

    @cached_property
    def wide(self) -> Floats:
        """The components for the kernels, float64. They are here, because many transforms share a basis."""
        return self.components.astype(np.float64)

    @classmethod
    def principal(cls, rows: Floats) -> "Basis":
        """Return the eigenvectors of the second moments of rows, float64 [n, num_cols], the largest first."""
        values = torch.from_numpy(rows)
        _, vectors = torch.linalg.eigh(values.T @ values)
        return cls(np.ascontiguousarray(vectors.numpy().T[::-1]).astype(np.float32))

    def components_of(self, rows: Floats) -> Floats:
        """Return the components of rows, float64 [n, num_cols].

        They are computed by torch, because the threads of NumPy's BLAS keep processors busy for a tenth of a second
        after each product.
        """
        components: Floats = (torch.from_numpy(rows) @ torch.from_numpy(self.wide).T).numpy()
        return components

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
        dead_zone: float64 [num_cols], by how many steps components are moved towards zero before they are rounded. It
            is not stored; None in a transform that was read, for zeros.
        bits_per_value: How many bits a value took when the basis was learned; 0 if that is not known.
        is_stored: Whether a checkpoint that a save is based on has it, not only its basis.
    """

    num_cols: int
    step: float
    basis: Basis | None
    first_class: int
    class_frequencies: npt.NDArray[np.uint16]
    choices: npt.NDArray[np.uint8]
    dead_zone: npt.NDArray[np.float64] | None = None
    bits_per_value: float = 0.0
    is_stored: bool = True

    @property
    def zones(self) -> Floats:
        """The dead zone of each component, float64 [num_cols]."""
        return np.zeros(self.num_cols) if self.dead_zone is None else self.dead_zone

    @property
    def largest_part(self) -> str:
        """The digest, in hexadecimal, of the part that takes most bytes: the basis, or the transform without one."""
        return self.digest if self.basis is None else self.basis.digest.hex()

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

    @property
    def wide_basis(self) -> Floats:
        """The basis for the kernels: float64 [num_cols, num_cols], or [0, 0] for the columns themselves."""
        return np.empty((0, 0)) if self.basis is None else self.basis.wide

    @cached_property
    def digest(self) -> str:
        """SHA-256 of :attr:`data`, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    def num_bits(self, numbers: Numbers) -> float:
        """Return the bits that rows of numbers, int16 [n, num_cols], take, without those of streams' beginnings."""
        classes = classes_of(numbers, self.first_class)
        bits = -np.log2(self.class_frequencies[classes].astype(np.float64) / (1 << SCALE_BITS)).sum()
        tables = self.choices[classes]
        return float(bits + bits_of(numbers, tables).sum())


def transform_bytes(num_cols: int) -> int:
    """Return the bytes of a stored transform, without its basis."""
    return _HEADER.size + 2 * NUM_CLASSES + NUM_CLASSES * num_cols


def basis_bytes(num_cols: int) -> int:
    """Return the bytes of a stored basis."""
    return 4 * num_cols * num_cols


def energies_of(numbers: Numbers) -> npt.NDArray[np.int64]:
    wide = numbers.astype(np.int64)
    energies: npt.NDArray[np.int64] = np.einsum("rc,rc->r", wide, wide)
    return energies


def num_bits_of(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many bits each value has, 0 for 0."""
    exponents: npt.NDArray[np.int64] = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    return exponents


def classes_of(numbers: Numbers, first_class: int) -> npt.NDArray[np.uint8]:
    return np.clip(num_bits_of(energies_of(numbers)) - first_class, 0, NUM_CLASSES - 1).astype(np.uint8)


def bits_of(numbers: Numbers, tables: npt.NDArray[np.integer]) -> Floats:
    """Return the bits of each number by its table."""
    digits = (numbers >> symbol_tables().low_bits[tables].astype(np.int16)).astype(np.int64) + ZERO_DIGIT
    digits = np.where((digits >= 0) & (digits < ESCAPE), digits, ESCAPE)
    result: Floats = _digit_bits().take((tables.astype(np.int64) << 8) + digits)
    return result


@cache
def _digit_bits() -> Floats:
    """Return the bits of a number by its table and digit, float64 [tables, 256]: of the digit and of the raw bits."""
    known = symbol_tables()
    bits = SCALE_BITS - np.log2(np.maximum(known.frequencies, 1).astype(np.float64)) + known.low_bits[:, None]
    escape_bits = bits[:, ESCAPE:] - known.low_bits[:, None] + 16
    result: Floats = np.where(known.frequencies > 0, bits, escape_bits)
    result[:, ESCAPE:] = escape_bits
    return result

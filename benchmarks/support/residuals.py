"""What rows would take if they were stored as residuals: what is missing from the row that a reader has already.

The coder is closed-loop: it follows what a reader would reconstruct, so errors do not add up. A residual is a whole
number of steps an element, the step being that of the row's own plain code, ``Asymmetric(bits)``: so an element that
was stored is off by half a step at most, as with the plain code. Nothing is stored; bits are entropies of order 0.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import torchrec_cnr as cnr

STEP_BITS = 16  # a row's step in fp16, where a reader is told it
SCALE_AND_BIAS_BITS = 32  # of a row in a plain code


def entropy(counts: Collection[int]) -> float:
    """Bits a symbol, of how often each one occurs; 0 where there are none."""
    found = np.array([count for count in counts if count > 0], dtype=np.float64)
    shares = found / found.sum() if len(found) else found
    return float(-(shares * np.log2(shares)).sum()) + 0.0  # no negative zero


@dataclass
class Tally:
    """What was stored of some rows.

    Attributes:
        dim: Elements of a row.
        num_rows: How many rows were modified and could be coded.
        num_zero: Of these, rows whose residuals are all zero; they take a flag and nothing else.
        num_exact: Rows beside these, which the plain code stores exactly.
        residuals: How often each residual occurs in the other rows.
        codes: How often each plain code occurs in all of the rows.
        squared_error: Of what a reader has of the rows afterwards.
        plain_squared_error: The same with plain codes.
    """

    dim: int
    num_rows: int = 0
    num_zero: int = 0
    num_exact: int = 0
    residuals: Counter[int] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    squared_error: float = 0.0
    plain_squared_error: float = 0.0

    @property
    def zero_share(self) -> float:
        """The part of the rows that take a flag and nothing else."""
        return self.num_zero / max(1, self.num_rows)

    @property
    def residual_bits(self) -> float:
        """Bits an element, the row's flag counted, steps not."""
        flag = entropy((self.num_zero, self.num_rows - self.num_zero)) / self.dim
        return flag + (1 - self.zero_share) * entropy(self.residuals.values())

    @property
    def step_bits(self) -> float:
        """Bits an element that steps take, if a reader is told those of rows that are not zero."""
        return (1 - self.zero_share) * STEP_BITS / self.dim

    @property
    def code_bits(self) -> float:
        """Bits an element that plain codes would take if they were entropy-coded, without scale and bias."""
        return entropy(self.codes.values())

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.dim,
            self.num_rows + other.num_rows,
            self.num_zero + other.num_zero,
            self.num_exact + other.num_exact,
            self.residuals + other.residuals,
            self.codes + other.codes,
            self.squared_error + other.squared_error,
            self.plain_squared_error + other.plain_squared_error,
        )


class ResidualReader:
    """What a reader of residuals has of a table.

    Attributes:
        values: float32 [num_rows, dim]; at first what the table began with, which a seed tells.
    """

    def __init__(self, values: Tensor, bits: int) -> None:
        self.values = values.clone()
        self._bits = bits
        self._scheme = cnr.Asymmetric(bits)

    def store(self, table: Tensor, rows: Tensor) -> Tally:
        """Bring rows to what a table has now; rows that ``Asymmetric`` stores exactly are only counted.

        Args:
            table: float32 [num_rows, dim].
            rows: int64 [n], those that were modified, each once.
        """
        dim = table.shape[1]
        encoded = self._scheme.encode(table, rows)
        exact = rows[encoded.exact]
        self.values[exact] = table[exact]
        is_coded = torch.ones(len(rows), dtype=torch.bool)
        is_coded[encoded.exact] = False
        rows, codes = rows[is_coded], encoded.codes[is_coded]
        wanted = table[rows].double()
        steps = codes[:, -4:-2].contiguous().view(torch.float16).double()
        residuals = ((wanted - self.values[rows].double()) / steps).round()
        self.values[rows] = (self.values[rows].double() + residuals * steps).float()
        is_zero = (residuals == 0).all(dim=1)
        plain = self._scheme.decode(codes, dim, table.dtype).double()
        return Tally(
            dim,
            len(rows),
            int(is_zero.sum()),
            len(exact),
            counts_of(residuals[~is_zero].long()),
            counts_of(plain_codes(codes, self._bits, dim)),
            float((self.values[rows].double() - wanted).square().sum()),
            float((plain - wanted).square().sum()),
        )


def plain_codes(codes: Tensor, bits: int, dim: int) -> Tensor:
    """int64 [n, dim], each from 0 to ``2**bits - 1``: out of fused rows of 2, 4 or 8 bits, lowest bits first."""
    shifts = torch.arange(0, 8, bits)
    unpacked = (codes[:, :-4].long()[:, :, None] >> shifts) & ((1 << bits) - 1)
    return unpacked.flatten(1)[:, :dim]


def counts_of(values: Tensor) -> Counter[int]:
    """How often each value of an int64 tensor occurs."""
    found, counts = values.unique(return_counts=True)
    return Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))

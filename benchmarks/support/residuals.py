"""The bits of rows that are stored as residuals: differences from the values that a reader already has.

The coder is closed-loop: it follows the values that a reader would reconstruct, so errors do not add up. The residual
of an element is a whole number of steps of the row's own plain code, ``Asymmetric(bits)``. So the error of a stored
element is at most half a step, as with the plain code. Nothing is written; bits are entropies of order 0.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import torchrec_cnr as cnr

STEP_BITS = 16  # per row: its step in fp16, if the reader needs it
SCALE_AND_BIAS_BITS = 32  # per row of a plain code


def entropy(counts: Collection[int]) -> float:
    """Return the bits per symbol, from the number of occurrences of each; 0 if there are none."""
    found = np.array([count for count in counts if count > 0], dtype=np.float64)
    shares = found / found.sum() if len(found) else found
    return float(-(shares * np.log2(shares)).sum()) + 0.0  # no negative zero


@dataclass
class Tally:
    """Counts of the rows that were stored.

    Attributes:
        dim: Elements per row.
        num_rows: Number of modified rows that could be coded.
        num_zero: Number of these rows whose residuals are all zero; they take only a flag.
        num_exact: Number of further rows, which the plain code stores exactly.
        residuals: Occurrences of each residual in the rows with residuals.
        codes: Occurrences of each plain code in all coded rows.
        squared_error: Sum of squared errors of the values that a reader has afterwards.
        plain_squared_error: Sum of squared errors with plain codes.
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
        """The share of rows that take only a flag."""
        return self.num_zero / max(1, self.num_rows)

    @property
    def residual_bits(self) -> float:
        """The bits per element, with the flags of rows and without steps."""
        flag = entropy((self.num_zero, self.num_rows - self.num_zero)) / self.dim
        return flag + (1 - self.zero_share) * entropy(self.residuals.values())

    @property
    def step_bits(self) -> float:
        """The bits per element for the steps of rows that are not zero."""
        return (1 - self.zero_share) * STEP_BITS / self.dim

    @property
    def told_bits(self) -> float:
        """The bits per element, with the flags of rows and with steps."""
        return self.residual_bits + self.step_bits

    @property
    def code_bits(self) -> float:
        """The bits per element of plain codes if they were entropy-coded, without scale and bias."""
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
    """A reader of residuals of a table.

    Attributes:
        values: The values that the reader has, float32 [num_rows, dim]; at first the initial values of the table,
            which a seed determines.
    """

    def __init__(self, values: Tensor, bits: int) -> None:
        self.values = values.clone()
        self._bits = bits
        self._scheme = cnr.Asymmetric(bits)

    def store(self, table: Tensor, rows: Tensor) -> Tally:
        """Update rows to the values that a table has now; rows that ``Asymmetric`` stores exactly are only counted.

        Args:
            table: The table, float32 [num_rows, dim].
            rows: The numbers of the modified rows, int64 [n], each once.
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
    """Unpack the codes of fused rows of 2, 4 or 8 bits: int64 [n, dim], each from 0 to ``2**bits - 1``."""
    shifts = torch.arange(0, 8, bits)
    unpacked = (codes[:, :-4].long()[:, :, None] >> shifts) & ((1 << bits) - 1)
    return unpacked.flatten(1)[:, :dim]


def counts_of(values: Tensor) -> Counter[int]:
    """Count the occurrences of each value of an int64 tensor."""
    found, counts = values.unique(return_counts=True)
    return Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))

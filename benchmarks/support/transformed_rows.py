"""The bytes of modified rows that are transform-coded at each checkpoint, with the transform of the checkpoint before.

A transform and its basis count at the checkpoint that learns them, as they do in files.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import torchrec_cnr as cnr
from torchrec_cnr.quantization import SchemeRules, Transformed
from torchrec_cnr.quantization.packed_rows import pack_rows
from torchrec_cnr.quantization.row_transform import RowTransform
from torchrec_cnr.saving.encoding import choose_scheme


@dataclass
class TransformTally:
    """Counts of the rows that were stored.

    Attributes:
        num_values: Values in the rows that could be coded.
        num_bytes: Bytes of these rows, and of the transforms and bases that were learned for them.
        num_bases: Number of these bases.
        squared_error: Sum of squared errors of these rows.
        uniform_squared_error: Sum of their squared errors by uniform codes.
    """

    num_values: int = 0
    num_bytes: int = 0
    num_bases: int = 0
    squared_error: float = 0.0
    uniform_squared_error: float = 0.0

    @property
    def bits(self) -> float:
        """The bits per value."""
        return 8 * self.num_bytes / max(1, self.num_values)

    @property
    def error(self) -> float:
        """The squared error, divided by that of uniform codes; 1 if there is none."""
        return self.squared_error / self.uniform_squared_error if self.uniform_squared_error else 1.0

    def __add__(self, other: "TransformTally") -> "TransformTally":
        return TransformTally(
            self.num_values + other.num_values,
            self.num_bytes + other.num_bytes,
            self.num_bases + other.num_bases,
            self.squared_error + other.squared_error,
            self.uniform_squared_error + other.uniform_squared_error,
        )


class TransformedRows:
    """The checkpoints of a table that is transform-coded at the error of uniform codes."""

    def __init__(self, bits: int) -> None:
        uniform = cnr.AdaptiveAsymmetric(bits)
        self._uniform_rules = SchemeRules.of(uniform)
        self._rules = SchemeRules.of(cnr.TransformCoded(uniform))
        self._known: RowTransform | None = None

    def store(self, table: Tensor, rows: Tensor) -> TransformTally:
        """Store rows as a save does; rows that a scheme stores exactly are left out.

        Args:
            table: The table, float32 [num_rows, dim].
            rows: The numbers of the modified rows, int64 [n], each once.
        """
        if not len(rows):
            return TransformTally()
        uniform = choose_scheme(self._uniform_rules, "table", is_table=True, values=table, rows=rows, num_restores=0)
        scheme = choose_scheme(
            self._rules, "table", is_table=True, values=table, rows=rows, num_restores=0, known=self._known
        )
        encoded, uniform_encoded = scheme.encode(table, rows), uniform.encode(table, rows)
        is_coded = torch.ones(len(rows), dtype=torch.bool)
        is_coded[encoded.exact] = is_coded[uniform_encoded.exact] = False
        wanted, dim = table[rows[is_coded]].double(), table.shape[1]
        errors = [
            float((each.decode(codes[is_coded], dim, table.dtype).double() - wanted).square().sum())
            for each, codes in ((scheme, encoded.codes), (uniform, uniform_encoded.codes))
        ]
        tally = TransformTally(wanted.numel(), 0, 0, *errors)
        if not isinstance(scheme, Transformed):
            tally.num_bytes = len(wanted) * scheme.row_bytes(dim, table.dtype)
            return tally
        transform = scheme.known
        known = set() if self._known is None else {self._known.digest, self._known.largest_part}
        tally.num_bytes = pack_rows(encoded.codes.view(torch.int16).numpy()[is_coded.numpy()], transform).nbytes
        if transform.digest not in known:
            tally.num_bytes += len(transform.data)
        if transform.basis is not None and transform.basis.digest.hex() not in known:
            tally.num_bytes += len(transform.basis.data)
            tally.num_bases += 1
        self._known = transform
        return tally

"""K-means of each row: the codes' values lie where the row's values do, and are stored with it."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrec_cnr import kernels
from torchrec_cnr.quantization.scheme import Encoded, RowCodes, all_rows, positions, tail_of
from torchrec_cnr.quantization.uniform import check_bits


@dataclass(frozen=True)
class KMeans(RowCodes):
    """The best clusters of each row's values, found exactly, and a codebook of their means in fp16 (section 5.2).

    Check-N-Run has the smallest error for it and rejects it, because it took days. Here a row of 64 columns takes some
    microseconds, and one twice as wide about three times as long; but a codebook takes ``2 * 2**bits`` bytes a row, so
    that it pays for wide rows only: at 64 columns, 4 bits take as many bytes as 7.

    Each value is stored as the nearest one of the codebook. Rows with NaN or infinity are stored exactly, and rows
    whose means fp16 moves by more than half a step of a uniform code; with one value, if fp16 does not hold it.
    Clustering takes ``64 * 2**bits`` bytes of memory for each column of a row, in every thread.

    Attributes:
        bits: 2, 3, 4 or 8 bits an element.

    Raises:
        ConfigurationError: ``bits`` is none of these.
    """

    bits: int
    name: ClassVar[str] = "kmeans"

    def __post_init__(self) -> None:
        check_bits(self.bits)

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Whole bytes of codes, and two bytes for each value of the codebook."""
        return -(-num_cols * self.bits // 8) + 2 * (1 << self.bits)

    def tail_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """The codebook, if it is small."""
        return tail_of(2 * (1 << self.bits))

    def encode(self, table: Tensor, rows: Tensor | None = None) -> Encoded:
        """Cluster each row; the rows of tables on other devices are copied to the host first."""
        numbers = all_rows(table) if rows is None else rows
        codes, is_exact = kernels.encode_clusters(
            table, numbers, self.bits, self.row_bytes(table.shape[1], table.dtype)
        )
        return Encoded(codes, positions(is_exact))

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Look the codes up."""
        kernels.decode_clusters(codes, positions, self.bits, first_col, target, rows)

    def to_json(self) -> dict[str, Any]:
        """``{"name": "kmeans", "bits": ...}``."""
        return {"name": self.name, "bits": self.bits}

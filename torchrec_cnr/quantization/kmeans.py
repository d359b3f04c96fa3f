"""K-means of each row: its values are clustered, and each row stores its cluster means as a codebook."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrec_cnr import kernels
from torchrec_cnr.quantization.scheme import Encoded, RowCodes, all_rows, positions, tail_of
from torchrec_cnr.quantization.uniform import check_bits


@dataclass(frozen=True)
class KMeans(RowCodes):
    """The optimal clusters of each row's values, with a codebook of their means in fp16 (Check-N-Run, section 5.2).

    Check-N-Run measures the smallest error for k-means, but rejects it, because it took days. Here the optimal clusters
    of a row of 64 columns take some microseconds, and twice the columns take about three times as long. A codebook
    takes ``2 * 2**bits`` bytes per row, so ``KMeans`` pays only for wide rows: at 64 columns, 4 bits with a codebook
    take more bytes than 7 bits of a uniform scheme.

    Each value is stored as the nearest value of the codebook. Rows are stored exactly if they contain NaN or infinity,
    or if rounding to fp16 moves a mean by more than half a step of a uniform code. A row of equal values is stored
    exactly if fp16 cannot represent this value. Clustering takes ``64 * 2**bits`` bytes of memory per column, in every
    thread.

    Attributes:
        bits: Bits per element: 2, 3, 4 or 8.

    Raises:
        ConfigurationError: ``bits`` is not 2, 3, 4 or 8.

    Examples:
        >>> scheme = cnr.KMeans(bits=4)
        >>> writer = cnr.CNRStorageWriter("run", quantization=scheme)
        >>> scheme.row_bytes(64, torch.float32)
        64
    """

    bits: int
    name: ClassVar[str] = "kmeans"

    def __post_init__(self) -> None:
        check_bits(self.bits)

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Return the bytes per row: the codes, rounded up to whole bytes, and two for each value of the codebook."""
        return -(-num_cols * self.bits // 8) + 2 * (1 << self.bits)

    def tail_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Return the bytes of the codebook if it is small, otherwise 0."""
        return tail_of(2 * (1 << self.bits))

    def encode(self, table: Tensor, rows: Tensor | None = None) -> Encoded:
        """Cluster each row. Rows on other devices are first copied to the host."""
        row_numbers = all_rows(table) if rows is None else rows
        codes, is_exact = kernels.encode_clusters(
            table, row_numbers, self.bits, self.row_bytes(table.shape[1], table.dtype)
        )
        return Encoded(codes, positions(is_exact))

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Look up each code in the codebook of its row."""
        kernels.decode_clusters(codes, positions, self.bits, first_col, target, rows)

    def to_json(self) -> dict[str, Any]:
        """Return ``{"name": "kmeans", "bits": ...}``."""
        return {"name": self.name, "bits": self.bits}

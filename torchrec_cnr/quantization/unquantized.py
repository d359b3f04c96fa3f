"""Schemes that store each value by itself: as it is, or in half precision."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.quantization.scheme import Encoded, RowCodes, positions, tail_of


@dataclass(frozen=True)
class NoQuantization(RowCodes):
    """Rows as they are, bit for bit, in the table's own dtype, whatever it is."""

    name: ClassVar[str] = "none"

    def supports(self, dtype: torch.dtype) -> bool:
        """Every dtype."""
        return True

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """``num_cols`` elements of ``dtype``."""
        return num_cols * dtype.itemsize

    def tail_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """All of a row of a few values, such as row-wise optimizer state."""
        return tail_of(self.row_bytes(num_cols, dtype))

    def encode(self, table: Tensor, rows: Tensor | None = None) -> Encoded:
        """The bytes of the values."""
        values = table if rows is None else table.index_select(0, rows)
        row_bytes = self.row_bytes(values.shape[1], values.dtype)
        codes = values.contiguous().reshape(-1).view(torch.uint8).view(len(values), row_bytes)
        return Encoded(codes, torch.empty(0, dtype=torch.int64))

    def decode(self, codes: Tensor, num_cols: int, dtype: torch.dtype) -> Tensor:
        """The bytes, seen as ``dtype``."""
        return codes.reshape(-1).view(dtype).view(-1, num_cols)

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Copy."""
        values = codes.reshape(-1).view(target.dtype).view(len(codes), -1)
        columns = slice(first_col, first_col + target.shape[1])
        target.index_copy_(0, rows, values[:, columns].index_select(0, positions))

    def to_json(self) -> dict[str, Any]:
        """``{"name": "none"}``."""
        return {"name": self.name}


@dataclass(frozen=True)
class HalfPrecision(RowCodes):
    """Every value of an fp32 table rounded to 16 bits.

    fp16 keeps 11 significant bits of values up to 65504, and bf16 8 bits of any value: an error is at most 2^-11 or
    2^-8 of the value (below 6.1e-5, fp16 is off by at most 3e-8). Rows in which a value becomes infinite or zero, or
    is NaN, are stored exactly, and rows of several columns with one value that is rounded.

    Attributes:
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Raises:
        ConfigurationError: ``dtype`` is another one.
    """

    dtype: torch.dtype = torch.float16
    name: ClassVar[str] = "half"

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ConfigurationError(f"'dtype' must be torch.float16 or torch.bfloat16 (got {self.dtype!r})")

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Two bytes an element."""
        return 2 * num_cols

    def tail_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """All of a row of a few values."""
        return tail_of(self.row_bytes(num_cols, dtype))

    def encode(self, table: Tensor, rows: Tensor | None = None) -> Encoded:
        """Round to nearest, ties to even."""
        values = table if rows is None else table.index_select(0, rows)
        codes = values.to(self.dtype)
        decoded = codes.to(values.dtype)
        is_held = decoded.isfinite().all(1) & ((decoded != 0) | (values == 0)).all(1)
        if values.shape[1] > 1:
            is_constant = (values == values[:, :1]).all(1)
            is_held &= ~is_constant | (decoded == values).all(1)
        row_bytes = self.row_bytes(values.shape[1], values.dtype)
        codes = codes.contiguous().reshape(-1).view(torch.uint8).view(len(values), row_bytes)
        return Encoded(codes, positions(~is_held))

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Widen."""
        columns = slice(first_col, first_col + target.shape[1])
        values = codes.contiguous().view(self.dtype)[:, columns].index_select(0, positions)
        target.index_copy_(0, rows, values.to(target.dtype))

    def to_json(self) -> dict[str, Any]:
        """``{"name": "half", "dtype": ...}``."""
        return {"name": self.name, "dtype": str(self.dtype).removeprefix("torch.")}

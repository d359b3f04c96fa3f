"""Quantization schemes: frozen values that turn rows into codes and back; and the two that store values as they are.

A scheme knows nothing of tables' names, files or deltas. What it cannot represent (NaN, infinity, values that fp16
cannot tell apart) it names in ``Encoded.exact``, and such rows are stored in full beside the codes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError

_MAX_TAIL_BYTES = 16  # of a row; wide rows of values would take longer to pack than it is worth
Sample = Callable[[], Tensor]  # gathers some rows of a table, [n, num_cols]; called only where a choice needs them


@dataclass(frozen=True, eq=False)
class Encoded:
    """A block of rows as it is stored.

    Attributes:
        codes: uint8 [n, row_bytes].
        exact: int64 [k], the positions in the block of rows that ``codes`` cannot represent.
    """

    codes: Tensor
    exact: Tensor


class Quantization(Protocol):
    """What the writer takes for a tensor: a scheme, or a rule that chooses one for every shard."""

    def choose(self, sample: Sample, num_restores: int) -> "Scheme":
        """The scheme of one shard, ready to encode.

        Args:
            sample: Gathers some of the rows that are to be stored.
            num_restores: Restores that the state has been through.
        """
        ...

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this dtype can be encoded."""
        ...


class Scheme(Quantization, Protocol):
    """What every quantization scheme has."""

    name: ClassVar[str]

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Bytes that a row of ``num_cols`` elements takes."""
        ...

    def tail_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Bytes of a row behind its codes, as far as they are worth being packed; see ``format.blob_bytes``."""
        ...

    def encode(self, table: Tensor, rows: Tensor | None = None) -> Encoded:
        """Encode rows of a table.

        Args:
            table: [num_rows, num_cols] of a supported dtype, the elements of a row side by side.
            rows: int64 [n], numbers of the rows, on the table's device; None for all of them.
        """
        ...

    def decode(self, codes: Tensor, num_cols: int, dtype: torch.dtype) -> Tensor:
        """[n, num_cols] of ``dtype``, from uint8 [n, row_bytes]."""
        ...

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Decode some rows and columns straight into a target.

        Args:
            codes: uint8 [n, row_bytes], on the target's device.
            positions: int64 [k], which rows.
            first_col: The encoded column that is the target's first.
            target: [num_rows, num_cols] of the table's dtype, the elements of a row side by side. Written.
            rows: int64 [k], the rows of the target that they go to.
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """The scheme as the manifest records it."""
        ...


class DeviceScheme(Scheme, Protocol):
    """A scheme whose codes are made on the device that holds the table."""

    def encode_without_waiting(self, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Encode rows that are known to be there, and do not wait for the device.

        Args:
            table: As for ``encode``.
            rows: int64 [n], numbers of rows that the table has, on its device: nobody looks at them.

        Returns:
            uint8 [n, row_bytes], and bool [n], on the table's device: rows that codes cannot represent.
        """
        ...


class RowCodes:
    """What the schemes share that turn each row into codes of its own."""

    def choose(self, sample: Sample, num_restores: int) -> Any:
        """Itself: nothing is left open."""
        return self

    def supports(self, dtype: torch.dtype) -> bool:
        """fp32, fp16 and bf16."""
        return is_quantizable(dtype)

    def decode(self, codes: Tensor, num_cols: int, dtype: torch.dtype) -> Tensor:
        """[n, num_cols] of ``dtype``, from uint8 [n, row_bytes]."""
        values = torch.empty(len(codes), num_cols, dtype=dtype, device=codes.device)
        numbers = all_rows(codes)
        self.decode_into(codes, numbers, 0, values, numbers)
        return values

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Decode some rows and columns straight into a target; see ``Scheme.decode_into``."""
        raise NotImplementedError


def is_quantizable(dtype: torch.dtype) -> bool:
    """Whether rows of this dtype can be turned into codes: fp32, fp16 and bf16."""
    return dtype in (torch.float32, torch.float16, torch.bfloat16)


def all_rows(table: Tensor) -> Tensor:
    """The numbers of a table's rows, on its device.

    On CPUs this and ``positions`` leave torch's threads alone: after an operation they wait for the next one at full
    speed, and would take cores from the kernels' threads.
    """
    if table.device.type == "cpu":
        return torch.from_numpy(np.arange(len(table)))
    return torch.arange(len(table), device=table.device)


def positions(mask: Tensor) -> Tensor:
    """int64 [k]: where a bool mask [n] is true."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)


def tail_of(num_bytes: int) -> int:
    """The tail of a row that has so many bytes behind its codes."""
    return num_bytes if num_bytes <= _MAX_TAIL_BYTES else 0


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
        return Encoded(codes, torch.empty(0, dtype=torch.int64, device="cpu"))

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
        codes, is_exact = self._rounded(table if rows is None else table.index_select(0, rows))
        return Encoded(codes, positions(is_exact))

    def encode_without_waiting(self, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The same; which rows are stored exactly stays on the device."""
        return self._rounded(table.index_select(0, rows))

    def _rounded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        codes = values.to(self.dtype)
        decoded = codes.to(values.dtype)
        is_held = decoded.isfinite().all(1) & ((decoded != 0) | (values == 0)).all(1)
        if values.shape[1] > 1:
            is_constant = (values == values[:, :1]).all(1)
            is_held &= ~is_constant | (decoded == values).all(1)
        row_bytes = self.row_bytes(values.shape[1], values.dtype)
        codes = codes.contiguous().reshape(-1).view(torch.uint8).view(len(values), row_bytes)
        return codes, ~is_held

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Widen."""
        columns = slice(first_col, first_col + target.shape[1])
        values = codes.contiguous().view(self.dtype)[:, columns].index_select(0, positions)
        target.index_copy_(0, rows, values.to(target.dtype))

    def to_json(self) -> dict[str, Any]:
        """``{"name": "half", "dtype": ...}``."""
        return {"name": self.name, "dtype": str(self.dtype).removeprefix("torch.")}

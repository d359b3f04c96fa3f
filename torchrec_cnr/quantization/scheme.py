"""The interface of quantization schemes, and the two schemes that store each value by itself.

A scheme knows nothing of the names of tables, of files or of deltas. ``Encoded.exact`` lists the rows that it cannot
represent (NaN, infinity, values that fp16 cannot distinguish). These are stored in full, in addition to the codes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError

_MAX_TAIL_BYTES = 16  # per row; compressing longer tails takes more time than it is worth
Sample = Callable[[], Tensor]  # returns some rows of a table, [n, num_cols]; called only if a choice needs them


@dataclass(frozen=True, eq=False)
class Encoded:
    """An encoded block of rows.

    Attributes:
        codes: The encoded rows, uint8 [n, row_bytes].
        exact: The positions in the block of the rows that ``codes`` cannot represent, int64 [k].

    Examples:
        >>> rows = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, float("nan"), 3.0]])
        >>> encoded = cnr.Asymmetric(bits=8).encode(rows)
        >>> encoded.codes.shape, encoded.exact
        (torch.Size([2, 8]), tensor([1]))
    """

    codes: Tensor
    exact: Tensor


class Quantization(Protocol):
    """The ``quantization`` of a tensor: a scheme, or a rule that chooses a scheme for every shard."""

    def choose(self, sample: Sample, num_restores: int) -> "Scheme":
        """Return the scheme of one shard, ready to encode.

        Args:
            sample: Returns some of the rows that are to be stored.
            num_restores: The number of restores of the training so far.
        """
        ...

    def supports(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of this dtype can be encoded."""
        ...


class Scheme(Quantization, Protocol):
    """The interface of every quantization scheme."""

    name: ClassVar[str]

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Return the bytes that the codes of a row of ``num_cols`` elements take."""
        ...

    def tail_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Return the bytes of a row after its codes that are worth compressing; see ``format.blob_bytes``."""
        ...

    def encode(self, table: Tensor, rows: Tensor | None = None) -> Encoded:
        """Encode rows of a table.

        Args:
            table: [num_rows, num_cols] of a supported dtype; the elements of a row are contiguous.
            rows: The numbers of the rows, int64 [n], on the table's device; None for all of them.
        """
        ...

    def decode(self, codes: Tensor, num_cols: int, dtype: torch.dtype) -> Tensor:
        """Decode uint8 [n, row_bytes] to [n, num_cols] of ``dtype``."""
        ...

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Decode some rows and columns directly into a target.

        Args:
            codes: The encoded rows, uint8 [n, row_bytes], on the target's device.
            positions: The positions in ``codes`` of the rows to decode, int64 [k].
            first_col: The encoded column that becomes the first column of ``target``.
            target: The tensor to write to, [num_rows, num_cols]; the elements of a row are contiguous.
            rows: The rows of ``target`` to write to, int64 [k].
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the scheme as the manifest records it."""
        ...


class DeviceScheme(Scheme, Protocol):
    """A scheme that encodes on the device of the table."""

    def encode_without_waiting(self, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Encode rows without waiting for the device.

        Args:
            table: As for ``encode``.
            rows: The numbers of the rows, int64 [n], on the table's device. They are not checked: the table must have
                these rows.

        Returns:
            The codes, uint8 [n, row_bytes], and a mask of the rows that codes cannot represent, bool [n]. Both are on
            the table's device.
        """
        ...


class RowCodes:
    """The base class of the schemes. Each encodes a row independently of the other rows."""

    def choose(self, sample: Sample, num_restores: int) -> Any:
        """Return ``self``, since a scheme leaves nothing to choose."""
        return self

    def supports(self, dtype: torch.dtype) -> bool:
        """Return whether ``dtype`` is fp32, fp16 or bf16."""
        return is_quantizable(dtype)

    def decode(self, codes: Tensor, num_cols: int, dtype: torch.dtype) -> Tensor:
        """Decode uint8 [n, row_bytes] to [n, num_cols] of ``dtype``."""
        values = torch.empty(len(codes), num_cols, dtype=dtype, device=codes.device)
        row_numbers = all_rows(codes)
        self.decode_into(codes, row_numbers, 0, values, row_numbers)
        return values

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Decode some rows and columns directly into a target; see ``Scheme.decode_into``."""
        raise NotImplementedError


def is_quantizable(dtype: torch.dtype) -> bool:
    """Return whether rows of this dtype can be turned into codes, which holds for fp32, fp16 and bf16."""
    return dtype in (torch.float32, torch.float16, torch.bfloat16)


def all_rows(table: Tensor) -> Tensor:
    """Return the numbers of a table's rows, on its device.

    On CPUs, this and ``positions`` use NumPy, because torch's threads would take cores from the kernels' threads: after
    an operation they spin while they wait for the next one.
    """
    if table.device.type == "cpu":
        return torch.from_numpy(np.arange(len(table)))
    return torch.arange(len(table), device=table.device)


def positions(mask: Tensor) -> Tensor:
    """Return the positions, int64 [k], at which a bool mask [n] is true."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)


def tail_of(num_bytes: int) -> int:
    """Return ``num_bytes`` if a tail of this many bytes is worth compressing, otherwise 0."""
    return num_bytes if num_bytes <= _MAX_TAIL_BYTES else 0


@dataclass(frozen=True)
class NoQuantization(RowCodes):
    """No quantization: rows are stored bit for bit, in the table's own dtype, which can be any.

    Examples:
        >>> scheme = cnr.NoQuantization()
        >>> writer = cnr.CNRStorageWriter("run", quantization=scheme)
        >>> scheme.row_bytes(64, torch.float32)
        256
    """

    name: ClassVar[str] = "none"

    def supports(self, dtype: torch.dtype) -> bool:
        """Return True: every dtype can be stored."""
        return True

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Return the bytes of ``num_cols`` elements of ``dtype``."""
        return num_cols * dtype.itemsize

    def tail_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Return all bytes of a short row, such as row-wise optimizer state; 0 for longer rows."""
        return tail_of(self.row_bytes(num_cols, dtype))

    def encode(self, table: Tensor, rows: Tensor | None = None) -> Encoded:
        """Return the bytes of the values."""
        values = table if rows is None else table.index_select(0, rows)
        row_bytes = self.row_bytes(values.shape[1], values.dtype)
        codes = values.contiguous().reshape(-1).view(torch.uint8).view(len(values), row_bytes)
        return Encoded(codes, torch.empty(0, dtype=torch.int64, device="cpu"))

    def decode(self, codes: Tensor, num_cols: int, dtype: torch.dtype) -> Tensor:
        """Return a view of the bytes as ``dtype``."""
        return codes.reshape(-1).view(dtype).view(-1, num_cols)

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Copy some rows and columns into a target; see ``Scheme.decode_into``."""
        values = codes.reshape(-1).view(target.dtype).view(len(codes), -1)
        columns = slice(first_col, first_col + target.shape[1])
        target.index_copy_(0, rows, values[:, columns].index_select(0, positions))

    def to_json(self) -> dict[str, Any]:
        """Return ``{"name": "none"}``."""
        return {"name": self.name}


@dataclass(frozen=True)
class HalfPrecision(RowCodes):
    """Rounding of every value of an fp32 table to 16 bits.

    fp16 keeps 11 significant bits of values up to 65504, and bf16 keeps 8 of any value. The error is at most 2^-11
    (fp16) or 2^-8 (bf16) of the value; for values below 6.1e-5, the error of fp16 is at most 3e-8. A row is stored
    exactly if rounding makes one of its values infinite or zero, or if it contains NaN. A row of several equal values
    is stored exactly if rounding changes the value.

    Attributes:
        dtype: The dtype to round to, ``torch.float16`` (the default) or ``torch.bfloat16``.

    Raises:
        ConfigurationError: ``dtype`` is another dtype.

    Examples:
        >>> scheme = cnr.HalfPrecision(torch.bfloat16)
        >>> codes = scheme.encode(torch.tensor([[0.1, 1.0, 3.0]])).codes
        >>> scheme.decode(codes, 3, torch.float32)
        tensor([[0.1001, 1.0000, 3.0000]])
    """

    dtype: torch.dtype = torch.float16
    name: ClassVar[str] = "half"

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ConfigurationError(f"'dtype' must be torch.float16 or torch.bfloat16 (got {self.dtype!r})")

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Return two bytes per element."""
        return 2 * num_cols

    def tail_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Return all bytes of a short row; 0 for longer rows."""
        return tail_of(self.row_bytes(num_cols, dtype))

    def encode(self, table: Tensor, rows: Tensor | None = None) -> Encoded:
        """Round to nearest, ties to even."""
        codes, is_exact = self._rounded(table if rows is None else table.index_select(0, rows))
        return Encoded(codes, positions(is_exact))

    def encode_without_waiting(self, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Round as ``encode`` does; the mask of the exact rows is returned on the device."""
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
        """Convert some rows and columns to the dtype of a target; see ``Scheme.decode_into``."""
        columns = slice(first_col, first_col + target.shape[1])
        values = codes.contiguous().view(self.dtype)[:, columns].index_select(0, positions)
        target.index_copy_(0, rows, values.to(target.dtype))

    def to_json(self) -> dict[str, Any]:
        """Return ``{"name": "half", "dtype": ...}``."""
        return {"name": self.name, "dtype": str(self.dtype).removeprefix("torch.")}

"""Quantization schemes: how the rows of a table become bytes, and bytes rows again.

A scheme is a frozen value with the same members each time: ``name``, ``row_bytes``, ``encode``, ``decode``. It turns a
block of rows [n, num_cols] into codes [n, row_bytes]; it knows nothing of tables, files or deltas. What a scheme
cannot represent (NaN, infinity, values beyond fp16's range) it names in ``Encoded.exact``, and such rows are stored in
full beside the codes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Protocol

import fbgemm_gpu  # noqa: F401  registers the operators used here
import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError, DamagedError

_SCALE_AND_BIAS_BYTES = 4  # two fp16 values behind the codes of each row
_QUANTIZABLE = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Encoded:
    """A block of rows as it is stored.

    Attributes:
        codes: uint8 [n, row_bytes], or the values themselves [n, num_cols] where nothing is quantized.
        exact: int64 [k], the positions in the block of rows that ``codes`` cannot represent.
    """

    codes: Tensor
    exact: Tensor


class Scheme(Protocol):
    """What every quantization scheme has."""

    name: ClassVar[str]

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this dtype can be encoded."""
        ...

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Bytes that a row of ``num_cols`` elements takes."""
        ...

    def encode(self, values: Tensor) -> Encoded:
        """Encode [n, num_cols] rows of any supported dtype, on their device."""
        ...

    def decode(self, codes: Tensor, num_cols: int, dtype: torch.dtype) -> Tensor:
        """Decode uint8 [n, row_bytes] to [n, num_cols] of ``dtype``."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The scheme as the manifest records it."""
        ...


@dataclass(frozen=True)
class NoQuantization:
    """Rows as they are, bit for bit, in the table's own dtype."""

    name: ClassVar[str] = "none"

    def supports(self, dtype: torch.dtype) -> bool:
        """Every dtype."""
        return True

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """``num_cols`` elements of ``dtype``."""
        return num_cols * dtype.itemsize

    def encode(self, values: Tensor) -> Encoded:
        """The values themselves."""
        return Encoded(values, torch.empty(0, dtype=torch.int64))

    def decode(self, codes: Tensor, num_cols: int, dtype: torch.dtype) -> Tensor:
        """The bytes, seen as ``dtype``."""
        return codes.reshape(-1).view(dtype).view(-1, num_cols)

    def to_json(self) -> dict[str, Any]:
        """``{"name": "none"}``."""
        return {"name": self.name}


@dataclass(frozen=True)
class Asymmetric:
    """Uniform quantization between the minimum and the maximum of each row (Check-N-Run, section 5).

    The bytes are FBGEMM's fused row-wise layout: the codes, lowest bits first, then scale and bias in fp16. An odd
    width is filled up with the row's last value, which changes neither minimum nor maximum.

    An element's error is at most half a step, and what rounding to fp16 adds: half a unit in the last place of the
    bias, and of the scale times the code. Rows whose values lie closer together than fp16 resolves (at 8 bits a range
    below some 4e-3, or values far from zero) therefore come back coarser than their bits promise.

    Attributes:
        bits: 8, 4 or 2 bits an element.

    Raises:
        ConfigurationError: ``bits`` is none of these.
    """

    bits: int
    name: ClassVar[str] = "asymmetric"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (2, 4, 8):
            raise ConfigurationError(f"'bits' must be 8, 4 or 2 (got {self.bits!r})")

    def supports(self, dtype: torch.dtype) -> bool:
        """fp32, fp16 and bf16."""
        return dtype in _QUANTIZABLE

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Codes of the width rounded up to two whole bytes, and four bytes of scale and bias."""
        return self._padded(num_cols) * self.bits // 8 + _SCALE_AND_BIAS_BYTES

    def encode(self, values: Tensor) -> Encoded:
        """FBGEMM's ``FloatToFusedNBitRowwiseQuantizedSBHalf`` on fp32 values."""
        floats = values.float()
        padding = self._padded(values.shape[1]) - values.shape[1]
        if padding:
            floats = torch.cat((floats, floats[:, -1:].expand(-1, padding)), dim=1)
        codes = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(floats.contiguous(), self.bits)
        # NaN and infinity survive a sum; values that fp16 cannot hold are infinite as scale or bias.
        total = floats.sum(dim=1) + _scale_and_bias(codes).float().sum(dim=1)
        return Encoded(codes, (~total.isfinite()).nonzero().squeeze(1))

    def decode(self, codes: Tensor, num_cols: int, dtype: torch.dtype) -> Tensor:
        """FBGEMM's ``FusedNBitRowwiseQuantizedSBHalfToFloat``."""
        values: Tensor = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(codes, self.bits)
        return values[:, :num_cols].to(dtype)

    def to_json(self) -> dict[str, Any]:
        """``{"name": "asymmetric", "bits": ...}``."""
        return {"name": self.name, "bits": self.bits}

    def _padded(self, num_cols: int) -> int:
        """FBGEMM wants the codes of a row to fill pairs of bytes."""
        multiple = 16 // self.bits
        return -(-num_cols // multiple) * multiple


def _scale_and_bias(codes: Tensor) -> Tensor:
    """fp16 [n, 2] of a block of fused rows."""
    return codes[:, -_SCALE_AND_BIAS_BYTES:].contiguous().view(torch.float16)


def exact_row_bytes(num_cols: int, itemsize: int) -> int:
    """Bytes of one row stored exactly behind a block's codes: its position in the block and its values."""
    return 4 + num_cols * itemsize


def scheme_from_json(value: Mapping[str, Any], where: str) -> Scheme:
    """The scheme that a manifest records.

    Raises:
        DamagedError: Not a scheme of this version of the format.
    """
    match list(value.items()):
        case [("name", "none")]:
            return NoQuantization()
        case [("name", "asymmetric"), ("bits", int(bits))] if bits in (2, 4, 8):
            return Asymmetric(bits)
    raise DamagedError(f"{where}: {value!r} is not a quantization scheme of this format version")


@dataclass(frozen=True)
class SchemeRules:
    """Which scheme each tensor gets: one for all tables, or by FQN patterns, first match wins.

    Attributes:
        tables: The scheme of every table, where ``patterns`` is empty.
        patterns: Pairs of an ``fnmatch`` pattern and a scheme, for tables and all other tensors.
    """

    tables: Scheme
    patterns: tuple[tuple[str, Scheme], ...] = ()

    @classmethod
    def of(cls, quantization: "Scheme | Mapping[str, Scheme]") -> "SchemeRules":
        """From the writer's ``quantization`` argument.

        Raises:
            ConfigurationError: It is neither a scheme nor a mapping of patterns to schemes.
        """
        if isinstance(quantization, Mapping):
            rules = cls(NoQuantization(), tuple(quantization.items()))
        else:
            rules = cls(quantization)
        for scheme in (rules.tables, *(scheme for _, scheme in rules.patterns)):
            if not isinstance(scheme, NoQuantization | Asymmetric):
                raise ConfigurationError(f"'quantization' must be a scheme or a mapping to schemes (got {scheme!r})")
        return rules

    def scheme_for(self, fqn: str, dtype: torch.dtype, is_table: bool) -> Scheme:
        """The scheme of one tensor; dtypes that a scheme does not know are stored exactly."""
        for pattern, scheme in self.patterns:
            if fnmatchcase(fqn, pattern):
                return scheme if scheme.supports(dtype) else NoQuantization()
        return self.tables if is_table and self.tables.supports(dtype) else NoQuantization()

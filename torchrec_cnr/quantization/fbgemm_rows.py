"""Rows as FBGEMM's inference kernels keep them, made of a checkpoint's codes or of values.

A row of 2, 4 or 8 bits has scale and bias (fp16) in front, then codes, lowest bits first, then padding. But for the
order, these are the fused rows of uniform schemes, so codes can be taken over. Also codes of fewer bits can: with the
scale and bias that they have, they stand for the same values in more bits. A row of 16 or 32 bits has values.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_cnr.kernels.search_plan import SCALE_AND_BIAS_BYTES
from torchrec_cnr.quantization import Asymmetric

_HALF_MAX, _HALF_MIN = 65504.0, 2.0**-24  # the largest and the smallest positive number of fp16
_UNIT_SCALE = (0x00, 0x3C, 0x00, 0x00)  # 1 and 0 as scale and bias: a row decodes to its codes


@dataclass(frozen=True)
class InferenceRow:
    """How the rows of one table are kept.

    Attributes:
        num_cols: Elements of a row; their codes fill whole bytes.
        bits: 2, 4 or 8 for codes, 16 or 32 for fp16 and fp32 values.
        row_bytes: Of a whole row, padding included.
    """

    num_cols: int
    bits: int
    row_bytes: int

    def takes_over(self, bits: int | None) -> bool:
        """Whether codes of so many bits, None for those of no uniform scheme, are kept as they are."""
        return bits is not None and bits <= self.bits <= 8

    def of_codes(self, codes: Tensor, bits: int) -> Tensor:
        """Rows of the values that fused rows decode to, exactly.

        Args:
            codes: uint8 [n, bytes of a fused row], of ``num_cols`` elements.
            bits: Of a code, as many as here or fewer.

        Returns:
            uint8 [n, row_bytes].
        """
        if bits == self.bits:
            packed = codes[:, : self.num_cols * bits // 8]
        else:
            unit = codes.clone()
            unit[:, -SCALE_AND_BIAS_BYTES:] = torch.tensor(_UNIT_SCALE, dtype=torch.uint8, device="cpu")
            packed = _packed(Asymmetric(bits).decode(unit, self.num_cols, torch.float32).to(torch.uint8), self.bits)
        return self._joined(codes[:, -SCALE_AND_BIAS_BYTES:], packed)

    def of_values(self, values: Tensor) -> Tensor:
        """Rows of values, quantized by ``Asymmetric``, or rounded to fp16 or fp32.

        Rows that ``Asymmetric`` leaves to be stored exactly get codes here, too. Where fp16 cannot hold the range of a
        row closely, a wider one is taken, so that values are off by half a step at most. What a scale and
        a bias of at most 65504 do not reach is clipped. Rows with NaN or infinity are NaN throughout.

        Args:
            values: [n, num_cols] of a floating dtype, in host memory.

        Returns:
            uint8 [n, row_bytes].
        """
        if self.bits > 8:
            rounded = values.to(torch.float16 if self.bits == 16 else torch.float32)
            return self._joined(rounded.contiguous().view(torch.uint8))
        values = values.float()
        encoded = Asymmetric(self.bits).encode(values)
        rows = self.of_codes(encoded.codes, self.bits)
        if len(encoded.exact):
            rows[encoded.exact] = self._of_widened(values[encoded.exact])
        return rows

    def _of_widened(self, values: Tensor) -> Tensor:
        """Rows whose scale and bias are rounded away from their values, which are all between code 0 and the last."""
        top = (1 << self.bits) - 1
        wide = values.double().numpy()
        is_finite = np.isfinite(wide).all(axis=1, keepdims=True)
        wide = np.where(is_finite, wide, 0.0)
        bias = _rounded_away(wide.min(axis=1, keepdims=True), -np.inf)
        scale = _rounded_away((wide.max(axis=1, keepdims=True) - bias) / top, np.inf).clip(_HALF_MIN)
        codes = np.rint((wide - bias) / scale).clip(0, top).astype(np.uint8)
        ends = np.hstack((scale, np.where(is_finite, bias, np.nan))).astype(np.float16)
        return self._joined(torch.from_numpy(ends).view(torch.uint8), _packed(torch.from_numpy(codes), self.bits))

    def _joined(self, *parts: Tensor) -> Tensor:
        """Parts of rows, each uint8 [n, k], side by side, and zeros behind."""
        rows = parts[0].new_zeros(len(parts[0]), self.row_bytes)
        start = 0
        for part in parts:
            rows[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return rows


def _rounded_away(values: npt.NDArray[np.float64], towards: float) -> npt.NDArray[np.float64]:
    """Finite numbers of fp16, each the nearest in one direction."""
    wanted = values.clip(-_HALF_MAX, _HALF_MAX)
    found = wanted.astype(np.float16)
    is_short = found > wanted if towards < 0 else found < wanted
    found[is_short] = np.nextafter(found[is_short], np.float16(towards))
    return found.astype(np.float64)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [n, num_cols], one code a byte, to uint8 [n, num_cols * bits / 8], lowest bits first."""
    if bits == 8:
        return codes
    parts = codes.view(len(codes), -1, 8 // bits)
    packed = parts[:, :, 0].clone()
    for number in range(1, 8 // bits):
        packed |= parts[:, :, number] << (number * bits)
    return packed

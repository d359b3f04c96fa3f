"""Rows in the layout of FBGEMM's inference kernels, made from a checkpoint's codes or from values.

A row of 2, 4 or 8 bits consists of scale and bias (fp16), then the codes, lowest bits first, then padding. Only the
order differs from the fused rows of uniform schemes, so codes can be reused. Codes of fewer bits can be reused, too:
with the same scale and bias, the same numbers in wider codes represent the same values. A row of 16 or 32 bits
consists of values.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_cnr.kernels.search_plan import SCALE_AND_BIAS_BYTES
from torchrec_cnr.quantization import Asymmetric

_HALF_MAX, _HALF_MIN = 65504.0, 2.0**-24  # the largest and the smallest positive number of fp16
_UNIT_SCALE = (0x00, 0x3C, 0x00, 0x00)  # scale 1 and bias 0 in fp16, with which a row decodes to its codes


@dataclass(frozen=True)
class InferenceRow:
    """The layout of the rows of one table in an inference kernel.

    Attributes:
        num_cols: Number of elements of a row; their codes fill whole bytes.
        bits: Bits per element: 2, 4 or 8 for codes, 16 or 32 for fp16 and fp32 values.
        row_bytes: Bytes per row, padding included.
    """

    num_cols: int
    bits: int
    row_bytes: int

    def takes_over(self, bits: int | None) -> bool:
        """Return whether codes of this many bits can be reused; ``bits`` is None if no uniform scheme made them."""
        return bits is not None and bits <= self.bits <= 8

    def of_codes(self, codes: Tensor, bits: int) -> Tensor:
        """Convert fused rows of a uniform scheme. The results decode to exactly the same values.

        Args:
            codes: The fused rows, uint8 [n, bytes per fused row], of ``num_cols`` elements each.
            bits: Bits per code of ``codes``, at most ``self.bits``.

        Returns:
            uint8 [n, row_bytes].
        """
        if bits == self.bits:
            packed_codes = codes[:, : self.num_cols * bits // 8]
        else:
            unit_codes = codes.clone()
            unit_codes[:, -SCALE_AND_BIAS_BYTES:] = torch.tensor(_UNIT_SCALE, dtype=torch.uint8, device="cpu")
            packed_codes = _packed(
                Asymmetric(bits).decode(unit_codes, self.num_cols, torch.float32).to(torch.uint8), self.bits
            )
        return self._joined(codes[:, -SCALE_AND_BIAS_BYTES:], packed_codes)

    def of_values(self, values: Tensor) -> Tensor:
        """Quantize values by ``Asymmetric``, or round them to fp16 or fp32.

        Rows that ``Asymmetric`` would store exactly get codes here, too. If fp16 cannot represent the range of a row
        closely, a wider range is used, so that the error of a value is at most half a step. Values that a scale and a
        bias of at most 65504 cannot represent are clipped. In rows with NaN or infinity, all values become NaN.

        Args:
            values: [n, num_cols] of a floating-point dtype, in host memory.

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
        """Quantize rows with bias rounded down and scale rounded up, so that the range includes all their values."""
        top = (1 << self.bits) - 1
        wide = values.double().numpy()
        is_finite = np.isfinite(wide).all(axis=1, keepdims=True)
        wide = np.where(is_finite, wide, 0.0)
        bias = _rounded_away(wide.min(axis=1, keepdims=True), -np.inf)
        scale = _rounded_away((wide.max(axis=1, keepdims=True) - bias) / top, np.inf).clip(_HALF_MIN)
        codes = np.rint((wide - bias) / scale).clip(0, top).astype(np.uint8)
        scales_and_biases = np.hstack((scale, np.where(is_finite, bias, np.nan))).astype(np.float16)
        return self._joined(
            torch.from_numpy(scales_and_biases).view(torch.uint8), _packed(torch.from_numpy(codes), self.bits)
        )

    def _joined(self, *parts: Tensor) -> Tensor:
        """Concatenate parts of rows, each uint8 [n, k], and pad with zeros to [n, row_bytes]."""
        rows = parts[0].new_zeros(len(parts[0]), self.row_bytes)
        start = 0
        for part in parts:
            rows[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return rows


def _rounded_away(values: npt.NDArray[np.float64], towards: float) -> npt.NDArray[np.float64]:
    """Round to finite fp16 numbers in one direction: down if ``towards`` is negative, otherwise up."""
    clipped = values.clip(-_HALF_MAX, _HALF_MAX)
    rounded = clipped.astype(np.float16)
    is_short = rounded > clipped if towards < 0 else rounded < clipped
    rounded[is_short] = np.nextafter(rounded[is_short], np.float16(towards))
    return rounded.astype(np.float64)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 [n, num_cols], one code per byte, into uint8 [n, num_cols * bits / 8], lowest bits first."""
    if bits == 8:
        return codes
    parts = codes.view(len(codes), -1, 8 // bits)
    packed = parts[:, :, 0].clone()
    for number in range(1, 8 // bits):
        packed |= parts[:, :, number] << (number * bits)
    return packed

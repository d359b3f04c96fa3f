"""The reference: what the compiled kernels compute, in plain torch, as plainly as it can be said.

The kernels for CPUs and GPUs are tested to give the same bytes as these functions. Each row is summed from its first
column to its last, in fp32, and no product is fused with a sum. Names and order are those of ``search``; shapes are
[n] for ranges and [n, num_cols] for rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_cnr.kernels.search_plan import CLOSING_ROUNDS, GREEDY, LEAST_SQUARES, MIRRORED, SearchPlan

_NOWHERE = torch.inf


def half(x: Tensor) -> Tensor:
    """The nearest fp16 value."""
    return x.half().float()


def half_below(x: Tensor) -> Tensor:
    """The next fp16 value below one that fp16 holds."""
    bits = x.half().view(torch.int16)
    below = torch.where(bits < 0, bits + 1, bits - 1)
    below = torch.where(bits == 0, torch.tensor(-0x7FFF, dtype=torch.int16), below)
    return below.view(torch.float16).float()


def half_above(x: Tensor) -> Tensor:
    """The next fp16 value above one that fp16 holds."""
    return 0.0 - half_below(0.0 - x)


def half_floor(x: Tensor) -> Tensor:
    """The greatest fp16 value that is not greater."""
    nearest = half(x)
    return torch.where(nearest > x, half_below(nearest), nearest)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows whose ranges are wanted.

    Attributes:
        x: float32 [n, num_cols].
        dtype: What they are decoded to.
        top: The greatest code.
    """

    x: Tensor
    dtype: torch.dtype
    top: int

    def code(self, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        """The nearest code, as float32."""
        inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
        position = (x - bias) * inverse
        position = torch.where(position < self.top, position, float(self.top))
        return torch.where(position > 0, position, 0.0).round()

    def value(self, code: Tensor | float, scale: Tensor, bias: Tensor) -> Tensor:
        """What a reader decodes, as float32."""
        return (scale * code + bias).to(self.dtype).float()

    def error(self, scale: Tensor, bias: Tensor) -> Tensor:
        """The sum of squared errors of what a reader will decode."""
        difference = self.x - self.value(
            self.code(self.x, scale[:, None], bias[:, None]), scale[:, None], bias[:, None]
        )
        return in_order(difference * difference)

    def holds(self, scale: Tensor, bias: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Whether the least and the greatest value come back within half a step."""
        low_error, high_error = (
            (end - self.value(self.code(end, scale, bias), scale, bias)).abs() for end in (low, high)
        )
        error = torch.where(low_error > high_error, low_error, high_error)
        return error + error <= scale

    def covering(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest stored range that reaches from ``low`` to ``high``."""
        bias = half_floor(low) + 0.0  # no negative zero
        scale = half((high - bias) / self.top)
        reaches = self.value(self.top, scale, bias) >= high
        return torch.where(reaches, scale, half_above(scale)), bias

    def closed(self, scale: Tensor, bias: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The range that its own decoded least and greatest value lead to, and whether it leads to itself."""
        same = torch.zeros_like(scale, dtype=torch.bool)
        for _ in range(CLOSING_ROUNDS):
            ends = [self.value(self.code(end, scale, bias), scale, bias) for end in (low, high)]
            next_scale, next_bias = self.covering(*ends)
            same = (next_scale == scale) & (next_bias == bias)
            scale, bias = next_scale, next_bias
        return scale, bias, same


def in_order(terms: Tensor) -> Tensor:
    """[n]: the sum of each row, from its first column to its last."""
    total = torch.zeros(len(terms))
    for column in terms.unbind(1):
        total = total + column
    return total


@dataclass(eq=False)
class _Best:
    """The best range so far of each row."""

    error: Tensor
    scale: Tensor
    bias: Tensor

    def take(self, better: Tensor, error: Tensor, scale: Tensor, bias: Tensor) -> None:
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        self.bias = torch.where(better, bias, self.bias)

    def offer(self, rows: Rows, scale: Tensor, bias: Tensor, low: Tensor, high: Tensor) -> None:
        """Another range, which is rounded and closed first."""
        scale, bias, same = rows.closed(half(scale), half(bias), low, high)
        error = rows.error(scale, bias)
        self.take(same & (scale > 0) & (error < self.error), error, scale, bias)


def _mirrored(rows: Rows, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Symmetric ranges: the best of three scales next to the one asked for, or one of seven without any error."""
    zero = torch.zeros_like(low)
    magnitude = torch.where(high > 0.0 - low, high, 0.0 - low)
    wanted = (magnitude + magnitude) / rows.top
    scale = half_below(half_below(half_below(0.0 - half_floor(0.0 - wanted))))
    best = _Best(torch.full_like(low, _NOWHERE), zero, zero)
    for number in range(7):
        bias = 0.0 - half(scale * rows.top * 0.5)
        error = rows.error(scale, bias)
        is_near = 2 <= number <= 4
        best.take((scale >= 0) & (error < best.error) & ((error == 0) | is_near), error, scale, bias)
        scale = half_above(scale)
    is_right = (best.scale <= wanted + wanted) & (best.error < _NOWHERE)
    return best.scale, best.bias, is_right & ((high > low) | (best.error == 0))


def _greedy(rows: Rows, low: Tensor, high: Tensor, plan: SearchPlan, best: _Best) -> None:
    """Check-N-Run's greedy search: cut one bin off the side where it costs less, and remember the best range."""
    step = (high - low) / plan.num_bins
    left, right = low, high
    for _ in range(plan.num_steps):
        biases = half(left + step), half(left)
        scales = half((right - biases[0]) / rows.top), half((right - step - biases[1]) / rows.top)
        errors = [rows.error(scale, bias) for scale, bias in zip(scales, biases, strict=True)]
        cut_left = errors[0] < errors[1]
        left, right = torch.where(cut_left, left + step, left), torch.where(cut_left, right, right - step)
        improves = torch.where(cut_left, errors[0], errors[1]) < best.error
        scale = torch.where(improves, torch.where(cut_left, *scales), 0.0)
        best.offer(rows, scale, torch.where(cut_left, *biases), low, high)


def _regressed(rows: Rows, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One round of least squares on rows less their least values: see ``search``."""
    count = float(rows.x.shape[1])
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    position = rows.x * inverse[:, None] + (0.0 - offset * inverse)[:, None]
    position = torch.where(position < rows.top, position, float(rows.top))
    code = torch.where(position > 0, position, 0.0).round()
    codes, squares, products = in_order(code), in_order(code * code), in_order(code * rows.x)
    total, total_squares = in_order(rows.x), in_order(rows.x * rows.x)
    spread_of_codes = count * squares - codes * codes
    covariance = count * products - codes * total
    fits = (spread_of_codes > 0) & (covariance > 0)
    slope = covariance / spread_of_codes
    error = total_squares - total * total / count - covariance * slope / count
    scale = torch.where(fits, slope, scale)
    return scale, (total - scale * codes) / count, torch.where(fits, error, _NOWHERE)


def _least_squares(rows: Rows, low: Tensor, high: Tensor, plan: SearchPlan) -> Iterator[tuple[Tensor, Tensor]]:
    """Alternating least squares from every pair of cuts: the best ranges, refined further."""
    shifted = Rows(rows.x - low[:, None], rows.dtype, rows.top)
    width = high - low
    nowhere = torch.full_like(low, _NOWHERE)
    kept = [_Best(nowhere, width / rows.top, torch.zeros_like(low)) for _ in range(plan.kept)]
    cuts = torch.from_numpy(plan.cuts)
    for below in cuts:
        for above in cuts:
            scale, offset = width * (1.0 - below - above) / rows.top, width * below
            error = torch.zeros_like(low)
            for _ in range(plan.rounds):
                scale, offset, error = _regressed(shifted, scale, offset)
            for best in kept:
                old = best.error, best.scale, best.bias
                better = error < best.error
                best.take(better, error, scale, offset)
                error, scale, offset = (
                    torch.where(better, *pair) for pair in zip(old, (error, scale, offset), strict=True)
                )
    for best in kept:
        scale, offset = best.scale, best.bias
        for _ in range(plan.polish):
            scale, offset, _ = _regressed(shifted, scale, offset)
        yield scale, offset + low


def find_range(x: Tensor, bits: int, plan: SearchPlan) -> tuple[Tensor, Tensor, Tensor]:
    """The range of each row.

    Args:
        x: [n, num_cols] of fp32, fp16 or bf16.
        bits: Bits of a code.
        plan: How to search.

    Returns:
        Scale and bias, float32 [n] that fp16 holds, and bool [n]: the rows that they can represent.
    """
    rows = Rows(x.float(), x.dtype, (1 << bits) - 1)
    low, high = rows.x.amin(1), rows.x.amax(1)
    is_number = ~rows.x.isnan().any(1)
    if plan.method == MIRRORED:
        scale, bias, is_right = _mirrored(rows, low, high)
        return scale, bias, is_right & is_number & rows.holds(scale, bias, low, high)
    scale, bias, same = rows.closed(*rows.covering(low, high), low, high)
    width = high - low
    is_right = is_number & same & (scale * rows.top <= width + width) & (scale <= 65504.0)
    is_right = is_right & rows.holds(scale, bias, low, high)
    best = _Best(rows.error(scale, bias), scale, bias)
    if plan.method == GREEDY:
        _greedy(rows, low, high, plan, best)
    if plan.method == LEAST_SQUARES:
        for found in _least_squares(rows, low, high, plan):
            best.offer(rows, *found, low, high)
    return best.scale, best.bias, is_right


def encode(x: Tensor, bits: int, plan: SearchPlan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes uint8 [n, num_cols], scale and bias fp16 [n], and which rows are to be stored exactly, bool [n].

    Rows that are stored exactly have zeros for codes, scale and bias.
    """
    scale, bias, is_right = find_range(x, bits, plan)
    rows = Rows(x.float(), x.dtype, (1 << bits) - 1)
    codes = torch.where(is_right[:, None], rows.code(rows.x, scale[:, None], bias[:, None]), 0.0)
    scale, bias = torch.where(is_right, scale, 0.0), torch.where(is_right, bias, 0.0)
    return codes.to(torch.uint8), scale.half(), bias.half(), ~is_right


def decode(codes: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, num_cols] of ``dtype``, from what ``encode`` returns."""
    return (codes.float() * scale.float()[:, None] + bias.float()[:, None]).to(dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [n, ceil(num_cols * bits / 8)]: codes one after another, lowest bits first."""
    num_rows, num_cols = codes.shape
    stream = (codes[:, :, None] >> torch.arange(bits)) & 1
    stream = torch.nn.functional.pad(stream.reshape(num_rows, -1), (0, -num_cols * bits % 8))
    weights = 1 << torch.arange(8)
    return (stream.view(num_rows, -1, 8) * weights).sum(2).to(torch.uint8)

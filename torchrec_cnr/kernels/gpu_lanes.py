"""Lanes on GPUs: ``lanes`` in Triton, the arithmetic of ``gpu_search``, with one row in each of a warp's 32 lanes.

Every function rounds as IEEE 754 says, as the CPU's lanes do; kernels are compiled without fused multiply-add.

Tables of bf16 come as int16, their bits: Triton's interpreter, which the tests run in, does not round to bf16 as it
should.
"""

import triton
import triton.language as tl

LANES = tl.constexpr(32)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it becomes a whole number, halves to even


@triton.jit
def widened(x):
    """Elements of a table as float32."""
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505  # the branch is chosen when this is compiled
        return x.to(tl.float32)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """float32, rounded to nearest even, as elements of a table."""
    if dtype == tl.int16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = bits + ((bits >> 16) & 1) + 0x7FFF
        # A GPU's NaN has all bits set: rounding would carry into its sign and make it a zero.
        return (tl.where(x == x, rounded, bits | 0x400000) >> 16).to(tl.int16)
    else:  # noqa: RET505  # the branch is chosen when this is compiled
        return x.to(dtype)


@triton.jit
def to_half(x):
    """To the nearest fp16 value."""
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def half_below(x):
    """The next fp16 value below one that fp16 holds."""
    bits = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    below = tl.where(bits < 0, bits + 1, bits - 1)
    below = tl.where(bits == 0, -0x7FFF, below)
    return below.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def rounded(x):
    """To the nearest whole number, halves to even, from 0 to 255."""
    return (x + _ROUNDER) - _ROUNDER

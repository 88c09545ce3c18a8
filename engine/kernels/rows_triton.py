"""Pieces that the kernels share: rounding as eager code, rotation, quantisation, sums of blocks.

Owns inlined functions, and the options and sizes of launches that agree; formulas in `reference`.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.reference import FP8_AMAX_FLOOR, FP8_BLOCK, FP8_MAX

AS_WRITTEN = {"enable_fp_fusion": False}
"""Launch option: a product that is added is rounded first, as in eager code; otherwise the kernels
of one formula, plain and quantised, would differ in their last bits. Costs nothing here: all wait
for memory."""

BLOCK_WARPS = 4
"""Of a kernel that sums blocks of rows."""
_LEAST_SIDE = 16
"""Of a product on a GPU."""

_FP8_MAX, _FP8_AMAX_FLOOR = tl.constexpr(FP8_MAX), tl.constexpr(FP8_AMAX_FLOOR)
_FP8_STEP = tl.constexpr(1.0 / FP8_MAX)
_FP8_BLOCK = tl.constexpr(FP8_BLOCK)


@triton.jit
def load_wide(at_, mask):
    """Load as fp32; zero outside the mask."""
    return tl.load(at_, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_sum(at_, delta_at_, mask, kind: tl.constexpr, HAS_DELTA: tl.constexpr):
    """Load as fp32, with what is added to it; the sum is rounded as if it had been stored."""
    x = load_wide(at_, mask)
    if HAS_DELTA:
        x = (x + load_wide(delta_at_, mask)).to(kind).to(tl.float32)
    return x


@triton.jit
def rounded(x, kind: tl.constexpr, EAGER: tl.constexpr):
    """Round to the dtype of the rows where eager code would; stay fp32 otherwise."""
    if EAGER:
        x = x.to(kind).to(tl.float32)
    return x


@triton.jit
def rotated_pair(first, second, cos, sin, kind: tl.constexpr, EAGER: tl.constexpr):
    """Rotate channels j and j + S/2 of rows, in fp32."""
    low = rounded(first * cos, kind, EAGER) - rounded(second * sin, kind, EAGER)
    high = rounded(second * cos, kind, EAGER) + rounded(first * sin, kind, EAGER)
    return low, high


@triton.jit
def row_factors(amax):
    """Return the factor of a row's codes and its inverse.

    One exact division; the rest are products, which round alike on every device.
    """
    amax = tl.maximum(amax, _FP8_AMAX_FLOOR)
    return amax * _FP8_STEP, tl.div_rn(1.0, amax) * _FP8_MAX


@triton.jit
def codes_of(x, inverse):
    """Return e4m3 codes."""
    scaled = tl.minimum(tl.maximum(x * inverse, -_FP8_MAX), _FP8_MAX)
    return scaled.to(tl.float8e4nv)


@triton.jit
def block_codes(
    x, factor_at_, first, factor_step, WIDTH: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return e4m3 codes of a run of whole blocks of a row, and store their factors.

    The run begins at channel `first`; what is past the row is zero.
    """
    parts = tl.reshape(x, (SIZE // _FP8_BLOCK, _FP8_BLOCK))
    factor, inverse = row_factors(tl.max(tl.abs(parts), axis=1))
    block = first // _FP8_BLOCK + tl.arange(0, SIZE // _FP8_BLOCK)
    tl.store(factor_at_ + block * factor_step, factor, mask=block < WIDTH // _FP8_BLOCK)
    return tl.reshape(codes_of(parts, inverse[:, None]), (SIZE,))


@triton.jit
def block_sum(
    at_, row_step, left, is_column, KEYS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Sum a block of rows, of which `left` count, in fp32, to [STEP, columns].

    `at_` is where its first rows are. Row i is added to row i - STEP; `tl.sum` over the first axis
    of what is left gives the sum: in one order, whichever kernel forms it.
    """
    row = tl.arange(0, STEP)[:, None]
    sum_ = load_wide(at_, is_column & (row < left))
    for step in tl.static_range(1, KEYS // STEP):
        mask = is_column & (row + step * STEP < left)
        sum_ += load_wide(at_ + step * STEP * row_step, mask)
    return sum_


@triton.jit
def block_sum_and_reach(
    at_, row_step, left, is_column, KEYS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Return `block_sum`, and the length of the longest row."""
    row = tl.arange(0, STEP)[:, None]
    x = load_wide(at_, is_column & (row < left))
    sum_, most = x, tl.sum(x * x, axis=1)
    for step in tl.static_range(1, KEYS // STEP):
        mask = is_column & (row + step * STEP < left)
        x = load_wide(at_ + step * STEP * row_step, mask)
        sum_ += x
        most = tl.maximum(most, tl.sum(x * x, axis=1))
    return sum_, tl.sqrt(tl.max(most, axis=0))


def padded_side(count: int) -> int:
    """Side of a block that holds so many rows or columns and may enter a product."""
    return max(_LEAST_SIDE, triton.next_power_of_2(count))


def block_step(keys: int, columns: int, itemsize: int) -> int:
    """Rows that `block_sum` adds at once: as many as the threads of `BLOCK_WARPS` load in one."""
    return max(1, min(keys, BLOCK_WARPS * 32 * 16 // itemsize // columns))


def warps_for(block: int) -> int:
    """Warps of a program that holds ``block`` elements: 32 to 63 a thread where there are enough.

    A thread then has several wide loads on their way at once, and a sum few warps to cross.
    """
    return min(max(2 ** (block // 1024).bit_length() // 2, 1), 16)

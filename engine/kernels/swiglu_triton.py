"""Triton kernels of `swiglu`; formula, shapes and roundings stand there.

Owns the launches. The plain form goes by tiles of columns, and so does the one that is quantised in
blocks. That with a factor a row needs the largest value of the row first: a program has a whole
row, reads it once, and keeps what it made of each tile, rounded, in registers. Offsets are int64.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.contract import new_quantized
from engine.kernels.rows_triton import (
    AS_WRITTEN,
    block_codes,
    codes_of,
    load_sum,
    rounded,
    row_factors,
)

_TILE = 1024
_ROW_TILE = 2048


@triton.jit
def _gated(
    at_, delta_at_, WIDTH: tl.constexpr, mask, kind: tl.constexpr, HAS_DELTA: tl.constexpr,
    EAGER: tl.constexpr,
):  # fmt: skip
    value = load_sum(at_, delta_at_, mask, kind, HAS_DELTA)
    gate = load_sum(at_ + WIDTH, delta_at_ + WIDTH, mask, kind, HAS_DELTA)
    return value * rounded(gate / (1.0 + tl.exp(-gate)), kind, EAGER)


@triton.jit
def _swiglu_kernel(
    z_ptr, delta_ptr, out_ptr, factor_ptr, rows, z_batch, z_row, factor_step,
    WIDTH: tl.constexpr, TILE: tl.constexpr, HAS_DELTA: tl.constexpr, IN_BLOCKS: tl.constexpr,
    EAGER: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, row = program // rows, program % rows
    begin = tl.program_id(1) * TILE
    column = begin + tl.arange(0, TILE)
    mask = column < WIDTH
    kind: tl.constexpr = z_ptr.dtype.element_ty
    at = z_ptr + batch * z_batch + row * z_row + column
    delta_at = delta_ptr + program * (2 * WIDTH) + column
    out = _gated(at, delta_at, WIDTH, mask, kind, HAS_DELTA, EAGER).to(kind)
    if IN_BLOCKS:
        factor_at = factor_ptr + program
        out = block_codes(out.to(tl.float32), factor_at, begin, factor_step, WIDTH, TILE)
    tl.store(out_ptr + program * WIDTH + column, out, mask=mask)


@triton.jit
def _swiglu_fp8_kernel(
    z_ptr, out_ptr, factor_ptr, rows, z_batch, z_row,
    WIDTH: tl.constexpr, TILE: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, row = program // rows, program % rows
    kind: tl.constexpr = z_ptr.dtype.element_ty
    at = z_ptr + batch * z_batch + row * z_row
    largest = tl.full((TILE,), 0.0, tl.float32)
    made = ()
    for begin in tl.static_range(0, WIDTH, TILE):
        column = begin + tl.arange(0, TILE)
        out = _gated(at + column, at, WIDTH, column < WIDTH, kind, False, EAGER)
        largest = tl.maximum(largest, tl.abs(out))
        made += (out.to(kind),)  # type: ignore[assignment]
    # Rounding keeps the order, so that the largest value rounded is the largest rounded value.
    factor, inverse = row_factors(tl.max(largest, axis=0).to(kind).to(tl.float32))
    tl.store(factor_ptr + program, factor)
    for begin in tl.static_range(0, WIDTH, TILE):
        column = begin + tl.arange(0, TILE)
        codes = codes_of(made[begin // TILE].to(tl.float32), inverse)
        tl.store(out_ptr + program * WIDTH + column, codes, mask=column < WIDTH)


def _by_tiles(
    z_BRF: Tensor, is_eager: bool, delta_BRF: Tensor | None, out: Tensor, factor: Tensor | None
) -> None:
    batch_size, rows, width = out.shape
    tile = min(_TILE, triton.next_power_of_2(width))
    _swiglu_kernel[(batch_size * rows, triton.cdiv(width, tile))](
        z_BRF, z_BRF if delta_BRF is None else delta_BRF, out, out if factor is None else factor,
        rows, z_BRF.stride(0), z_BRF.stride(1), 0 if factor is None else factor.stride(-1),
        WIDTH=width, TILE=tile, HAS_DELTA=delta_BRF is not None, IN_BLOCKS=factor is not None,
        EAGER=is_eager, num_warps=4, **AS_WRITTEN,
    )  # fmt: skip


def swiglu(z_BRF: Tensor, is_eager: bool, delta_BRF: Tensor | None) -> Tensor:
    """Launch for checked arguments."""
    out = z_BRF.new_empty((*z_BRF.shape[:2], z_BRF.shape[2] // 2))
    _by_tiles(z_BRF, is_eager, delta_BRF, out, None)
    return out


def swiglu_fp8(z_BRF: Tensor, is_eager: bool, in_blocks: bool) -> tuple[Tensor, Tensor]:
    """Launch for checked arguments."""
    batch_size, rows, width = *z_BRF.shape[:2], z_BRF.shape[2] // 2
    codes, factor = new_quantized(z_BRF, (batch_size, rows, width), in_blocks)
    if in_blocks:
        _by_tiles(z_BRF, is_eager, None, codes, factor)
        return codes, factor
    tile = min(_ROW_TILE, triton.next_power_of_2(width))
    _swiglu_fp8_kernel[(batch_size * rows,)](
        z_BRF, codes, factor, rows, z_BRF.stride(0), z_BRF.stride(1),
        WIDTH=width, TILE=tile, EAGER=is_eager, num_warps=8, **AS_WRITTEN,
    )  # fmt: skip
    return codes, factor

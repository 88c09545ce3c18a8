"""Triton kernels of `swiglu`; formula, shapes and roundings stand there.

Owns the launches. The plain form goes by tiles of columns. The quantised one needs the largest
value of the row first: a program has a whole row, reads it once, and keeps what it made of each
tile, rounded, in registers. Offsets are int64.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.contract import new_row_scale
from engine.kernels.rows_triton import AS_WRITTEN, codes_of, load_sum, rounded, row_factors

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
    z_ptr, delta_ptr, out_ptr, rows, z_batch, z_row,
    WIDTH: tl.constexpr, TILE: tl.constexpr, HAS_DELTA: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, row = program // rows, program % rows
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < WIDTH
    kind: tl.constexpr = z_ptr.dtype.element_ty
    at = z_ptr + batch * z_batch + row * z_row + column
    delta_at = delta_ptr + program * (2 * WIDTH) + column
    out = _gated(at, delta_at, WIDTH, mask, kind, HAS_DELTA, EAGER)
    tl.store(out_ptr + program * WIDTH + column, out.to(kind), mask=mask)


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


def swiglu(z_BRF: Tensor, is_eager: bool, delta_BRF: Tensor | None) -> Tensor:
    """Launch for checked arguments."""
    batch_size, rows, width = *z_BRF.shape[:2], z_BRF.shape[2] // 2
    out = z_BRF.new_empty((batch_size, rows, width))
    tile = min(_TILE, triton.next_power_of_2(width))
    _swiglu_kernel[(batch_size * rows, triton.cdiv(width, tile))](
        z_BRF, z_BRF if delta_BRF is None else delta_BRF, out, rows, z_BRF.stride(0),
        z_BRF.stride(1), WIDTH=width, TILE=tile, HAS_DELTA=delta_BRF is not None, EAGER=is_eager,
        num_warps=4, **AS_WRITTEN,
    )  # fmt: skip
    return out


def swiglu_fp8(z_BRF: Tensor, is_eager: bool) -> tuple[Tensor, Tensor]:
    """Launch for checked arguments."""
    batch_size, rows, width = *z_BRF.shape[:2], z_BRF.shape[2] // 2
    codes = z_BRF.new_empty((batch_size, rows, width), dtype=torch.float8_e4m3fn)
    factor = new_row_scale(codes)
    tile = min(_ROW_TILE, triton.next_power_of_2(width))
    _swiglu_fp8_kernel[(batch_size * rows,)](
        z_BRF, codes, factor, rows, z_BRF.stride(0), z_BRF.stride(1),
        WIDTH=width, TILE=tile, EAGER=is_eager, num_warps=8, **AS_WRITTEN,
    )  # fmt: skip
    return codes, factor

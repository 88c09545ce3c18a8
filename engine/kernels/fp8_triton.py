"""Triton kernel of the quantiser of rows; formula in `reference`.

Owns the launch. One program goes through one row twice, the second time from the cache; in blocks,
whose factors come with the codes, once.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.contract import new_quantized
from engine.kernels.rows_triton import AS_WRITTEN, block_codes, codes_of, load_wide, row_factors

_ROW_TILE = 2048


@triton.jit
def _quantize_kernel(
    x_ptr, codes_ptr, factor_ptr, x_row, factor_step,
    WIDTH: tl.constexpr, TILE: tl.constexpr, IN_BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = x_ptr + row * x_row
    if IN_BLOCKS:
        for begin in range(0, WIDTH, TILE):
            column = begin + tl.arange(0, TILE)
            mask = column < WIDTH
            x = load_wide(at + column, mask)
            codes = block_codes(x, factor_ptr + row, begin, factor_step, WIDTH, TILE)
            tl.store(codes_ptr + row * WIDTH + column, codes, mask=mask)
        return
    largest = tl.full((TILE,), 0.0, tl.float32)
    for begin in range(0, WIDTH, TILE):
        column = begin + tl.arange(0, TILE)
        largest = tl.maximum(largest, tl.abs(load_wide(at + column, column < WIDTH)))
    factor, inverse = row_factors(tl.max(largest, axis=0))
    tl.store(factor_ptr + row, factor)
    for begin in range(0, WIDTH, TILE):
        column = begin + tl.arange(0, TILE)
        mask = column < WIDTH
        codes = codes_of(load_wide(at + column, mask), inverse)
        tl.store(codes_ptr + row * WIDTH + column, codes, mask=mask)


def quantize_rows(x: Tensor, in_blocks: bool) -> tuple[Tensor, Tensor]:
    """Launch for checked arguments; leading axes that do not lie in one run are copied first."""
    rows_RK = x.reshape(-1, x.shape[-1])
    codes, factor = new_quantized(x, x.shape, in_blocks)
    width = x.shape[-1]
    tile = min(_ROW_TILE, triton.next_power_of_2(width))
    _quantize_kernel[(rows_RK.shape[0],)](
        rows_RK,
        codes,
        factor,
        rows_RK.stride(0),
        factor.stride(-1),
        WIDTH=width,
        TILE=tile,
        IN_BLOCKS=in_blocks,
        num_warps=8,
        **AS_WRITTEN,
    )
    return codes, factor

"""Triton kernels of `row_ops`: a program a row, which it reads once; formulas stand there.

Owns the launches. Offsets are int64. A row's bits do not depend on how many rows there are.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS, _WARPS_OF_TWO = 4, 8
"""Of a program: as fast as 2 or 8 with one product; with two, 57.7 us where 4 take 60.6 (8069 rows
of 2048, H200)."""


@triton.jit
def _scaled(product_ptr, bias_ptr, scale_ptr, row, at, mask):
    product = tl.load(product_ptr + row, mask=mask, other=0.0).to(tl.float32)
    product += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return product * tl.load(scale_ptr + at, mask=mask, other=0.0)


@triton.jit
def _add_norm_kernel(
    x_ptr, y_ptr, y_bias_ptr, y_scale_ptr, z_ptr, z_bias_ptr, z_scale_ptr, weight_ptr, sum_ptr,
    n_ptr, eps, HAS_Z: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, WIDTH_PAD)
    mask = at < WIDTH
    row = tl.program_id(0).to(tl.int64) * WIDTH + at
    x = tl.load(x_ptr + row, mask=mask, other=0.0)
    x += _scaled(y_ptr, y_bias_ptr, y_scale_ptr, row, at, mask)
    if HAS_Z:
        x += _scaled(z_ptr, z_bias_ptr, z_scale_ptr, row, at, mask)
        tl.store(sum_ptr + row, x, mask=mask)
    inverse_rms = tl.rsqrt(tl.sum(x * x) / WIDTH + eps)
    n = x * inverse_rms * tl.load(weight_ptr + at, mask=mask, other=0.0)
    tl.store(n_ptr + row, n.to(n_ptr.dtype.element_ty), mask=mask)


def add_norm(
    x_RD: Tensor, y_RD: Tensor, bias_D: Tensor, scale_D: Tensor, weight_D: Tensor, eps: float
) -> Tensor:
    """Launch; see `row_ops`."""
    n_RD, width = torch.empty_like(y_RD), x_RD.shape[1]
    # What belongs to the second product is not read.
    _add_norm_kernel[(x_RD.shape[0],)](
        x_RD, y_RD, bias_D, scale_D, y_RD, bias_D, scale_D, weight_D, x_RD, n_RD, eps, HAS_Z=False,
        WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), num_warps=_WARPS,
    )  # fmt: skip
    return n_RD


def add_two_norm(
    x_RD: Tensor, y_RD: Tensor, y_bias_D: Tensor, y_scale_D: Tensor, z_RD: Tensor,
    z_bias_D: Tensor, z_scale_D: Tensor, weight_D: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch; see `row_ops`."""
    sum_RD, n_RD, width = torch.empty_like(x_RD), torch.empty_like(y_RD), x_RD.shape[1]
    _add_norm_kernel[(x_RD.shape[0],)](
        x_RD, y_RD, y_bias_D, y_scale_D, z_RD, z_bias_D, z_scale_D, weight_D, sum_RD, n_RD, eps,
        HAS_Z=True, WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), num_warps=_WARPS_OF_TWO,
    )  # fmt: skip
    return sum_RD, n_RD

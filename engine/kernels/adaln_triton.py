"""Triton kernels of `adaln`; formulas, shapes and roundings stand there.

Owns the launches. One program holds one row: the reduction needs all of it, and at 5,376 channels
it fits the registers of 8 warps. The gated sum alone has no reduction and goes by tiles of
columns. Offsets are int64.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.contract import batch_stride, new_quantized
from engine.kernels.reference import GATE_A, GATE_F, SCALE_A, SCALE_F, SHIFT_A, SHIFT_F
from engine.kernels.rows_triton import (
    AS_WRITTEN,
    block_codes,
    codes_of,
    load_sum,
    load_wide,
    rounded,
    row_factors,
    warps_for,
)

_TILE = 1024
_ACCESS_BYTES = 16
"""Widest access of a thread."""


@triton.jit
def _norm_kernel(
    x_ptr,
    branch_ptr,
    delta_ptr,
    weight_ptr,
    gate_ptr,
    shift_ptr,
    scale_ptr,
    h_ptr,
    out_ptr,
    factor_ptr,
    rows,
    run_rows,
    x_batch,
    x_row,
    branch_batch,
    branch_row,
    gate_batch,
    gate_run,
    modulation_batch,
    modulation_run,
    factor_step,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    FP8: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    EAGER: tl.constexpr,
    RUN: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    batch, row = program // rows, program % rows
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    kind: tl.constexpr = x_ptr.dtype.element_ty
    modulation = batch * modulation_batch + (row // run_rows) * modulation_run + column
    x = load_wide(x_ptr + batch * x_batch + row * x_row + column, mask)
    if HAS_BRANCH:
        at = branch_ptr + batch * branch_batch + row * branch_row + column
        branch = load_sum(at, delta_ptr + program * WIDTH + column, mask, kind, HAS_DELTA)
        gate_at = gate_ptr + batch * gate_batch + (row // run_rows) * gate_run + column
        gate = load_wide(gate_at, mask)
        x = rounded(x + rounded(gate * branch, kind, EAGER), kind, EAGER)
        tl.store(h_ptr + program * WIDTH + column, x.to(kind), mask=mask)
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    weight = load_wide(weight_ptr + column, mask)
    normed = rounded(x * inverse_rms * weight, kind, EAGER)
    scale = rounded(1.0 + load_wide(scale_ptr + modulation, mask), kind, EAGER)
    shift = load_wide(shift_ptr + modulation, mask)
    out = (rounded(normed * scale, kind, EAGER) + shift).to(kind)
    if FP8:
        wide = tl.where(mask, out.to(tl.float32), 0.0)
        if IN_BLOCKS:
            codes = block_codes(wide, factor_ptr + program, 0, factor_step, WIDTH, BLOCK)
        else:
            factor, inverse = row_factors(tl.max(tl.abs(wide), axis=0))
            tl.store(factor_ptr + program, factor)
            codes = codes_of(wide, inverse)
        # Runs as long as those of the plain form: a thread then holds the same columns, and a row
        # is summed in the same order. Left alone, the compiler makes those of codes longer.
        at = tl.max_contiguous(out_ptr + program * WIDTH + column, RUN)
        tl.store(at, codes, mask=mask)
    else:
        tl.store(out_ptr + program * WIDTH + column, out, mask=mask)


@triton.jit
def _add_gated_kernel(
    x_ptr,
    branch_ptr,
    delta_ptr,
    gate_ptr,
    out_ptr,
    rows,
    run_rows,
    x_batch,
    x_row,
    branch_batch,
    branch_row,
    modulation_batch,
    modulation_run,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    EAGER: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    batch, row = program // rows, program % rows
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < WIDTH
    kind: tl.constexpr = x_ptr.dtype.element_ty
    modulation = batch * modulation_batch + (row // run_rows) * modulation_run + column
    x = load_wide(x_ptr + batch * x_batch + row * x_row + column, mask)
    at = branch_ptr + batch * branch_batch + row * branch_row + column
    branch = load_sum(at, delta_ptr + program * WIDTH + column, mask, kind, HAS_DELTA)
    gate = load_wide(gate_ptr + modulation, mask)
    out = x + rounded(gate * branch, kind, EAGER)
    tl.store(out_ptr + program * WIDTH + column, out.to(kind), mask=mask)


def _launch(
    x_BRD: Tensor,
    branch_BRD: Tensor | None,
    weight_D: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor],
    eps: float,
    is_eager: bool,
    delta_BRD: Tensor | None = None,
    in_blocks: bool = False,
) -> None:
    """Run the row kernel; `parts` are gate, shift, scale, `outputs` are h, rows, factors."""
    batch_size, rows, width = x_BRD.shape
    branch = x_BRD if branch_BRD is None else branch_BRD
    gate, shift, scale = parts
    block = triton.next_power_of_2(width)
    _norm_kernel[(batch_size * rows,)](
        x_BRD, branch, branch if delta_BRD is None else delta_BRD, weight_D, gate, shift, scale,
        *outputs, rows, rows // shift.shape[1],
        x_BRD.stride(0), x_BRD.stride(1), branch.stride(0), branch.stride(1),
        batch_stride(gate), gate.stride(1), batch_stride(shift), shift.stride(1),
        outputs[2].stride(-1), eps,
        WIDTH=width, BLOCK=block, HAS_BRANCH=branch_BRD is not None,
        HAS_DELTA=delta_BRD is not None, FP8=outputs[1].dtype == torch.float8_e4m3fn,
        IN_BLOCKS=in_blocks, EAGER=is_eager, RUN=_ACCESS_BYTES // x_BRD.element_size(),
        num_warps=warps_for(block), **AS_WRITTEN,
    )  # fmt: skip


def norm_modulate(
    x_BRD: Tensor, weight_D: Tensor, modulation: Tensor, eps: float, is_eager: bool
) -> Tensor:
    """Launch for checked arguments."""
    shift, scale = modulation[:, :, SHIFT_A], modulation[:, :, SCALE_A]
    out = x_BRD.new_empty(x_BRD.shape)
    _launch(x_BRD, None, weight_D, (shift, shift, scale), (out, out, out), eps, is_eager)
    return out


def norm_modulate_fp8(
    x_BRD: Tensor, weight_D: Tensor, modulation: Tensor, eps: float, is_eager: bool, in_blocks: bool
) -> tuple[Tensor, Tensor]:
    """Launch for checked arguments."""
    shift, scale = modulation[:, :, SHIFT_A], modulation[:, :, SCALE_A]
    codes, factor = new_quantized(x_BRD, x_BRD.shape, in_blocks)
    parts, outputs = (shift, shift, scale), (x_BRD, codes, factor)
    _launch(x_BRD, None, weight_D, parts, outputs, eps, is_eager, in_blocks=in_blocks)
    return codes, factor


def _between(modulation: Tensor, following: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, shift, scale between the branches of a block, or between it and the following one."""
    if following is None:
        return modulation[:, :, GATE_A], modulation[:, :, SHIFT_F], modulation[:, :, SCALE_F]
    return modulation[:, :, GATE_F], following[:, :, SHIFT_A], following[:, :, SCALE_A]


def add_norm_modulate(
    x_BRD: Tensor,
    branch_BRD: Tensor,
    weight_D: Tensor,
    modulation: Tensor,
    eps: float,
    is_eager: bool,
    delta_BRD: Tensor | None,
    following: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Launch for checked arguments."""
    h, out = (x_BRD.new_empty(x_BRD.shape) for _ in range(2))
    parts, outputs = _between(modulation, following), (h, out, out)
    _launch(x_BRD, branch_BRD, weight_D, parts, outputs, eps, is_eager, delta_BRD)
    return h, out


def add_norm_modulate_fp8(
    x_BRD: Tensor,
    branch_BRD: Tensor,
    weight_D: Tensor,
    modulation: Tensor,
    eps: float,
    is_eager: bool,
    following: Tensor | None,
    in_blocks: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch for checked arguments."""
    h = x_BRD.new_empty(x_BRD.shape)
    codes, factor = new_quantized(x_BRD, x_BRD.shape, in_blocks)
    parts, outputs = _between(modulation, following), (h, codes, factor)
    _launch(x_BRD, branch_BRD, weight_D, parts, outputs, eps, is_eager, in_blocks=in_blocks)
    return h, codes, factor


def add_gated(
    x_BRD: Tensor,
    branch_BRD: Tensor,
    modulation: Tensor,
    is_eager: bool,
    delta_BRD: Tensor | None,
) -> Tensor:
    """Launch for checked arguments."""
    batch_size, rows, width = x_BRD.shape
    gate = modulation[:, :, GATE_F]
    out = x_BRD.new_empty(x_BRD.shape)
    tile = min(_TILE, triton.next_power_of_2(width))
    _add_gated_kernel[(batch_size * rows, triton.cdiv(width, tile))](
        x_BRD, branch_BRD, branch_BRD if delta_BRD is None else delta_BRD, gate, out, rows,
        rows // gate.shape[1], x_BRD.stride(0), x_BRD.stride(1), branch_BRD.stride(0),
        branch_BRD.stride(1), batch_stride(gate), gate.stride(1),
        WIDTH=width, TILE=tile, HAS_DELTA=delta_BRD is not None, EAGER=is_eager, num_warps=4,
        **AS_WRITTEN,
    )  # fmt: skip
    return out

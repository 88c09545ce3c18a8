"""Norm, modulation and gated residual of a block, each in one pass over the rows.

    norm_modulate       norm(x) (1 + scale) + shift                          block start
    add_norm_modulate   h = x + gate branch;  norm(h) (1 + scale) + shift    between the branches,
                        and, with the modulation of the next block, between two blocks
    add_gated           x + gate branch                                      block end

norm(x) = x rsqrt(mean x^2 + eps) weight. x, branch and outputs are [B, R, D] in fp32 or bf16; a
modulation [B or 1, M, parts, D] has M equal runs of rows, so nothing is gathered. Sums and all that
is between load and store are fp32; see `reference` for `rounding`. With "fast" the norm sees h
before it is rounded. A `delta`, contiguous, is added to the branch first, and that sum is rounded.
A `following` modulation, of as many runs, is that of the next block: the gate is then part 5 of the
modulation, and shift and scale are parts 0 and 1 of the following one.
The forms that end in `_fp8` return e4m3 codes and one factor a row, or one for each 128 channels of
it, instead of the modulated rows.
Outputs are contiguous.
Owns the operators; `adaln_triton` has the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import contract


def _check(
    op: str, x_BRD: Tensor, weight_D: Tensor | None, modulation: Tensor, parts: int, rounding: str
) -> None:
    contract.require_kernels(op, x_BRD)
    contract.require_rounding(op, rounding)
    batch_size, rows, width = x_BRD.shape
    if weight_D is not None:
        contract.require_shape(op, "weight", weight_D, (width,))
        contract.require_dense(op, "weight", weight_D)
    contract.require_rows(op, x=x_BRD, modulation=modulation)
    contract.require_runs(op, "modulation", modulation, batch_size, rows)
    least = (*modulation.shape[:2], max(parts, modulation.shape[2]), width)
    contract.require_shape(op, "modulation", modulation, least)


@torch.library.custom_op("worldstream::norm_modulate", mutates_args=())
def norm_modulate(
    x_BRD: Tensor, weight_D: Tensor, modulation_BMPD: Tensor, eps: float, rounding: str
) -> Tensor:
    """Return the modulated rows. Raises: ConfigError, UnsupportedError."""
    from engine.kernels import adaln_triton

    _check("norm_modulate", x_BRD, weight_D, modulation_BMPD, 2, rounding)
    return adaln_triton.norm_modulate(x_BRD, weight_D, modulation_BMPD, eps, rounding == "eager")


@norm_modulate.register_fake
def _(
    x_BRD: Tensor, weight_D: Tensor, modulation_BMPD: Tensor, eps: float, rounding: str
) -> Tensor:
    return x_BRD.new_empty(x_BRD.shape)


@torch.library.custom_op("worldstream::norm_modulate_fp8", mutates_args=())
def norm_modulate_fp8(
    x_BRD: Tensor,
    weight_D: Tensor,
    modulation_BMPD: Tensor,
    eps: float,
    rounding: str,
    in_blocks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return codes and factors of the modulated rows. Raises: ConfigError, UnsupportedError."""
    from engine.kernels import adaln_triton

    _check("norm_modulate_fp8", x_BRD, weight_D, modulation_BMPD, 2, rounding)
    if in_blocks:
        contract.require_blocks("norm_modulate_fp8", x_BRD.shape[-1])
    return adaln_triton.norm_modulate_fp8(
        x_BRD, weight_D, modulation_BMPD, eps, rounding == "eager", in_blocks
    )


@norm_modulate_fp8.register_fake
def _(
    x_BRD: Tensor,
    weight_D: Tensor,
    modulation_BMPD: Tensor,
    eps: float,
    rounding: str,
    in_blocks: bool = False,
) -> tuple[Tensor, Tensor]:
    return contract.new_quantized(x_BRD, x_BRD.shape, in_blocks)


def _check_add(
    op: str,
    x_BRD: Tensor,
    branch_BRD: Tensor,
    weight_D: Tensor | None,
    modulation_BM6D: Tensor,
    rounding: str,
    following: Tensor | None = None,
) -> None:
    _check(op, x_BRD, weight_D, modulation_BM6D, 6, rounding)
    if following is not None:
        _check(op, x_BRD, weight_D, following, 2, rounding)
        runs = (following.shape[0], modulation_BM6D.shape[1], *following.shape[2:])
        contract.require_shape(op, "following modulation", following, runs)
    contract.require_shape(op, "branch", branch_BRD, tuple(x_BRD.shape))
    contract.require_rows(op, x=x_BRD, branch=branch_BRD)


@torch.library.custom_op("worldstream::add_norm_modulate", mutates_args=())
def add_norm_modulate(
    x_BRD: Tensor,
    branch_BRD: Tensor,
    weight_D: Tensor,
    modulation_BM6D: Tensor,
    eps: float,
    rounding: str,
    delta_BRD: Tensor | None = None,
    following_BMPD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return h and the modulated rows. Raises: ConfigError, UnsupportedError."""
    from engine.kernels import adaln_triton

    op = "add_norm_modulate"
    _check_add(op, x_BRD, branch_BRD, weight_D, modulation_BM6D, rounding, following_BMPD)
    contract.require_delta(op, "delta", delta_BRD, branch_BRD)
    return adaln_triton.add_norm_modulate(
        x_BRD, branch_BRD, weight_D, modulation_BM6D, eps, rounding == "eager", delta_BRD,
        following_BMPD,
    )  # fmt: skip


@add_norm_modulate.register_fake
def _(
    x_BRD: Tensor,
    branch_BRD: Tensor,
    weight_D: Tensor,
    modulation_BM6D: Tensor,
    eps: float,
    rounding: str,
    delta_BRD: Tensor | None = None,
    following_BMPD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return x_BRD.new_empty(x_BRD.shape), x_BRD.new_empty(x_BRD.shape)


@torch.library.custom_op("worldstream::add_norm_modulate_fp8", mutates_args=())
def add_norm_modulate_fp8(
    x_BRD: Tensor,
    branch_BRD: Tensor,
    weight_D: Tensor,
    modulation_BM6D: Tensor,
    eps: float,
    rounding: str,
    following_BMPD: Tensor | None = None,
    in_blocks: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return h, codes and factors of the modulated rows. Raises: ConfigError, UnsupportedError."""
    from engine.kernels import adaln_triton

    op = "add_norm_modulate_fp8"
    _check_add(op, x_BRD, branch_BRD, weight_D, modulation_BM6D, rounding, following_BMPD)
    if in_blocks:
        contract.require_blocks(op, x_BRD.shape[-1])
    return adaln_triton.add_norm_modulate_fp8(
        x_BRD, branch_BRD, weight_D, modulation_BM6D, eps, rounding == "eager", following_BMPD,
        in_blocks,
    )  # fmt: skip


@add_norm_modulate_fp8.register_fake
def _(
    x_BRD: Tensor,
    branch_BRD: Tensor,
    weight_D: Tensor,
    modulation_BM6D: Tensor,
    eps: float,
    rounding: str,
    following_BMPD: Tensor | None = None,
    in_blocks: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    quantized = contract.new_quantized(x_BRD, x_BRD.shape, in_blocks)
    return x_BRD.new_empty(x_BRD.shape), *quantized


@torch.library.custom_op("worldstream::add_gated", mutates_args=())
def add_gated(
    x_BRD: Tensor,
    branch_BRD: Tensor,
    modulation_BM6D: Tensor,
    rounding: str,
    delta_BRD: Tensor | None = None,
) -> Tensor:
    """Return x + gate branch. Raises: ConfigError, UnsupportedError."""
    from engine.kernels import adaln_triton

    _check_add("add_gated", x_BRD, branch_BRD, None, modulation_BM6D, rounding)
    contract.require_delta("add_gated", "delta", delta_BRD, branch_BRD)
    return adaln_triton.add_gated(
        x_BRD, branch_BRD, modulation_BM6D, rounding == "eager", delta_BRD
    )


@add_gated.register_fake
def _(
    x_BRD: Tensor,
    branch_BRD: Tensor,
    modulation_BM6D: Tensor,
    rounding: str,
    delta_BRD: Tensor | None = None,
) -> Tensor:
    return x_BRD.new_empty(x_BRD.shape)

"""The gate of the feed-forward part in one pass: value * silu(gate) for rows [value ; gate].

Rows [B, R, 2F] in fp32 or bf16, any strides but a dense last axis; output [B, R, F], contiguous.
The middle is fp32; with rounding "eager" silu(gate) is rounded to the dtype of the rows first, as
plain code does. A `delta`, contiguous, is added to the rows first, and that sum is rounded.
`swiglu_fp8` returns e4m3 codes and one factor a row, or one for each 128 channels of it.
Owns the operators; `swiglu_triton` has the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels import contract


def _check(op: str, z_BRF: Tensor, rounding: str) -> None:
    contract.require_kernels(op, z_BRF)
    contract.require_rounding(op, rounding)
    contract.require_rows(op, z=z_BRF)
    if z_BRF.ndim != 3 or z_BRF.shape[-1] % 2:
        raise ConfigError(
            f"{op}: z has shape {tuple(z_BRF.shape)}; allowed: [batch, rows, an even number]"
        )


def _half(z_BRF: Tensor) -> tuple[int, ...]:
    return (*z_BRF.shape[:2], z_BRF.shape[2] // 2)


@torch.library.custom_op("worldstream::swiglu", mutates_args=())
def swiglu(z_BRF: Tensor, rounding: str, delta_BRF: Tensor | None = None) -> Tensor:
    """Return [B, R, F]. Raises: ConfigError, UnsupportedError."""
    from engine.kernels import swiglu_triton

    _check("swiglu", z_BRF, rounding)
    contract.require_delta("swiglu", "delta", delta_BRF, z_BRF)
    return swiglu_triton.swiglu(z_BRF, rounding == "eager", delta_BRF)


@swiglu.register_fake
def _(z_BRF: Tensor, rounding: str, delta_BRF: Tensor | None = None) -> Tensor:
    return z_BRF.new_empty(_half(z_BRF))


@torch.library.custom_op("worldstream::swiglu_fp8", mutates_args=())
def swiglu_fp8(z_BRF: Tensor, rounding: str, in_blocks: bool = False) -> tuple[Tensor, Tensor]:
    """Return codes [B, R, F] and factors [B, R, 1], in blocks [B, R, F / 128].

    Raises: ConfigError, UnsupportedError.
    """
    from engine.kernels import swiglu_triton

    _check("swiglu_fp8", z_BRF, rounding)
    if in_blocks:
        contract.require_blocks("swiglu_fp8", z_BRF.shape[-1] // 2)
    return swiglu_triton.swiglu_fp8(z_BRF, rounding == "eager", in_blocks)


@swiglu_fp8.register_fake
def _(z_BRF: Tensor, rounding: str, in_blocks: bool = False) -> tuple[Tensor, Tensor]:
    return contract.new_quantized(z_BRF, _half(z_BRF), in_blocks)

"""Linear layers in e4m3: the quantiser of rows and the product.

    quantize_rows   x [..., K] -> codes e4m3 [..., K], factors fp32 [..., 1] = amax of the row / 448
    fp8_linear      codes, factors, weight codes [N, K], weight factors [N] -> [..., N]

Products accumulate in fp32, meet both factors at the end and round once to `dtype`. On CUDA they
are cuBLAS's or CUTLASS's row-wise products (`torch._scaled_mm`, fast accumulation, bf16 output
alone); on a CPU the codes are multiplied out in fp32, so that the numbers can be judged anywhere.
Owns the operators; `fp8_triton` has the quantiser's kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels import contract, reference

WIDTH_MULTIPLE = 16
"""Both sides of a weight: what the products on a GPU ask for."""


@torch.library.custom_op("worldstream::quantize_rows", mutates_args=())
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [..., K] and factors [..., 1]. Raises: ConfigError, UnsupportedError."""
    if x.ndim < 2:
        raise ConfigError(f"quantize_rows: x has shape {tuple(x.shape)}; allowed: [..., rows, K]")
    contract.require_rows("quantize_rows", x=x)
    if not contract.kernels_run_on(x):
        return reference.quantize_rows(x)
    from engine.kernels import fp8_triton

    return fp8_triton.quantize_rows(x)


@quantize_rows.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return codes, contract.new_row_scale(codes)


def _check(codes: Tensor, scale: Tensor, weight_NK: Tensor, weight_scale_N: Tensor) -> None:
    op = "fp8_linear"
    for name, tensor in (("codes", codes), ("weight", weight_NK)):
        if tensor.dtype != torch.float8_e4m3fn or not tensor.is_contiguous():
            raise ConfigError(f"{op}: {name} is {tensor.dtype}; allowed: dense float8_e4m3fn")
    contract.require_shape(op, "weight", weight_NK, (weight_NK.shape[0], codes.shape[-1]))
    contract.require_shape(op, "scale", scale, (*codes.shape[:-1], 1))
    contract.require_shape(op, "weight scale", weight_scale_N, (weight_NK.shape[0],))


@torch.library.custom_op("worldstream::fp8_linear", mutates_args=())
def fp8_linear(
    codes: Tensor, scale: Tensor, weight_NK: Tensor, weight_scale_N: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return [..., N] in ``dtype``. Raises: ConfigError."""
    _check(codes, scale, weight_NK, weight_scale_N)
    if codes.device.type == "cpu":
        return reference.fp8_linear(codes, scale, weight_NK, weight_scale_N, dtype)
    if dtype != torch.bfloat16 or any(side % WIDTH_MULTIPLE for side in weight_NK.shape):
        raise ConfigError(
            f"fp8_linear: {dtype}, weight {tuple(weight_NK.shape)}; allowed on a GPU: bfloat16 and "
            f"multiples of {WIDTH_MULTIPLE}"
        )
    product = torch._scaled_mm(
        codes.view(-1, codes.shape[-1]),
        weight_NK.t(),
        scale_a=scale.view(-1, 1),
        scale_b=weight_scale_N.view(1, -1),
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return product.view(*codes.shape[:-1], -1)


@fp8_linear.register_fake
def _(
    codes: Tensor, scale: Tensor, weight_NK: Tensor, weight_scale_N: Tensor, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], weight_NK.shape[0]), dtype=dtype)

"""Linear layers in e4m3: the quantiser of rows and the product.

    quantize_rows   x [..., K] -> codes e4m3 [..., K], factors fp32 [..., 1] = amax of the row / 448
    fp8_linear      codes, factors, weight codes [N, K], weight factors [N] -> [..., N]

In blocks there is a factor for each 128 channels of a row [..., K / 128], and one for each 128 by
128 of a weight, laid out as `reference.quantize_weight` says; the weight's factors tell the form.
Products accumulate in fp32 and round once to `dtype`. With a factor a row they meet both factors at
the end: on CUDA they are cuBLAS's or CUTLASS's row-wise products (`torch._scaled_mm`, fast
accumulation). In blocks the sum over each 128 input channels meets its factors and is then added
up, so that no partial sum is kept in fewer bits: cuBLASLt's products of blocks, which Hopper alone
has (`torch.nn.functional.scaled_mm`; it reads the factors of rows column by column and a multiple
of 4 rows). Both give bfloat16 alone. On a CPU the codes are multiplied out in fp32, so that the
numbers can be judged anywhere.
Owns the operators; `fp8_triton` has the quantiser's kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels import contract, reference
from engine.kernels.reference import FP8_BLOCK

WIDTH_MULTIPLE = 16
"""Both sides of a weight: what the products on a GPU ask for."""


@torch.library.custom_op("worldstream::quantize_rows", mutates_args=())
def quantize_rows(x: Tensor, in_blocks: bool = False) -> tuple[Tensor, Tensor]:
    """Return codes [..., K] and factors [..., 1], in blocks [..., K / 128].

    Raises: ConfigError, UnsupportedError.
    """
    if x.ndim < 2:
        raise ConfigError(f"quantize_rows: x has shape {tuple(x.shape)}; allowed: [..., rows, K]")
    contract.require_rows("quantize_rows", x=x)
    if in_blocks:
        contract.require_blocks("quantize_rows", x.shape[-1])
    if not contract.kernels_run_on(x):
        codes, scale = reference.quantize_rows(x, in_blocks)
        return codes, contract.new_quantized(x, x.shape, in_blocks)[1].copy_(scale)
    from engine.kernels import fp8_triton

    return fp8_triton.quantize_rows(x, in_blocks)


@quantize_rows.register_fake
def _(x: Tensor, in_blocks: bool = False) -> tuple[Tensor, Tensor]:
    return contract.new_quantized(x, x.shape, in_blocks)


def _check(codes: Tensor, scale: Tensor, weight_NK: Tensor, weight_scale: Tensor) -> None:
    op = "fp8_linear"
    for name, tensor in (("codes", codes), ("weight", weight_NK)):
        if tensor.dtype != torch.float8_e4m3fn or not tensor.is_contiguous():
            raise ConfigError(f"{op}: {name} is {tensor.dtype}; allowed: dense float8_e4m3fn")
    channels, width = weight_NK.shape
    contract.require_shape(op, "weight", weight_NK, (channels, codes.shape[-1]))
    in_blocks = weight_scale.ndim == 2
    if in_blocks:
        for side in weight_NK.shape:
            contract.require_blocks(op, side)
    factors = width // FP8_BLOCK if in_blocks else 1
    contract.require_shape(op, "scale", scale, (*codes.shape[:-1], factors))
    shape = reference.weight_scale_shape(channels, width, in_blocks)
    contract.require_shape(op, "weight scale", weight_scale, shape)


@torch.library.custom_op("worldstream::fp8_linear", mutates_args=())
def fp8_linear(
    codes: Tensor, scale: Tensor, weight_NK: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return [..., N] in ``dtype``. Raises: ConfigError."""
    _check(codes, scale, weight_NK, weight_scale)
    if codes.device.type == "cpu":
        return reference.fp8_linear(codes, scale, weight_NK, weight_scale, dtype)
    if dtype != torch.bfloat16 or any(side % WIDTH_MULTIPLE for side in weight_NK.shape):
        raise ConfigError(
            f"fp8_linear: {dtype}, weight {tuple(weight_NK.shape)}; allowed on a GPU: bfloat16 and "
            f"multiples of {WIDTH_MULTIPLE}"
        )
    if weight_scale.ndim == 2:
        return _product_of_blocks(codes, scale, weight_NK, weight_scale)
    product = torch._scaled_mm(
        codes.view(-1, codes.shape[-1]),
        weight_NK.t(),
        scale_a=scale.view(-1, 1),
        scale_b=weight_scale.view(1, -1),
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return product.view(*codes.shape[:-1], -1)


@fp8_linear.register_fake
def _(
    codes: Tensor, scale: Tensor, weight_NK: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], weight_NK.shape[0]), dtype=dtype)


def _product_of_blocks(
    codes: Tensor, scale: Tensor, weight_NK: Tensor, weight_scale: Tensor
) -> Tensor:
    codes_PK, scale_PJ = operand_of_blocks(codes, scale)
    product = F.scaled_mm(
        codes_PK,
        weight_NK.t(),
        scale_PJ,
        F.ScalingType.BlockWise1x128,
        weight_scale.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    rows = codes.shape[:-1].numel()
    return product[:rows].view(*codes.shape[:-1], -1)


def operand_of_blocks(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [P, K] and factors [P, K / 128] as a product of blocks reads them.

    P is the number of rows or up to 3 more, which hold anything. What `contract.new_quantized` made
    has that room and is read in place; anything else, as what was joined from parts, is copied.
    """
    codes_RK, scale_RJ = codes.view(-1, codes.shape[-1]), scale.reshape(-1, scale.shape[-1])
    rows, blocks = scale_RJ.shape
    room = contract.rows_in_blocks(rows)
    has_room = _reaches(codes_RK, room) and _reaches(scale_RJ, room)
    if not has_room or scale_RJ.stride() != (1, room):
        made = contract.new_quantized(codes, codes_RK.shape, in_blocks=True)
        codes_RK, scale_RJ = made[0].copy_(codes_RK), made[1].copy_(scale_RJ)
    codes_PK = codes_RK.as_strided((room, codes_RK.shape[1]), codes_RK.stride())
    return codes_PK, scale_RJ.as_strided((room, blocks), (1, room))


def _reaches(x_RC: Tensor, rows: int) -> bool:
    """Whether the storage goes on to so many rows."""
    end = x_RC.storage_offset() + rows * x_RC.shape[1]
    return end * x_RC.itemsize <= x_RC.untyped_storage().nbytes()

"""Attention in eight bits, class A: queries, keys, weights and values are e4m3 codes.

    window_codes   keys: a factor a row, amax / 448; values: transposed, a factor for each channel
                   of 128 keys
    fp8_attend     o = softmax(q K^T / sqrt(width)) V over such codes; q is quantised by row as it
                   is read, weights, at most 1, times 256

Products are of codes, sums, softmax and factors in fp32; what a weight counts for in the sum of
weights is not rounded. q, o are [B, R, N, K], k, v [B, S, N, K] with any strides but a dense last
axis. Heads are 64 or 128 wide where kernels run; elsewhere the plain form serves all. Codes have
room for whole blocks of 128 keys, zero after the last. Weights as FlashAttention 3 has them in FP8
(https://arxiv.org/abs/2407.08608), with factors of blocks in place of one a tensor.
Owns the operators; `fp8_attention_triton` has the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels import contract
from engine.kernels import fp8_attention_reference as reference
from engine.kernels.reference import FP8_BLOCK

WIDTHS = (64, 128)
"""Of a head."""


def room_of(keys: int) -> int:
    """Keys that codes have room for."""
    return -(-keys // FP8_BLOCK) * FP8_BLOCK


@torch.library.custom_op("worldstream::window_codes", mutates_args=())
def window_codes(k_BSNK: Tensor, v_BSNK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes [B, N, S', K] and factors [B, N, S', 1] of keys, [B, N, K, S'] and
    [B, N, K, S' / 128] of values.

    Raises: ConfigError, UnsupportedError.
    """
    op = "window_codes"
    contract.require_rows(op, k=k_BSNK, v=v_BSNK)
    contract.require_shape(op, "v", v_BSNK, tuple(k_BSNK.shape))
    if not contract.kernels_run_on(k_BSNK):
        k_codes, k_factors, v_codes, v_factors = reference.window_codes(k_BSNK, v_BSNK)
        return (
            k_codes.contiguous(), k_factors.contiguous(),
            v_codes.contiguous(), v_factors.contiguous(),
        )  # fmt: skip
    _require_width(op, k_BSNK.shape[-1])
    from engine.kernels import fp8_attention_triton

    codes = _empty_codes(k_BSNK)
    fp8_attention_triton.window_codes(k_BSNK, v_BSNK, *codes)
    return codes


@window_codes.register_fake
def _(k_BSNK: Tensor, v_BSNK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_codes(k_BSNK)


@torch.library.custom_op("worldstream::fp8_attend", mutates_args=())
def fp8_attend(
    q_BRNK: Tensor,
    k_codes: Tensor,
    k_factors: Tensor,
    v_codes: Tensor,
    v_factors: Tensor,
    keys: int,
) -> Tensor:
    """Return the output, dense, over the first ``keys`` of what `window_codes` returned.

    Raises: ConfigError, UnsupportedError.
    """
    op = "fp8_attend"
    batch_size, _, heads, width = q_BRNK.shape
    contract.require_rows(op, q=q_BRNK)
    room = room_of(keys)
    if not 1 <= keys <= k_codes.shape[2]:
        raise ConfigError(f"{op}: keys is {keys}; allowed: 1 to {k_codes.shape[2]}")
    blocks = room // FP8_BLOCK
    for name, tensor, shape, dtype in (
        ("k_codes", k_codes, (room, width), torch.float8_e4m3fn),
        ("k_factors", k_factors, (room, 1), torch.float32),
        ("v_codes", v_codes, (width, room), torch.float8_e4m3fn),
        ("v_factors", v_factors, (width, blocks), torch.float32),
    ):
        contract.require_shape(op, name, tensor, (batch_size, heads, *shape))
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ConfigError(
                f"{op}: {name} is {tensor.dtype} with strides {tensor.stride()}; allowed: {dtype}, "
                "contiguous"
            )
    if not contract.kernels_run_on(q_BRNK):
        made_BRNK = reference.fp8_attend(q_BRNK, k_codes, k_factors, v_codes, v_factors, keys)
        return made_BRNK.contiguous()
    _require_width(op, width)
    from engine.kernels import fp8_attention_triton

    return fp8_attention_triton.attend(q_BRNK, k_codes, k_factors, v_codes, v_factors, keys)


@fp8_attend.register_fake
def _(
    q_BRNK: Tensor,
    k_codes: Tensor,
    k_factors: Tensor,
    v_codes: Tensor,
    v_factors: Tensor,
    keys: int,
) -> Tensor:
    return q_BRNK.new_empty(q_BRNK.shape)


def _require_width(op: str, width: int) -> None:
    if width not in WIDTHS:
        allowed = " or ".join(map(str, WIDTHS))
        raise ConfigError(f"{op}: heads are {width} wide; allowed: {allowed}")


def _empty_codes(k_BSNK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch_size, keys, heads, width = k_BSNK.shape
    plane, room = (batch_size, heads), room_of(keys)
    fp8 = torch.float8_e4m3fn
    return (
        k_BSNK.new_empty((*plane, room, width), dtype=fp8),
        k_BSNK.new_empty((*plane, room, 1), dtype=torch.float32),
        k_BSNK.new_empty((*plane, width, room), dtype=fp8),
        k_BSNK.new_empty((*plane, width, room // FP8_BLOCK), dtype=torch.float32),
    )

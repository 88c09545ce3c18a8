"""A few more keys for an attention that was done without them.

    absorb   o = softmax(q K^T / sqrt(width)) V over some keys, lse its logarithm of sums; with the
             keys k and values v besides: o <- (e^lse o + e^l v) / (e^lse + sum e^l), l = q k^T / ..

Exact but for the rounding of `o` on the way; sums are fp32. o, q are [B, R, N, K], k, v [B, S, N,
K] with S up to 128, lse fp32 [B, N, R]; any strides but a dense last axis of the rows.
Owns the operator; `absorb_triton` has the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import UnsupportedError
from engine.kernels import contract

KEY_LIMIT = 128
"""Keys that a program holds."""


@torch.library.custom_op("worldstream::absorb", mutates_args=("o_BRNK",))
def absorb(o_BRNK: Tensor, lse_BNR: Tensor, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> None:
    """Write the new output over the old one. Raises: ConfigError, UnsupportedError."""
    from engine.kernels import absorb_triton

    op = "absorb"
    batch_size, rows, heads, width = q_BRNK.shape
    keys = k_BSNK.shape[1]
    contract.require_kernels(op, q_BRNK)
    contract.require_rows(op, q=q_BRNK, o=o_BRNK, k=k_BSNK, v=v_BSNK)
    contract.require_shape(op, "o", o_BRNK, tuple(q_BRNK.shape))
    for name, tensor in (("k", k_BSNK), ("v", v_BSNK)):
        contract.require_shape(op, name, tensor, (batch_size, keys, heads, width))
    contract.require_shape(op, "lse", lse_BNR, (batch_size, heads, rows))
    if not 1 <= keys <= KEY_LIMIT:
        raise UnsupportedError(f"{op}: {keys} keys; allowed: 1 to {KEY_LIMIT}")
    absorb_triton.absorb(o_BRNK, lse_BNR, q_BRNK, k_BSNK, v_BSNK)


@absorb.register_fake
def _(o_BRNK: Tensor, lse_BNR: Tensor, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> None:
    return None

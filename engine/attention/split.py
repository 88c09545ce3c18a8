"""cuDNN's attention over a number of keys that it likes, and the few that are left by a kernel.

cuDNN takes a tenth longer where the number of keys is no multiple of 128, because it masks the last
block. So the keys up to such a multiple go to cuDNN, which also returns the logarithms of its sums,
and the rest is let in afterwards (`engine.kernels.absorb`). Exact; the output is rounded twice.
Shape suffixes: B batch, R query rows, S key rows, N heads, K head width.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from engine.attention.base import AttentionNeed
from engine.attention.sdpa import half_precision_refusal
from engine.kernels.absorb import absorb

KEY_BLOCK = 128


@torch.library.custom_op("worldstream::split_attention", mutates_args=())
def split_op(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
    """Full attention; dense [B, R, N, K]."""
    keys = k_BSNK.shape[1]
    whole = keys // KEY_BLOCK * KEY_BLOCK or keys
    q, k, v = (part.transpose(1, 2) for part in (q_BRNK, k_BSNK[:, :whole], v_BSNK[:, :whole]))
    with_sums = whole < keys
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, with_sums)
    o_BRNK: Tensor = o.transpose(1, 2).contiguous()
    if with_sums:
        lse_BNR = lse.view(q.shape[:3])
        absorb(o_BRNK, lse_BNR, q_BRNK, k_BSNK[:, whole:], v_BSNK[:, whole:])
    return o_BRNK


@split_op.register_fake
def _(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
    return q_BRNK.new_empty(q_BRNK.shape)


class SplitBackend:
    """cuDNN and the kernel for the rest."""

    name = "cudnn_split"

    def refusal(self, need: AttentionNeed) -> str | None:
        """Serve half precision on Hopper and later, with Triton."""
        if find_spec("triton") is None:
            return "the package triton is not installed"
        return half_precision_refusal(need, (9, 0), 128)

    def __call__(self, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
        """Return [B, R, N, K]."""
        return split_op(q_BRNK, k_BSNK, v_BSNK)

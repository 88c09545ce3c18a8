"""Attention by torch: the fused product and the exact one.

Owns `SdpaBackend` (cuDNN, flash or math, as torch dispatches) and `MathBackend`, the oracle.
Shape suffixes: B batch, R query rows, S key rows, N heads, K head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import AttentionNeed


class SdpaBackend:
    """torch's scaled_dot_product_attention; serves every device and dtype that torch does."""

    name = "sdpa"

    def refusal(self, need: AttentionNeed) -> str | None:
        """Serve floating-point dtypes."""
        return None if need.dtype.is_floating_point else f"{need.dtype} is not floating point"

    def __call__(self, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
        """Return [B, R, N, K]."""
        q, k, v = q_BRNK.transpose(1, 2), k_BSNK.transpose(1, 2), v_BSNK.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class MathBackend:
    """softmax(q k^T / sqrt(K)) v in fp32, rounded once; memory grows with R times S."""

    name = "math"

    def refusal(self, need: AttentionNeed) -> str | None:
        """Serve floating-point dtypes."""
        return None if need.dtype.is_floating_point else f"{need.dtype} is not floating point"

    def __call__(self, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
        """Return [B, R, N, K]."""
        q, k, v = (a.float().transpose(1, 2) for a in (q_BRNK, k_BSNK, v_BSNK))
        weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1)
        return (weights @ v).transpose(1, 2).to(q_BRNK.dtype)

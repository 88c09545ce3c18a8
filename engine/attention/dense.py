"""Attention by the kernel of our own for Hopper (`engine.kernels.dense`).

Shape suffixes: B batch, R query rows, S key rows, N heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.base import AttentionNeed
from engine.kernels.contract import has_gluon
from engine.kernels.dense import WIDTH, dense


class GluonBackend:
    """Bfloat16 on Hopper, heads of 128."""

    name = "gluon"

    def refusal(self, need: AttentionNeed) -> str | None:
        """Serve what the kernel is made for, where Triton has Gluon."""
        if need.device_type != "cuda":
            return f"made for cuda, not {need.device_type}"
        if need.dtype != torch.bfloat16:
            return f"made for bfloat16, not {need.dtype}"
        if need.head_dim != WIDTH:
            return f"heads are {need.head_dim} wide; allowed: {WIDTH}"
        if need.capability != (9, 0):
            return f"the device has capability {need.capability}; needed: (9, 0)"
        return None if has_gluon() else "Triton has no Gluon for Hopper here"

    def __call__(self, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
        """Return [B, R, N, K]."""
        return dense(q_BRNK, k_BSNK, v_BSNK)

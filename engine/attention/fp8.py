"""Attention of the chunk's rows in eight bits (`engine.kernels.fp8_attention`), class A.

Owns the backend and its place in a plan: rows of the chunk alone use it, over keys and values that
are quantised anew at each call; conditioning and audio stay as they are. Nothing chooses it but its
name, because it is an approximation.
Shape suffixes: B batch, R query rows, S key rows, N heads, K head width.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import torch
from torch import Tensor

from engine.attention.base import AttentionNeed, AttentionPlan
from engine.errors import UnsupportedError
from engine.kernels.fp8_attention import WIDTHS, fp8_attend, window_codes

_CAPABILITY = (8, 9)
"""Of CUDA devices that multiply e4m3."""


class Fp8Backend:
    """Bfloat16 on CUDA, heads of 64 or 128; the plain form on a CPU."""

    name = "fp8"

    def refusal(self, need: AttentionNeed) -> str | None:
        """Serve what the kernels are made for, and a CPU."""
        if need.device_type == "cpu":
            return None
        if need.device_type != "cuda":
            return f"made for cpu and cuda, not {need.device_type}"
        if need.dtype != torch.bfloat16:
            return f"made for bfloat16, not {need.dtype}"
        if need.head_dim not in WIDTHS:
            return f"heads are {need.head_dim} wide; allowed: {' or '.join(map(str, WIDTHS))}"
        if need.capability < _CAPABILITY:
            return f"the device has capability {need.capability}; needed: {_CAPABILITY}"
        return None if find_spec("triton") else "the package triton is not installed"

    def __call__(self, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
        """Return [B, R, N, K]."""
        return fp8_attend(q_BRNK, *window_codes(k_BSNK, v_BSNK), k_BSNK.shape[1])


def require_fp8(need: AttentionNeed) -> None:
    """Raises: UnsupportedError where it cannot be served."""
    reason = Fp8Backend().refusal(need)
    if reason is not None:
        raise UnsupportedError(f"attention fp8 refuses {need}: {reason}")


def with_fp8(plan: AttentionPlan, need: AttentionNeed) -> AttentionPlan:
    """Return the plan with eight bits for the rows of the chunk.

    Raises: UnsupportedError.
    """
    require_fp8(need)
    return dataclasses.replace(plan, video=Fp8Backend())

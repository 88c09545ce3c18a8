"""Attention by kernels that are not part of every torch: FlashAttention 3 and 4, FlexAttention.

Owns their detection and their calls; nothing of theirs is imported before the first call. Each is
one opaque operator for a compiler.
Shape suffixes: B batch, R query rows, S key rows, N heads, K head width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from engine.attention.base import AttentionNeed
from engine.attention.sdpa import half_precision_refusal

_MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}


def _missing(name: str) -> str | None:
    module = _MODULES[name]
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # of the package around it
        found = None
    return None if found else f"the package {module} is not installed"


@cache
def _kernel(name: str) -> Callable[..., Any]:
    if name == "flex":
        from torch.nn.attention.flex_attention import flex_attention

        return torch.compile(flex_attention, dynamic=True)
    function: Callable[..., Any] = importlib.import_module(_MODULES[name]).flash_attn_func
    return function


@torch.library.custom_op("worldstream::flash_attention", mutates_args=())
def flash_op(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor, kernel: str) -> Tensor:
    """Full attention by "fa3", "fa4" or "flex"; dense [B, R, N, K]."""
    if kernel == "flex":
        parts = (part.transpose(1, 2) for part in (q_BRNK, k_BSNK, v_BSNK))
        return _kernel(kernel)(*parts).transpose(1, 2).contiguous()
    out = _kernel(kernel)(q_BRNK, k_BSNK, v_BSNK)
    # Releases differ in whether the logarithms of the sums come along.
    return (out[0] if isinstance(out, tuple) else out).contiguous()


@flash_op.register_fake
def _(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor, kernel: str) -> Tensor:
    return q_BRNK.new_empty(q_BRNK.shape)


class _FlashBackend:
    """One of the kernels."""

    name: str

    def __call__(self, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
        """Return [B, R, N, K]."""
        return flash_op(q_BRNK, k_BSNK, v_BSNK, self.name)


class Fa3Backend(_FlashBackend):
    """FlashAttention 3: Hopper."""

    name = "fa3"

    def refusal(self, need: AttentionNeed) -> str | None:
        """Serve half precision on Hopper where the package is there."""
        if need.device_type == "cuda" and need.capability[0] != 9:
            return f"the device has capability {need.capability}; needed: (9, 0)"
        return half_precision_refusal(need, (9, 0), 256) or _missing(self.name)


class Fa4Backend(_FlashBackend):
    """FlashAttention 4: Hopper and Blackwell."""

    name = "fa4"

    def refusal(self, need: AttentionNeed) -> str | None:
        """Serve half precision where the package is there."""
        return half_precision_refusal(need, (9, 0), 128) or _missing(self.name)


class FlexBackend(_FlashBackend):
    """torch's FlexAttention, compiled by Triton at the first call."""

    name = "flex"

    def refusal(self, need: AttentionNeed) -> str | None:
        """Serve CUDA; heads as wide as a power of two."""
        if need.device_type != "cuda":
            return f"made for cuda, not {need.device_type}"
        if need.head_dim & (need.head_dim - 1) or need.head_dim < 16:
            return f"heads are {need.head_dim} wide; allowed: powers of two from 16"
        return None

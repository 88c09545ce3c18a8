"""Attention by torch: the fused products and the exact one.

Owns `SdpaBackend` (what torch dispatches to), the kernels of torch by name, `ProductsBackend` for
bfloat16 on a CPU, and `MathBackend`, the oracle. A compiler sees each fused product as one opaque
operator: it would otherwise choose a kernel while it traces, and fix the number of keys with it.

Keys are not padded to a multiple of 128, though cuDNN is about a tenth faster then: padded keys
need a mask to have no weight, and torch hands cuDNN masks as an addend of the size of the logits.
`split` takes the keys apart instead.
Shape suffixes: B batch, R query rows, S key rows, N heads, K head width.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.attention.base import AttentionNeed

_KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def _attend(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor, kernel: str) -> Tensor:
    q, k, v = q_BRNK.transpose(1, 2), k_BSNK.transpose(1, 2), v_BSNK.transpose(1, 2)
    with sdpa_kernel(_KERNELS[kernel]) if kernel in _KERNELS else nullcontext():
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@torch.library.custom_op("worldstream::sdpa", mutates_args=())
def sdpa_op(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor, kernel: str) -> Tensor:
    """Full attention by a kernel of torch, "sdpa" for its own choice; dense [B, R, N, K]."""
    return _attend(q_BRNK, k_BSNK, v_BSNK, kernel).contiguous()


@sdpa_op.register_fake
def _(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor, kernel: str) -> Tensor:
    return q_BRNK.new_empty(q_BRNK.shape)


class SdpaBackend:
    """torch's scaled_dot_product_attention; serves every device and dtype that torch does."""

    name = "sdpa"

    def refusal(self, need: AttentionNeed) -> str | None:
        """Serve floating-point dtypes."""
        return None if need.dtype.is_floating_point else f"{need.dtype} is not floating point"

    def __call__(self, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
        """Return [B, R, N, K]."""
        if torch.compiler.is_compiling():
            return sdpa_op(q_BRNK, k_BSNK, v_BSNK, self.name)
        return _attend(q_BRNK, k_BSNK, v_BSNK, self.name)


class KernelBackend(SdpaBackend):
    """One kernel of torch on CUDA: "cudnn" or "flash"."""

    def __init__(self, name: str, width_limit: int) -> None:
        self.name = name
        self._width_limit = width_limit

    def refusal(self, need: AttentionNeed) -> str | None:
        """Serve half precision on Ampere and later."""
        return half_precision_refusal(need, (8, 0), self._width_limit)


def half_precision_refusal(
    need: AttentionNeed, capability: tuple[int, int], width_limit: int
) -> str | None:
    """Return why a kernel for half precision on CUDA cannot serve, or None."""
    if need.device_type != "cuda":
        return f"made for cuda, not {need.device_type}"
    if need.dtype not in (torch.bfloat16, torch.float16):
        return f"made for bfloat16 and float16, not {need.dtype}"
    if need.head_dim > width_limit or need.head_dim % 8:
        return f"heads are {need.head_dim} wide; allowed: multiples of 8 up to {width_limit}"
    if need.capability < capability:
        return f"the device has capability {need.capability}; needed: {capability}"
    return None


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


class ProductsBackend:
    """Two batched products around a softmax, all in the dtype of the inputs.

    In bfloat16 on a CPU that is 1.6 times as fast as the fused product (200 rows over 1250 keys, 6
    heads of 64: 3.4 against 5.5 ms on one core), which converts its blocks again and again. The
    logits are rounded to the dtype once, so the error of the output is about twice as large; it
    stays within that of the plain form in the same dtype, because it is the plain form. Softmax
    itself runs in fp32.
    """

    name = "products"

    def __init__(self, buffer_bytes: int = 32 * 2**20) -> None:
        self._buffer_bytes = buffer_bytes
        self._buffers: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def refusal(self, need: AttentionNeed) -> str | None:
        """Serve CPUs only; elsewhere the fused product is faster and needs no buffer."""
        return None if need.device_type == "cpu" else f"made for cpu, not {need.device_type}"

    def __call__(self, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
        """Return [B, R, N, K]; long queries go in blocks, so that a buffer stays small."""
        if torch.compiler.is_compiling():
            return products_op(q_BRNK, k_BSNK, v_BSNK, self._buffer_bytes)
        q, k, v = (a.transpose(1, 2).flatten(0, 1) for a in (q_BRNK, k_BSNK, v_BSNK))
        row_bytes = k.shape[0] * k.shape[1] * q.element_size()
        rows = max(1, self._buffer_bytes // row_bytes)
        blocks = [self._block(part, k, v) for part in q.split(rows, dim=1)]
        out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        return out.unflatten(0, (q_BRNK.shape[0], -1)).transpose(1, 2)

    def _block(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits, weights = self._buffers_of(q, k)
        scale = q.shape[-1] ** -0.5
        torch.baddbmm(logits, q, k.mT, beta=0.0, alpha=scale, out=logits)
        torch.softmax(logits, dim=-1, out=weights)
        return torch.bmm(weights, v)

    def _buffers_of(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scratch of a shape. Fresh memory of this size costs more than the products themselves."""
        shape = (q.shape[0], q.shape[1], k.shape[1])
        if shape not in self._buffers:
            self._buffers[shape] = (q.new_zeros(shape), q.new_zeros(shape))
        return self._buffers[shape]


@cache
def _products(buffer_bytes: int) -> ProductsBackend:
    return ProductsBackend(buffer_bytes)


@torch.library.custom_op("worldstream::products", mutates_args=())
def products_op(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor, buffer_bytes: int) -> Tensor:
    """`ProductsBackend` for a compiler, which would fix the number of keys with the buffers."""
    return _products(buffer_bytes)(q_BRNK, k_BSNK, v_BSNK).contiguous()


@products_op.register_fake
def _(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor, buffer_bytes: int) -> Tensor:
    return q_BRNK.new_empty(q_BRNK.shape)

"""Triton kernel that lets a few more keys into an attention output; formula in `reference`.

Owns the launch. A program holds a tile of rows of one head and all of the keys.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.rows_triton import AS_WRITTEN

_LOG2_E = tl.constexpr(math.log2(math.e))
_ROWS = 64
_LEAST_SIDE = 16
"""Of a product on a GPU."""


@triton.jit
def _absorb_kernel(
    o_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, rows, keys, scale,
    o_batch, o_row, o_head, lse_batch, lse_head, lse_row, q_batch, q_row, q_head,
    k_batch, k_row, k_head, v_batch, v_row, v_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(1).to(tl.int64)
    batch, head = plane // HEADS, plane % HEADS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    key = tl.arange(0, KEYS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    row_mask, key_mask = (row < rows) & (column < WIDTH), (key < keys) & (column < WIDTH)
    kind: tl.constexpr = o_ptr.dtype.element_ty
    q_at = q_ptr + batch * q_batch + head * q_head + row * q_row + column
    k_at = k_ptr + batch * k_batch + head * k_head + key * k_row + column
    v_at = v_ptr + batch * v_batch + head * v_head + key * v_row + column
    q = tl.load(q_at, mask=row_mask, other=0.0)
    k = tl.load(k_at, mask=key_mask, other=0.0)
    v = tl.load(v_at, mask=key_mask, other=0.0)
    lse_at = lse_ptr + batch * lse_batch + head * lse_head + row * lse_row
    before = tl.load(lse_at, mask=row < rows, other=0.0) * _LOG2_E

    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * _LOG2_E)
    logits = tl.where(tl.arange(0, KEYS)[None, :] < keys, logits, float("-inf"))
    top = tl.maximum(tl.max(logits, axis=1)[:, None], before)
    weights, weight_before = tl.exp2(logits - top), tl.exp2(before - top)
    total = weight_before + tl.sum(weights, axis=1)[:, None]
    o_at = o_ptr + batch * o_batch + head * o_head + row * o_row + column
    o = tl.load(o_at, mask=row_mask, other=0.0).to(tl.float32) * weight_before
    o += tl.dot(weights.to(kind), v, input_precision="ieee")
    tl.store(o_at, (o / total).to(kind), mask=row_mask)


def absorb(o_BRNK: Tensor, lse_BNR: Tensor, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> None:
    """Launch for checked arguments."""
    batch_size, rows, heads, width = q_BRNK.shape
    keys = k_BSNK.shape[1]
    _absorb_kernel[(triton.cdiv(rows, _ROWS), batch_size * heads)](
        o_BRNK, lse_BNR, q_BRNK, k_BSNK, v_BSNK, rows, keys, width**-0.5,
        *o_BRNK.stride()[:3], *lse_BNR.stride(), *q_BRNK.stride()[:3], *k_BSNK.stride()[:3],
        *v_BSNK.stride()[:3], HEADS=heads, WIDTH=width, ROWS=_ROWS,
        KEYS=max(_LEAST_SIDE, triton.next_power_of_2(keys)),
        COLUMNS=max(_LEAST_SIDE, triton.next_power_of_2(width)), num_warps=4, **AS_WRITTEN,
    )  # fmt: skip

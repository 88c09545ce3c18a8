"""Triton kernel that lets a few more keys into an attention output; formula in `reference`.

Owns the launch. A program holds a tile of rows of one head and all of the keys, in one or two tiles
whose sides are powers of two. The assembler puts the loads of the output off until queries, keys
and values have come: a second wait for memory, but barriers that hold it off cost more (47 us, and
38 without, on an H200 for 1950 rows of 56 heads and 86 keys).
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.rows_triton import padded_side

_LOG2_E = tl.constexpr(math.log2(math.e))
_ROWS, _WARPS, _REGISTERS = 64, 4, 168
"""Of a program: its rows, its warps, and the registers that a thread may take. The kernel waits for
memory, so what counts is how many programs a multiprocessor holds: three of 168 registers and up to
96 keys (64 KiB); without a limit the assembler takes 174, which leaves two."""


@triton.jit
def _keys(
    base, first, keys,
    ROW: tl.constexpr, SIDE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load the rows from `first` of one head's keys or values; zero after the last."""
    key = (first + tl.arange(0, SIDE)).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    return tl.load(base + key * ROW + column, mask=(key < keys) & (column < WIDTH), other=0.0)


@triton.jit
def _products(q, k, first, keys, SIDE: tl.constexpr):
    """Multiply queries with keys; minus infinity after the last key."""
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    return tl.where((first + tl.arange(0, SIDE))[None, :] < keys, products, float("-inf"))


@triton.jit
def _absorb_kernel(
    o_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, rows, keys, scale,
    o_batch, o_head, lse_batch, lse_head, lse_row, q_batch, q_head, k_batch, k_head,
    v_batch, v_head,
    O_ROW: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KEYS: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    # Heads go first: programs that run at one time then read and write rows from end to end. Row
    # strides are compiled in, which saves registers that addresses would hold.
    plane = tl.program_id(0).to(tl.int64)
    batch, head = plane // HEADS, plane % HEADS
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row[:, None] < rows) & (column < WIDTH)
    kind: tl.constexpr = o_ptr.dtype.element_ty
    o_at = o_ptr + batch * o_batch + head * o_head + row[:, None] * O_ROW + column
    o = tl.load(o_at, mask=mask, other=0.0)
    lse_at = lse_ptr + batch * lse_batch + head * lse_head + row * lse_row
    before = tl.load(lse_at, mask=row < rows, other=0.0) * _LOG2_E
    q_at = q_ptr + batch * q_batch + head * q_head + row[:, None] * Q_ROW + column
    q = tl.load(q_at, mask=mask, other=0.0)
    k_base = k_ptr + batch * k_batch + head * k_head
    v_base = v_ptr + batch * v_batch + head * v_head
    k = _keys(k_base, 0, keys, K_ROW, KEYS, WIDTH, COLUMNS)
    if MORE:
        more_k = _keys(k_base, KEYS, keys, K_ROW, MORE, WIDTH, COLUMNS)
    v = _keys(v_base, 0, keys, V_ROW, KEYS, WIDTH, COLUMNS)
    if MORE:
        more_v = _keys(v_base, KEYS, keys, V_ROW, MORE, WIDTH, COLUMNS)

    products = _products(q, k, 0, keys, KEYS)
    top = tl.maximum(tl.max(products, axis=1) * scale, before)
    if MORE:
        more_products = _products(q, more_k, KEYS, keys, MORE)
        top = tl.maximum(tl.max(more_products, axis=1) * scale, top)
    weights, weight_before = tl.exp2(products * scale - top[:, None]), tl.exp2(before - top)
    total = weight_before + tl.sum(weights, axis=1)
    sum_ = tl.dot(weights.to(kind), v, input_precision="ieee")
    if MORE:
        more_weights = tl.exp2(more_products * scale - top[:, None])
        total += tl.sum(more_weights, axis=1)
        sum_ = tl.dot(more_weights.to(kind), more_v, sum_, input_precision="ieee")
    sum_ += o.to(tl.float32) * weight_before[:, None]
    tl.store(o_at, (sum_ * (1.0 / total)[:, None]).to(kind), mask=mask)


def _sides(keys: int) -> tuple[int, int]:
    """Return the sides of the tiles of keys, the second zero where one tile is as good."""
    side = padded_side(keys)
    first = side // 2
    second = padded_side(max(1, keys - first))
    return (first, second) if first + second < side else (side, 0)


def absorb(o_BRNK: Tensor, lse_BNR: Tensor, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> None:
    """Launch for checked arguments."""
    batch_size, rows, heads, width = q_BRNK.shape
    keys = k_BSNK.shape[1]
    side, more = _sides(keys)
    # Products that are added may be fused: no other form of the formula has to have the same bits.
    _absorb_kernel[(batch_size * heads, triton.cdiv(rows, _ROWS))](
        o_BRNK, lse_BNR, q_BRNK, k_BSNK, v_BSNK, rows, keys, width**-0.5 * _LOG2_E.value,
        *o_BRNK.stride()[:3:2], *lse_BNR.stride(), *q_BRNK.stride()[:3:2], *k_BSNK.stride()[:3:2],
        *v_BSNK.stride()[:3:2],
        O_ROW=o_BRNK.stride(1), Q_ROW=q_BRNK.stride(1), K_ROW=k_BSNK.stride(1),
        V_ROW=v_BSNK.stride(1), HEADS=heads, WIDTH=width, ROWS=_ROWS,
        COLUMNS=padded_side(width), KEYS=side, MORE=more,
        num_warps=_WARPS, maxnreg=_REGISTERS,
    )  # fmt: skip

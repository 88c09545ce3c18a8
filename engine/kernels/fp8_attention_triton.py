"""Triton kernels of attention in eight bits; formulas in `fp8_attention_reference`.

Owns the launches. Values lie transposed, because products of e4m3 on Hopper read both sides along
the axis that they sum over. A product of weights and values is of one block of keys, and meets the
sum of the blocks before it in fp32: the tensor cores alone keep some 14 bits of a sum.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fp8_attention_reference import WEIGHT_FACTOR, WEIGHT_KEYS
from engine.kernels.reference import FP8_BLOCK
from engine.kernels.rows_triton import codes_of, load_wide, row_factors

_LOG2_E = math.log2(math.e)
_ROWS, _WARPS, _STAGES = 64, 4, 3
"""Of a program of `attend`: one group of warps and 251 registers a thread, so that two programs
share a multiprocessor, one at its products while the other is at its weights. Twice the rows and
warps would spill."""
_CODE_WARPS = 8
_KEYS = tl.constexpr(FP8_BLOCK)
_WEIGHT_FACTOR = tl.constexpr(WEIGHT_FACTOR)


@triton.jit
def _codes_kernel(
    k_ptr, v_ptr, k_codes_ptr, k_factors_ptr, v_codes_ptr, v_factors_ptr, keys, room,
    k_batch, k_row, k_head, v_batch, v_row, v_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)
    batch, head = plane // HEADS, plane % HEADS
    block = tl.program_id(1)
    key = block.to(tl.int64) * _KEYS + tl.arange(0, _KEYS)
    column = tl.arange(0, WIDTH)
    mask = (key < keys)[:, None]
    k_at = k_ptr + batch * k_batch + head * k_head + key[:, None] * k_row + column[None, :]
    k = load_wide(k_at, mask)
    factor, inverse = row_factors(tl.max(tl.abs(k), axis=1))
    codes_at = k_codes_ptr + (plane * room + key[:, None]) * WIDTH + column[None, :]
    tl.store(codes_at, codes_of(k, inverse[:, None]))
    tl.store(k_factors_ptr + plane * room + key, factor)

    v_at = v_ptr + batch * v_batch + head * v_head + key[:, None] * v_row + column[None, :]
    v = load_wide(v_at, mask)
    factor, inverse = row_factors(tl.max(tl.abs(v), axis=0))
    channel = plane * WIDTH + column
    codes_at = v_codes_ptr + channel[:, None] * room + key[None, :]
    tl.store(codes_at, tl.trans(codes_of(v, inverse[None, :])))
    tl.store(v_factors_ptr + channel * (room // _KEYS) + block, factor)


@triton.jit
def _attend_kernel(
    o_ptr, q_ptr, k_codes_ptr, k_factors_ptr, v_codes_ptr, v_factors_ptr, rows, keys, room, scale,
    q_batch, q_row, q_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # Programs that run at one time share the keys of few heads.
    plane = tl.program_id(1).to(tl.int64)
    batch, head = plane // HEADS, plane % HEADS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, place = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    mask = (row < rows)[:, None]
    q_at = q_ptr + batch * q_batch + head * q_head + row[:, None] * q_row + column[None, :]
    q = load_wide(q_at, mask)
    q_factor, inverse = row_factors(tl.max(tl.abs(q), axis=1))
    q_codes = codes_of(q, inverse[:, None])
    q_factor *= scale

    k_at = k_codes_ptr + plane * room * WIDTH + place[:, None] * WIDTH + column[None, :]
    v_at = v_codes_ptr + plane * WIDTH * room + column[:, None] * room + place[None, :]
    k_factor_at = k_factors_ptr + plane * room + place
    v_factor_at = v_factors_ptr + (plane * WIDTH + column) * (room // _KEYS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sum_ = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, keys, KEYS):
        products = tl.dot(q_codes, tl.trans(tl.load(k_at + first * WIDTH)))
        logits = products * q_factor[:, None] * tl.load(k_factor_at + first)[None, :]
        logits = tl.where((first + place < keys)[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_top[:, None])
        kept = tl.exp2(top - new_top)
        total = total * kept + tl.sum(weights, axis=1)
        codes = (weights * _WEIGHT_FACTOR).to(tl.float8e4nv)
        values = tl.dot(codes, tl.trans(tl.load(v_at + first)))
        factor = tl.load(v_factor_at + first // _KEYS)
        sum_ = sum_ * kept[:, None] + values * factor[None, :]
        top = new_top
    o_at = o_ptr + ((batch * rows + row[:, None]) * HEADS + head) * WIDTH + column[None, :]
    kind: tl.constexpr = o_ptr.dtype.element_ty
    tl.store(o_at, (sum_ / (total * _WEIGHT_FACTOR)[:, None]).to(kind), mask=mask)


def window_codes(
    k_BSNK: Tensor,
    v_BSNK: Tensor,
    k_codes: Tensor,
    k_factors: Tensor,
    v_codes: Tensor,
    v_factors: Tensor,
) -> None:
    """Launch for checked arguments."""
    batch_size, keys, heads, width = k_BSNK.shape
    room = k_codes.shape[2]
    _codes_kernel[(batch_size * heads, room // FP8_BLOCK)](
        k_BSNK, v_BSNK, k_codes, k_factors, v_codes, v_factors, keys, room,
        *k_BSNK.stride()[:3], *v_BSNK.stride()[:3], HEADS=heads, WIDTH=width,
        num_warps=_CODE_WARPS,
    )  # fmt: skip


def attend(
    q_BRNK: Tensor,
    k_codes: Tensor,
    k_factors: Tensor,
    v_codes: Tensor,
    v_factors: Tensor,
    keys: int,
) -> Tensor:
    """Launch for checked arguments."""
    batch_size, rows, heads, width = q_BRNK.shape
    o_BRNK = q_BRNK.new_empty(q_BRNK.shape)
    _attend_kernel[(triton.cdiv(rows, _ROWS), batch_size * heads)](
        o_BRNK, q_BRNK, k_codes, k_factors, v_codes, v_factors, rows, keys, k_codes.shape[2],
        width**-0.5 * _LOG2_E, *q_BRNK.stride()[:3], HEADS=heads, WIDTH=width, ROWS=_ROWS,
        KEYS=WEIGHT_KEYS, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return o_BRNK

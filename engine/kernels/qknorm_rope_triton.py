"""Triton kernels of `qknorm_rope`; formulas, shapes and roundings stand there.

Owns the launches. One program holds some heads of one row: few threads with 16 bytes each, so that
no sum and no matrix crosses more than a warp or two. A head is taken as three pieces: both halves
of the rotary channels, which pair element by element, and the groups of four behind them, which are
split into four planes in registers so that memory is still read and written in order. All that a
program reads is asked for before anything is computed. Offsets are int64.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.contract import batch_stride, new_quantized
from engine.kernels.reference import FP8_BLOCK
from engine.kernels.rows_triton import (
    AS_WRITTEN,
    codes_of,
    load_sum,
    load_wide,
    rotated_pair,
    rounded,
    row_factors,
    warps_for,
)

_HEADS, _WARPS = 8, 2
"""Of a program: 8 x 64 pairs are 8 a thread, one load of 16 bytes in bf16."""


@triton.jit
def _row_of(row_ptr):
    m0, m1 = tl.load(row_ptr).to(tl.float32), tl.load(row_ptr + 1).to(tl.float32)
    m2, m3 = tl.load(row_ptr + 2).to(tl.float32), tl.load(row_ptr + 3).to(tl.float32)
    return m0, m1, m2, m3


@triton.jit
def _matrix(ptr):
    return _row_of(ptr), _row_of(ptr + 4), _row_of(ptr + 8), _row_of(ptr + 12)


@triton.jit
def _product_of_row(x0, x1, x2, x3, m):
    """Sum in the order of the plain code."""
    return m[0] * x0 + m[1] * x1 + m[2] * x2 + m[3] * x3


@triton.jit
def _turned(x, matrix, HEADS: tl.constexpr, REST_PAD: tl.constexpr):
    """Multiply each run of four channels of [HEADS, REST_PAD] by a 4x4 matrix, in fp32."""
    even, odd = tl.split(tl.reshape(x, (HEADS, REST_PAD // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    y0 = _product_of_row(x0, x1, x2, x3, matrix[0])
    y1 = _product_of_row(x0, x1, x2, x3, matrix[1])
    y2 = _product_of_row(x0, x1, x2, x3, matrix[2])
    y3 = _product_of_row(x0, x1, x2, x3, matrix[3])
    return tl.reshape(tl.join(tl.join(y0, y2), tl.join(y1, y3)), (HEADS, REST_PAD))


@triton.jit
def _of_each_head(ptr, column, end, HEADS: tl.constexpr):
    """Load the columns below ``end`` once a head: they then lie over threads as rows do.

    Loaded once and spread afterwards they would go through shared memory, behind barriers.
    """
    head = tl.zeros((HEADS, 1), tl.int32)
    return load_wide(ptr + (head + column), (head == 0) & (column < end))


@triton.jit
def _tables(
    cos_ptr, sin_ptr, row, cos_row, sin_row, pair,
    kind: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    cos = _of_each_head(cos_ptr + row * cos_row, pair, HALF, HEADS)
    sin = _of_each_head(sin_ptr + row * sin_row, pair, HALF, HEADS)
    return rounded(cos, kind, EAGER), rounded(sin, kind, EAGER)


@triton.jit
def _pieces(
    at_, delta_at_, pair, rest, pair_mask, rest_mask,
    kind: tl.constexpr, HAS_DELTA: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    high, tail = HALF + pair, 2 * HALF + rest
    first = load_sum(at_ + pair, delta_at_ + pair, pair_mask, kind, HAS_DELTA)
    second = load_sum(at_ + high, delta_at_ + high, pair_mask, kind, HAS_DELTA)
    other = load_sum(at_ + tail, delta_at_ + tail, rest_mask, kind, HAS_DELTA)
    return first, second, other


@triton.jit
def _normed(
    pieces, weight_ptr, pair, rest, eps,
    kind: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    EAGER: tl.constexpr,
):  # fmt: skip
    first, second, other = pieces
    squares = tl.sum(first * first + second * second, axis=1) + tl.sum(other * other, axis=1)
    inverse_rms = tl.rsqrt(squares / WIDTH + eps)[:, None]
    weight = _of_each_head(weight_ptr, pair, HALF, HEADS)
    first = rounded(first * inverse_rms * weight, kind, EAGER)
    weight = _of_each_head(weight_ptr + HALF, pair, HALF, HEADS)
    second = rounded(second * inverse_rms * weight, kind, EAGER)
    weight = _of_each_head(weight_ptr + 2 * HALF, rest, WIDTH - 2 * HALF, HEADS)
    other = rounded(other * inverse_rms * weight, kind, EAGER)
    return first, second, other


@triton.jit
def _store(
    at_, first, second, other, pair, rest, pair_mask, rest_mask,
    kind: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    tl.store(at_ + pair, first.to(kind), mask=pair_mask)
    tl.store(at_ + HALF + pair, second.to(kind), mask=pair_mask)
    tl.store(at_ + 2 * HALF + rest, other.to(kind), mask=rest_mask)


@triton.jit
def _place_kernel(
    q_ptr, k_ptr, v_ptr, q_delta_ptr, k_delta_ptr, v_delta_ptr, q_weight_ptr, k_weight_ptr,
    cos_ptr, sin_ptr, query_ptr, key_value_ptr, key_ptr, value_ptr, raw_ptr, out_ptr, rows,
    camera_rows, kv_camera_rows, q_batch, q_row, q_head,
    k_batch, k_row, k_head, v_batch, v_row, v_head, cos_row, sin_row, query_batch, query_run,
    key_value_batch, key_value_run, key_batch, key_row, key_head, value_batch, value_row,
    value_head, raw_batch, raw_row, raw_head, eps,
    HEAD_COUNT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, HAS_DELTA: tl.constexpr,
    KEEP: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    short_row = tl.program_id(0)
    row, batch = short_row.to(tl.int64), tl.program_id(2).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair, rest = tl.arange(0, HALF_PAD)[None, :], tl.arange(0, REST_PAD)[None, :]
    pair_mask = (head < HEAD_COUNT) & (pair < HALF)
    rest_mask = (head < HEAD_COUNT) & (rest < WIDTH - 2 * HALF)
    head = head.to(tl.int64)
    kind: tl.constexpr = q_ptr.dtype.element_ty

    # Contiguous rows: of the output, and of what is added to the inputs.
    packed = ((batch * rows + row) * HEAD_COUNT + head) * WIDTH
    q_at = q_ptr + batch * q_batch + row * q_row + head * q_head
    k_at = k_ptr + batch * k_batch + row * k_row + head * k_head
    v_at = v_ptr + batch * v_batch + row * v_row + head * v_head
    q = _pieces(q_at, q_delta_ptr + packed, pair, rest, pair_mask, rest_mask, kind, HAS_DELTA, HALF)
    k = _pieces(k_at, k_delta_ptr + packed, pair, rest, pair_mask, rest_mask, kind, HAS_DELTA, HALF)
    v = _pieces(v_at, v_delta_ptr + packed, pair, rest, pair_mask, rest_mask, kind, HAS_DELTA, HALF)
    # A row of its run in 32 bits: a division in 64 is a long way.
    run = short_row // kv_camera_rows
    key_value = _matrix(key_value_ptr + batch * key_value_batch + run * key_value_run)
    cos, sin = _tables(cos_ptr, sin_ptr, row, cos_row, sin_row, pair, kind, HEADS, HALF, EAGER)
    query = _matrix(query_ptr + batch * query_batch + short_row // camera_rows * query_run)

    first, second, other = _normed(
        q, q_weight_ptr, pair, rest, eps, kind, HEADS, HALF, WIDTH, EAGER
    )
    low, high = rotated_pair(first, second, cos, sin, kind, EAGER)
    other = _turned(other, query, HEADS, REST_PAD)
    _store(out_ptr + packed, low, high, other, pair, rest, pair_mask, rest_mask, kind, HALF)

    first, second, other = _normed(
        k, k_weight_ptr, pair, rest, eps, kind, HEADS, HALF, WIDTH, EAGER
    )
    if KEEP:
        at = raw_ptr + batch * raw_batch + row * raw_row + head * raw_head
        tl.store(at + pair, first.to(kind), mask=pair_mask)
        tl.store(at + HALF + pair, second.to(kind), mask=pair_mask)
    low, high = rotated_pair(first, second, cos, sin, kind, EAGER)
    other = _turned(other, key_value, HEADS, REST_PAD)
    at = key_ptr + batch * key_batch + row * key_row + head * key_head
    _store(at, low, high, other, pair, rest, pair_mask, rest_mask, kind, HALF)

    first, second, other = v
    other = _turned(other, key_value, HEADS, REST_PAD)
    at = value_ptr + batch * value_batch + row * value_row + head * value_head
    _store(at, first, second, other, pair, rest, pair_mask, rest_mask, kind, HALF)


@triton.jit
def _rotate_kernel(
    raw_ptr, cos_ptr, sin_ptr, key_ptr, rows, raw_batch, raw_row, raw_head, cos_row, sin_row,
    key_batch, key_row, key_head,
    HEAD_COUNT: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    EAGER: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, row = program // rows, program % rows
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, HALF_PAD)[None, :]
    mask = (head < HEAD_COUNT) & (pair < HALF)
    head = head.to(tl.int64)
    kind: tl.constexpr = raw_ptr.dtype.element_ty
    cos, sin = _tables(cos_ptr, sin_ptr, row, cos_row, sin_row, pair, kind, HEADS, HALF, EAGER)
    at = raw_ptr + batch * raw_batch + row * raw_row + head * raw_head
    first, second = load_wide(at + pair, mask), load_wide(at + HALF + pair, mask)
    low, high = rotated_pair(first, second, cos, sin, kind, EAGER)
    at = key_ptr + batch * key_batch + row * key_row + head * key_head
    tl.store(at + pair, low.to(kind), mask=mask)
    tl.store(at + HALF + pair, high.to(kind), mask=mask)


@triton.jit
def _turn_kernel(
    o_ptr, matrix_ptr, out_ptr, factor_ptr, rows, camera_rows, o_batch, o_row, o_head,
    matrix_batch, matrix_run, factor_step,
    HEAD_COUNT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, START: tl.constexpr,
    START_PAD: tl.constexpr, REST_PAD: tl.constexpr, FP8: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, row = program // rows, program % rows
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    lead, rest = tl.arange(0, START_PAD)[None, :], tl.arange(0, REST_PAD)[None, :]
    lead_mask = (head < HEAD_COUNT) & (lead < START)
    rest_mask = (head < HEAD_COUNT) & (rest < WIDTH - START)
    head = head.to(tl.int64)
    kind: tl.constexpr = o_ptr.dtype.element_ty
    source = o_ptr + batch * o_batch + row * o_row + head * o_head
    target = out_ptr + (program * HEAD_COUNT + head) * WIDTH
    kept = load_wide(source + lead, lead_mask)
    matrix = matrix_ptr + batch * matrix_batch + (row // camera_rows) * matrix_run
    other = load_wide(source + START + rest, rest_mask)
    turned = _turned(other, _matrix(matrix), HEADS, REST_PAD).to(kind)
    if FP8:
        turned = turned.to(tl.float32)
        if BLOCK_HEADS:  # a block of channels has some whole heads
            amax = tl.maximum(tl.max(tl.abs(kept), axis=1), tl.max(tl.abs(turned), axis=1))
            shared = tl.max(tl.reshape(amax, (HEADS // BLOCK_HEADS, BLOCK_HEADS)), axis=1)
            factor, inverse = row_factors(shared)
            block = tl.program_id(1) * (HEADS // BLOCK_HEADS)
            block += tl.arange(0, HEADS // BLOCK_HEADS)
            at = factor_ptr + program + block * factor_step
            tl.store(at, factor, mask=block < HEAD_COUNT // BLOCK_HEADS)
            inverse = tl.broadcast_to(inverse[:, None], (HEADS // BLOCK_HEADS, BLOCK_HEADS))
            inverse = tl.reshape(inverse, (HEADS, 1))
        else:
            amax = tl.maximum(tl.max(tl.abs(kept)), tl.max(tl.abs(turned)))
            factor, inverse = row_factors(amax)
            tl.store(factor_ptr + program, factor)
        tl.store(target + lead, codes_of(kept, inverse), mask=lead_mask)
        tl.store(target + START + rest, codes_of(turned, inverse), mask=rest_mask)
    else:
        tl.store(target + lead, kept.to(kind), mask=lead_mask)
        tl.store(target + START + rest, turned, mask=rest_mask)


def place(
    q_BRNK: Tensor,
    k_BRNK: Tensor,
    v_BRNK: Tensor,
    q_weight_K: Tensor,
    k_weight_K: Tensor,
    cos_RK: Tensor,
    sin_RK: Tensor,
    query_BG44: Tensor,
    key_value_BG44: Tensor,
    key_BRNK: Tensor,
    value_BRNK: Tensor,
    raw_BRNK: Tensor | None,
    eps: float,
    is_eager: bool,
    q_delta_BRNK: Tensor | None,
    k_delta_BRNK: Tensor | None,
    v_delta_BRNK: Tensor | None,
) -> Tensor:
    """Launch for checked arguments."""
    batch_size, rows, heads, width = q_BRNK.shape
    start = cos_RK.shape[-1]
    out = q_BRNK.new_empty(q_BRNK.shape)
    raw = key_BRNK if raw_BRNK is None else raw_BRNK
    deltas = (q_delta_BRNK, k_delta_BRNK, v_delta_BRNK)
    tile = min(_HEADS, triton.next_power_of_2(heads))
    _place_kernel[(rows, triton.cdiv(heads, tile), batch_size)](
        q_BRNK, k_BRNK, v_BRNK,
        *(q_BRNK if delta is None else delta for delta in deltas),
        q_weight_K, k_weight_K, cos_RK, sin_RK, query_BG44, key_value_BG44,
        key_BRNK, value_BRNK, raw, out, rows, rows // query_BG44.shape[1],
        rows // key_value_BG44.shape[1],
        *q_BRNK.stride()[:3], *k_BRNK.stride()[:3], *v_BRNK.stride()[:3],
        cos_RK.stride(0), sin_RK.stride(0), batch_stride(query_BG44), query_BG44.stride(1),
        batch_stride(key_value_BG44), key_value_BG44.stride(1),
        *key_BRNK.stride()[:3], *value_BRNK.stride()[:3], *raw.stride()[:3], eps,
        HEAD_COUNT=heads, HEADS=tile, WIDTH=width, HALF=start // 2,
        HALF_PAD=triton.next_power_of_2(start // 2), REST_PAD=triton.next_power_of_2(width - start),
        HAS_DELTA=q_delta_BRNK is not None, KEEP=raw_BRNK is not None, EAGER=is_eager,
        num_warps=_WARPS, **AS_WRITTEN,
    )  # fmt: skip
    return out


def rotate(
    raw_BRNK: Tensor, cos_RK: Tensor, sin_RK: Tensor, key_BRNK: Tensor, is_eager: bool
) -> None:
    """Launch for checked arguments."""
    batch_size, rows, heads, _ = key_BRNK.shape
    half, tile = cos_RK.shape[-1] // 2, min(_HEADS, triton.next_power_of_2(heads))
    _rotate_kernel[(batch_size * rows, triton.cdiv(heads, tile))](
        raw_BRNK, cos_RK, sin_RK, key_BRNK, rows, *raw_BRNK.stride()[:3], cos_RK.stride(0),
        sin_RK.stride(0), *key_BRNK.stride()[:3],
        HEAD_COUNT=heads, HEADS=tile, HALF=half, HALF_PAD=triton.next_power_of_2(half),
        EAGER=is_eager, num_warps=_WARPS, **AS_WRITTEN,
    )  # fmt: skip


def _turn(
    o_BRNK: Tensor, matrix_BG44: Tensor, start: int, out: Tensor, factor: Tensor, tile: int,
    block_heads: int = 0,
) -> None:  # fmt: skip
    batch_size, rows, heads, width = o_BRNK.shape
    rest, lead = triton.next_power_of_2(width - start), triton.next_power_of_2(start)
    _turn_kernel[(batch_size * rows, triton.cdiv(heads, tile))](
        o_BRNK, matrix_BG44, out, factor, rows, rows // matrix_BG44.shape[1],
        *o_BRNK.stride()[:3], batch_stride(matrix_BG44), matrix_BG44.stride(1),
        factor.stride(-1), HEAD_COUNT=heads, HEADS=tile, WIDTH=width, START=start, START_PAD=lead,
        REST_PAD=rest, FP8=out.dtype == torch.float8_e4m3fn, BLOCK_HEADS=block_heads,
        num_warps=warps_for(tile * (lead + rest)), **AS_WRITTEN,
    )  # fmt: skip


def turn_output(o_BRNK: Tensor, matrix_BG44: Tensor, start: int) -> Tensor:
    """Launch for checked arguments."""
    batch_size, rows, heads, width = o_BRNK.shape
    out = o_BRNK.new_empty((batch_size, rows, heads * width))
    tile = min(_HEADS, triton.next_power_of_2(heads))
    _turn(o_BRNK, matrix_BG44, start, out, out, tile)
    return out


def turn_output_fp8(
    o_BRNK: Tensor, matrix_BG44: Tensor, start: int, in_blocks: bool
) -> tuple[Tensor, Tensor]:
    """Launch for checked arguments; a program holds all heads of a row, or some whole blocks."""
    batch_size, rows, heads, width = o_BRNK.shape
    codes, factor = new_quantized(o_BRNK, (batch_size, rows, heads * width), in_blocks)
    tile, block_heads = triton.next_power_of_2(heads), 0
    if in_blocks:
        block_heads = FP8_BLOCK // width
        tile = min(max(_HEADS, block_heads), tile)
    _turn(o_BRNK, matrix_BG44, start, codes, factor, tile, block_heads)
    return codes, factor

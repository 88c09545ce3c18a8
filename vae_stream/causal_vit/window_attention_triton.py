"""Triton kernels of `window_attention`; formulas and shapes stand there.

Owns the launches. Attention adds one block of keys after another to sums in fp32: of weights, and
of weighted values. No largest logit is kept, which makes a softmax slow: logits are bounded. A
window's keys lie together in each slot of the ring; its queries are gathered by their index in
the raster. The channels of a head of one token are 128 bytes that lie together. Offsets are int64.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """Shape of a program of attention."""

    queries: int
    keys: int
    warps: int
    stages: int


# The fastest of eight on an H200: 146 us for a latent of 48x84 (160 with 64x128), 243 us for a pair
# (259 with 64 queries), 855 us for 14 tiles of 1797 rows (887 with 4 warps). The best of
# eight kernels for Hopper alone (a loading warp, two or three groups that compute, larger blocks,
# part of the powers by a polynomial) takes 14 to 39 per cent longer, in each case.
_TILES = (
    (1024, Tile(queries=128, keys=64, warps=8, stages=3)),
    (512, Tile(queries=128, keys=64, warps=4, stages=3)),
    (0, Tile(queries=64, keys=64, warps=4, stages=3)),
)
"""For windows of so many queries at least, most first; bf16."""
_EXACT_TILE = Tile(queries=32, keys=32, warps=4, stages=2)
"""Exact products run on plain cores, from registers: larger tiles spill and compile for ages."""
_LAST_ROWS = 16
"""Rows of a product at least; the suffix has five."""


@triton.jit
def _biased(source_ptr, bias_ptr, at, mask):
    x = tl.load(source_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return x + tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _place_kernel(
    qkv_ptr, bias_ptr, cos_ptr, sin_ptr, own_ptr, ring_ptr, q_ptr, key_ptr, value_ptr,
    last_key_ptr, last_value_ptr, tokens, latents, scale, eps,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, WIDTH: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = q_ptr.dtype.element_ty
    head, at = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (head < HEADS) & (at < WIDTH)
    turns = at < 2 * ANGLES
    angle = tl.where(at < ANGLES, at, at - ANGLES)
    partner = tl.where(at < ANGLES, at + ANGLES, at - ANGLES)
    cos = tl.load(cos_ptr + row * ANGLES + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + row * ANGLES + angle, mask=turns, other=0.0)
    sin = tl.where(at < ANGLES, -sin, sin)

    is_token = row < tokens * latents
    slot = tl.load(own_ptr + row // tokens, mask=is_token, other=0)
    in_slot = tl.load(ring_ptr + row % tokens, mask=is_token, other=0)
    channel = head * WIDTH + at
    in_ring = (slot * tokens + in_slot) * HEADS * WIDTH + channel
    in_last = (row - tokens * latents) * HEADS * WIDTH + channel
    source = qkv_ptr + row * 3 * HEADS * WIDTH + head * 3 * WIDTH
    bias_ptr += head * 3 * WIDTH

    for part in tl.static_range(2):
        x = _biased(source, bias_ptr, part * WIDTH + at, mask)
        y = _biased(source, bias_ptr, part * WIDTH + partner, mask & turns)
        inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
        turned = x * inverse_rms * cos + y * inverse_rms * sin
        if part == 0:
            q = (turned * scale).to(kind)
            tl.store(q_ptr + row * HEADS * WIDTH + channel, q, mask=mask)
        else:
            turned = turned.to(kind)
            tl.store(key_ptr + in_ring, turned, mask=mask & is_token)
            tl.store(last_key_ptr + in_last, turned, mask=mask & (row >= tokens * latents))
    value = _biased(source, bias_ptr, 2 * WIDTH + at, mask).to(kind)
    tl.store(value_ptr + in_ring, value, mask=mask & is_token)
    tl.store(last_value_ptr + in_last, value, mask=mask & (row >= tokens * latents))


@triton.jit
def _rows(pointer, first, size, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Rows [ROWS, WIDTH] of a head; zeros from `size` on."""
    row = first + tl.arange(0, ROWS)[:, None]
    return tl.load(pointer + row * D + tl.arange(0, WIDTH)[None, :], mask=row < size, other=0.0)


@triton.jit
def _next(place, slot, size, KEYS: tl.constexpr, SLOTS: tl.constexpr):
    """The block of keys that follows: in this latent, or the first one of the next."""
    place += KEYS
    is_over = place >= size
    slot = tl.where(is_over, slot + 1, slot)
    return tl.where(is_over, 0, place), tl.where(slot == SLOTS, 0, slot)


@triton.jit
def _added(q, k, v, total, acc):
    """Add keys [S, K] and their values to the sums of queries [R, K]."""
    weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee"))
    total += tl.sum(weights, axis=1)
    return total, tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit
def _added_turned(q, k, v, total, acc):
    """The same for few queries [K, R]: sums [S, R] and [K, R], since programs want 64 rows."""
    weights = tl.exp2(tl.dot(k, q, input_precision="ieee"))
    return total + weights, tl.dot(tl.trans(v), weights.to(v.dtype), acc, input_precision="ieee")


@triton.jit
def _attend_kernel(
    q_ptr, key_ptr, value_ptr, last_key_ptr, last_value_ptr, slots_ptr, count_ptr, token_ptr,
    begin_ptr, size_ptr, out_ptr, acc_ptr, total_ptr, tokens,
    LATENTS: tl.constexpr, PLACES: tl.constexpr, SLOTS: tl.constexpr, SUFFIX: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A block of a window's queries; or, after the last one, the suffix over that window.

    Of the suffix that is a part of its sums. In the first window it sees itself, too.
    """
    block, head, window = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    size = tl.load(size_ptr + window)
    begin = tl.load(begin_ptr + window).to(tl.int64) * D + head * WIDTH
    slot = tl.load(slots_ptr).to(tl.int32)
    latents = tl.load(count_ptr).to(tl.int32)
    steps = latents * tl.cdiv(size, KEYS)
    # A key of zeros has weight 1 and adds nothing but that.
    empty = (steps * KEYS - latents * size).to(tl.float32)
    key_ptr += begin
    value_ptr += begin
    last_key_ptr += head * WIDTH
    last_value_ptr += head * WIDTH
    stride = tokens.to(tl.int64) * D
    place = size * 0
    at = tl.arange(0, WIDTH)
    first = block * QUERIES
    if first >= LATENTS * PLACES:
        last = tl.arange(0, ROWS)
        source = (LATENTS * tokens + last).to(tl.int64)[None, :] * D + head * WIDTH + at[:, None]
        q = tl.load(q_ptr + source, mask=(last < SUFFIX)[None, :], other=0.0)
        total = tl.zeros((KEYS, ROWS), tl.float32)
        acc = tl.zeros((WIDTH, ROWS), tl.float32)
        for _ in range(steps):
            k = _rows(key_ptr + slot * stride, place, size, WIDTH, D, KEYS)
            v = _rows(value_ptr + slot * stride, place, size, WIDTH, D, KEYS)
            total, acc = _added_turned(q, k, v, total, acc)
            place, slot = _next(place, slot, size, KEYS, SLOTS)
        summed = tl.sum(total, axis=0) - empty
        if window == 0:
            last_k = _rows(last_key_ptr, 0, SUFFIX, WIDTH, D, ROWS)
            last_v = _rows(last_value_ptr, 0, SUFFIX, WIDTH, D, ROWS)
            own, acc = _added_turned(q, last_k, last_v, tl.zeros((ROWS, ROWS), tl.float32), acc)
            summed += tl.sum(own, axis=0) - (ROWS - SUFFIX)
        part = (window * tl.num_programs(1) + head) * ROWS + last
        tl.store(total_ptr + part, summed)
        tl.store(acc_ptr + part[None, :] * WIDTH + at[:, None], acc)
    elif first < LATENTS * size:
        query = first + tl.arange(0, QUERIES)
        is_query = query < LATENTS * size
        token = tl.load(token_ptr + window * PLACES + query % size, mask=is_query, other=0)
        row = (query // size).to(tl.int64) * tokens + token
        offset = row[:, None] * D + head * WIDTH + at[None, :]
        q = tl.load(q_ptr + offset, mask=is_query[:, None], other=0.0)
        total = tl.full((QUERIES,), SUFFIX - ROWS, tl.float32) - empty
        acc = tl.zeros((QUERIES, WIDTH), tl.float32)
        last_k = _rows(last_key_ptr, 0, SUFFIX, WIDTH, D, ROWS)
        last_v = _rows(last_value_ptr, 0, SUFFIX, WIDTH, D, ROWS)
        total, acc = _added(q, last_k, last_v, total, acc)
        for _ in range(steps):
            k = _rows(key_ptr + slot * stride, place, size, WIDTH, D, KEYS)
            v = _rows(value_ptr + slot * stride, place, size, WIDTH, D, KEYS)
            total, acc = _added(q, k, v, total, acc)
            place, slot = _next(place, slot, size, KEYS, SLOTS)
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offset, out, mask=is_query[:, None])


@triton.jit
def _merge_kernel(
    acc_ptr, total_ptr, out_ptr, windows, first_row,
    WINDOWS_PAD: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Join the parts of the sums of one row of the suffix."""
    head, last = tl.program_id(0), tl.program_id(1)
    window, at = tl.arange(0, WINDOWS_PAD), tl.arange(0, WIDTH)
    is_there = window < windows
    part = (window * tl.num_programs(0) + head) * ROWS + last
    total = tl.load(total_ptr + part, mask=is_there, other=0.0)
    acc = tl.load(acc_ptr + part[:, None] * WIDTH + at[None, :], mask=is_there[:, None], other=0.0)
    out = tl.sum(acc, axis=0) / tl.sum(total, axis=0)
    target = (first_row + last).to(tl.int64) * D + head * WIDTH + at
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty))


def place(
    qkv_RF: Tensor, bias_F: Tensor, cos_RA: Tensor, sin_RA: Tensor, own_C: Tensor, ring_R: Tensor,
    key_SRD: Tensor, value_SRD: Tensor, heads: int, scale: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch; see `window_attention`."""
    rows, width = qkv_RF.shape[0], key_SRD.shape[2] // heads
    tokens, latents = key_SRD.shape[1], own_C.shape[0]
    q_RD = qkv_RF.new_empty(rows, key_SRD.shape[2])
    last_key_RD = qkv_RF.new_empty(rows - tokens * latents, key_SRD.shape[2])
    last_value_RD = torch.empty_like(last_key_RD)
    _place_kernel[(rows,)](
        qkv_RF, bias_F, cos_RA, sin_RA, own_C, ring_R, q_RD, key_SRD, value_SRD, last_key_RD,
        last_value_RD, tokens, latents, scale, eps, HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads), WIDTH=width, ANGLES=cos_RA.shape[1], num_warps=4,
    )  # fmt: skip
    return q_RD, last_key_RD, last_value_RD


def tile_for(dtype: torch.dtype, queries: int) -> Tile:
    """Return the tile for windows of that many queries."""
    if dtype == torch.float32:
        return _EXACT_TILE
    return next(tile for least, tile in _TILES if queries >= least)


def attend(
    q_RD: Tensor, key_SRD: Tensor, value_SRD: Tensor, last_key_RD: Tensor, last_value_RD: Tensor,
    slots_S: Tensor, count_1: Tensor, token_WJ: Tensor, begin_W: Tensor, size_W: Tensor,
    heads: int, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Launch; see `window_attention`."""
    slots, tokens, channels = key_SRD.shape
    suffix, (windows, places) = last_key_RD.shape[0], token_WJ.shape
    latents, width = (q_RD.shape[0] - suffix) // tokens, channels // heads
    queries = latents * places
    tile = tile or tile_for(q_RD.dtype, queries)
    out_RD = torch.empty_like(q_RD)
    parts = q_RD.new_empty((windows, heads, _LAST_ROWS, width + 1), dtype=torch.float32).view(-1)
    count = windows * heads * _LAST_ROWS
    acc, total = parts.split([count * width, count])
    _attend_kernel[(triton.cdiv(queries, tile.queries) + (suffix > 0), heads, windows)](
        q_RD, key_SRD, value_SRD, last_key_RD, last_value_RD, slots_S, count_1, token_WJ, begin_W,
        size_W, out_RD, acc, total, tokens, LATENTS=latents, PLACES=places, SLOTS=slots,
        SUFFIX=suffix, WIDTH=width, D=channels, QUERIES=tile.queries, KEYS=tile.keys,
        ROWS=_LAST_ROWS, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if suffix > 0:
        _merge_kernel[(heads, suffix)](
            acc, total, out_RD, windows, latents * tokens,
            WINDOWS_PAD=max(2, triton.next_power_of_2(windows)), WIDTH=width, D=channels,
            ROWS=_LAST_ROWS, num_warps=1,
        )  # fmt: skip
    return out_RD

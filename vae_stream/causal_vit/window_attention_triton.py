"""Triton kernels of `window_attention`; formulas and shapes stand there.

Owns the launches. Attention folds one block of keys after another into a running softmax in fp32:
best logit so far, sum of weights, weighted sum of values. Tokens of a window are gathered by their
index in the raster, so that nothing is ever re-ordered in memory; the channels of a head of one
token are 128 bytes that lie together. Offsets are int64.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = math.log2(math.e)


class Tile(NamedTuple):
    """Shape of a program of attention."""

    queries: int
    keys: int
    warps: int
    stages: int


TILES = {
    torch.bfloat16: Tile(queries=128, keys=64, warps=4, stages=3),
    # Exact products run on plain cores, from registers: larger tiles spill and compile for ages.
    torch.float32: Tile(queries=32, keys=32, warps=4, stages=2),
}
_LAST_ROWS = 16
"""Rows of a product at least; the suffix has five."""


@triton.jit
def _biased(source_ptr, bias_ptr, at, mask):
    x = tl.load(source_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return x + tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _place_kernel(
    qkv_ptr, bias_ptr, cos_ptr, sin_ptr, own_ptr, q_ptr, key_ptr, value_ptr, last_key_ptr,
    last_value_ptr, tokens, latents, eps,
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
    channel = head * WIDTH + at
    in_ring = (slot * tokens + row % tokens) * HEADS * WIDTH + channel
    in_last = (row - tokens * latents) * HEADS * WIDTH + channel
    source = qkv_ptr + row * 3 * HEADS * WIDTH + head * 3 * WIDTH
    bias_ptr += head * 3 * WIDTH

    for part in tl.static_range(2):
        x = _biased(source, bias_ptr, part * WIDTH + at, mask)
        y = _biased(source, bias_ptr, part * WIDTH + partner, mask & turns)
        inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
        turned = (x * inverse_rms * cos + y * inverse_rms * sin).to(kind)
        if part == 0:
            tl.store(q_ptr + row * HEADS * WIDTH + channel, turned, mask=mask)
        else:
            tl.store(key_ptr + in_ring, turned, mask=mask & is_token)
            tl.store(last_key_ptr + in_last, turned, mask=mask & (row >= tokens * latents))
    value = _biased(source, bias_ptr, 2 * WIDTH + at, mask).to(kind)
    tl.store(value_ptr + in_ring, value, mask=mask & is_token)
    tl.store(last_value_ptr + in_last, value, mask=mask & (row >= tokens * latents))


@triton.jit
def _folded(q, k, v, is_seen, scale, best, total, acc):
    """Fold keys and values [S, K] into the running softmax of queries [R, K]."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    logits = tl.where(is_seen[None, :], logits, float("-inf"))
    newest = tl.maximum(best, tl.max(logits, axis=1))
    weights = tl.exp2(logits - newest[:, None])
    shrink = tl.exp2(best - newest)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return newest, total, acc


@triton.jit
def _folded_last(
    q, key_ptr, value_ptr, head, scale, best, total, acc,
    WIDTH: tl.constexpr, D: tl.constexpr, SUFFIX: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Fold the suffix."""
    row, at = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_seen = row < SUFFIX
    offset = row[:, None] * D + head * WIDTH + at[None, :]
    k = tl.load(key_ptr + offset, mask=is_seen[:, None], other=0.0)
    v = tl.load(value_ptr + offset, mask=is_seen[:, None], other=0.0)
    return _folded(q, k, v, is_seen, scale, best, total, acc)


@triton.jit
def _folded_window(
    q, key_ptr, value_ptr, slots_ptr, count, token_ptr, size, tokens, head, scale, best, total, acc,
    WIDTH: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Fold the tokens of a window in all latents that are seen, a block of places at a time."""
    at = tl.arange(0, WIDTH)
    for first in range(0, size, KEYS):
        place = first + tl.arange(0, KEYS)
        is_seen = place < size
        token = tl.load(token_ptr + place, mask=is_seen, other=0).to(tl.int64)
        offset = token[:, None] * D + head * WIDTH + at[None, :]
        for index in range(count):
            slot = tl.load(slots_ptr + index) * tokens * D
            k = tl.load(key_ptr + slot + offset, mask=is_seen[:, None], other=0.0)
            v = tl.load(value_ptr + slot + offset, mask=is_seen[:, None], other=0.0)
            best, total, acc = _folded(q, k, v, is_seen, scale, best, total, acc)
    return best, total, acc


@triton.jit
def _attend_kernel(
    q_ptr, key_ptr, value_ptr, last_key_ptr, last_value_ptr, slots_ptr, count_ptr, token_ptr,
    size_ptr, out_ptr, acc_ptr, best_ptr, total_ptr, tokens, scale,
    LATENTS: tl.constexpr, PLACES: tl.constexpr, SUFFIX: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of a window's queries; or, in the first block of each, the suffix over that window.

    Of the suffix that is a part of its softmax. In the first window it sees itself, too.
    """
    block, head, window = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    size = tl.load(size_ptr + window)
    count = tl.load(count_ptr).to(tl.int32)
    token_ptr += window * PLACES
    at = tl.arange(0, WIDTH)
    begin = (block - 1) * QUERIES
    if block == 0:
        last = tl.arange(0, ROWS)
        source = (LATENTS * tokens + last).to(tl.int64)[:, None] * D + head * WIDTH + at[None, :]
        q = tl.load(q_ptr + source, mask=(last < SUFFIX)[:, None], other=0.0)
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        best, total, acc = _folded_window(
            q, key_ptr, value_ptr, slots_ptr, count, token_ptr, size, tokens, head, scale, best,
            total, acc, WIDTH, D, KEYS)  # fmt: skip
        if window == 0:
            best, total, acc = _folded_last(
                q, last_key_ptr, last_value_ptr, head, scale, best, total, acc, WIDTH, D, SUFFIX,
                ROWS)  # fmt: skip
        part = (window * tl.num_programs(1) + head) * ROWS + last
        tl.store(best_ptr + part, best)
        tl.store(total_ptr + part, total)
        tl.store(acc_ptr + part[:, None] * WIDTH + at[None, :], acc)
    elif begin < LATENTS * size:
        query = begin + tl.arange(0, QUERIES)
        is_query = query < LATENTS * size
        token = tl.load(token_ptr + query % size, mask=is_query, other=0)
        row = (query // size).to(tl.int64) * tokens + token
        offset = row[:, None] * D + head * WIDTH + at[None, :]
        q = tl.load(q_ptr + offset, mask=is_query[:, None], other=0.0)
        best = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, WIDTH), tl.float32)
        best, total, acc = _folded_last(
            q, last_key_ptr, last_value_ptr, head, scale, best, total, acc, WIDTH, D, SUFFIX, ROWS
        )
        best, total, acc = _folded_window(
            q, key_ptr, value_ptr, slots_ptr, count, token_ptr, size, tokens, head, scale, best,
            total, acc, WIDTH, D, KEYS)  # fmt: skip
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offset, out, mask=is_query[:, None])


@triton.jit
def _merge_kernel(
    acc_ptr, best_ptr, total_ptr, out_ptr, windows, first_row,
    WINDOWS_PAD: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Join the parts of the softmax of one row of the suffix."""
    head, last = tl.program_id(0), tl.program_id(1)
    window, at = tl.arange(0, WINDOWS_PAD), tl.arange(0, WIDTH)
    is_there = window < windows
    part = (window * tl.num_programs(0) + head) * ROWS + last
    best = tl.load(best_ptr + part, mask=is_there, other=float("-inf"))
    weight = tl.exp2(best - tl.max(best, axis=0))
    total = tl.load(total_ptr + part, mask=is_there, other=0.0)
    acc = tl.load(acc_ptr + part[:, None] * WIDTH + at[None, :], mask=is_there[:, None], other=0.0)
    out = tl.sum(acc * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    target = (first_row + last).to(tl.int64) * D + head * WIDTH + at
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty))


def place(
    qkv_RF: Tensor, bias_F: Tensor, cos_RA: Tensor, sin_RA: Tensor, own_C: Tensor, key_SRD: Tensor,
    value_SRD: Tensor, heads: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch; see `window_attention`."""
    rows, width = qkv_RF.shape[0], key_SRD.shape[2] // heads
    tokens, latents = key_SRD.shape[1], own_C.shape[0]
    q_RD = qkv_RF.new_empty(rows, key_SRD.shape[2])
    last_key_RD = qkv_RF.new_empty(rows - tokens * latents, key_SRD.shape[2])
    last_value_RD = torch.empty_like(last_key_RD)
    _place_kernel[(rows,)](
        qkv_RF, bias_F, cos_RA, sin_RA, own_C, q_RD, key_SRD, value_SRD, last_key_RD,
        last_value_RD, tokens, latents, eps, HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads), WIDTH=width, ANGLES=cos_RA.shape[1], num_warps=4,
    )  # fmt: skip
    return q_RD, last_key_RD, last_value_RD


def attend(
    q_RD: Tensor, key_SRD: Tensor, value_SRD: Tensor, last_key_RD: Tensor, last_value_RD: Tensor,
    slots_S: Tensor, count_1: Tensor, token_WJ: Tensor, size_W: Tensor, heads: int,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Launch; see `window_attention`."""
    tokens, channels = key_SRD.shape[1:]
    suffix, (windows, places) = last_key_RD.shape[0], token_WJ.shape
    latents, width = (q_RD.shape[0] - suffix) // tokens, channels // heads
    scale, tile = width**-0.5 * _LOG2_E, tile or TILES[q_RD.dtype]
    out_RD = torch.empty_like(q_RD)
    parts = q_RD.new_empty((windows, heads, _LAST_ROWS, width + 2), dtype=torch.float32).view(-1)
    count = windows * heads * _LAST_ROWS
    acc, best, total = parts.split([count * width, count, count])
    _attend_kernel[(1 + triton.cdiv(latents * places, tile.queries), heads, windows)](
        q_RD, key_SRD, value_SRD, last_key_RD, last_value_RD, slots_S, count_1, token_WJ, size_W,
        out_RD, acc, best, total, tokens, scale, LATENTS=latents, PLACES=places, SUFFIX=suffix,
        WIDTH=width, D=channels, QUERIES=tile.queries, KEYS=tile.keys, ROWS=_LAST_ROWS,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _merge_kernel[(heads, suffix)](
        acc, best, total, out_RD, windows, latents * tokens,
        WINDOWS_PAD=max(2, triton.next_power_of_2(windows)), WIDTH=width, D=channels,
        ROWS=_LAST_ROWS, num_warps=1,
    )  # fmt: skip
    return out_RD

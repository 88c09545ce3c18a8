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


TILE = Tile(queries=128, keys=64, warps=4, stages=3)
_SUFFIX_KEYS = 128
_LAST_ROWS = 16
"""Rows of a product at least; the suffix has five."""


@triton.jit
def _place_kernel(
    qkv_ptr, cos_ptr, sin_ptr, own_ptr, q_ptr, key_ptr, value_ptr, last_key_ptr, last_value_ptr,
    tokens, latents, eps,
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

    for part in tl.static_range(2):
        x = tl.load(source + part * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(source + part * WIDTH + partner, mask=mask & turns, other=0.0).to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
        turned = (x * inverse_rms * cos + y * inverse_rms * sin).to(kind)
        if part == 0:
            tl.store(q_ptr + row * HEADS * WIDTH + channel, turned, mask=mask)
        else:
            tl.store(key_ptr + in_ring, turned, mask=mask & is_token)
            tl.store(last_key_ptr + in_last, turned, mask=mask & (row >= tokens * latents))
    value = tl.load(source + 2 * WIDTH + at, mask=mask, other=0.0)
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
def _window_kernel(
    q_ptr, key_ptr, value_ptr, last_key_ptr, last_value_ptr, slots_ptr, count_ptr, token_ptr,
    size_ptr, out_ptr, tokens, scale,
    LATENTS: tl.constexpr, PLACES: tl.constexpr, SUFFIX: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, window = tl.program_id(1), tl.program_id(2)
    size = tl.load(size_ptr + window)
    begin = tl.program_id(0) * QUERIES
    if begin < LATENTS * size:
        token_ptr += window * PLACES
        query, at = begin + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
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
        count = tl.load(count_ptr).to(tl.int32)
        best, total, acc = _folded_window(
            q, key_ptr, value_ptr, slots_ptr, count, token_ptr, size, tokens, head, scale, best,
            total, acc, WIDTH, D, KEYS)  # fmt: skip
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offset, out, mask=is_query[:, None])


@triton.jit
def _suffix_kernel(
    q_ptr, key_ptr, value_ptr, last_key_ptr, last_value_ptr, slots_ptr, count_ptr, token_ptr,
    size_ptr, acc_ptr, best_ptr, total_ptr, tokens, scale,
    LATENTS: tl.constexpr, PLACES: tl.constexpr, SUFFIX: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The suffix over one window: a part of its softmax; the first window has the suffix itself."""
    head, window = tl.program_id(0), tl.program_id(1)
    row, at = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    source = (LATENTS * tokens + row).to(tl.int64)[:, None] * D + head * WIDTH + at[None, :]
    q = tl.load(q_ptr + source, mask=(row < SUFFIX)[:, None], other=0.0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    size = tl.load(size_ptr + window)
    count = tl.load(count_ptr).to(tl.int32)
    best, total, acc = _folded_window(
        q, key_ptr, value_ptr, slots_ptr, count, token_ptr + window * PLACES, size, tokens, head,
        scale, best, total, acc, WIDTH, D, KEYS)  # fmt: skip
    if window == 0:
        best, total, acc = _folded_last(
            q, last_key_ptr, last_value_ptr, head, scale, best, total, acc, WIDTH, D, SUFFIX, ROWS
        )
    part = (window * tl.num_programs(0) + head) * ROWS + row
    tl.store(best_ptr + part, best)
    tl.store(total_ptr + part, total)
    tl.store(acc_ptr + part[:, None] * WIDTH + at[None, :], acc)


@triton.jit
def _merge_kernel(
    acc_ptr, best_ptr, total_ptr, out_ptr, windows, first_row,
    SUFFIX: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Join the parts of the suffix's softmax."""
    head = tl.program_id(0)
    row, at = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for window in range(windows):
        part = (window * tl.num_programs(0) + head) * ROWS + row
        own = tl.load(best_ptr + part)
        newest = tl.maximum(best, own)
        shrink, grow = tl.exp2(best - newest), tl.exp2(own - newest)
        total = total * shrink + tl.load(total_ptr + part) * grow
        own_acc = tl.load(acc_ptr + part[:, None] * WIDTH + at[None, :])
        acc = acc * shrink[:, None] + own_acc * grow[:, None]
        best = newest
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    target = (first_row + row).to(tl.int64)[:, None] * D + head * WIDTH + at[None, :]
    tl.store(out_ptr + target, out, mask=(row < SUFFIX)[:, None])


def place(
    qkv_RF: Tensor, cos_RA: Tensor, sin_RA: Tensor, own_C: Tensor, key_SRD: Tensor,
    value_SRD: Tensor, heads: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch; see `window_attention`."""
    rows, width = qkv_RF.shape[0], key_SRD.shape[2] // heads
    tokens, latents = key_SRD.shape[1], own_C.shape[0]
    q_RD = qkv_RF.new_empty(rows, key_SRD.shape[2])
    last_key_RD = qkv_RF.new_empty(rows - tokens * latents, key_SRD.shape[2])
    last_value_RD = torch.empty_like(last_key_RD)
    _place_kernel[(rows,)](
        qkv_RF, cos_RA, sin_RA, own_C, q_RD, key_SRD, value_SRD, last_key_RD, last_value_RD,
        tokens, latents, eps, HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), WIDTH=width,
        ANGLES=cos_RA.shape[1], num_warps=4,
    )  # fmt: skip
    return q_RD, last_key_RD, last_value_RD


def attend(
    q_RD: Tensor, key_SRD: Tensor, value_SRD: Tensor, last_key_RD: Tensor, last_value_RD: Tensor,
    slots_S: Tensor, count_1: Tensor, token_WJ: Tensor, size_W: Tensor, heads: int,
    tile: Tile = TILE,
) -> Tensor:  # fmt: skip
    """Launch; see `window_attention`."""
    tokens, channels = key_SRD.shape[1:]
    suffix, (windows, places) = last_key_RD.shape[0], token_WJ.shape
    latents, width = (q_RD.shape[0] - suffix) // tokens, channels // heads
    scale = width**-0.5 * _LOG2_E
    out_RD = torch.empty_like(q_RD)
    common = {"LATENTS": latents, "PLACES": places, "SUFFIX": suffix, "WIDTH": width, "D": channels,
              "ROWS": _LAST_ROWS}  # fmt: skip
    sources = (q_RD, key_SRD, value_SRD, last_key_RD, last_value_RD, slots_S, count_1, token_WJ,
               size_W)  # fmt: skip
    _window_kernel[(triton.cdiv(latents * places, tile.queries), heads, windows)](
        *sources, out_RD, tokens, scale, **common, QUERIES=tile.queries, KEYS=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    parts = q_RD.new_empty((windows, heads, _LAST_ROWS, width + 2), dtype=torch.float32).view(-1)
    count = windows * heads * _LAST_ROWS
    acc, best, total = parts.split([count * width, count, count])
    _suffix_kernel[(heads, windows)](
        *sources, acc, best, total, tokens, scale, **common, KEYS=_SUFFIX_KEYS, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    _merge_kernel[(heads,)](
        acc, best, total, out_RD, windows, latents * tokens, SUFFIX=suffix, WIDTH=width,
        D=channels, ROWS=_LAST_ROWS, num_warps=1,
    )  # fmt: skip
    return out_RD

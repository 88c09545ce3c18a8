"""Triton kernels of `sparse`: its launches for checked arguments.

Owns `summarize`, `route` and the form of `attend` for any GPU. A program has one head of one
sample. Offsets are int64.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import contract
from engine.kernels.rows_triton import AS_WRITTEN
from engine.kernels.sparse_reference import own_block, score_scale, tile_rows

_ROWS = 64
"""Queries of a program of `attend` at most. They are half a tile where blocks have 64 keys: a form
like this took 0.84 ms against 0.97 with all of it, 1950 queries over 13526 keys, 56 heads of 128,
four tenths read, H200."""
_LEAST_SIDE = 16
"""Of a product on a GPU."""
HOPPER_BLOCK = 64
"""Keys of a block that `sparse_gluon` is made for."""


def is_for_hopper(q_BRNK: Tensor, block: int) -> bool:
    """Whether `sparse_gluon` serves such queries over blocks of so many keys."""
    if q_BRNK.device.type != "cuda" or q_BRNK.dtype != torch.bfloat16:
        return False
    if q_BRNK.shape[-1] != 128 or block != HOPPER_BLOCK:
        return False
    return torch.cuda.get_device_capability(q_BRNK.device) == (9, 0) and contract.has_gluon()


# No code of their own for windows whose sizes are multiples of 16.
@triton.jit(do_not_specialize=["keys", "blocks", "first"])
def _summarize_kernel(
    k_ptr, v_ptr, mean_ptr, sum_ptr, reach_ptr, keys, blocks, first,
    k_batch, k_row, k_head, v_batch, v_row, v_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, plane = tl.program_id(0) + first, tl.program_id(1).to(tl.int64)
    batch, head = plane // HEADS, plane % HEADS
    key = (block * KEYS + tl.arange(0, KEYS))[:, None]
    column = tl.arange(0, COLUMNS)
    mask = (key < keys) & (column < WIDTH)[None, :]
    row = key.to(tl.int64)
    k_at = k_ptr + batch * k_batch + head * k_head + row * k_row + column[None, :]
    v_at = v_ptr + batch * v_batch + head * v_head + row * v_row + column[None, :]
    k = tl.load(k_at, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_at, mask=mask, other=0.0).to(tl.float32)
    count = tl.minimum(keys - block * KEYS, KEYS).to(tl.float32)
    at = plane * blocks + block
    kind: tl.constexpr = mean_ptr.dtype.element_ty
    mean, sum_ = tl.sum(k, axis=0) / count, tl.sum(v, axis=0)
    tl.store(mean_ptr + at * WIDTH + column, mean.to(kind), mask=column < WIDTH)
    tl.store(sum_ptr + at * WIDTH + column, sum_.to(kind), mask=column < WIDTH)
    tl.store(reach_ptr + at, tl.sqrt(tl.max(tl.sum(k * k, axis=1))))


@triton.jit(do_not_specialize=["rows", "blocks", "own"])
def _route_kernel(
    q_ptr, mean_ptr, sink_ptr, tally_ptr, exact_ptr, list_ptr, count_ptr, rows, blocks, own,
    scale, tau, q_batch, q_row, q_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    q_ptr += plane // HEADS * q_batch + plane % HEADS * q_head
    row = tile * TILE + tl.arange(0, TILE)
    column = tl.arange(0, COLUMNS)
    q_at = q_ptr + row.to(tl.int64)[:, None] * q_row + column[None, :]
    q_mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    q = tl.load(q_at, mask=q_mask, other=0.0).to(tl.float32)
    count = tl.minimum(rows - tile * TILE, TILE).to(tl.float32)
    query = tl.sum(q, axis=0) * (scale / count)
    scores = tl.zeros((GROUPS_PAD, 64), tl.float32)
    for group in tl.static_range(GROUPS):
        block = group * 64 + tl.arange(0, 64)
        mean_at = mean_ptr + (plane * blocks + block)[:, None] * WIDTH + column[None, :]
        mean_mask = (block < blocks)[:, None] & (column < WIDTH)[None, :]
        mean = tl.load(mean_at, mask=mean_mask, other=0.0).to(tl.float32)
        score = tl.sum(mean * query[None, :], axis=1)
        scores = tl.where((tl.arange(0, GROUPS_PAD) == group)[:, None], score[None, :], scores)
    scores = tl.reshape(scores, (GROUPS_PAD * 64,))
    block = tl.arange(0, GROUPS_PAD * 64)
    is_block = block < blocks
    middle = tl.sum(tl.where(is_block, scores, 0.0), axis=0) / blocks
    off = tl.where(is_block, scores - middle, 0.0)
    limit = middle + tau * tl.sqrt(tl.sum(off * off, axis=0) / blocks + 1e-6)
    is_exact = is_block & ((scores > limit) | (block < tl.load(sink_ptr)) | (block >= own))
    at = plane * tl.num_programs(0) + tile
    tl.store(exact_ptr + at * blocks + block, is_exact.to(tl.int8), mask=is_block)
    listed = (is_exact & (block < blocks - 1)).to(tl.int32)
    place = tl.cumsum(listed, axis=0) - listed
    tl.store(list_ptr + at * blocks + place, block, mask=listed != 0)
    tl.store(count_ptr + at, tl.sum(listed, axis=0))
    tl.atomic_add(tally_ptr, tl.sum(is_exact.to(tl.int64), axis=0), sem="relaxed")
    tl.atomic_add(tally_ptr + 1, tl.sum(is_block.to(tl.int64), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["rows", "keys", "blocks", "tiles"])
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, mean_ptr, sum_ptr, exact_ptr, list_ptr, count_ptr, o_ptr,
    rows, keys, blocks, tiles, scale, q_batch, q_row, q_head, k_batch, k_row, k_head,
    v_batch, v_row, v_head, o_batch, o_row, o_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(1).to(tl.int64)
    batch, head = plane // HEADS, plane % HEADS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_column = (column < WIDTH)[None, :]
    q_mask = (row < rows)[:, None] & is_column
    wide_row = row.to(tl.int64)[:, None]
    kind: tl.constexpr = q_ptr.dtype.element_ty
    q_at = q_ptr + batch * q_batch + head * q_head + wide_row * q_row + column[None, :]
    q = tl.load(q_at, mask=q_mask, other=0.0)
    at = plane * tiles + tl.program_id(0) * ROWS // TILE
    exact_ptr += at * blocks
    list_ptr += at * blocks
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    made = tl.zeros((ROWS, COLUMNS), tl.float32)

    # Means of all blocks bound `top` from below, also of those whose weight is left out here.
    for group in tl.range(0, tl.cdiv(blocks, 64), num_stages=1):
        block = group * 64 + tl.arange(0, 64)
        is_block = block < blocks
        cell = (plane * blocks + block)[:, None] * WIDTH + column[None, :]
        mean = tl.load(mean_ptr + cell, mask=is_block[:, None] & is_column, other=0.0)
        sums = tl.load(sum_ptr + cell, mask=is_block[:, None] & is_column, other=0.0)
        is_exact = tl.load(exact_ptr + block, mask=is_block, other=1) != 0
        count = tl.minimum(keys - block * KEYS, KEYS).to(tl.float32)
        score = tl.dot(q, tl.trans(mean), input_precision="ieee") * scale
        score = tl.where(is_block[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        fade = tl.exp2(top - higher)
        weight = tl.where(is_exact[None, :], 0.0, tl.exp2(score - higher[:, None]))
        total = total * fade + tl.sum(weight * count[None, :], axis=1)
        made = tl.dot(weight.to(kind), sums, made * fade[:, None], input_precision="ieee")
        top = higher

    k_ptr += batch * k_batch + head * k_head
    v_ptr += batch * v_batch + head * v_head
    listed = tl.load(count_ptr + at)
    for index in tl.range(0, listed + 1):
        # The last block of all, which may be short, comes behind the list.
        block = tl.load(list_ptr + index, mask=index < listed, other=blocks - 1)
        key = block.to(tl.int64) * KEYS + tl.arange(0, KEYS)
        mask = (key < keys)[:, None] & is_column
        k = tl.load(k_ptr + key[:, None] * k_row + column[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + key[:, None] * v_row + column[None, :], mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where((key < keys)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        fade = tl.exp2(top - higher)
        weight = tl.exp2(score - higher[:, None])
        total = total * fade + tl.sum(weight, axis=1)
        made = tl.dot(weight.to(kind), v, made * fade[:, None], input_precision="ieee")
        top = higher
    o_at = o_ptr + batch * o_batch + head * o_head + wide_row * o_row + column[None, :]
    tl.store(o_at, (made / total[:, None]).to(kind), mask=q_mask)


def _columns(width: int) -> int:
    return max(_LEAST_SIDE, triton.next_power_of_2(width))


def summarize(
    k_BSNK: Tensor,
    v_BSNK: Tensor,
    mean_BNJK: Tensor,
    sum_BNJK: Tensor,
    reach_BNJ: Tensor,
    rows: int,
    block: int,
) -> None:
    """Launch for checked arguments."""
    batch_size, keys, heads, width = k_BSNK.shape
    blocks, first = reach_BNJ.shape[2], own_block(rows, keys, block)
    _summarize_kernel[(blocks - first, batch_size * heads)](
        k_BSNK, v_BSNK, mean_BNJK, sum_BNJK, reach_BNJ, keys, blocks, first, *k_BSNK.stride()[:3],
        *v_BSNK.stride()[:3], HEADS=heads, WIDTH=width, COLUMNS=_columns(width), KEYS=block,
        num_warps=4, **AS_WRITTEN,
    )  # fmt: skip


def route(
    q_BRNK: Tensor,
    mean_BNJK: Tensor,
    sink_1: Tensor,
    tally_2: Tensor,
    own: int,
    tau: float,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch for checked arguments."""
    batch_size, rows, heads, width = q_BRNK.shape
    blocks, tiles = mean_BNJK.shape[2], triton.cdiv(rows, tile_rows(block))
    groups = triton.cdiv(blocks, 64)
    exact_BNTJ = q_BRNK.new_empty((batch_size, heads, tiles, blocks), dtype=torch.int8)
    list_BNTJ = torch.empty_like(exact_BNTJ, dtype=torch.int32)
    count_BNT = q_BRNK.new_empty((batch_size, heads, tiles), dtype=torch.int32)
    _route_kernel[(tiles, batch_size * heads)](
        q_BRNK, mean_BNJK, sink_1, tally_2, exact_BNTJ, list_BNTJ, count_BNT, rows, blocks, own,
        score_scale(width), float(tau), *q_BRNK.stride()[:3], HEADS=heads, WIDTH=width,
        COLUMNS=_columns(width), GROUPS=groups, GROUPS_PAD=triton.next_power_of_2(groups),
        TILE=tile_rows(block), num_warps=4, **AS_WRITTEN,
    )  # fmt: skip
    return exact_BNTJ, list_BNTJ, count_BNT


def attend(
    q_BRNK: Tensor,
    k_BSNK: Tensor,
    v_BSNK: Tensor,
    mean_BNJK: Tensor,
    sum_BNJK: Tensor,
    reach_BNJ: Tensor,
    exact_BNTJ: Tensor,
    list_BNTJ: Tensor,
    count_BNT: Tensor,
    block: int,
) -> Tensor:
    """Launch for checked arguments."""
    batch_size, rows, heads, width = q_BRNK.shape
    o_BRNK = q_BRNK.new_empty(q_BRNK.shape)
    tile = tile_rows(block)
    program_rows = min(_ROWS, tile)
    _attend_kernel[(triton.cdiv(rows, program_rows), batch_size * heads)](
        q_BRNK, k_BSNK, v_BSNK, mean_BNJK, sum_BNJK, exact_BNTJ, list_BNTJ, count_BNT, o_BRNK,
        rows, k_BSNK.shape[1], exact_BNTJ.shape[3], exact_BNTJ.shape[2], score_scale(width),
        *q_BRNK.stride()[:3], *k_BSNK.stride()[:3], *v_BSNK.stride()[:3], *o_BRNK.stride()[:3],
        HEADS=heads, WIDTH=width, COLUMNS=_columns(width), ROWS=program_rows, KEYS=block,
        TILE=tile, num_warps=4, num_stages=3,
    )  # fmt: skip
    return o_BRNK

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
from engine.kernels.rows_triton import (
    AS_WRITTEN,
    BLOCK_WARPS,
    block_step,
    block_sum,
    block_sum_and_reach,
    load_wide,
    padded_side,
)
from engine.kernels.sparse_reference import own_block, score_scale, tile_rows

_ROWS = 64
"""Queries of a program of `attend` at most. They are half a tile where blocks have 64 keys: a form
like this took 0.84 ms against 0.97 with all of it, 1950 queries over 13526 keys, 56 heads of 128,
four tenths read, H200."""
_SUMMARY_REGISTERS = 64
"""Of a thread of `summarize`, so that the compiler loads further ahead than with the 37 that it
takes by itself: 147 us a layer against 175, 13526 keys, 56 heads of 128, H200."""
_SCORED_TILES = 8
"""Tiles whose scores are made of the same means, which are read once for them."""
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
    STEP: tl.constexpr,
):  # fmt: skip
    block, plane = tl.program_id(0) + first, tl.program_id(1).to(tl.int64)
    batch, head = plane // HEADS, plane % HEADS
    row = (block * KEYS + tl.arange(0, STEP)).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMNS)
    is_column, left = column < WIDTH, keys - block * KEYS
    k_at = k_ptr + batch * k_batch + head * k_head + row * k_row + column[None, :]
    v_at = v_ptr + batch * v_batch + head * v_head + row * v_row + column[None, :]
    at = plane * blocks + block
    kind: tl.constexpr = mean_ptr.dtype.element_ty
    k_sum, reach = block_sum_and_reach(k_at, k_row, left, is_column[None, :], KEYS, STEP)
    v_sum = block_sum(v_at, v_row, left, is_column[None, :], KEYS, STEP)
    mean = tl.sum(k_sum, axis=0) / tl.minimum(left, KEYS).to(tl.float32)
    sum_ = tl.sum(v_sum, axis=0)
    tl.store(mean_ptr + at * WIDTH + column, mean.to(kind), mask=is_column)
    tl.store(sum_ptr + at * WIDTH + column, sum_.to(kind), mask=is_column)
    tl.store(reach_ptr + at, reach)


@triton.jit(do_not_specialize=["rows"])
def _query_kernel(
    q_ptr, query_ptr, rows, scale, q_batch, q_row, q_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Mean query of a tile of a head, times the factor of scores."""
    tile, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = (tile * TILE + tl.arange(0, STEP)).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMNS)
    is_column, left = column < WIDTH, rows - tile * TILE
    q_at = q_ptr + plane // HEADS * q_batch + plane % HEADS * q_head
    q_at += row * q_row + column[None, :]
    sum_ = tl.sum(block_sum(q_at, q_row, left, is_column[None, :], TILE, STEP), axis=0)
    query = sum_ * (scale / tl.minimum(left, TILE).to(tl.float32))
    at = plane * tl.num_programs(0) + tile
    tl.store(query_ptr + at * WIDTH + column, query, mask=is_column)


@triton.jit(do_not_specialize=["tiles", "blocks"])
def _score_kernel(
    query_ptr, mean_ptr, score_ptr, tiles, blocks,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Scores of 64 means of a head with the queries of some tiles."""
    plane = tl.program_id(2).to(tl.int64)
    block = tl.program_id(0) * 64 + tl.arange(0, 64)
    column = tl.arange(0, COLUMNS)
    mean_at = mean_ptr + (plane * blocks + block)[:, None] * WIDTH + column[None, :]
    mean = load_wide(mean_at, (block < blocks)[:, None] & (column < WIDTH)[None, :])
    for index in tl.static_range(TILES):
        tile = tl.program_id(1) * TILES + index
        at = plane * tiles + tile
        query = load_wide(query_ptr + at * WIDTH + column, (column < WIDTH) & (tile < tiles))
        score = tl.sum(mean * query[None, :], axis=1)
        tl.store(score_ptr + at * blocks + block, score, mask=(block < blocks) & (tile < tiles))


@triton.jit(do_not_specialize=["blocks", "own"])
def _choose_kernel(
    score_ptr, sink_ptr, tally_ptr, exact_ptr, list_ptr, count_ptr, blocks, own, tau,
    BLOCKS_PAD: tl.constexpr,
):  # fmt: skip
    """Blocks that a tile of a head reads key by key."""
    tile, tiles, plane = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    at = plane * tiles + tile
    block = tl.arange(0, BLOCKS_PAD)
    is_block = block < blocks
    scores = load_wide(score_ptr + at * blocks + block, is_block)
    middle = tl.sum(scores, axis=0) / blocks
    off = tl.where(is_block, scores - middle, 0.0)
    limit = middle + tau * tl.sqrt(tl.sum(off * off, axis=0) / blocks + 1e-6)
    is_exact = is_block & ((scores > limit) | (block < tl.load(sink_ptr)) | (block >= own))
    tl.store(exact_ptr + at * blocks + block, is_exact.to(tl.int8), mask=is_block)
    listed = (is_exact & (block < blocks - 1)).to(tl.int32)
    place = tl.cumsum(listed, axis=0) - listed
    tl.store(list_ptr + at * blocks + place, block, mask=listed != 0)
    tl.store(count_ptr + at, tl.sum(listed, axis=0))
    tl.atomic_add(tally_ptr, tl.sum(is_exact.to(tl.int64), axis=0), sem="relaxed")
    if at == 0:
        all_ = tl.num_programs(1).to(tl.int64) * tiles * blocks
        tl.atomic_add(tally_ptr + 1, all_, sem="relaxed")


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
    columns, blocks, first = padded_side(width), reach_BNJ.shape[2], own_block(rows, keys, block)
    _summarize_kernel[(blocks - first, batch_size * heads)](
        k_BSNK, v_BSNK, mean_BNJK, sum_BNJK, reach_BNJ, keys, blocks, first, *k_BSNK.stride()[:3],
        *v_BSNK.stride()[:3], HEADS=heads, WIDTH=width, COLUMNS=columns, KEYS=block,
        STEP=block_step(block, columns, k_BSNK.itemsize), num_warps=BLOCK_WARPS,
        maxnreg=_SUMMARY_REGISTERS, **AS_WRITTEN,
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
    tile, blocks, planes = tile_rows(block), mean_BNJK.shape[2], batch_size * heads
    tiles, columns = triton.cdiv(rows, tile), padded_side(width)
    exact_BNTJ = q_BRNK.new_empty((batch_size, heads, tiles, blocks), dtype=torch.int8)
    list_BNTJ = torch.empty_like(exact_BNTJ, dtype=torch.int32)
    count_BNT = q_BRNK.new_empty((batch_size, heads, tiles), dtype=torch.int32)
    query_BNTK = q_BRNK.new_empty((batch_size, heads, tiles, width), dtype=torch.float32)
    score_BNTJ = torch.empty_like(exact_BNTJ, dtype=torch.float32)
    _query_kernel[(tiles, planes)](
        q_BRNK, query_BNTK, rows, score_scale(width), *q_BRNK.stride()[:3], HEADS=heads,
        WIDTH=width, COLUMNS=columns, TILE=tile, STEP=block_step(tile, columns, q_BRNK.itemsize),
        num_warps=BLOCK_WARPS, **AS_WRITTEN,
    )  # fmt: skip
    groups = triton.cdiv(blocks, 64)
    _score_kernel[(groups, triton.cdiv(tiles, _SCORED_TILES), planes)](
        query_BNTK, mean_BNJK, score_BNTJ, tiles, blocks, WIDTH=width, COLUMNS=columns,
        TILES=_SCORED_TILES, num_warps=4, **AS_WRITTEN,
    )  # fmt: skip
    _choose_kernel[(tiles, planes)](
        score_BNTJ, sink_1, tally_2, exact_BNTJ, list_BNTJ, count_BNT, blocks, own, float(tau),
        BLOCKS_PAD=64 * triton.next_power_of_2(groups), num_warps=4, **AS_WRITTEN,
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
        HEADS=heads, WIDTH=width, COLUMNS=padded_side(width), ROWS=program_rows, KEYS=block,
        TILE=tile, num_warps=4, num_stages=3,
    )  # fmt: skip
    return o_BRNK

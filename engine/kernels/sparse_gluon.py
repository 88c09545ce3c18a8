"""`sparse.attend` for Hopper in Gluon: two groups of warps compute, one warp loads for both.

A program has a tile of 128 queries of one head, 64 for each group. The loading warp goes through
the summaries of all blocks, 64 at a time, then through the blocks on the tile's list, then the last
block of all; each is a copy by the tensor memory accelerator into the next of a ring of buffers,
keys and values in turn. The first block that is computed is the last of all, which may be short.
Where no row of a tile is left for its second group, that computes nothing and hands each buffer on.

Weights need a reference value, which softmax takes out again. Here it is known before the list
begins, so that the loop needs no maximum. The score of a row with any key is at most `far`, |q|
times the length of the longest key; the row's largest score is at least that with the best mean,
because a mean lies among its keys. With the larger of the best mean's score and far - 100 for
reference no weight is above 2^100, and a sum of 2^15 of them, times values up to 2^12, is finite.
Where far - 100 is at most 100 above the best mean, the largest weight is at least 2^-100, and what
is lost below is nothing beside it. Where it is further above (a key that is many times as long as
those that count), the group takes the maximum in each step, as usual.

On an H200, without the routes, at 56 heads: 0.57 ms for 1950 queries over 13526 keys, four tenths
read, and 3.02 ms for 5040 over 33302, 0.37 of them read (0.60 and 3.08 where a second group without
rows computed, too; the same bits). `dense_gluon` takes 1.15 and 6.92 ms for all of them beside it;
forms in Triton took 0.84 ms for the first.
Owns the launch.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.kernels.sparse_reference import score_scale, tile_rows
from engine.kernels.sparse_triton import HOPPER_BLOCK

BUFFERS, REGISTERS, MAX_REGISTERS = 8, 240, 168
"""Of keys or values; of a thread that computes, after the loading warp has given some away; of a
thread at first. 12 buffers are no faster; 10 with 232 registers are a twentieth slower at 13526
keys and a twentieth faster at 33302."""
_MARGIN = gl.constexpr(100.0)
"""Powers of two that weights may lie above or below the reference value."""


@gluon.jit
def _load(desc, plane, row, turn, ready, empty, tiles, BUFFERS: gl.constexpr):
    """Copy 64 rows into the buffer of a turn, once both groups have done with it."""
    slot = turn % BUFFERS
    mbarrier.wait(empty.index(slot), (turn // BUFFERS & 1) ^ 1)
    mbarrier.expect(ready.index(slot), 2 * desc.block_type.shape[1] * desc.block_type.shape[2])
    tma.async_copy_global_to_shared(desc, [plane, row, 0], ready.index(slot), tiles.index(slot))


@gluon.jit
def _produce(
    descs, ready, empty, tiles, list_ptr, plane, groups, count, last, KEYS: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    mean_desc, sum_desc, k_desc, v_desc = descs
    for group in range(groups):
        _load(mean_desc, plane, group * KEYS, 2 * group, ready, empty, tiles, BUFFERS)
        _load(sum_desc, plane, group * KEYS, 2 * group + 1, ready, empty, tiles, BUFFERS)
    block = last
    for index in range(count + 1):
        following = gl.load(list_ptr + index, mask=index < count, other=last)
        turn = 2 * (groups + index)
        _load(k_desc, plane, block * KEYS, turn, ready, empty, tiles, BUFFERS)
        _load(v_desc, plane, block * KEYS, turn + 1, ready, empty, tiles, BUFFERS)
        block = following


@gluon.jit
def _await(turn, ready, BUFFERS: gl.constexpr):
    mbarrier.wait(ready.index(turn % BUFFERS), turn // BUFFERS & 1)


@gluon.jit
def _taken(turn, ready, tiles, KEYS: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr):
    """Wait for the buffer of a turn."""
    _await(turn, ready, BUFFERS)
    return tiles.index(turn % BUFFERS).reshape([KEYS, WIDTH])


@gluon.jit
def _release(turn, empty, BUFFERS: gl.constexpr):
    mbarrier.arrive(empty.index(turn % BUFFERS), count=1)


@gluon.jit
def _read_near(
    q, scale, least, top, total, sum_, zero, is_last_key, ready, empty, tiles, groups, count,
    KEYS: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Go through the listed blocks with a fixed reference value.

    Weights of a block are made while the values of the block before are summed.
    """
    o_rows: gl.constexpr = gl.SliceLayout(1, sum_.type.layout)
    p_kind: gl.constexpr = gl.DotOperandLayout(0, sum_.type.layout, 2)
    new = gl.maximum(top, least)
    fade = gl.exp2(top - new)
    total = total * fade
    sum_ = sum_ * gl.convert_layout(fade, o_rows)[:, None]
    top = new
    k = _taken(2 * groups, ready, tiles, KEYS, WIDTH, BUFFERS)
    s = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    _release(2 * groups, empty, BUFFERS)
    s = gl.where(is_last_key[None, :], s, float("-inf"))
    p = gl.exp2(s * scale - top[:, None])
    total += gl.sum(p, axis=1)
    p_in = gl.convert_layout(p.to(gl.bfloat16), p_kind)
    for index in range(1, count + 1):
        later_turn = 2 * (groups + index)
        k = _taken(later_turn, ready, tiles, KEYS, WIDTH, BUFFERS)
        later = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
        v = _taken(later_turn - 1, ready, tiles, KEYS, WIDTH, BUFFERS)
        acc = warpgroup_mma(p_in, v, sum_, is_async=True)
        s = warpgroup_mma_wait(1, deps=(later,))
        _release(later_turn, empty, BUFFERS)
        p = gl.exp2(s * scale - top[:, None])
        total += gl.sum(p, axis=1)
        p_next = gl.convert_layout(p.to(gl.bfloat16), p_kind)
        # Waits for the weights, too: they are made while the product runs, not after it.
        sum_, p_in, p_next = warpgroup_mma_wait(0, deps=(acc, p_in, p_next))
        _release(later_turn - 1, empty, BUFFERS)
        p_in = p_next
    last_turn = 2 * (groups + count) + 1
    v = _taken(last_turn, ready, tiles, KEYS, WIDTH, BUFFERS)
    acc = warpgroup_mma(p_in, v, sum_, is_async=True)
    sum_, p_in = warpgroup_mma_wait(0, deps=(acc, p_in))
    _release(last_turn, empty, BUFFERS)
    return total, sum_


@gluon.jit
def _read_far(
    q, scale, top, total, sum_, zero, is_last_key, ready, empty, tiles, groups, count,
    KEYS: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Go through the listed blocks and take the maximum in each step."""
    o_rows: gl.constexpr = gl.SliceLayout(1, sum_.type.layout)
    p_kind: gl.constexpr = gl.DotOperandLayout(0, sum_.type.layout, 2)
    for index in range(count + 1):
        k_turn = 2 * (groups + index)
        k = _taken(k_turn, ready, tiles, KEYS, WIDTH, BUFFERS)
        s = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        _release(k_turn, empty, BUFFERS)
        s = gl.where((is_last_key | (index > 0))[None, :], s * scale, float("-inf"))
        new = gl.maximum(top, gl.max(s, axis=1))
        fade = gl.exp2(top - new)
        p = gl.exp2(s - new[:, None])
        total = total * fade + gl.sum(p, axis=1)
        sum_ = sum_ * gl.convert_layout(fade, o_rows)[:, None]
        top = new
        v = _taken(k_turn + 1, ready, tiles, KEYS, WIDTH, BUFFERS)
        p_in = gl.convert_layout(p.to(gl.bfloat16), p_kind)
        acc = warpgroup_mma(p_in, v, sum_, is_async=True)
        sum_, p_in = warpgroup_mma_wait(0, deps=(acc, p_in))
        _release(k_turn + 1, empty, BUFFERS)
    return total, sum_


@gluon.jit
def _consume(
    q_ptr, o_ptr, reach_ptr, exact_ptr, sizes, strides, scale, ready, empty, tiles, groups, count,
    begin, KEYS: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    rows, keys, blocks = sizes
    q_row, o_row = strides
    s_kind: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_kind: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    q_kind: gl.constexpr = gl.DotOperandLayout(0, s_kind, 2)
    p_kind: gl.constexpr = gl.DotOperandLayout(0, o_kind, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_kind)
    io: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = begin + gl.arange(0, 64, gl.SliceLayout(1, io))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, io))
    q_at = q_ptr + row.to(gl.int64)[:, None] * q_row + column[None, :]
    q_io = gl.load(q_at, mask=(row < rows)[:, None], other=0.0)
    wide = q_io.to(gl.float32)
    length = gl.convert_layout(gl.sqrt(gl.sum(wide * wide, axis=1)), gl.SliceLayout(1, s_kind))
    length = length * scale
    q = gl.convert_layout(q_io, q_kind)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_kind))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_kind))
    sum_ = gl.zeros([64, WIDTH], gl.float32, o_kind)
    zero = gl.zeros([64, KEYS], gl.float32, s_kind)
    each = gl.arange(0, KEYS, gl.SliceLayout(0, s_kind))
    reach = 0.0
    for group in range(groups):
        block = group * KEYS + each
        is_block = block < blocks
        exact = gl.load(exact_ptr + block, mask=is_block, other=1) != 0
        longest = gl.max(gl.load(reach_ptr + block, mask=is_block, other=0.0), axis=0)
        reach = gl.maximum(reach, longest)
        n = gl.minimum(keys - block * KEYS, KEYS).to(gl.float32)
        mean = _taken(2 * group, ready, tiles, KEYS, WIDTH, BUFFERS)
        s = warpgroup_mma(q, mean.permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        _release(2 * group, empty, BUFFERS)
        s = gl.where(is_block[None, :], s * scale, float("-inf"))
        new = gl.maximum(top, gl.max(s, axis=1))
        fade = gl.exp2(top - new)
        p = gl.where(exact[None, :], 0.0, gl.exp2(s - new[:, None]))
        total = total * fade + gl.sum(p * n[None, :], axis=1)
        sum_ = sum_ * gl.convert_layout(fade, o_rows)[:, None]
        top = new
        sums = _taken(2 * group + 1, ready, tiles, KEYS, WIDTH, BUFFERS)
        p_in = gl.convert_layout(p.to(gl.bfloat16), p_kind)
        acc = warpgroup_mma(p_in, sums, sum_, is_async=True)
        sum_, p_in = warpgroup_mma_wait(0, deps=(acc, p_in))
        _release(2 * group + 1, empty, BUFFERS)

    least = length * reach - _MARGIN
    is_last_key = (keys - 1) // KEYS * KEYS + each < keys
    if gl.max(least - top, axis=0) <= _MARGIN:
        total, sum_ = _read_near(
            q, scale, least, top, total, sum_, zero, is_last_key, ready, empty, tiles, groups,
            count, KEYS, WIDTH, BUFFERS,
        )  # fmt: skip
    else:
        total, sum_ = _read_far(
            q, scale, top, total, sum_, zero, is_last_key, ready, empty, tiles, groups,
            count, KEYS, WIDTH, BUFFERS,
        )  # fmt: skip
    out = gl.convert_layout((sum_ / gl.convert_layout(total, o_rows)[:, None]).to(gl.bfloat16), io)
    o_at = o_ptr + row.to(gl.int64)[:, None] * o_row + column[None, :]
    gl.store(o_at, out, mask=(row < rows)[:, None])


@gluon.jit
def _consume_if_any(
    q_ptr, o_ptr, reach_ptr, exact_ptr, sizes, strides, scale, ready, empty, tiles, groups, count,
    begin, KEYS: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    if begin < sizes[0]:
        _consume(
            q_ptr, o_ptr, reach_ptr, exact_ptr, sizes, strides, scale, ready, empty, tiles, groups,
            count, begin, KEYS, WIDTH, BUFFERS,
        )  # fmt: skip
    else:
        for turn in range(2 * (groups + count + 1)):
            _await(turn, ready, BUFFERS)
            _release(turn, empty, BUFFERS)


# No code of their own for windows whose sizes are multiples of 16.
@gluon.jit(do_not_specialize=["rows", "keys", "blocks"])
def attend_kernel(
    q_ptr, o_ptr, k_desc, v_desc, mean_desc, sum_desc, reach_ptr, exact_ptr, list_ptr, count_ptr,
    rows, keys, blocks, scale, q_row, q_head, o_row, o_head,
    KEYS: gl.constexpr, TILE: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """See the module."""
    tile, plane = gl.program_id(0), gl.program_id(1)
    wide_plane = plane.to(gl.int64)
    at = wide_plane * gl.num_programs(0) + tile
    q_ptr += wide_plane * q_head
    o_ptr += wide_plane * o_head
    reach_ptr += wide_plane * blocks
    exact_ptr += at * blocks
    list_ptr += at * blocks
    count = gl.load(count_ptr + at)
    groups = (blocks + KEYS - 1) // KEYS
    tiles = gl.allocate_shared_memory(k_desc.dtype, [BUFFERS, 1, KEYS, WIDTH], k_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=2)
    fence_async_shared()
    begin = tile * TILE
    sizes, strides = (rows, keys, blocks), (q_row, o_row)
    descs = (mean_desc, sum_desc, k_desc, v_desc)
    gl.warp_specialize(
        [
            (_consume, (q_ptr, o_ptr, reach_ptr, exact_ptr, sizes, strides, scale, ready, empty,
                        tiles, groups, count, begin, KEYS, WIDTH, BUFFERS)),
            (_consume_if_any, (q_ptr, o_ptr, reach_ptr, exact_ptr, sizes, strides, scale, ready,
                               empty, tiles, groups, count, begin + 64, KEYS, WIDTH, BUFFERS)),
            (_produce, (descs, ready, empty, tiles, list_ptr, plane, groups, count,
                        (keys - 1) // KEYS, KEYS, BUFFERS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def _descriptor(x_NSK: Tensor) -> TensorDescriptor:
    """Rows of one head as they are copied; what lies past the last one reads as zero."""
    block = [1, HOPPER_BLOCK, x_NSK.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(x_NSK, list(x_NSK.shape), list(x_NSK.stride()), block, layout)


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
    """Launch for checked arguments in bf16 with heads of 128 and blocks of `HOPPER_BLOCK` keys."""
    tile = tile_rows(block)
    _, rows, heads, width = q_BRNK.shape
    o_BRNK = torch.empty_like(q_BRNK, memory_format=torch.contiguous_format)
    for q, k, v, mean, sum_, reach, exact, listed, count, o in zip(
        q_BRNK, k_BSNK, v_BSNK, mean_BNJK, sum_BNJK, reach_BNJ, exact_BNTJ, list_BNTJ, count_BNT,
        o_BRNK, strict=True,
    ):  # fmt: skip
        attend_kernel[(triton.cdiv(rows, tile), heads)](
            q, o, _descriptor(k.transpose(0, 1)), _descriptor(v.transpose(0, 1)),
            _descriptor(mean), _descriptor(sum_), reach, exact, listed, count, rows, k.shape[0],
            reach.shape[1], score_scale(width), *q.stride()[:2], *o.stride()[:2],
            KEYS=block, TILE=tile, WIDTH=width, BUFFERS=BUFFERS, REGISTERS=REGISTERS,
            num_warps=4, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    return o_BRNK

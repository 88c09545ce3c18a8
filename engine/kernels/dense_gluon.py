"""`dense` for Hopper in Gluon: two groups of warps compute, one warp loads for both.

A program does one tile after another, or pieces of tiles (`dense_triton`). The loading warp goes
through the blocks of keys of a piece from the last, which may be short, to the first; each block of
keys and each of values is a copy by the tensor memory accelerator into the next of a ring of
buffers, and it runs ahead of the computing groups, also from one piece to the next.

A group has 64 queries. In each step it issues the scores of the next block and, behind them, the
sum of the values of the block before, and while the second runs it makes weights of the scores, by
a maximum that runs along. Two things of the order are not left to chance. Sums are scaled down to
the new maximum behind the issue of the scores, not in front of it. And between the weights and the
wait for the sum there is a branch: the assembler moves that wait up in front of the weights unless
it lies in another basic block, and then nothing runs meanwhile.

Owns the launch.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from triton.errors import TritonError
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

from engine.errors import UnsupportedError
from engine.kernels.dense_triton import (
    COUNTS,
    GROUP_ROWS,
    NO_SCORE,
    TILE_ROWS,
    Shares,
    join,
    piece,
    share,
)

_BLOCK_KEYS, _BUFFERS = 128, 4
"""Keys of a block, blocks of keys or values in flight."""
_REGISTERS, _LOADER_REGISTERS, _LEAST_REGISTERS = 240, 24, 168
"""Of a thread that computes, of one that loads, of each when the program starts."""
_TILE, _GROUP = gl.constexpr(TILE_ROWS), gl.constexpr(GROUP_ROWS)


@gluon.jit
def _load(desc, batch, head, key, turn, ready, empty, ring, BUFFERS: gl.constexpr):
    """Copy a block into the buffer of a turn, once both groups have done with it."""
    slot = turn % BUFFERS
    mbarrier.wait(empty.index(slot), (turn // BUFFERS & 1) ^ 1)
    mbarrier.expect(ready.index(slot), 2 * desc.block_type.shape[2] * desc.block_type.shape[3])
    tma.async_copy_global_to_shared(
        desc, [batch, head, key, 0], ready.index(slot), ring.index(slot)
    )


@gluon.jit
def _produce(
    k_desc, v_desc, ready, empty, ring, heads, units, cut, KEYS: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    blocks, pairs, shared, rounds, full_tiles = cut
    program, programs = gl.program_id(0), gl.num_programs(0)
    begin, end, pieces = share(program, programs, units, blocks, pairs, shared)
    turn = 0
    for index in range(rounds + pieces):
        plane, _, low, high, _, _ = piece(
            index, program, programs, begin, end, blocks, pairs, shared, rounds, full_tiles
        )
        batch, head = plane // heads, plane % heads
        for step in range(high - low):
            # A block that makes a pair full may lie behind all keys, and reads as zeros.
            key = (high - 1 - step) * KEYS
            _load(k_desc, batch, head, key, turn, ready, empty, ring, BUFFERS)
            _load(v_desc, batch, head, key, turn + 1, ready, empty, ring, BUFFERS)
            turn += 2


@gluon.jit
def _await(turn, ready, BUFFERS: gl.constexpr):
    mbarrier.wait(ready.index(turn % BUFFERS), turn // BUFFERS & 1)


@gluon.jit
def _release(turn, empty, BUFFERS: gl.constexpr):
    mbarrier.arrive(empty.index(turn % BUFFERS), count=1)


@gluon.jit
def _pass_over(turn, ready, empty, BUFFERS: gl.constexpr):
    """Release keys and values that are for the other group."""
    _await(turn, ready, BUFFERS)
    _release(turn, empty, BUFFERS)
    _await(turn + 1, ready, BUFFERS)
    _release(turn + 1, empty, BUFFERS)


@gluon.jit
def _block(turn, ring, BUFFERS: gl.constexpr):
    return ring.index(turn % BUFFERS).reshape([ring.shape[3], ring.shape[4]])


@gluon.jit
def _attend(
    q, zero, scale, low, high, keys, is_short, turn, ready, empty, ring, group: gl.constexpr,
    KEYS: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Sum of the values of a group's queries, and the reference value and the total of weights."""
    s_kind: gl.constexpr = zero.type.layout
    o_kind: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_kind: gl.constexpr = gl.DotOperandLayout(0, o_kind, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_kind)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_kind)
    stride = 2 if is_short else 1
    at = turn + 2 * group if is_short else turn
    block = high - 1 - group if is_short else high - 1
    _await(at, ready, BUFFERS)
    k = _block(at, ring, BUFFERS)
    s = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    _release(at, empty, BUFFERS)
    key = block * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, s_kind))
    s = gl.where((key < keys)[None, :], s, float("-inf"))
    top = gl.maximum(gl.max(s, axis=1) * scale, NO_SCORE)
    p = gl.exp2(s * scale - top[:, None])
    total = gl.sum(p, axis=1)
    p_in = gl.convert_layout(p.to(gl.bfloat16), p_kind)
    sum_ = gl.zeros([_GROUP, WIDTH], gl.float32, o_kind)
    fade = gl.full([_GROUP], 1.0, gl.float32, s_rows)
    if group == 1 and is_short:
        _pass_over(turn, ready, empty, BUFFERS)
    for _ in range(1, (high - low) // stride):
        v_at = at + 1
        at += 2 * stride
        _await(at, ready, BUFFERS)
        k = _block(at, ring, BUFFERS)
        later = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
        sum_ = sum_ * gl.convert_layout(fade, o_rows)[:, None]
        _await(v_at, ready, BUFFERS)
        acc = warpgroup_mma(p_in, _block(v_at, ring, BUFFERS), sum_, is_async=True)
        s = warpgroup_mma_wait(1, deps=(later,))
        _release(at, empty, BUFFERS)
        new = gl.maximum(top, gl.max(s, axis=1) * scale)
        p = gl.exp2(s * scale - new[:, None])
        fade = gl.exp2(top - new)
        total = total * fade + gl.sum(p, axis=1)
        top = new
        p_next = gl.convert_layout(p.to(gl.bfloat16), p_kind)
        if is_short:
            _pass_over(at - 2, ready, empty, BUFFERS)
        sum_, p_in, p_next = warpgroup_mma_wait(0, deps=(acc, p_in, p_next))
        _release(v_at, empty, BUFFERS)
        p_in = p_next
    sum_ = sum_ * gl.convert_layout(fade, o_rows)[:, None]
    _await(at + 1, ready, BUFFERS)
    acc = warpgroup_mma(p_in, _block(at + 1, ring, BUFFERS), sum_, is_async=True)
    sum_, p_in = warpgroup_mma_wait(0, deps=(acc, p_in))
    _release(at + 1, empty, BUFFERS)
    if group == 0 and is_short:
        _pass_over(at + 2, ready, empty, BUFFERS)
    return sum_, gl.convert_layout(top, o_rows), gl.convert_layout(total, o_rows)


@gluon.jit
def _consume(
    pointers, strides, rows, keys, heads, scale, ready, empty, ring, queries, units, cut,
    group: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    q_ptr, o_ptr, part_ptr, stat_ptr = pointers
    q_batch, q_row, q_head, o_batch, o_row, o_head = strides
    blocks, pairs, shared, rounds, full_tiles = cut
    io: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    s_kind: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    zero = gl.zeros([_GROUP, KEYS], gl.float32, s_kind)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, io))
    program, programs = gl.program_id(0), gl.num_programs(0)
    begin, end, pieces = share(program, programs, units, blocks, pairs, shared)
    turn = 0
    for index in range(rounds + pieces):
        plane, first_row, low, high, is_short, slot = piece(
            index, program, programs, begin, end, blocks, pairs, shared, rounds, full_tiles
        )
        batch, head = (plane // heads).to(gl.int64), (plane % heads).to(gl.int64)
        own_row = first_row if is_short else first_row + group * _GROUP
        row = own_row + gl.arange(0, _GROUP, gl.SliceLayout(1, io))
        mask, wide_row = (row < rows)[:, None], row.to(gl.int64)[:, None]
        q_at = q_ptr + batch * q_batch + head * q_head + wide_row * q_row + column[None, :]
        q = queries.index(group)
        q.store(gl.load(q_at, mask=mask, other=0.0))
        fence_async_shared()
        sum_, top, total = _attend(
            q, zero, scale, low, high, keys, is_short, turn, ready, empty, ring, group, KEYS,
            WIDTH, BUFFERS,
        )  # fmt: skip
        turn += 2 * (high - low)
        o_kind: gl.constexpr = sum_.type.layout
        if slot < 0:
            o = gl.convert_layout((sum_ / total[:, None]).to(gl.bfloat16), io)
            o_at = o_ptr + batch * o_batch + head * o_head + wide_row * o_row + column[None, :]
            gl.store(o_at, o, mask=mask)
        else:
            at = slot.to(gl.int64) * _TILE + group * _GROUP
            at = at + gl.arange(0, _GROUP, gl.SliceLayout(1, o_kind))
            part_column = gl.arange(0, WIDTH, gl.SliceLayout(0, o_kind))
            gl.store(part_ptr + at[:, None] * WIDTH + part_column[None, :], sum_)
            gl.store(stat_ptr + 2 * at, top)
            gl.store(stat_ptr + 2 * at + 1, total)


@gluon.jit(do_not_specialize=["rows", "keys", "heads", *COUNTS])
def _dense_kernel(
    q_ptr, o_ptr, part_ptr, stat_ptr, k_desc, v_desc, rows, keys, heads, scale,
    q_batch, q_row, q_head, o_batch, o_row, o_head,
    units, blocks, pairs, shared, rounds, full_tiles,
    KEYS: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr, REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ring = gl.allocate_shared_memory(k_desc.dtype, [BUFFERS, 1, 1, KEYS, WIDTH], k_desc.layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_GROUP, WIDTH], gl.bfloat16)
    queries = gl.allocate_shared_memory(gl.bfloat16, [2, _GROUP, WIDTH], q_layout)
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=2)
    fence_async_shared()
    pointers = (q_ptr, o_ptr, part_ptr, stat_ptr)
    strides = (q_batch, q_row, q_head, o_batch, o_row, o_head)
    cut = (blocks, pairs, shared, rounds, full_tiles)
    gl.warp_specialize(
        [
            (_consume, (pointers, strides, rows, keys, heads, scale, ready, empty, ring, queries,
                        units, cut, 0, KEYS, WIDTH, BUFFERS)),
            (_consume, (pointers, strides, rows, keys, heads, scale, ready, empty, ring, queries,
                        units, cut, 1, KEYS, WIDTH, BUFFERS)),
            (_produce, (k_desc, v_desc, ready, empty, ring, heads, units, cut, KEYS, BUFFERS)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


def _descriptor(x_BSNK: Tensor) -> TensorDescriptor:
    """Rows of one head as they are copied; what lies behind the last one reads as zeros."""
    x_BNSK = x_BSNK.transpose(1, 2)
    block = [1, 1, _BLOCK_KEYS, x_BSNK.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(x_BNSK, list(x_BNSK.shape), list(x_BNSK.stride()), block, layout)


@cache
def multiprocessors(device: torch.device) -> int:
    """Programs that run side by side."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def dense(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
    """Launch for checked arguments in bf16 with heads of 128.

    Raises: UnsupportedError for a Triton whose Gluon does not take the kernel.
    """
    batch_size, rows, heads, width = q_BRNK.shape
    keys, programs = k_BSNK.shape[1], multiprocessors(q_BRNK.device)
    shares = Shares.of(rows, keys, batch_size * heads, programs, _BLOCK_KEYS)
    slots = shares.slots(programs)
    o_BRNK = torch.empty_like(q_BRNK, memory_format=torch.contiguous_format)
    parts = q_BRNK.new_empty(slots, TILE_ROWS, width, dtype=torch.float32)
    stats = q_BRNK.new_empty(slots, TILE_ROWS, 2, dtype=torch.float32)
    pointers = (q_BRNK, o_BRNK, parts, stats, _descriptor(k_BSNK), _descriptor(v_BSNK))
    scale = math.log2(math.e) / math.sqrt(width)
    try:
        _dense_kernel[(programs,)](
            *pointers, rows, keys, heads, scale, *q_BRNK.stride()[:3], *o_BRNK.stride()[:3],
            *shares.counts, KEYS=_BLOCK_KEYS, WIDTH=width, BUFFERS=_BUFFERS, REGISTERS=_REGISTERS,
            LOADER_REGISTERS=_LOADER_REGISTERS, num_warps=4, maxnreg=_LEAST_REGISTERS,
        )  # fmt: skip
    except TritonError as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise UnsupportedError(f"dense: triton does not compile its kernel: {reason}") from error
    if slots:
        join(o_BRNK, parts, stats, shares, programs)
    return o_BRNK

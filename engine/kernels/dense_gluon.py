"""`dense` for Hopper in Gluon: two groups of warps compute, one warp loads for both.

A program has a tile of 128 queries of one head, 64 for each group. The loading warp goes through
the blocks of keys from the last, which may be short, to the first; each block of keys and each of
values is a copy by the tensor memory accelerator into the next of a ring of buffers, and it runs
ahead of the computing groups.

In each step a group issues the scores of the next block and, behind them, the sum of the values of
the block before, and while the second runs it makes weights of the scores, by a maximum that runs
along. Two things of the order are not left to chance. Sums are scaled down to the new maximum
behind the issue of the scores, not in front of it. And between the weights and the wait for the sum
stands the wait for the keys of the step to come: the assembler moves the wait for the sum up in
front of the weights unless it lies in another basic block, and then nothing runs meanwhile.

At 1950 queries over 13526 keys, 56 heads, 1.2 ms: 628 TFLOP/s on an H200, where cuDNN takes 1.43.
One program a tile is faster there than one a multiprocessor that takes an even share of all tiles,
1.33, although the last round is not full.
Owns the launch.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import torch
import triton
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

_GROUP_ROWS, _BLOCK_KEYS, _BUFFERS = 64, 128, 4
"""Queries of a group, keys of a block, blocks of keys or values in flight."""
_REGISTERS, _LOADER_REGISTERS, _LEAST_REGISTERS = 240, 24, 168
"""Of a thread that computes, of one that loads, of each when the program starts."""
_GROUP = gl.constexpr(_GROUP_ROWS)


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
    k_desc, v_desc, ready, empty, ring, batch, head, blocks, KEYS: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    for step in range(blocks):
        key = (blocks - 1 - step) * KEYS
        _load(k_desc, batch, head, key, 2 * step, ready, empty, ring, BUFFERS)
        _load(v_desc, batch, head, key, 2 * step + 1, ready, empty, ring, BUFFERS)


@gluon.jit
def _await(turn, ready, BUFFERS: gl.constexpr):
    mbarrier.wait(ready.index(turn % BUFFERS), turn // BUFFERS & 1)


@gluon.jit
def _release(turn, empty, BUFFERS: gl.constexpr):
    mbarrier.arrive(empty.index(turn % BUFFERS), count=1)


@gluon.jit
def _block(turn, ring, BUFFERS: gl.constexpr):
    return ring.index(turn % BUFFERS).reshape([ring.shape[3], ring.shape[4]])


@gluon.jit
def _consume(
    q_ptr, o_ptr, q_row, o_row, rows, keys, scale, ready, empty, ring, queries, begin, blocks,
    KEYS: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    s_kind: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_kind: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_kind: gl.constexpr = gl.DotOperandLayout(0, o_kind, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_kind)
    io: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = begin + gl.arange(0, _GROUP, gl.SliceLayout(1, io))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, io))[None, :]
    mask, wide_row = (row < rows)[:, None], row.to(gl.int64)[:, None]
    queries.store(gl.load(q_ptr + wide_row * q_row + column, mask=mask, other=0.0))
    fence_async_shared()
    zero = gl.zeros([_GROUP, KEYS], gl.float32, s_kind)
    _await(0, ready, BUFFERS)
    k = _block(0, ring, BUFFERS)
    s = warpgroup_mma(queries, k.permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    _release(0, empty, BUFFERS)
    key = (blocks - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, s_kind))
    s = gl.where((key < keys)[None, :], s, float("-inf"))
    top = gl.max(s, axis=1) * scale
    p = gl.exp2(s * scale - top[:, None])
    total = gl.sum(p, axis=1)
    p_in = gl.convert_layout(p.to(gl.bfloat16), p_kind)
    sum_ = gl.zeros([_GROUP, WIDTH], gl.float32, o_kind)
    fade = gl.full([_GROUP], 1.0, gl.float32, gl.SliceLayout(1, s_kind))
    if blocks > 1:
        _await(2, ready, BUFFERS)
    for step in range(1, blocks):
        turn = 2 * step
        k = _block(turn, ring, BUFFERS)
        later = warpgroup_mma(queries, k.permute([1, 0]), zero, use_acc=False, is_async=True)
        sum_ = sum_ * gl.convert_layout(fade, o_rows)[:, None]
        _await(turn - 1, ready, BUFFERS)
        acc = warpgroup_mma(p_in, _block(turn - 1, ring, BUFFERS), sum_, is_async=True)
        s = warpgroup_mma_wait(1, deps=(later,))
        _release(turn, empty, BUFFERS)
        new = gl.maximum(top, gl.max(s, axis=1) * scale)
        p = gl.exp2(s * scale - new[:, None])
        fade = gl.exp2(top - new)
        total = total * fade + gl.sum(p, axis=1)
        top = new
        p_next = gl.convert_layout(p.to(gl.bfloat16), p_kind)
        # Here, not where a step begins: see the module.
        if step + 1 < blocks:
            _await(turn + 2, ready, BUFFERS)
        sum_, p_in, p_next = warpgroup_mma_wait(0, deps=(acc, p_in, p_next))
        _release(turn - 1, empty, BUFFERS)
        p_in = p_next
    sum_ = sum_ * gl.convert_layout(fade, o_rows)[:, None]
    _await(2 * blocks - 1, ready, BUFFERS)
    acc = warpgroup_mma(p_in, _block(2 * blocks - 1, ring, BUFFERS), sum_, is_async=True)
    sum_, p_in = warpgroup_mma_wait(0, deps=(acc, p_in))
    _release(2 * blocks - 1, empty, BUFFERS)
    o = (sum_ / gl.convert_layout(total, o_rows)[:, None]).to(gl.bfloat16)
    gl.store(o_ptr + wide_row * o_row + column, gl.convert_layout(o, io), mask=mask)


# No code of their own for sizes that are multiples of 16: keys follow the length of a prompt.
@gluon.jit(do_not_specialize=["rows", "keys", "heads"])
def _dense_kernel(
    q_ptr, o_ptr, k_desc, v_desc, rows, keys, heads, scale,
    q_batch, q_row, q_head, o_batch, o_row, o_head,
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
    begin, plane = gl.program_id(0) * (2 * _GROUP), gl.program_id(1)
    batch, head = plane // heads, plane % heads
    q_ptr += batch.to(gl.int64) * q_batch + head.to(gl.int64) * q_head
    o_ptr += batch.to(gl.int64) * o_batch + head.to(gl.int64) * o_head
    blocks = (keys + KEYS - 1) // KEYS
    gl.warp_specialize(
        [
            (_consume, (q_ptr, o_ptr, q_row, o_row, rows, keys, scale, ready, empty, ring,
                        queries.index(0), begin, blocks, KEYS, WIDTH, BUFFERS)),
            (_consume, (q_ptr, o_ptr, q_row, o_row, rows, keys, scale, ready, empty, ring,
                        queries.index(1), begin + _GROUP, blocks, KEYS, WIDTH, BUFFERS)),
            (_produce, (k_desc, v_desc, ready, empty, ring, batch, head, blocks, KEYS, BUFFERS)),
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


def dense(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
    """Launch for checked arguments in bf16 with heads of 128.

    Raises: UnsupportedError for a Triton whose Gluon does not take the kernel.
    """
    batch_size, rows, heads, width = q_BRNK.shape
    o_BRNK = torch.empty_like(q_BRNK, memory_format=torch.contiguous_format)
    grid = (triton.cdiv(rows, 2 * _GROUP_ROWS), batch_size * heads)
    scale = math.log2(math.e) / math.sqrt(width)
    try:
        _dense_kernel[grid](
            q_BRNK, o_BRNK, _descriptor(k_BSNK), _descriptor(v_BSNK), rows, k_BSNK.shape[1], heads,
            scale, *q_BRNK.stride()[:3], *o_BRNK.stride()[:3], KEYS=_BLOCK_KEYS, WIDTH=width,
            BUFFERS=_BUFFERS, REGISTERS=_REGISTERS, LOADER_REGISTERS=_LOADER_REGISTERS,
            num_warps=4, maxnreg=_LEAST_REGISTERS,
        )  # fmt: skip
    except TritonError as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise UnsupportedError(f"dense: triton does not compile its kernel: {reason}") from error
    return o_BRNK

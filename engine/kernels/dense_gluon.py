"""`dense` for Hopper in Gluon: two groups of warps compute, one warp loads for both.

A program has a tile of 128 queries of one head, 64 for each group. The loading warp goes through
the blocks of keys from the last, which may be short, to the first; each block of keys and each of
values is a copy by the tensor memory accelerator into the next of a ring of buffers, and it runs
ahead of the computing groups. Queries are in registers, which leaves room for two more buffers.
Where no row of a tile is left for its second group, that computes nothing; it takes its turns and
hands each buffer on.

In each step a group issues the scores of the next block and, behind them, the sum of the values of
the block before, and while the second runs it makes weights of the scores. The groups take turns
at the issue, so that one has the tensor cores while the other makes weights. One thing of the
order is not left to chance: between the weights and the wait for the sum stands the wait for the
keys of the step to come. The assembler moves the wait for the sum up in front of the weights
unless it lies in another basic block, and then nothing runs meanwhile.

Weights of a row are relative to its maximum in the first block that is computed, and stay so: no
step looks for a larger one and scales sums down to it. fp32 and bf16 reach equally far, so this
costs no digits, as far as it fits: where scores to come lie some 2^100 of weight above, a sum may
overflow. Each group looks at its sums in the end, and if those of either went too far, the tile is
swept once more by a maximum that runs along, which fits always. Which way a tile goes follows from
its inputs alone. Four threads share a row; each sums its own weights, and they add up at the end.

On an H200, bf16, 56 heads: 1.146 ms for 1950 queries over 13526 keys (660 TFLOP/s) and 6.915 ms
for 5040 over 33302 (696 TFLOP/s). A maximum that runs along, no turns, queries in shared memory and
sums across threads in each step took 1.313 and 8.027 ms beside it; cuDNN, in an earlier run on such
a machine, 1.43 ms for the first.

There is one program a tile, although their last round is not full: one a multiprocessor, with an
even share of all tiles, took a tenth longer on an H200 at 1950 queries over 13526 keys.
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

_GROUP_ROWS, _BLOCK_KEYS, _BUFFERS = 64, 128, 6
"""Queries of a group, keys of a block, blocks of keys or values in flight."""
_REGISTERS, _LOADER_REGISTERS, _LEAST_REGISTERS = 240, 24, 168
"""Of a thread that computes, of one that loads, of each when the program starts."""
_GROUP = gl.constexpr(_GROUP_ROWS)
_MOST_WEIGHT, _MOST_SUM = gl.constexpr(2.0**100), gl.constexpr(3.0e38)
"""Above these a row's sum of weights, or of weighted values, is not trusted."""


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
def _feed(
    k_desc, v_desc, ready, empty, ring, batch, head, first, blocks, KEYS: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    """Load for a sweep that has `first` steps before it."""
    for step in range(blocks):
        key = (blocks - 1 - step) * KEYS
        turn = 2 * (first + step)
        _load(k_desc, batch, head, key, turn, ready, empty, ring, BUFFERS)
        _load(v_desc, batch, head, key, turn + 1, ready, empty, ring, BUFFERS)


@gluon.jit
def _either_went_too_far(judged, verdicts, WARPS: gl.constexpr):
    """Whether either group has said so; waits until both have judged their sums."""
    mbarrier.wait(judged, 0)
    word: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    either = verdicts.index(0).load(word) | verdicts.index(1).load(word)
    return gl.max(either, axis=0) > 0


@gluon.jit
def _produce(
    k_desc, v_desc, ready, empty, judged, verdicts, ring, batch, head, blocks, KEYS: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    _feed(k_desc, v_desc, ready, empty, ring, batch, head, 0, blocks, KEYS, BUFFERS)
    if _either_went_too_far(judged, verdicts, 1):
        _feed(k_desc, v_desc, ready, empty, ring, batch, head, blocks, blocks, KEYS, BUFFERS)


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
def _own_sums(p, KEYS: gl.constexpr):
    """Sums over what each thread has of a row: pairs of keys, one pair in four."""
    return gl.sum(gl.sum(gl.reshape(p, [_GROUP, KEYS // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def _sweep(
    q, keys, scale, ready, empty, issue, ring, first, blocks, WHO: gl.constexpr,
    KEYS: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr, RUNS: gl.constexpr,
):  # fmt: skip
    """Sums of weighted values and of weights over all keys; `first` steps went before.

    The maximum is that of the block computed first, or with RUNS that of all blocks so far.
    """
    s_kind: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_kind: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_kind: gl.constexpr = gl.DotOperandLayout(0, o_kind, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_kind)
    zero = gl.zeros([_GROUP, KEYS], gl.float32, s_kind)
    begin, end = 2 * first, 2 * (first + blocks)
    _await(begin, ready, BUFFERS)
    mbarrier.wait(issue.index(WHO), first & 1)
    k = _block(begin, ring, BUFFERS)
    s = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.arrive(issue.index(1 - WHO), count=1)
    s = warpgroup_mma_wait(0, deps=(s,))
    _release(begin, empty, BUFFERS)
    key = (blocks - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, s_kind))
    s = gl.where((key < keys)[None, :], s, float("-inf"))
    top = gl.max(s, axis=1) * scale
    p = gl.exp2(s * scale - top[:, None])
    total = _own_sums(p, KEYS)
    own_rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    p_in = gl.convert_layout(p.to(gl.bfloat16), p_kind)
    sum_ = gl.zeros([_GROUP, WIDTH], gl.float32, o_kind)
    fade = gl.full([_GROUP], 1.0, gl.float32, gl.SliceLayout(1, s_kind))
    if blocks > 1:
        _await(begin + 2, ready, BUFFERS)
    for step in range(first + 1, first + blocks):
        turn = 2 * step
        k = _block(turn, ring, BUFFERS)
        mbarrier.wait(issue.index(WHO), step & 1)
        later = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
        if RUNS:
            # Behind the issue of the scores, not in front of it.
            sum_ = sum_ * gl.convert_layout(fade, o_rows)[:, None]
        _await(turn - 1, ready, BUFFERS)
        acc = warpgroup_mma(p_in, _block(turn - 1, ring, BUFFERS), sum_, is_async=True)
        mbarrier.arrive(issue.index(1 - WHO), count=1)
        s = warpgroup_mma_wait(1, deps=(later,))
        _release(turn, empty, BUFFERS)
        if RUNS:
            new = gl.maximum(top, gl.max(s, axis=1) * scale)
            fade = gl.exp2(top - new)
            total *= gl.convert_layout(fade, own_rows)[:, None]
            top = new
        p = gl.exp2(s * scale - top[:, None])
        total += _own_sums(p, KEYS)
        p_next = gl.convert_layout(p.to(gl.bfloat16), p_kind)
        # Here, not where a step begins: see the module.
        if turn + 2 < end:
            _await(turn + 2, ready, BUFFERS)
        sum_, p_in, p_next = warpgroup_mma_wait(0, deps=(acc, p_in, p_next))
        _release(turn - 1, empty, BUFFERS)
        p_in = p_next
    if RUNS:
        sum_ = sum_ * gl.convert_layout(fade, o_rows)[:, None]
    _await(end - 1, ready, BUFFERS)
    acc = warpgroup_mma(p_in, _block(end - 1, ring, BUFFERS), sum_, is_async=True)
    sum_, p_in = warpgroup_mma_wait(0, deps=(acc, p_in))
    _release(end - 1, empty, BUFFERS)
    return sum_, gl.convert_layout(gl.sum(total, axis=1), o_rows)


@gluon.jit
def _judge(went_too_far, judged, verdicts, WHO: gl.constexpr):
    """Say of a group's sums whether they went too far; whether those of either did."""
    word: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    verdicts.index(WHO).store(gl.full([1], went_too_far, gl.int32, word))
    mbarrier.arrive(judged, count=1)
    return _either_went_too_far(judged, verdicts, 4)


@gluon.jit
def _consume(
    q_ptr, o_ptr, q_row, o_row, rows, keys, scale, ready, empty, issue, judged, verdicts, ring,
    begin, blocks, WHO: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    s_kind: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    io: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = begin + gl.arange(0, _GROUP, gl.SliceLayout(1, io))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, io))[None, :]
    mask, wide_row = (row < rows)[:, None], row.to(gl.int64)[:, None]
    q_io = gl.load(q_ptr + wide_row * q_row + column, mask=mask, other=0.0)
    q = gl.convert_layout(q_io, gl.DotOperandLayout(0, s_kind, 2))
    sum_, total = _sweep(
        q, keys, scale, ready, empty, issue, ring, 0, blocks, WHO, KEYS, WIDTH, BUFFERS, False
    )
    # What is not a number compares as false.
    is_sound = (gl.abs(sum_) <= _MOST_SUM) & (total <= _MOST_WEIGHT)[:, None]
    went_too_far = gl.max(gl.max(gl.where(is_sound, 0, 1), axis=1), axis=0)
    if _judge(went_too_far, judged, verdicts, WHO):
        sum_, total = _sweep(
            q, keys, scale, ready, empty, issue, ring, blocks, blocks, WHO, KEYS, WIDTH, BUFFERS,
            True,
        )  # fmt: skip
    o = (sum_ / total[:, None]).to(gl.bfloat16)
    gl.store(o_ptr + wide_row * o_row + column, gl.convert_layout(o, io), mask=mask)


@gluon.jit
def _pass_on(ready, empty, issue, first, blocks, WHO: gl.constexpr, BUFFERS: gl.constexpr):
    """Go through a sweep without rows."""
    for step in range(first, first + blocks):
        mbarrier.wait(issue.index(WHO), step & 1)
        mbarrier.arrive(issue.index(1 - WHO), count=1)
        for turn in range(2 * step, 2 * step + 2):
            _await(turn, ready, BUFFERS)
            _release(turn, empty, BUFFERS)


@gluon.jit
def _consume_if_any(
    q_ptr, o_ptr, q_row, o_row, rows, keys, scale, ready, empty, issue, judged, verdicts, ring,
    begin, blocks, WHO: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    if begin < rows:
        _consume(
            q_ptr, o_ptr, q_row, o_row, rows, keys, scale, ready, empty, issue, judged, verdicts,
            ring, begin, blocks, WHO, KEYS, WIDTH, BUFFERS,
        )  # fmt: skip
    else:
        _pass_on(ready, empty, issue, 0, blocks, WHO, BUFFERS)
        if _judge(0, judged, verdicts, WHO):
            _pass_on(ready, empty, issue, blocks, blocks, WHO, BUFFERS)


# No code of their own for sizes that are multiples of 16: keys follow the length of a prompt.
@gluon.jit(do_not_specialize=["rows", "keys", "heads"])
def _dense_kernel(
    q_ptr, o_ptr, k_desc, v_desc, rows, keys, heads, scale,
    q_batch, q_row, q_head, o_batch, o_row, o_head,
    KEYS: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr, REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ring = gl.allocate_shared_memory(k_desc.dtype, [BUFFERS, 1, 1, KEYS, WIDTH], k_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    issue = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    judged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    verdicts = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=2)
    for group in gl.static_range(2):
        mbarrier.init(issue.index(group), count=1)
    mbarrier.init(judged, count=2)
    fence_async_shared()
    # The first group begins.
    mbarrier.arrive(issue.index(0), count=1)
    begin, plane = gl.program_id(0) * (2 * _GROUP), gl.program_id(1)
    batch, head = plane // heads, plane % heads
    q_ptr += batch.to(gl.int64) * q_batch + head.to(gl.int64) * q_head
    o_ptr += batch.to(gl.int64) * o_batch + head.to(gl.int64) * o_head
    blocks = (keys + KEYS - 1) // KEYS
    gl.warp_specialize(
        [
            (_consume, (q_ptr, o_ptr, q_row, o_row, rows, keys, scale, ready, empty, issue, judged,
                        verdicts, ring, begin, blocks, 0, KEYS, WIDTH, BUFFERS)),
            (_consume_if_any, (q_ptr, o_ptr, q_row, o_row, rows, keys, scale, ready, empty, issue,
                               judged, verdicts, ring, begin + _GROUP, blocks, 1, KEYS, WIDTH,
                               BUFFERS)),
            (_produce, (k_desc, v_desc, ready, empty, judged, verdicts, ring, batch, head, blocks,
                        KEYS, BUFFERS)),
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

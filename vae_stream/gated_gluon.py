"""`row_ops.gated` for Hopper in Gluon: a product whose tiles end in bias and activation.

A program a multiprocessor goes through tiles of 128 rows by 128 columns of the gate and the same
columns of the value; two groups of warps have 64 rows each, one warp loads for both, ahead of them,
through a ring of buffers. A group waits for the multiplication before the last one alone, and
writes a tile while the next is summed. Tiles of 32 rows of tiles are taken together, so that they
find their weights in the cache. A ragged last row of tiles comes at the end, where a group without
rows is let go on at once. The order of a sum does not depend on how many rows there are.

The product alone keeps up with cuBLAS (793 us, 796 at 8069 rows of 2048 by 16384, H200); activation
and bias, 105 us apart, take 40 in it.
Owns the launch.
Source: the persistent, warp-specialised products of CUTLASS (github.com/NVIDIA/cutlass).
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

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

_ROWS, _COLUMNS, _DEPTH, _BUFFERS = 128, 128, 64, 4
"""Of a tile; summed at a time; tiles in flight."""
_TOGETHER = 32
"""Rows of tiles: 833 us at 8069 rows, 838 with 16, 842 with 8."""
_REGISTERS, _LOADER_REGISTERS, _LEAST_REGISTERS = 240, 24, 168
"""Of a thread that computes, of one that loads, of each when the program starts."""
_TILE_ROWS, _GROUP_ROWS = gl.constexpr(_ROWS), gl.constexpr(_ROWS // 2)
_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _tile_at(index, rows, columns, TOGETHER: gl.constexpr):
    """Row and column of a tile."""
    whole = rows // _TILE_ROWS
    bundle = index // (TOGETHER * columns)
    first = bundle * TOGETHER
    size = gl.maximum(gl.minimum(whole - first, TOGETHER), 1)
    inside = index - bundle * TOGETHER * columns
    is_ragged = index >= whole * columns
    row = gl.where(is_ragged, whole, first + inside % size)
    column = gl.where(is_ragged, index - whole * columns, inside // size)
    return row, column


@gluon.jit
def _load(
    n_desc, w_desc, ready, empty, n_ring, w_ring, rows, columns, value, STEPS: gl.constexpr,
    TOGETHER: gl.constexpr, BUFFERS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    turn = 0
    tiles = gl.cdiv(rows, _TILE_ROWS) * columns
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = _tile_at(index, rows, columns, TOGETHER)
        for step in range(STEPS):
            slot = turn % BUFFERS
            is_ready, w, at = ready.index(slot), w_ring.index(slot), step * DEPTH
            mbarrier.wait(empty.index(slot), (turn // BUFFERS & 1) ^ 1)
            mbarrier.expect(is_ready, 2 * DEPTH * (_TILE_ROWS + 2 * COLUMNS))
            tma.async_copy_global_to_shared(
                n_desc, [row * _TILE_ROWS, at], is_ready, n_ring.index(slot)
            )
            gate = column * COLUMNS
            tma.async_copy_global_to_shared(w_desc, [gate, at], is_ready, w.slice(0, COLUMNS, 0))
            tma.async_copy_global_to_shared(
                w_desc, [value + gate, at], is_ready, w.slice(COLUMNS, COLUMNS, 0)
            )
            turn += 1


@gluon.jit
def _multiply(
    out_desc, bias_ptr, ready, empty, n_ring, w_ring, out_tile, rows, columns, value,
    GROUP: gl.constexpr, STEPS: gl.constexpr, TOGETHER: gl.constexpr, BUFFERS: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    turn = 0
    tiles = gl.cdiv(rows, _TILE_ROWS) * columns
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = _tile_at(index, rows, columns, TOGETHER)
        first = row * _TILE_ROWS + GROUP * _GROUP_ROWS
        if first < rows:
            acc = gl.zeros([_GROUP_ROWS, 2 * COLUMNS], gl.float32, kind)
            for step in range(STEPS):
                slot = turn % BUFFERS
                mbarrier.wait(ready.index(slot), turn // BUFFERS & 1)
                n = n_ring.index(slot).slice(GROUP * _GROUP_ROWS, _GROUP_ROWS, 0)
                w = w_ring.index(slot).permute([1, 0])
                acc = warpgroup_mma(n, w, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                before = empty.index((turn + BUFFERS - 1) % BUFFERS)
                mbarrier.arrive(before, count=1, pred=step > 0)
                turn += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((turn + BUFFERS - 1) % BUFFERS), count=1)
            tma.store_wait(0)
            halves = gl.permute(gl.reshape(acc, [_GROUP_ROWS, 2, COLUMNS]), [0, 2, 1])
            g, v = gl.split(halves)
            at = column * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, g.type.layout))
            g += gl.load(bias_ptr + at).to(gl.float32)[None, :]
            v += gl.load(bias_ptr + value + at).to(gl.float32)[None, :]
            made = v * g / (1.0 + gl.exp2(g * -_LOG2_E))
            out_tile.store(made.to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [first, column * COLUMNS], out_tile)
        else:
            for _ in range(STEPS):
                mbarrier.wait(ready.index(turn % BUFFERS), turn // BUFFERS & 1)
                mbarrier.arrive(empty.index(turn % BUFFERS), count=1)
                turn += 1
    tma.store_wait(0)


# No code of their own for rows that are a multiple of 16.
@gluon.jit(do_not_specialize=["rows", "columns"])
def _gated_kernel(
    n_desc, w_desc, out_desc, bias_ptr, rows, columns, value, STEPS: gl.constexpr,
    TOGETHER: gl.constexpr, BUFFERS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = gl.bfloat16
    n_ring = gl.allocate_shared_memory(kind, [BUFFERS, _TILE_ROWS, DEPTH], n_desc.layout)
    w_ring = gl.allocate_shared_memory(kind, [BUFFERS, 2 * COLUMNS, DEPTH], w_desc.layout)
    out_tiles = gl.allocate_shared_memory(kind, [2, _GROUP_ROWS, COLUMNS], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (out_desc, bias_ptr, ready, empty, n_ring, w_ring, out_tiles.index(0),
                         rows, columns, value, 0, STEPS, TOGETHER, BUFFERS, COLUMNS)),
            (_multiply, (out_desc, bias_ptr, ready, empty, n_ring, w_ring, out_tiles.index(1),
                         rows, columns, value, 1, STEPS, TOGETHER, BUFFERS, COLUMNS)),
            (_load, (n_desc, w_desc, ready, empty, n_ring, w_ring, rows, columns, value, STEPS,
                     TOGETHER, BUFFERS, COLUMNS, DEPTH)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A matrix as it is copied; behind its last row zeros are read, and nothing is written."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def gated(n_RD: Tensor, weight_GD: Tensor, bias_G: Tensor, *, programs: int) -> Tensor:
    """Launch for checked arguments.

    Args:
        n_RD: see `row_ops.gated`.
        weight_GD: as above.
        bias_G: as above.
        programs: as many as the device has multiprocessors.
    """
    (rows, width), value = n_RD.shape, weight_GD.shape[0] // 2
    out_RU = n_RD.new_empty(rows, value)
    _gated_kernel[(programs,)](
        _descriptor(n_RD, [_ROWS, _DEPTH]), _descriptor(weight_GD, [_COLUMNS, _DEPTH]),
        _descriptor(out_RU, [_ROWS // 2, _COLUMNS]), bias_G, rows, value // _COLUMNS, value,
        STEPS=width // _DEPTH, TOGETHER=_TOGETHER, BUFFERS=_BUFFERS, COLUMNS=_COLUMNS,
        DEPTH=_DEPTH, REGISTERS=_REGISTERS, LOADER_REGISTERS=_LOADER_REGISTERS, num_warps=4,
        maxnreg=_LEAST_REGISTERS,
    )  # fmt: skip
    return out_RU

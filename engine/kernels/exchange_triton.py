"""Triton kernels that pack and merge heads around an exchange; formulas in `exchange`.

Owns the launches. One program takes 1,024 elements of the output and writes them in order; reads
are runs of K elements. Offsets are int64, because a row times its stride may pass 2**31.
Shape suffixes as in `exchange`.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.exchange import PARTS_LIMIT, packed_shape

_BLOCK = 1024


def pack(parts_BRNK: Sequence[Tensor], world_size: int) -> Tensor:
    """Return [W, R, B, n, P*K] of parts [B, R, N, K] that share shape and dtype.

    Raises: ValueError unless the last axis of every part is dense.
    """
    if any(part_BRNK.stride(3) != 1 for part_BRNK in parts_BRNK):
        raise ValueError("a part is not dense in its last axis; allowed: stride 1")
    first_BRNK = parts_BRNK[0]
    batch_size, rows, heads, width = first_BRNK.shape
    packed = first_BRNK.new_empty(packed_shape(parts_BRNK, world_size))
    padded = [*parts_BRNK, *[first_BRNK] * (PARTS_LIMIT - len(parts_BRNK))]
    strides = [part_BRNK.stride(axis) for part_BRNK in padded for axis in range(3)]
    _pack_kernel[(triton.cdiv(packed.numel(), _BLOCK),)](
        *padded, packed, packed.numel(), rows, batch_size, heads // world_size, *strides,
        WIDTH=width, PARTS=len(parts_BRNK), BLOCK=_BLOCK,
    )  # fmt: skip
    return packed


def merge(received_WRBnK: Tensor) -> Tensor:
    """Return [B, R, W*n, K].

    Raises: ValueError unless the input is dense.
    """
    if not received_WRBnK.is_contiguous():
        raise ValueError("received heads are not dense; allowed: a contiguous tensor")
    world_size, rows, batch_size, heads, width = received_WRBnK.shape
    merged = received_WRBnK.new_empty((batch_size, rows, world_size * heads, width))
    _merge_kernel[(triton.cdiv(merged.numel(), _BLOCK),)](
        received_WRBnK, merged, merged.numel(), rows, batch_size, heads, world_size,
        WIDTH=width, BLOCK=_BLOCK,
    )  # fmt: skip
    return merged


@triton.jit
def _pack_kernel(
    first, second, third, packed, count, rows, batch_size, heads,
    first_b, first_r, first_n, second_b, second_r, second_n, third_b, third_r, third_n,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    channel = index % WIDTH
    part = index // WIDTH % PARTS
    place = index // (WIDTH * PARTS)
    local_head = place % heads
    place = place // heads
    batch = place % batch_size
    place = place // batch_size
    row = place % rows
    head = place // rows * heads + local_head
    value = tl.load(
        first + batch * first_b + row * first_r + head * first_n + channel,
        mask=inside & (part == 0),
    )
    if PARTS > 1:
        other = tl.load(
            second + batch * second_b + row * second_r + head * second_n + channel,
            mask=inside & (part == 1),
        )
        value = tl.where(part == 1, other, value)
    if PARTS > 2:
        other = tl.load(
            third + batch * third_b + row * third_r + head * third_n + channel,
            mask=inside & (part == 2),
        )
        value = tl.where(part == 2, other, value)
    tl.store(packed + index, value, mask=inside)


@triton.jit
def _merge_kernel(
    received, merged, count, rows, batch_size, heads, world_size,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    channel = index % WIDTH
    head = index // WIDTH % (heads * world_size)
    place = index // (WIDTH * heads * world_size)
    row = place % rows
    batch = place // rows
    rank, local_head = head // heads, head % heads
    source = (((rank * rows + row) * batch_size + batch) * heads + local_head) * WIDTH + channel
    value = tl.load(received + source, mask=inside)
    tl.store(merged + index, value, mask=inside)

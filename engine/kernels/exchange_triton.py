"""Triton kernels that pack and merge heads around an exchange; formulas in `exchange`.

Owns the launches. One program takes up to 1,024 elements of one row of the output and writes them
in order, 16 bytes a thread; reads are runs of K elements. What a row is, is found once a program:
divisions by numbers that are not constants would take longer than the copy if each element did
them. Offsets are int64, because a row times its stride may pass 2**31.
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
    tiles = triton.cdiv(heads // world_size * width * len(parts_BRNK), _BLOCK)
    _pack_kernel[(world_size * rows * batch_size, tiles)](
        *padded, packed, rows, batch_size, *strides,
        HEADS=heads // world_size, WIDTH=width, PARTS=len(parts_BRNK), BLOCK=_BLOCK,
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
    tiles = triton.cdiv(world_size * heads * width, _BLOCK)
    _merge_kernel[(batch_size * rows, tiles)](
        received_WRBnK, merged, rows, batch_size,
        RANKS=world_size, HEADS=heads, WIDTH=width, BLOCK=_BLOCK,
    )  # fmt: skip
    return merged


@triton.jit
def _pack_kernel(
    first, second, third, packed, rows, batch_size,
    first_b, first_r, first_n, second_b, second_r, second_n, third_b, third_r, third_n,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < HEADS * PARTS * WIDTH
    batch = place % batch_size
    row = place // batch_size % rows
    rank = place // batch_size // rows
    channel = index % WIDTH
    part = index // WIDTH % PARTS
    head = rank * HEADS + index // (WIDTH * PARTS)
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
    tl.store(packed + place * (HEADS * PARTS * WIDTH) + index, value, mask=inside)


@triton.jit
def _merge_kernel(
    received, merged, rows, batch_size,
    RANKS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < RANKS * HEADS * WIDTH
    batch = place // rows
    row = place % rows
    rank = index // (HEADS * WIDTH)
    source = (rank * rows + row) * batch_size + batch
    value = tl.load(received + source * (HEADS * WIDTH) + index % (HEADS * WIDTH), mask=inside)
    tl.store(merged + place * (RANKS * HEADS * WIDTH) + index, value, mask=inside)

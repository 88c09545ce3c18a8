"""Packing of rows and heads around an exchange between ranks: two copies, each in one pass.

`pack_heads`   [B, R, N, K] each of 1 to 3 parts -> [world, R, B, N / world, parts * K]
`merge_heads`  [world, R, B, n, K]               -> [B, R, world * n, K]

The first puts what one rank gets in one piece, all parts of a head side by side; after the exchange
the parts are strided views. The second joins the heads that came back. Both only move bits, so the
kernels equal the permutes (`*_reference`) that they replace bit for bit. The naive form (stack,
permute, contiguous) copies twice.
Owns the operators; a CPU runs the permutes, CUDA the kernels of `exchange_triton`.
Shape suffixes: W rank, B batch, R rows, N heads, n heads of one rank, K head width, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PARTS_LIMIT = 3


def pack_heads_reference(parts_BRNK: Sequence[Tensor], world_size: int) -> Tensor:
    """Return [W, R, B, n, P*K] by permutes."""
    joined_BRNC = torch.cat(list(parts_BRNK), dim=-1)
    split_BRWnC = joined_BRNC.unflatten(2, (world_size, -1))
    return split_BRWnC.permute(2, 1, 0, 3, 4).contiguous()


def merge_heads_reference(received_WRBnK: Tensor) -> Tensor:
    """Return [B, R, W*n, K] by permutes."""
    moved_BRWnK = received_WRBnK.permute(2, 1, 0, 3, 4)
    return moved_BRWnK.clone(memory_format=torch.contiguous_format).flatten(2, 3)


@torch.library.custom_op("worldstream::pack_heads", mutates_args=())
def pack_heads(parts_BRNK: Sequence[Tensor], world_size: int) -> Tensor:
    """Return [W, R, B, n, P*K] of 1 to 3 parts [B, R, N, K] of one shape and dtype.

    Raises: ValueError for parts that differ, whose heads do not divide among the ranks, or, on
    CUDA, whose last axis is not dense.
    """
    if not 1 <= len(parts_BRNK) <= PARTS_LIMIT:
        raise ValueError(f"parts are {len(parts_BRNK)}; allowed: 1 to {PARTS_LIMIT}")
    first_BRNK = parts_BRNK[0]
    for part_BRNK in parts_BRNK:
        if part_BRNK.shape != first_BRNK.shape or part_BRNK.dtype != first_BRNK.dtype:
            raise ValueError(
                f"a part is {tuple(part_BRNK.shape)} {part_BRNK.dtype}; allowed: that of the "
                f"first, {tuple(first_BRNK.shape)} {first_BRNK.dtype}"
            )
    if first_BRNK.shape[2] % world_size:
        raise ValueError(f"heads are {first_BRNK.shape[2]}; allowed: multiples of {world_size}")
    if not first_BRNK.is_cuda:
        return pack_heads_reference(parts_BRNK, world_size)
    from engine.kernels.exchange_triton import pack

    return pack(parts_BRNK, world_size)


@pack_heads.register_fake
def _(parts_BRNK: Sequence[Tensor], world_size: int) -> Tensor:
    return parts_BRNK[0].new_empty(packed_shape(parts_BRNK, world_size))


@torch.library.custom_op("worldstream::merge_heads", mutates_args=())
def merge_heads(received_WRBnK: Tensor) -> Tensor:
    """Return [B, R, W*n, K] of [W, R, B, n, K].

    Raises: ValueError on CUDA unless the input is dense.
    """
    if not received_WRBnK.is_cuda:
        return merge_heads_reference(received_WRBnK)
    from engine.kernels.exchange_triton import merge

    return merge(received_WRBnK)


@merge_heads.register_fake
def _(received_WRBnK: Tensor) -> Tensor:
    world_size, rows, batch_size, heads, width = received_WRBnK.shape
    return received_WRBnK.new_empty((batch_size, rows, world_size * heads, width))


def packed_shape(parts_BRNK: Sequence[Tensor], world_size: int) -> tuple[int, ...]:
    """Shape of what `pack_heads` makes."""
    batch_size, rows, heads, width = parts_BRNK[0].shape
    return (world_size, rows, batch_size, heads // world_size, len(parts_BRNK) * width)

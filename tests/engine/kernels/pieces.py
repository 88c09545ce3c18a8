"""Does the pieces of `dense` in plain fp32 arithmetic, in the shares that its kernels take.

Owns `joined`, for a process in which kernels are interpreted.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dense_triton import GROUP_ROWS, NO_SCORE, TILE_ROWS, Shares, join, piece, share

BLOCK_KEYS, WIDTH = 16, 16
_FIELDS = 6


@triton.jit
def _list_kernel(
    list_ptr, count_ptr, units, blocks, pairs, shared, rounds, full_tiles, ROOM: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    begin, end, pieces = share(program, programs, units, blocks, pairs, shared)
    tl.store(count_ptr + 2 * program, rounds + pieces)
    tl.store(count_ptr + 2 * program + 1, end - begin)
    for index in range(rounds + pieces):
        plane, row, low, high, is_short, slot = piece(
            index, program, programs, begin, end, blocks, pairs, shared, rounds, full_tiles
        )
        at = list_ptr + (program * ROOM + index) * FIELDS
        tl.store(at, plane)
        tl.store(at + 1, row)
        tl.store(at + 2, low)
        tl.store(at + 3, high)
        tl.store(at + 4, is_short)
        tl.store(at + 5, slot)


def joined(rows: int, keys: int, planes: int, programs: int) -> dict[str, Any]:
    """Error of the joined output, work that is missing or done twice, units of each program."""
    shares = Shares.of(rows, keys, planes, programs, BLOCK_KEYS)
    room = shares.rounds + shares.shared_tiles + 1
    listed = torch.zeros(programs, room, _FIELDS, dtype=torch.int32)
    counts = torch.zeros(programs, 2, dtype=torch.int32)
    _list_kernel[(programs,)](listed, counts, *shares.counts, ROOM=room, FIELDS=_FIELDS)

    q, k, v = (torch.randn(planes, n, WIDTH) for n in (rows, keys, keys))
    scores = q @ k.mT
    exact = torch.softmax(scores * torch.tensor(2.0).log(), dim=-1) @ v
    o_BRNK = torch.full((1, rows, planes, WIDTH), float("nan"))
    parts = torch.full((shares.slots(programs), TILE_ROWS, WIDTH), float("nan"))
    stats = torch.full((shares.slots(programs), TILE_ROWS, 2), float("nan"))
    done: Counter[tuple[int, int, int]] = Counter()
    for program in range(programs):
        for each in listed[program, : counts[program, 0]].tolist():
            plane, first_row, low, high, is_short, slot = each
            for group in range(2):
                begin = first_row if is_short else first_row + group * GROUP_ROWS
                end = min(begin + GROUP_ROWS, rows)
                blocks = range(low, high)[(1 - group if is_short else 0) :: 2 if is_short else 1]
                if begin >= end:
                    continue
                done.update((plane, begin, block) for block in blocks if block < shares.blocks)
                made = _part(scores[plane, begin:end], v[plane], blocks)
                if slot < 0:
                    o_BRNK[0, begin:end, plane] = made[0] / made[2][:, None]
                else:
                    at = slice(group * GROUP_ROWS, group * GROUP_ROWS + end - begin)
                    parts[slot, at] = made[0]
                    stats[slot, at] = torch.stack(made[1:], dim=-1)
    if shares.shared_tiles:
        join(o_BRNK, parts, stats, shares, programs)
    work = {
        (plane, row, block)
        for plane in range(planes)
        for row in range(0, rows, GROUP_ROWS)
        for block in range(shares.blocks)
    }
    return {
        "missing": sorted(work - done.keys()),
        "twice": [key for key, count in done.items() if count > 1 or key not in work],
        "units": counts[:, 1].tolist(),
        "error": (o_BRNK[0].transpose(0, 1) - exact).abs().max().nan_to_num(float("inf")).item(),
    }


def _part(scores: Tensor, v: Tensor, blocks: range) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the values, reference value and total of weights, over some blocks."""
    columns = [
        key for block in blocks for key in range(block * BLOCK_KEYS, (block + 1) * BLOCK_KEYS)
    ]
    columns = [key for key in columns if key < len(v)]
    if not columns:
        count = len(scores)
        return v.new_zeros(count, WIDTH), v.new_full((count,), NO_SCORE.value), v.new_zeros(count)
    top = scores[:, columns].amax(-1)
    weights = torch.exp2(scores[:, columns] - top[:, None])
    return weights @ v[columns], top, weights.sum(-1)

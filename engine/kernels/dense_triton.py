"""Shares of the programs of `dense`, and the kernel that joins what several of them did.

The work is tiles: 128 queries of one plane (a head of a sample) over all blocks of keys. One
program runs on each multiprocessor from the beginning to the end. It does `rounds` tiles alone; the
tiles that are then left, fewer than programs, are cut into units, and each program takes as many of
them as any other, so that none waits while a last few tiles are done: 6.6 rounds instead of 7 for
1950 queries of 56 heads on 132 multiprocessors.

    rounds * programs whole tiles | shared: full tiles | short tiles, one a plane

A short tile is the end of a plane where it has 64 queries or fewer: half of a tile would stand
empty, so the two groups of warps of a program take the same queries and every other block each. A
unit is a block of a full tile or a pair of blocks of a short one. What a program does of a shared
tile is a piece. It goes into a slot of its own, `program + tile`: along the programs one of the two
grows with each piece.

Owns the shares and the launch of the joining kernel. Functions here take scalars only, so that
kernels in Triton and in Gluon can call them.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

GROUP_ROWS, TILE_ROWS = 64, 128
"""Queries of a group of warps, of a program."""
_TILE, _GROUP = tl.constexpr(TILE_ROWS), tl.constexpr(GROUP_ROWS)
_ROWS = 16
"""Queries of a joining program."""
NO_SCORE = tl.constexpr(-3.0e38)
"""Below every score; finite, because a difference of two infinities is none."""
COUNTS = ["units", "blocks", "pairs", "shared", "rounds", "full_tiles"]
"""Arguments of a kernel that tell it the shares. They follow the number of keys, which follows the
length of a prompt: a kernel that were compiled for their divisors would be compiled again and
again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """How the work is cut."""

    units: int
    """Of all shared tiles."""
    blocks: int
    """Of keys."""
    pairs: int
    """Of blocks; the last may have one."""
    shared: int
    """Full tiles that are shared."""
    rounds: int
    full_tiles: int
    """Of a plane."""
    short_tiles: int
    """Of all planes."""

    @classmethod
    def of(cls, rows: int, keys: int, planes: int, programs: int, block_keys: int) -> Shares:
        """Cut the work of some programs."""
        blocks = -(-keys // block_keys)
        pairs = -(-blocks // 2)
        has_short = 0 < rows % TILE_ROWS <= GROUP_ROWS
        full_tiles = rows // TILE_ROWS if has_short else -(-rows // TILE_ROWS)
        short_tiles = planes if has_short else 0
        rounds, shared = divmod(full_tiles * planes, programs)
        return cls(
            units=shared * blocks + short_tiles * pairs, blocks=blocks, pairs=pairs, shared=shared,
            rounds=rounds, full_tiles=full_tiles, short_tiles=short_tiles,
        )  # fmt: skip

    @property
    def shared_tiles(self) -> int:
        """Full and short."""
        return self.shared + self.short_tiles

    @property
    def counts(self) -> tuple[int, ...]:
        """Arguments of a kernel, `COUNTS`."""
        return self.units, self.blocks, self.pairs, self.shared, self.rounds, self.full_tiles

    def slots(self, programs: int) -> int:
        """Pieces for which there has to be room."""
        return programs + self.shared_tiles if self.units else 0


@triton.jit
def _tile_of(unit, blocks, pairs, shared):
    """Shared tile of a unit."""
    beyond = unit - shared * blocks
    return unit // blocks if beyond < 0 else shared + beyond // pairs


@triton.jit
def share(program, programs, units, blocks, pairs, shared):
    """First unit of a program, the one after its last, and the number of its pieces."""
    begin = program * units // programs
    end = (program + 1) * units // programs
    first_tile = _tile_of(begin, blocks, pairs, shared)
    last_tile = _tile_of(end - 1, blocks, pairs, shared)
    return begin, end, last_tile - first_tile + 1 if end > begin else 0


@triton.jit
def piece(index, program, programs, begin, end, blocks, pairs, shared, rounds, full_tiles):
    """Tile or piece of a tile that a program does as its number ``index``.

    Returns: plane, first query, first block, the one after the last block, whether the groups take
    the same queries and every other block, and the slot (-1: the output is final).
    """
    is_alone = index < rounds
    tile = _tile_of(begin, blocks, pairs, shared) + index - rounds
    is_short = tile >= shared and not is_alone
    short = tile - shared
    size = pairs if is_short else blocks
    first = shared * blocks + short * pairs if is_short else tile * blocks
    low = begin - first if begin > first else 0
    high = end - first if end - first < size else size
    low = 0 if is_alone else low
    high = size if is_alone else high
    slot = program + tile if is_short or high - low < size else -1
    place = index * programs + program if is_alone else rounds * programs + tile
    plane = short if is_short else place // full_tiles
    row = (full_tiles if is_short else place % full_tiles) * _TILE
    low = 2 * low if is_short else low
    high = 2 * high if is_short else high
    return plane, row, low, high, is_short, slot


@triton.jit(do_not_specialize=["rows", "heads", "programs", *COUNTS])
def _join_kernel(
    part_ptr, stat_ptr, o_ptr, rows, heads, o_batch, o_row, o_head, programs,
    units, blocks, pairs, shared, rounds, full_tiles, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    is_short = tile >= shared
    size = pairs if is_short else blocks
    first = shared * blocks + (tile - shared) * pairs if is_short else tile * blocks
    place = rounds * programs + tile
    tiles = tl.maximum(full_tiles, 1)
    plane = tile - shared if is_short else place // tiles
    first_row = (full_tiles if is_short else place % tiles) * _TILE
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    is_there = (row < (_GROUP if is_short else _TILE)) & (first_row + row < rows)
    first_program = ((first + 1) * programs - 1) // units
    last_program = ((first + size) * programs - 1) // units
    if is_short | (first_program < last_program):
        top = tl.full((ROWS,), NO_SCORE, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sum_ = tl.zeros((ROWS, WIDTH), tl.float32)
        for program in range(first_program, last_program + 1):
            # Of fewer units than programs, some programs have none.
            if program * units // programs < (program + 1) * units // programs:
                for half in range(2 if is_short else 1):
                    at = (program + tile).to(tl.int64) * _TILE + half * _GROUP + row
                    part_at = part_ptr + at[:, None] * WIDTH + column[None, :]
                    part_top = tl.load(stat_ptr + 2 * at, mask=is_there, other=NO_SCORE)
                    part_total = tl.load(stat_ptr + 2 * at + 1, mask=is_there, other=0.0)
                    part = tl.load(part_at, mask=is_there[:, None], other=0.0)
                    new = tl.maximum(top, part_top)
                    fade, weight = tl.exp2(top - new), tl.exp2(part_top - new)
                    total = total * fade + part_total * weight
                    sum_ = sum_ * fade[:, None] + part * weight[:, None]
                    top = new
        plane_ptr = o_ptr + (plane // heads).to(tl.int64) * o_batch + (plane % heads) * o_head
        o_at = plane_ptr + (first_row + row).to(tl.int64)[:, None] * o_row + column[None, :]
        o = sum_ / tl.where(is_there, total, 1.0)[:, None]
        tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=is_there[:, None])


def join(o_BRNK: Tensor, parts: Tensor, stats: Tensor, shares: Shares, programs: int) -> None:
    """Write the output of the shared tiles.

    Args:
        o_BRNK: dense.
        parts: fp32 sums of the slots, [slots, 128, K].
        stats: fp32 reference value and total weight of each query of them, [slots, 128, 2].
        shares: of the programs.
        programs: how many there were.
    """
    _, rows, heads, width = o_BRNK.shape
    _join_kernel[(shares.shared_tiles, TILE_ROWS // _ROWS)](
        parts, stats, o_BRNK, rows, heads, *o_BRNK.stride()[:3], programs, *shares.counts,
        WIDTH=width, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip

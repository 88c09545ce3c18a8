"""Tiles of a picture: where they lie, and how they become one picture again.

Owns the layout rule and the two ways of stitching. The released one is part of the released
pictures: tile by tile, row by row, the overlap fades from the tile before as it was decoded; at
corners, and where three tiles cover a place, the oldest counts for nothing. `OVERLAP_ADD` weighs
all tiles that cover a place instead, and is another picture.
Invariant: all tiles of a plan have one size, so that they can form a batch.
Source: MiniMax-H3 video autoencoder. Shape suffixes: H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from vae_stream.geometry import SPATIAL_RATIO

_ROW_AXIS, _COLUMN_AXIS = -2, -1


class Stitch(StrEnum):
    """How tiles become a picture."""

    RELEASED = "released"
    OVERLAP_ADD = "overlap_add"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Size of tiles and how they are joined; the defaults are the released model's."""

    tile_px: int | None = 256
    """Longest side of a tile, a multiple of 16; None for a single tile of the picture's size."""
    overlap_px: int = 64
    """Least overlap of neighbours."""
    stitch: Stitch = Stitch.RELEASED

    def __post_init__(self) -> None:
        if self.tile_px is None:
            return
        if self.tile_px % SPATIAL_RATIO or self.tile_px <= 0:
            raise ValueError(
                f"tile_px: {self.tile_px}; allowed: positive multiples of {SPATIAL_RATIO}"
            )
        if self.overlap_px % SPATIAL_RATIO or not 0 < self.overlap_px < self.tile_px:
            raise ValueError(
                f"overlap_px: {self.overlap_px}; allowed: multiples of {SPATIAL_RATIO} above 0 and "
                f"below {self.tile_px}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TileAxis:
    """Tiles along one side of a picture."""

    size: int
    """Length of each tile."""
    starts: tuple[int, ...]
    overlaps: tuple[int, ...]
    """Length that each tile but the last shares with the next."""

    def scaled(self, divisor: int) -> TileAxis:
        """Return the same tiles in a unit that is `divisor` times as long."""
        return TileAxis(
            size=self.size // divisor,
            starts=tuple(start // divisor for start in self.starts),
            overlaps=tuple(overlap // divisor for overlap in self.overlaps),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TilePlan:
    """Tiles of a picture, row by row."""

    rows: TileAxis
    columns: TileAxis
    stitch: Stitch = Stitch.RELEASED

    @property
    def tile_count(self) -> int:
        """Tiles of one picture."""
        return len(self.rows.starts) * len(self.columns.starts)

    def scaled(self, divisor: int) -> TilePlan:
        """Return the same tiles in a unit that is `divisor` times as long."""
        return TilePlan(
            rows=self.rows.scaled(divisor), columns=self.columns.scaled(divisor), stitch=self.stitch
        )

    def cut(self, picture: Tensor) -> list[Tensor]:
        """Return the tiles of `[..., H, W]`, which has the plan's unit, as views."""
        return [
            picture[..., top : top + self.rows.size, left : left + self.columns.size]
            for top in self.rows.starts
            for left in self.columns.starts
        ]

    def join(self, tiles: Sequence[Tensor]) -> Tensor:
        """Return the picture `[..., H, W]` of its tiles `[..., h, w]`.

        Raises:
            ValueError: another number of tiles.
        """
        if len(tiles) != self.tile_count:
            raise ValueError(f"tiles: {len(tiles)}; allowed: {self.tile_count}")
        if self.stitch == Stitch.OVERLAP_ADD:
            return self._overlap_add(tiles)
        return self._released(tiles)

    def _released(self, tiles: Sequence[Tensor]) -> Tensor:
        """Write each tile up to where the next begins, and fade it in from those before."""
        first, across = tiles[0], len(self.columns.starts)
        joined = first.new_empty(*first.shape[:-2], _length(self.rows), _length(self.columns))
        for at, tile in enumerate(tiles):
            i, j = divmod(at, across)
            height, width = self._kept(self.rows, i), self._kept(self.columns, j)
            top, left = self.rows.starts[i], self.columns.starts[j]
            part = joined[..., top : top + height, left : left + width]
            part.copy_(tile[..., :height, :width])
            if i > 0:
                above = tiles[at - across][..., :width]
                _fade_in(part, above, self.rows.overlaps[i - 1], _ROW_AXIS)
            if j > 0:
                beside = tiles[at - 1][..., :height, :]
                _fade_in(part, beside, self.columns.overlaps[j - 1], _COLUMN_AXIS)
        return joined

    def _overlap_add(self, tiles: Sequence[Tensor]) -> Tensor:
        first = tiles[0]
        height, width = _length(self.rows), _length(self.columns)
        total = first.new_zeros(*first.shape[:-2], height, width)
        weight_HW = first.new_zeros(height, width)
        ramps_H = [_ramp(self.rows, at, first) for at in range(len(self.rows.starts))]
        ramps_W = [_ramp(self.columns, at, first) for at in range(len(self.columns.starts))]
        spots = [
            (top, left, ramp_H[:, None] * ramp_W)
            for top, ramp_H in zip(self.rows.starts, ramps_H, strict=True)
            for left, ramp_W in zip(self.columns.starts, ramps_W, strict=True)
        ]
        for tile, (top, left, ramp_HW) in zip(tiles, spots, strict=True):
            place = (
                ...,
                slice(top, top + self.rows.size),
                slice(left, left + self.columns.size),
            )
            total[place] += tile * ramp_HW
            weight_HW[place] += ramp_HW
        return total / weight_HW

    @staticmethod
    def _kept(axis: TileAxis, at: int) -> int:
        return axis.size - (axis.overlaps[at] if at < len(axis.overlaps) else 0)


def plan_tiles(height_px: int, width_px: int, tiling: Tiling) -> TilePlan:
    """Lay tiles over a picture.

    Raises:
        ValueError: a size that 16 does not divide.
    """
    for name, value in (("height_px", height_px), ("width_px", width_px)):
        if value % SPATIAL_RATIO or value <= 0:
            raise ValueError(f"{name}: {value}; allowed: positive multiples of {SPATIAL_RATIO}")
    return TilePlan(
        rows=_plan_axis(height_px, tiling),
        columns=_plan_axis(width_px, tiling),
        stitch=tiling.stitch,
    )


def _plan_axis(length: int, tiling: Tiling) -> TileAxis:
    """Fewest tiles that cover `length`; what they cover twice in excess widens the overlaps.

    It is dealt out in steps of a latent, first overlap first.
    """
    tile = tiling.tile_px
    if tile is None or length <= tile:
        return TileAxis(size=length, starts=(0,), overlaps=())
    stride = tile - tiling.overlap_px
    count = 1 + -(-(length - tile) // stride)
    excess_steps = (tile + stride * (count - 1) - length) // SPATIAL_RATIO
    share, rest = divmod(excess_steps, count - 1)
    overlaps = tuple(
        tiling.overlap_px + SPATIAL_RATIO * (share + (at < rest)) for at in range(count - 1)
    )
    starts = [0]
    for overlap in overlaps:
        starts.append(starts[-1] + tile - overlap)
    return TileAxis(size=tile, starts=tuple(starts), overlaps=overlaps)


def cross_fade(older: Tensor, newer: Tensor, extent: int, axis: int) -> Tensor:
    """Return `newer` with its first `extent` entries faded in from the last ones of `older`.

    Entry k has weight k / extent. Either may be shorter than `extent`, which is then its length.
    """
    faded = newer.clone()
    _fade_in(faded, older, min(extent, older.shape[axis], newer.shape[axis]), axis)
    return faded


def _fade_in(part: Tensor, older: Tensor, extent: int, axis: int) -> None:
    """Fade the first `extent` entries of `part`, or as many as it has, in from the last of `older`.

    Entry k has weight k / extent.
    """
    count = min(extent, part.shape[axis])
    shape = [1] * part.dim()
    shape[axis] = count
    share = torch.arange(count, device=part.device, dtype=part.dtype).view(shape) / extent
    start = older.narrow(axis, older.shape[axis] - extent, count)
    newer = part.narrow(axis, 0, count)
    newer.mul_(share).add_(start * (1 - share))


def _length(axis: TileAxis) -> int:
    return axis.starts[-1] + axis.size


def _ramp(axis: TileAxis, at: int, like: Tensor) -> Tensor:
    """Weight of tile `at` along its length: it rises and falls over its overlaps, never to 0."""
    ramp = torch.ones(axis.size, dtype=like.dtype, device=like.device)
    places = torch.arange(axis.size, dtype=like.dtype, device=like.device) + 0.5
    if at > 0:
        ramp = torch.minimum(ramp, places / axis.overlaps[at - 1])
    if at < len(axis.overlaps):
        ramp = torch.minimum(ramp, places.flip(0) / axis.overlaps[at])
    return ramp

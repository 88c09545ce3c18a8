"""Rows of a forward pass: their order, counts, positions and the patches behind them.

Owns: `[text | anchor | audio | chunk]`, positions in float64, patchify. Invariant: the positions of
a shorter window are the beginning of the longest one.
Shape suffixes: B batch, R rows, C channels or features, T latent frames, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from engine.config import FRAMES_PER_LATENT, Geometry, ModelConfig

_GRID_SCALE = 32.0
_UNITS_PER_FRAME = 5.0 / 3.0
"""One unit of time is one audio latent, 1/40 s; a frame at 24 fps has 5/3 of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixLayout:
    """Row counts of the prefix, in order."""

    text_rows: int
    anchor_rows: int
    audio_rows: int

    @property
    def conditioning_rows(self) -> int:
        """Text and anchor: the rows that see nothing but each other."""
        return self.text_rows + self.anchor_rows

    @property
    def rows(self) -> int:
        """All rows of the prefix."""
        return self.text_rows + self.anchor_rows + self.audio_rows


def prefix_layout(config: ModelConfig, text_rows: int) -> PrefixLayout:
    """Layout of a prefix whose prompt has ``text_rows`` rows."""
    return PrefixLayout(
        text_rows=text_rows, anchor_rows=config.rows_per_latent, audio_rows=config.audio_rows
    )


def spatial_positions(geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Height and width coordinates of the patch grid, float64 [H/2] and [W/2].

    Source: MiniMax-H3 layout; each axis spans 32 * side / sqrt(area) about 16, right end excluded.
    """
    height, width = geometry.latent_height, geometry.latent_width
    root = np.sqrt(height * width)
    axes = []
    for side in (height, width):
        ratio = side / root
        start = (1.0 - ratio) / 2.0
        axis = np.linspace(start, start + ratio, side // 2, endpoint=False, dtype=np.float64)
        axes.append(torch.from_numpy(axis * _GRID_SCALE))
    return axes[0], axes[1]


def _grid_rows(times_T: Tensor, geometry: Geometry) -> Tensor:
    y_H, x_W = spatial_positions(geometry)
    grid = torch.stack(torch.meshgrid(times_T, y_H, x_W, indexing="ij"), dim=-1)
    return grid.reshape(-1, 3)


def prefix_positions(config: ModelConfig, text_rows: int) -> Tensor:
    """(time, height, width) of the prefix rows, float64 [R, 3].

    Text row j sits at (j, 0, 0); the anchor and the first audio latent share the time origin of the
    window, which is the number of text rows. Audio channel 0 takes the left edge, channel 1 the
    right edge.
    """
    origin = float(text_rows)
    text_R3 = torch.zeros(text_rows, 3, dtype=torch.float64)
    text_R3[:, 0] = torch.arange(text_rows, dtype=torch.float64)
    anchor_R3 = _grid_rows(torch.tensor([origin], dtype=torch.float64), config.geometry)
    _, x_W = spatial_positions(config.geometry)
    edges = torch.stack([x_W[0], x_W[-1]])[: config.audio_channel_count]
    audio_R3 = torch.zeros(config.audio_channel_count, config.audio_latent_count, 3).double()
    audio_R3[..., 0] = origin + torch.arange(config.audio_latent_count, dtype=torch.float64)
    audio_R3[..., 2] = edges[:, None]
    return torch.cat([text_R3, anchor_R3, audio_R3.flatten(0, 1)])


def window_positions(config: ModelConfig, text_rows: int) -> Tensor:
    """(time, height, width) of the rows of a full window, float64 [R, 3].

    The oldest latent of a window always sits at time ``text_rows``; chunk slot s therefore takes
    rows s * rows_per_chunk onwards, whatever the age of the rollout.
    """
    latents = config.window_chunks * config.latents_per_chunk
    spans = torch.tensor(FRAMES_PER_LATENT, dtype=torch.float64).repeat(config.window_chunks)
    steps = torch.cat([torch.tensor([float(text_rows)]).double(), _UNITS_PER_FRAME * spans])
    return _grid_rows(steps.cumsum(0)[:latents], config.geometry)


def patchify(latents_BCTHW: Tensor) -> Tensor:
    """Latents to rows [B, T*H/2*W/2, C*4]: latent-major, then row-major; features channel-major."""
    return rearrange(
        latents_BCTHW,
        "batch channel latent (height ph) (width pw) -> "
        "batch (latent height width) (channel ph pw)",
        ph=2,
        pw=2,
    )


def unpatchify(rows_BRC: Tensor, geometry: Geometry) -> Tensor:
    """Inverse of `patchify`."""
    return rearrange(
        rows_BRC,
        "batch (latent height width) (channel ph pw) -> "
        "batch channel latent (height ph) (width pw)",
        height=geometry.latent_height // 2,
        width=geometry.latent_width // 2,
        ph=2,
        pw=2,
    )


def pack_audio(latents_BGCT: Tensor) -> Tensor:
    """Audio latents [B, channels G, features C, T] to rows [B, G*T, C], channel after channel."""
    return rearrange(latents_BGCT, "batch group feature time -> batch (group time) feature")

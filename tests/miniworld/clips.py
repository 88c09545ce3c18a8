"""Random encoded clips for the tests of the training stages: real layout, no renderer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.config import ModelConfig
from miniworld.stages.latents import ClipCache, LatentClips
from tests.tiny import tiny_config

CHUNKS = 7
"""More than the window, so that the oldest chunk leaves it."""


def stage_config() -> ModelConfig:
    """Return the tiny model with cameras in fp32, as the mini world has them."""
    return tiny_config(camera_dtype="float32", audio_latent_count=1)


def random_views(batch: int, latents: int, generator: torch.Generator) -> Tensor:
    """Return rigid views [B, T, 4, 4]: a turn and a walk that differ from latent to latent."""
    angle = 0.1 * torch.randn((batch, latents), generator=generator).cumsum(1)
    views = torch.eye(4).repeat(batch, latents, 1, 1)
    views[..., 0, 0] = views[..., 2, 2] = angle.cos()
    views[..., 0, 2], views[..., 2, 0] = angle.sin(), -angle.sin()
    views[..., :3, 3] = 0.3 * torch.randn((batch, latents, 3), generator=generator).cumsum(1)
    return views


def random_clips(
    config: ModelConfig, *, batch: int = 2, switch_chunk: int = 3, seed: int = 0
) -> LatentClips:
    """Return clips of noise; the last one lies in the middle of a session."""
    generator = torch.Generator().manual_seed(seed)
    rows, latents = config.rows_per_latent, CHUNKS * config.latents_per_chunk
    shape = (batch, CHUNKS, config.rows_per_chunk, config.patch_features)
    words = 1 + len(config.text.vocabulary)
    return LatentClips(
        latents_BNRC=torch.randn(shape, generator=generator).bfloat16(),
        anchor_BRC=torch.randn((batch, rows, config.patch_features), generator=generator),
        views_BT44=random_views(batch, latents, generator),
        text_ids_BPR=torch.randint(0, words, (batch, 2, config.text_rows), generator=generator),
        coverage_BTR=torch.rand((batch, latents, rows), generator=generator).half(),
        is_mid_session_B=torch.arange(batch) == batch - 1,
        switch_chunk=switch_chunk,
    )


def random_cache(config: ModelConfig) -> ClipCache:
    """Return two groups: one switches its prompt, one does not."""
    return ClipCache(
        [random_clips(config, switch_chunk=switch, seed=switch) for switch in (3, CHUNKS)]
    )


def stir(parameters: list[tuple[str, Tensor]], seed: int = 0) -> None:
    """Give the modulation and the heads, which start at zero, values that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in parameters:
            if "adaln_proj." in name or "norm_out.linear." in name or name.startswith("proj_out."):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise / math.sqrt(max(parameter.shape[-1], 1)) / 2)

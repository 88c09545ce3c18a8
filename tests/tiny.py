"""Small models and inputs that tests share.

Owns nothing but seeds and shapes; what it returns is real, only small.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.camera import FIRST_FRAMES, CameraState, integrate, relative_views
from engine.config import EngineConfig, Geometry, ModelConfig, TextConfig, preset
from engine.engine import Engine
from engine.model.dit import MiniMaxH3Transformer
from engine.prefix import PrefixDraws, PrefixInputs, anchor_shape, make_prefix
from engine.types import AXES, FRAMES_PER_CHUNK, Action

DATA = Path(__file__).parent / "data"
TEXT_ROWS = 5


def tiny_config(**changes: object) -> ModelConfig:
    """Return the tiny preset with three words, changed where asked."""
    base = dataclasses.replace(
        preset("tiny").model,
        text=TextConfig(vocabulary=("meadow", "night", "snow"), unknown_buckets=4, rows=TEXT_ROWS),
    )
    return dataclasses.replace(base, **changes)


def narrow_config() -> ModelConfig:
    """Return the smallest model with every part: 1 block, 1 head, 2 rows a latent."""
    return tiny_config(
        num_attention_heads=1,
        hidden_size=16,
        num_layers=1,
        ffn_dim=24,
        audio_latent_count=2,
        geometry=Geometry(height_px=32, width_px=64),
    )


def block_config(**changes: object) -> ModelConfig:
    """Return the tiny model with linears that are whole blocks of 128 by 128 channels."""
    return tiny_config(**{"hidden_size": 128, "ffn_dim": 128} | changes)


@cache
def tiny_engine(dtype: str = "float32") -> Engine:
    """Return one shared engine; engines do not change, rollouts do."""
    return Engine.from_random(tiny_config(), EngineConfig(device="cpu", dtype=dtype))


def tiny_model(config: ModelConfig, seed: int = 0) -> MiniMaxH3Transformer:
    """Return a random fp32 model whose gates, shifts and norms all matter."""
    return Engine.from_random(
        config, EngineConfig(device="cpu", dtype="float32"), seed=seed
    ).core.model


def unpacked_model(config: ModelConfig, seed: int = 0) -> MiniMaxH3Transformer:
    """Return `tiny_model` with plain linears, whatever an engine makes of them on this machine."""
    model = MiniMaxH3Transformer(config)
    model.load_state_dict(tiny_model(config, seed).state_dict())
    return model.requires_grad_(False).eval()


def random_anchor(config: ModelConfig, seed: int = 0, batch_size: int = 1) -> Tensor:
    """Return the latent of a first picture that shows nothing."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(anchor_shape(config, batch_size), generator=generator)


def random_prefix(
    config: ModelConfig, seed: int = 0, *, batch_size: int = 1, text_rows: int = TEXT_ROWS
) -> PrefixInputs:
    """Return prefix inputs with random text, anchor and draws."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    draws = PrefixDraws(
        anchor_eps_BCTHW=normal(*anchor_shape(config, batch_size)),
        audio_u_B=torch.rand(batch_size, generator=generator),
        audio_eps_BRC=normal(batch_size, config.audio_rows, config.audio_in_channels),
    )
    tags = torch.ones(text_rows, dtype=torch.int64)
    tags[1] = 0
    return make_prefix(
        config,
        normal(batch_size, text_rows, config.text_dim),
        tags,
        normal(*anchor_shape(config, batch_size)),
        draws,
    )


def chunk_noise(config: ModelConfig, index: int, batch_size: int = 1) -> list[Tensor]:
    """Return the start of a chunk and the noise after its steps."""
    generator = torch.Generator().manual_seed(1000 + index)
    grid = config.geometry
    shape = (
        batch_size,
        config.in_channels,
        config.latents_per_chunk,
        grid.latent_height,
        grid.latent_width,
    )
    return [torch.randn(shape, generator=generator) for _ in range(config.sampler.steps)]


def random_action(seed: int) -> Action:
    """Return controls that change every frame."""
    axes = np.random.default_rng(seed).uniform(-1.0, 1.0, (FRAMES_PER_CHUNK, len(AXES)))
    axes[:, -1] = np.abs(axes[:, -1])
    return Action(axes)


def walk_views(config: ModelConfig, chunks: int, seed: int = 0) -> Tensor:
    """Return relative views [1, T, 4, 4] of a random walk over some chunks."""
    poses = []
    state = CameraState()
    for chunk in range(chunks):
        path = integrate(state, random_action(seed * 100 + chunk), config.camera)
        poses.append(path.poses_F44[np.array(FIRST_FRAMES)])
        state = path.end
    poses_BT44 = torch.from_numpy(np.concatenate(poses))[None]
    return relative_views(poses_BT44, poses_BT44[:, 0])

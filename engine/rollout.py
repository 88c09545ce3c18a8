"""One rollout: everything that changes while a world is walked through.

Owns the state of a rollout and its random draws. Invariants: a draw depends on the seed and on the
index of the chunk alone, never on the device or on what was drawn before, so a rollout may be as
long as one likes and any chunk can be drawn again.
Shape suffixes: B batch, R rows, C channels, T latent frames, H height, W width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.camera import CameraState
from engine.config import ModelConfig
from engine.core import CoreState
from engine.errors import ConfigError
from engine.prefix import PrefixDraws, anchor_shape
from engine.types import SpanClock

SEED_LIMIT = 2**64


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ChunkDraws:
    """Random numbers of one chunk, fp32; fields are in the order of drawing."""

    noise_BCTHW: Tensor
    step_noise: tuple[Tensor, ...]


class Draws(Protocol):
    """Where a rollout takes its random numbers from."""

    def prefix(self) -> PrefixDraws:
        """Draws of the session."""
        ...

    def chunk(self, chunk_index: int) -> ChunkDraws:
        """Draws of one chunk; the same whenever it is asked for."""
        ...


class SeededDraws:
    """Draws from explicit CPU generators.

    The generator of the prefix is seeded with h("prefix"), that of chunk c with h("chunk c"); h of
    a label is the first 8 bytes of sha256("worldstream SEED label"), little endian, halved. In
    order: the prefix draws anchor eps, audio u, audio eps; a chunk draws its noise, then the noise
    after each denoise step but the last. All are standard normal in fp32 but u, which is uniform.

    Raises: ConfigError for a seed outside 0 .. 2^64 - 1.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        if type(seed) is not int or not 0 <= seed < SEED_LIMIT:
            raise ConfigError(f"seed is {seed!r}; allowed: whole numbers from 0 to 2^64 - 1")
        self._config = config
        self._seed = seed
        self._newest: tuple[int, ChunkDraws] | None = None

    def _generator(self, label: str) -> torch.Generator:
        digest = hashlib.sha256(f"worldstream {self._seed} {label}".encode()).digest()
        # torch takes seeds up to 2^63 - 1 on every platform.
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def prefix(self) -> PrefixDraws:
        """Draws of the session."""
        config, generator = self._config, self._generator("prefix")
        audio_shape = (1, config.audio_rows, config.audio_in_channels)
        return PrefixDraws(
            anchor_eps_BCTHW=torch.randn(anchor_shape(config), generator=generator),
            audio_u_B=torch.rand(1, generator=generator),
            audio_eps_BRC=torch.randn(audio_shape, generator=generator),
        )

    def chunk(self, chunk_index: int) -> ChunkDraws:
        """Draws of one chunk; the newest are kept, so that they can be asked for ahead."""
        if self._newest is None or self._newest[0] != chunk_index:
            self._newest = chunk_index, self._draw(chunk_index)
        return self._newest[1]

    def _draw(self, chunk_index: int) -> ChunkDraws:
        config, generator = self._config, self._generator(f"chunk {chunk_index}")
        grid = config.geometry
        shape = (
            1,
            config.in_channels,
            config.latents_per_chunk,
            grid.latent_height,
            grid.latent_width,
        )
        noise_BCTHW = torch.randn(shape, generator=generator)
        later = config.sampler.steps - 1
        step_noise = tuple(torch.randn(shape, generator=generator) for _ in range(later))
        return ChunkDraws(noise_BCTHW=noise_BCTHW, step_noise=step_noise)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class OpenChunk:
    """A chunk that is denoised and not yet history."""

    latents_BCTHW: Tensor
    camera: CameraState
    """At the first frame after it."""
    clock: SpanClock


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RolloutSnapshot:
    """A rollout between two chunks, less its seed, prompt and picture."""

    chunk_index: int
    camera: CameraState
    buffers: Mapping[str, Tensor]
    """Of the window cache; shared with the rollout until it goes on."""


@dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class Rollout:
    """One walk through a world. Made by `Engine.new_rollout`, changed by the engine only."""

    prompt: str
    seed: int
    epoch: int
    draws: Draws
    prefix_draws: PrefixDraws
    anchor_BCTHW: Tensor
    picture_HWC: Tensor | None
    """What the prompt encoder looks at."""
    core: CoreState
    camera: CameraState
    """At the first frame of the next chunk."""
    camera_before: CameraState
    """At the first frame of the last chunk, for `Engine.undo`."""
    open_chunk: OpenChunk | None = None
    drawn: tuple[int, ChunkDraws] | None = None
    """Random numbers of a chunk, by its index, where the model is."""

    @property
    def chunk_index(self) -> int:
        """Index of the next chunk."""
        return self.core.chunk_index

"""Held-out cases: clips that training never saw, their truth, and what a session is given of them.

Owns seeds, the scripts of the single items, and truth rendered chunk by chunk. Invariant: seeds are
fixed, so two evaluations see the same pictures, and none of them is a seed of training.

Shape suffixes: C clips, F frames, T latent frames, H height, W width, 44 a matrix.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from miniworld import walks
from miniworld.evaluation.models import (
    FrameStream,
    Models,
    Walk,
    encode_chunk,
    encode_pictures,
)
from miniworld.evaluation.presence import without_things
from miniworld.prompts import KINDS, PLACES, TIMES, parse_prompt, prompt_for, style_for
from miniworld.render import render
from miniworld.scene import Clips, Scenes, sample_clips
from miniworld.stages.latents import clip_views
from vae_stream.geometry import BLOCK_FRAMES

HELD_OUT_SEED = 10_000_000
_FRAMES_PER_CALL = 1024
ALL_FRAMES = tuple(range(BLOCK_FRAMES))

FORWARD, RIGHT, YAW = 0, 1, 2
"""Columns of a key script."""


class Cases:
    """Held-out clips on a device."""

    def __init__(self, clips: Clips, models: Models) -> None:
        self.clips = clips
        self.models = models
        self._scenes = clips.scenes.to(models.device)
        self._bare = without_things(self._scenes)
        self._styles = clips.styles_CKS().to(models.device)

    def __len__(self) -> int:
        return len(self.clips.scenes)

    @property
    def chunks(self) -> int:
        """Length of the clips."""
        return self.clips.c2w_CF44.shape[1] // BLOCK_FRAMES

    def walk(self) -> Walk:
        """Return what sessions are given of the clips."""
        clips = self.clips
        return Walk(
            anchor_BCTHW=encode_pictures(self.models, self.first_pictures()),
            views_BT44=clip_views(clips).to(self.models.device),
            prompts=clips.prompt_before,
            later_prompts=clips.prompt_after,
            switch_chunk=clips.switch_chunk,
        )

    def first_pictures(self) -> Tensor:
        """First picture of each session [C, 3, H, W], in the style before a switch."""
        poses = self.clips.origin_c2w_C44[:, None]
        return self._render(self._scenes, poses, torch.zeros(len(self), 1).long())[:, 0]

    def truth(
        self, chunk: int, frames: Sequence[int] = ALL_FRAMES, *, style: int | None = None
    ) -> Tensor:
        """Render frames of a chunk [C, F, 3, H, W].

        style: 0 or 1 draws all of it in the style before or after the switch.
        """
        return self._render(self._scenes, *self._span(chunk, frames, style))

    def empty(self, chunk: int, frames: Sequence[int]) -> Tensor:
        """Render the same views without any thing in the world."""
        return self._render(self._bare, *self._span(chunk, frames, None))

    def round_trip(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Send the truth of a chunk through the autoencoder; return (made, truth), all 17 frames.

        The decoder first sees the chunk before, so that its memory is filled as in use.
        """
        stream = FrameStream(self.models)
        if chunk > 0:
            stream.decode(encode_chunk(self.models, self.truth(chunk - 1)))
        truth = self.truth(chunk)
        return stream.decode(encode_chunk(self.models, truth)), truth

    def poses(self, chunk: int, frame: int) -> Tensor:
        """Return poses of one frame of a chunk [C, 4, 4], float64."""
        return self.clips.c2w_CF44[:, BLOCK_FRAMES * chunk + frame]

    def _span(self, chunk: int, frames: Sequence[int], style: int | None) -> tuple[Tensor, Tensor]:
        index = [BLOCK_FRAMES * chunk + frame for frame in frames]
        style_CF = self.clips.style_index_CF()[:, index]
        if style is not None:
            style_CF = torch.full_like(style_CF, style)
        return self.clips.c2w_CF44[:, index], style_CF

    def _render(self, scenes: Scenes, c2w_CF44: Tensor, style_CF: Tensor) -> Tensor:
        device = self.models.device
        step = max(1, _FRAMES_PER_CALL // c2w_CF44.shape[1])
        parts = []
        for start in range(0, len(self), step):
            clips = slice(start, start + step)
            parts.append(
                render(
                    scenes[clips],
                    c2w_CF44[clips].to(device),
                    (self._styles[clips], style_CF[clips].to(device)),
                ).float()
            )
        return torch.cat(parts)


def mixed_cases(
    models: Models, count: int, chunks: int, seed: int, *, switch_chunk: int | None = None
) -> Cases:
    """Sessions from their start under random key scripts, as training draws them.

    With ``switch_chunk`` both styles have names, and the later prompts name theirs in full.
    """
    clips = sample_clips(
        count,
        chunks,
        HELD_OUT_SEED + seed,
        switch_chunk=switch_chunk,
        mid_session_share=0.0,
        palette_share=0.25 if switch_chunk is None else 0.0,
    )
    return Cases(clips if switch_chunk is None else with_full_prompts(clips, seed), models)


def with_full_prompts(clips: Clips, seed: int) -> Clips:
    """Replace the later prompts by ones that name place and time of the later style.

    Training also shows prompts that leave the time out, which say nothing about the new light.
    """
    names = [(place, time) for place in PLACES for time in TIMES]
    table = torch.stack([style_for(place, time) for place, time in names])
    dice = random.Random(HELD_OUT_SEED + seed)
    later = []
    for style_S, kind in zip(clips.style_after_CS, clips.scenes.kind_C.tolist(), strict=True):
        place, time = names[int((table - style_S).abs().sum(1).argmin())]
        prompt = ""
        while parse_prompt(prompt)[::2] != (place, time):
            prompt = prompt_for(dice, place, KINDS[kind], time)
        later.append(prompt)
    return dataclasses.replace(clips, prompt_after=later)


def scripted_cases(models: Models, keys_CF4: Tensor, seed: int) -> Cases:
    """Sessions from their start under given keys: columns forward, right, yaw, pitch."""
    count, frames = keys_CF4.shape[:2]
    clips = sample_clips(count, 1, HELD_OUT_SEED + seed, mid_session_share=0.0)
    first = clips.c2w_CF44[:, 0]
    heading = torch.atan2(first[:, 0, 2], first[:, 2, 2])
    start = torch.stack([first[:, 0, 3], first[:, 2, 3], heading], 1)
    obstacles = walks.Obstacles(clips.scenes.primitives_CNP, clips.scenes.ponds_CQ4)
    c2w = walks.integrate(walks.smoothed_speeds(keys_CF4), obstacles, start)
    longer = dataclasses.replace(
        clips, c2w_CF44=c2w, origin_c2w_C44=c2w[:, 0], switch_chunk=frames // BLOCK_FRAMES
    )
    return Cases(longer, models)


def held_keys(count: int, chunks: int, column: int, signs: Sequence[int]) -> Tensor:
    """One key held for ever [C, F, 4]; clip c holds it with ``signs[c mod len(signs)]``."""
    keys = torch.zeros(count, chunks * BLOCK_FRAMES, 4)
    sign = torch.tensor([float(signs[clip % len(signs)]) for clip in range(count)])
    keys[..., column] = sign[:, None]
    return keys

"""Frames on the fly for the autoencoder: clips cut to object-rich columns, and photographs.

Owns: pools of clips, batches by step number, the held-out clips.
Invariant: a batch depends on (seed, step) alone, so that a resumed run sees the same data.
Legend: C clips, T frames, H height, W width; the colour axis before H is not named.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from miniworld.photos import pan_clips
from miniworld.render import render
from miniworld.scene import Clips, Scenes, sample_clips
from vae_stream.geometry import BLOCK_FRAMES

_SWITCH_EVERY = 5
_HELD_OUT_SEED = 7_000_000_019
# Keeps plain ground and sky in the training: a crop's weight is its edge energy plus this share.
_PLAIN_SHARE = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedSettings:
    """What a batch looks like."""

    chunks: int = 2
    """17-frame blocks in a clip: block starts with empty and with full memory need two."""
    height_px: int = 160
    """Height of a rendered picture."""
    width_px: int = 256
    """Width of a rendered picture."""
    crop_px: int = 160
    """Columns that are kept; all rows are, so that sky and ground keep their true borders."""
    supersample: int = 2
    """Rays a pixel and axis."""
    photo_share: float = 0.125
    """Share of clips that pan over synthetic photographs."""
    pool_clips: int = 512
    """Clips sampled at once."""
    pool_photos: int = 64
    """Pans over photographs drawn at once; they stay on the device as pictures."""
    pool_steps: int = 200
    """Steps that one pool serves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pool:
    scenes: Scenes
    c2w_CT44: Tensor
    styles_CKS: Tensor
    style_index_CT: Tensor

    @classmethod
    def of(cls, clips: Clips, device: torch.device) -> _Pool:
        return cls(
            scenes=clips.scenes.to(device),
            c2w_CT44=clips.c2w_CF44.to(device),
            styles_CKS=clips.styles_CKS().to(device),
            style_index_CT=clips.style_index_CF().to(device),
        )

    def render(self, index_C: Tensor, settings: FeedSettings) -> Tensor:
        return render(
            self.scenes[index_C],
            self.c2w_CT44[index_C],
            (self.styles_CKS[index_C], self.style_index_CT[index_C]),
            height=settings.height_px,
            width=settings.width_px,
            supersample=settings.supersample,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """What the steps of one pool draw from."""

    plain: _Pool
    switching: _Pool
    pans_CTHW: Tensor


class FrameFeed:
    """Batches of frames in 0..1 by step number; the next pool is sampled in the background."""

    def __init__(
        self, settings: FeedSettings, *, batch: int, seed: int, device: torch.device
    ) -> None:
        self._settings = settings
        self._batch = batch
        self._seed = seed
        self._device = device
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="clip-pool")
        self._pools: dict[int, Future[_Source]] = {}

    def batch(self, step: int) -> Tensor:
        """Return fp32 frames `[batch, T, 3, H, crop]` of training step `step`."""
        settings = self._settings
        pool_index = step // settings.pool_steps
        self._pools = {k: v for k, v in self._pools.items() if k >= pool_index}
        for index in (pool_index, pool_index + 1):
            if index not in self._pools:
                self._pools[index] = self._worker.submit(self._sample, index)
        source = self._pools[pool_index].result()
        pool = source.switching if step % _SWITCH_EVERY == 0 else source.plain
        dice = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        per_step = settings.photo_share * self._batch
        photos = math.floor((step + 1) * per_step) - math.floor(step * per_step)
        count = pool.c2w_CT44.shape[0]
        index_C = torch.randint(0, count, (self._batch - photos,), generator=dice)
        frames = pool.render(index_C.to(self._device), settings).float()
        if photos:
            chosen_C = torch.randint(0, settings.pool_photos, (photos,), generator=dice)
            frames = torch.cat([frames, source.pans_CTHW[chosen_C.to(self._device)].float()])
        return crop_columns(frames, settings.crop_px, dice)

    def close(self) -> None:
        """Stop sampling ahead."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _sample(self, index: int) -> _Source:
        settings = self._settings
        seed = (self._seed * 7_919 + index) * 2
        plain = sample_clips(settings.pool_clips, settings.chunks, seed)
        switching = sample_clips(
            max(settings.pool_clips // 4, 1),
            settings.chunks,
            seed + 1,
            switch_chunk=settings.chunks // 2,
        )
        return _Source(
            plain=_Pool.of(plain, self._device),
            switching=_Pool.of(switching, self._device),
            pans_CTHW=_pans(settings, settings.pool_photos, seed, self._device).half(),
        )


def crop_columns(frames_CTHW: Tensor, crop_px: int, dice: torch.Generator) -> Tensor:
    """Cut `crop_px` columns of each clip, likelier where the picture has many edges."""
    width = frames_CTHW.shape[-1]
    if crop_px >= width:
        return frames_CTHW
    still = frames_CTHW[:, frames_CTHW.shape[1] // 2]
    energy_CW = (still[..., 1:] - still[..., :-1]).abs().mean((1, 2))
    total = torch.nn.functional.pad(energy_CW.cumsum(1), (1, 0))
    inside = total[:, crop_px - 1 :] - total[:, : width - crop_px + 1]
    weight = inside + _PLAIN_SHARE * inside.mean(1, keepdim=True) + 1e-6
    edges = (weight / weight.sum(1, keepdim=True)).cumsum(1)
    dice_C1 = torch.rand(frames_CTHW.shape[0], 1, generator=dice).to(edges)
    start_C1 = (edges < dice_C1).sum(1, keepdim=True).clamp(max=width - crop_px)
    columns = start_C1 + torch.arange(crop_px, device=frames_CTHW.device)
    columns = columns[:, None, None, None].expand(*frames_CTHW.shape[:-1], crop_px)
    return frames_CTHW.gather(-1, columns)


def held_out_frames(
    settings: FeedSettings, count: int, device: torch.device, *, offset: int = 0
) -> Tensor:
    """Return whole pictures `[count, T, 3, H, W]` of clips that no training step sees."""
    clips = sample_clips(count, settings.chunks, _HELD_OUT_SEED + offset)
    pool = _Pool.of(clips, device)
    return pool.render(torch.arange(count, device=device), settings).float()


def held_out_photos(settings: FeedSettings, count: int, device: torch.device) -> Tensor:
    """Return pans over photographs that no training step sees, `[count, T, 3, H, W]`."""
    return _pans(settings, count, _HELD_OUT_SEED, device)


def _pans(settings: FeedSettings, count: int, seed: int, device: torch.device) -> Tensor:
    return pan_clips(
        count,
        BLOCK_FRAMES * settings.chunks,
        seed=seed,
        height=settings.height_px,
        width=settings.width_px,
        device=device,
    ).float()

"""Clips as latents: what the transformer stages train on.

Owns: rendering and encoding of whole clips, the cache of encoded groups, random batches of it.
Invariant: a group's clips share the chunk at which the prompt changes, so one visibility mask
serves a batch. Everything stays on the device; 10,000 clips of 10 chunks take about 4 GB.

Shape suffixes: B clips, P prompts (before, after), N chunks, T latent frames, R rows, C features.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.camera import FIRST_FRAMES, camera_indices, relative_views
from engine.layout import patchify
from engine.text import WordEncoder
from miniworld.render import render
from miniworld.scene import Clips, sample_clips
from vae_stream.taehv import TinyVae

FRAMES_PER_CHUNK = 17
_CLIPS_PER_CALL = 32
_THROUGH_SHARE = 0.6
"""Share of clips whose walker nothing stops: nothing does in a world that the model invents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentClips:
    """Encoded clips; ``switch_chunk`` is the first chunk that follows the second prompt.

    A clip in mid-session has a history that it does not show: its first chunk can only be history.
    """

    latents_BNRC: Tensor
    anchor_BRC: Tensor
    views_BT44: Tensor
    text_ids_BPR: Tensor
    coverage_BTR: Tensor
    is_mid_session_B: Tensor
    switch_chunk: int

    def take(self, index_B: Tensor) -> LatentClips:
        """Select clips."""
        tensors = {
            f.name: getattr(self, f.name)[index_B] for f in fields(self) if f.name != "switch_chunk"
        }
        return LatentClips(switch_chunk=self.switch_chunk, **tensors)

    def cut(self, start: int, chunks: int) -> LatentClips:
        """Return ``chunks`` chunks from ``start`` on; a later start lies in mid-session."""
        latents = self.views_BT44.shape[1] // self.latents_BNRC.shape[1]
        span, latent_span = slice(start, start + chunks), slice(latents * start, None)
        count = latents * chunks
        return replace(
            self,
            latents_BNRC=self.latents_BNRC[:, span],
            views_BT44=self.views_BT44[:, latent_span][:, :count],
            coverage_BTR=self.coverage_BTR[:, latent_span][:, :count],
            is_mid_session_B=self.is_mid_session_B | (start > 0),
            switch_chunk=min(max(self.switch_chunk - start, 0), chunks),
        )


def render_chunk(clips: Clips, chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Render one chunk of every clip: pictures [B, 17, 3, H, W] and coverage [B, 17, h, w]."""
    span = slice(FRAMES_PER_CHUNK * chunk, FRAMES_PER_CHUNK * (chunk + 1))
    styles = (clips.styles_CKS(), clips.style_index_CF()[:, span])
    return render(
        clips.scenes.to(device), clips.c2w_CF44[:, span].to(device), styles, coverage=True
    )


def render_anchor(clips: Clips, device: torch.device) -> Tensor:
    """Render the first picture of each session [B, 1, 3, H, W], in the style before a switch."""
    return render(
        clips.scenes.to(device),
        clips.origin_c2w_C44[:, None].to(device),
        clips.style_before_CS.to(device),
    )


def clip_views(clips: Clips) -> Tensor:
    """World-to-camera views of all latent frames relative to the session's start [B, T, 4, 4]."""
    chunks = clips.c2w_CF44.shape[1] // FRAMES_PER_CHUNK
    index = camera_indices(len(FIRST_FRAMES) * chunks)
    return relative_views(clips.c2w_CF44[:, index], clips.origin_c2w_C44)


def _row_coverage(coverage_BFHW: Tensor) -> Tensor:
    """Mean coverage of each row of a chunk's latent frames: [B, 17, h, w] -> [B, 5, R]."""
    cells = F.avg_pool2d(coverage_BFHW.float(), 2).flatten(2)
    bounds = (*FIRST_FRAMES, FRAMES_PER_CHUNK)
    return torch.stack([cells[:, a:b].mean(1) for a, b in itertools.pairwise(bounds)], dim=1)


@torch.no_grad()
def encode_clips(
    vae: TinyVae, text: WordEncoder, clips: Clips, device: torch.device
) -> LatentClips:
    """Render and encode a group of clips, chunk by chunk (each block encodes alone)."""
    chunks = clips.c2w_CF44.shape[1] // FRAMES_PER_CHUNK
    latents, coverage = [], []
    anchor_BTCHW = _encode(vae, render_anchor(clips, device))
    for chunk in range(chunks):
        frames, covered = render_chunk(clips, chunk, device)
        latents_BTCHW = _encode(vae, frames)
        rows = patchify(rearrange(latents_BTCHW, "b t c h w -> b c t h w"))
        latents.append(rows.to(torch.bfloat16))
        coverage.append(_row_coverage(covered).to(torch.float16))
    ids = [
        [text.tokenize(before), text.tokenize(after)]
        for before, after in zip(clips.prompt_before, clips.prompt_after, strict=True)
    ]
    return LatentClips(
        latents_BNRC=torch.stack(latents, dim=1),
        anchor_BRC=patchify(rearrange(anchor_BTCHW, "b t c h w -> b c t h w")),
        views_BT44=clip_views(clips).to(device),
        text_ids_BPR=torch.tensor(ids, device=device),
        coverage_BTR=torch.cat(coverage, dim=1),
        is_mid_session_B=clips.is_mid_session_C.to(device),
        switch_chunk=clips.switch_chunk,
    )


def _encode(vae: TinyVae, frames_BTCHW: Tensor) -> Tensor:
    parts = frames_BTCHW.split(_CLIPS_PER_CALL)
    return torch.cat([vae.encode(part.to(vae.encoder.stem.weight.dtype)) for part in parts])


class ClipCache:
    """Groups of encoded clips, kept on the device and optionally on disk."""

    def __init__(self, groups: list[LatentClips]) -> None:
        if not groups:
            raise ValueError("groups: none; allowed: at least one encoded group")
        self.groups = groups

    @classmethod
    def build(
        cls,
        vae: TinyVae,
        text: WordEncoder,
        *,
        groups: int,
        clips_per_group: int,
        chunks: int,
        seed: int,
        device: torch.device,
        folder: Path | None,
        log: Callable[[str], None],
    ) -> ClipCache:
        """Sample, render and encode ``groups`` groups, or read those that ``folder`` has.

        45 % of the groups switch the prompt at a random chunk; chunk 0 means that the prompt
        differs from the picture from the start.
        """
        made: list[LatentClips] = []
        started_s = time.monotonic()
        for index in range(groups):
            name = f"clips-{chunks}-{seed}-{index:04d}.safetensors"
            path = None if folder is None else folder / name
            if path is not None and path.exists():
                made.append(_read(path, device))
                continue
            dice = random.Random(seed * 100_003 + index)
            switch = None if dice.random() < 0.55 else dice.randrange(chunks)
            clips = sample_clips(
                clips_per_group,
                chunks,
                seed=dice.getrandbits(40),
                switch_chunk=switch,
                through_share=_THROUGH_SHARE,
            )
            made.append(encode_clips(vae, text, clips, device))
            if path is not None:
                _write(made[-1], path)
            if index % 10 == 9 or index == groups - 1:
                elapsed_s = time.monotonic() - started_s
                left_s = elapsed_s / (index + 1) * (groups - index - 1)
                log(
                    f"clips {(index + 1) * clips_per_group} of {groups * clips_per_group} "
                    f"elapsed {elapsed_s:.1f} s, left {left_s:.0f} s"
                )
        return cls(made)

    def batch(self, size: int, dice: random.Random, device: torch.device) -> LatentClips:
        """Return ``size`` random clips of one random group."""
        group = dice.choice(self.groups)
        count = group.latents_BNRC.shape[0]
        index = torch.tensor([dice.randrange(count) for _ in range(size)], device=device)
        return group.take(index)


def _write(clips: LatentClips, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        f.name: getattr(clips, f.name).contiguous().cpu()
        for f in fields(clips)
        if f.name != "switch_chunk"
    }
    part = path.with_suffix(".part")
    save_file({**tensors, "switch_chunk": torch.tensor(clips.switch_chunk)}, part)
    part.replace(path)


def _read(path: Path, device: torch.device) -> LatentClips:
    tensors = load_file(path, device=str(device))
    switch_chunk = int(tensors.pop("switch_chunk"))
    return LatentClips(switch_chunk=switch_chunk, **tensors)

"""Clock of latents against frames: pure integers.

A block is 5 latents and 17 frames; latent p of block b gives 1 frame (p = 0) or 4 (p = 1..4):
f = 17b | 17b+1..4 | 17b+5..8 | 17b+9..12 | 17b+13..16. Every latent decodes to 4 raw frames; at
p = 0 the first 3 are alignment padding, because the encoder pads each block with 3 frames.
Invariant: first_frame(n) is also the number of frames emitted before latent n.
"""

from __future__ import annotations

BLOCK_LATENTS = 5
BLOCK_FRAMES = 17
RAW_FRAMES = 4
TRIM_FRAMES = 3
SPATIAL_RATIO = 16


def first_frame(latent_index: int) -> int:
    """Return the absolute index of the first frame of latent `latent_index` (from 0)."""
    _check("latent_index", latent_index)
    block, position = divmod(latent_index, BLOCK_LATENTS)
    return BLOCK_FRAMES * block + (RAW_FRAMES * position - TRIM_FRAMES if position else 0)


def frame_count(latent_index: int) -> int:
    """Return how many frames latent `latent_index` gives: 1 at a block's start, else 4."""
    _check("latent_index", latent_index)
    return RAW_FRAMES if latent_index % BLOCK_LATENTS else RAW_FRAMES - TRIM_FRAMES


def latent_of_frame(frame_index: int) -> int:
    """Return the latent that gives frame `frame_index` (from 0)."""
    _check("frame_index", frame_index)
    block, offset = divmod(frame_index, BLOCK_FRAMES)
    return BLOCK_LATENTS * block + -(-offset // RAW_FRAMES)


def latents_for_frames(count: int) -> int:
    """Return the fewest latents that give at least `count` frames."""
    _check("count", count)
    return latent_of_frame(count - 1) + 1 if count else 0


def _check(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name}: {value}; allowed: 0 or more")

"""Windows of the original H3 decoder: which latents each sees, which pictures come from it.

Pure integers. A window has 7 latents, 28 raw frames, and starts every 5 latents; its first 20 raw
frames less 3 are the 17 pictures of a block, its last 8 less 3 the first 5 of the next block, for
which they fade into that block's own window, or which they are when the stream ends there. Slots
after the end of a stream repeat its last latent, so any number of latents decodes.
Invariant: pictures of latents `first` to `end` of a stream that ends at `end` need `windows(...)`
and no others. Source: MiniMax-H3 video autoencoder.
"""

from __future__ import annotations

from dataclasses import dataclass

from vae_stream.geometry import BLOCK_FRAMES, BLOCK_LATENTS, first_frame

WINDOW_LATENTS = 7
FADE_FRAMES = 5
_FADED_LATENTS = WINDOW_LATENTS - BLOCK_LATENTS


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPart:
    """Pictures of one block that are asked for, and the windows they come from."""

    own: int | None
    """Window whose 17 pictures are the block's; None where the stream ends before it has one."""
    before: int | None
    """Window whose last 5 pictures fade into them, or stand for them."""
    frames: slice
    """Within the block."""


def window_count(latents: int) -> int:
    """Return how many windows a stream of `latents` (1 or more) has."""
    return max(1, (latents + _FADED_LATENTS) // BLOCK_LATENTS)


def window_slots(window: int, latents: int) -> tuple[int, ...]:
    """Return the latents in the 7 slots of a window of a stream of `latents`."""
    start = BLOCK_LATENTS * window
    return tuple(min(start + slot, latents - 1) for slot in range(WINDOW_LATENTS))


def block_parts(first: int, end: int) -> tuple[BlockPart, ...]:
    """Return where the pictures of latents `first` to `end - 1` of a stream of `end` come from."""
    count = window_count(end)
    parts = []
    for block in range(first // BLOCK_LATENTS, (end - 1) // BLOCK_LATENTS + 1):
        before = BLOCK_FRAMES * block
        start = max(first_frame(first) - before, 0)
        is_faded = block > 0 and start < FADE_FRAMES
        parts.append(
            BlockPart(
                own=block if block < count else None,
                before=block - 1 if is_faded else None,
                frames=slice(start, min(first_frame(end) - before, BLOCK_FRAMES)),
            )
        )
    return tuple(parts)


def windows(parts: tuple[BlockPart, ...]) -> tuple[int, ...]:
    """Return the windows that these pictures come from, in order."""
    return tuple(sorted({w for part in parts for w in (part.own, part.before) if w is not None}))

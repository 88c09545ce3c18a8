"""Modes of the causal ViT decoder: which latents are decoded together, when pictures come. Pure.

The network was trained on pairs of latents that see each other and the four before them. Other
modes need no training; what they change is the sight of latents that are not there yet.

    pair               (0 1) (2 3) ...: as trained; every other latent waits for the next one
    single_a1          one at a time, each as the second of a pair: five before it, suffix one back
    preview_commit_a2  the first of a pair alone, forgotten again; then the pair, whose second shows
    hybrid_a3          pairs; only a latent that ends a chunk without a partner is shown as in a2
    single_a4          one at a time, each as the first of a pair: four before it
    single_a5          one at a time, in turn as the first and the second of a pair

Owns the plan of a push. Invariants: pictures come in order, each once; pair, a2 and a3 leave the
same state after each pair; only `pair` ever waits for the next chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vae_stream.causal_vit.places import CallKind

PAIR = CallKind(latents=2, past=4, suffix_back=0)
FIRST = CallKind(latents=1, past=4, suffix_back=0)
"""A latent alone, as the first of a pair."""
SECOND = CallKind(latents=1, past=5, suffix_back=1)
"""A latent alone, as the second of a pair."""


class Mode(StrEnum):
    """How latents are advanced."""

    HYBRID_A3 = "hybrid_a3"
    PAIR = "pair"
    SINGLE_A1 = "single_a1"
    PREVIEW_COMMIT_A2 = "preview_commit_a2"
    SINGLE_A4 = "single_a4"
    SINGLE_A5 = "single_a5"


_KINDS = {
    Mode.PAIR: (PAIR,),
    Mode.SINGLE_A1: (SECOND,),
    Mode.PREVIEW_COMMIT_A2: (FIRST, PAIR),
    Mode.HYBRID_A3: (PAIR, FIRST),
    Mode.SINGLE_A4: (FIRST,),
    Mode.SINGLE_A5: (FIRST, SECOND),
}


def lookahead_of(mode: Mode) -> int:
    """Return the latents of the next chunk that pictures of a chunk may wait for."""
    return 1 if mode == Mode.PAIR else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one push, or the flush, does."""

    kind: CallKind | None = None
    """Call to make; None only keeps the latent."""
    shown: tuple[int, ...] = ()
    """Which latents of the call give pictures, counted in it."""
    waits: bool = False
    """Whether the latent stays uncommitted, for the next push to pair it."""


def kinds(mode: Mode) -> tuple[CallKind, ...]:
    """Return the calls of a mode."""
    return _KINDS[mode]


def plan_push(
    mode: Mode, *, is_odd: bool, ends_chunk: bool, is_waiting: bool, is_shown: bool
) -> Step:
    """Plan what the next latent brings.

    Args:
        mode: of the decoder.
        is_odd: whether the latent is the second, fourth ... of the stream.
        ends_chunk: whether it is the last one of a chunk.
        is_waiting: whether the latent before waits.
        is_shown: whether that one's pictures came out already.
    """
    if is_waiting:
        return Step(kind=PAIR, shown=(1,) if is_shown else (0, 1))
    if mode == Mode.PREVIEW_COMMIT_A2 or (mode == Mode.HYBRID_A3 and ends_chunk):
        return Step(kind=FIRST, shown=(0,), waits=True)
    if mode in (Mode.PAIR, Mode.HYBRID_A3):
        return Step(waits=True)
    if mode == Mode.SINGLE_A1 or (mode == Mode.SINGLE_A5 and is_odd):
        return Step(kind=SECOND, shown=(0,))
    return Step(kind=FIRST, shown=(0,))


def plan_flush(mode: Mode, *, is_waiting: bool, is_shown: bool) -> Step:
    """Plan the end of a stream; a waiting latent in pair mode is paired with a copy of itself."""
    if not is_waiting or is_shown:
        return Step()
    return Step(kind=PAIR if mode == Mode.PAIR else FIRST, shown=(0,))

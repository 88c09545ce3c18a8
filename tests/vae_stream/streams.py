"""Streams of tiny decoders: latents pushed one after the other, frames compared bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from vae_stream import TinyDecoder


def decode(decoder: TinyDecoder, z: list[Tensor]) -> list[Tensor]:
    """Frames of a new stream."""
    state = decoder.new_state()
    return [chunk.frames_THWC for one in z for chunk in decoder.push(state, one)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Fail at the first latent whose frames differ."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"latent {index}"

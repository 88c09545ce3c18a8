"""Streaming decoder of tiny causal networks: pictures of a latent come with it.

Owns the order of calls into the network. Invariant: memories are never written in place, so a
snapshot is cheap. Legend: T frames, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from vae_stream.decoder import (
    DecoderState,
    FrameChunk,
    check_latent,
    check_open,
    frame_chunk,
    latent_shape,
)
from vae_stream.geometry import BLOCK_LATENTS
from vae_stream.pixels import to_uint8
from vae_stream.taehv import TinyVae


class TinyNetwork(Protocol):
    """A network that decodes latent by latent, with memories that it is given and gives back."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def latent_channels(self) -> int:
        """Channels of a latent."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    def prepare_streaming(self) -> None:
        """Lay the weights out as single steps are fastest with."""
        ...

    def empty_memories(self, height: int, width: int) -> dict[str, Tensor]:
        """Return the memories before the first latent of `height` x `width`."""
        ...

    def step(
        self, latent_1CHW: Tensor, memories: Mapping[str, Tensor], *, last_frame_only: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Decode a normalised latent to 4 raw frames [T, 3, 16H, 16W] in 0..1, or the last of them.

        Returns the frames and the memories after them; those given are left as they are.
        """
        ...


class TinyDecoder:
    """Decodes normalised latent frames of one picture size.

    Args:
        network: on its device and in its dtype.
        height_px: picture height, a multiple of 16.
        width_px: picture width, a multiple of 16.
    """

    lookahead_latents = 0

    def __init__(self, network: TinyNetwork, *, height_px: int = 160, width_px: int = 256) -> None:
        self._latent_shape = latent_shape(network.latent_channels, height_px, width_px)
        self.height_px, self.width_px = height_px, width_px
        self.name = network.name
        self._network = network
        network.prepare_streaming()

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        height_px: int = 160,
        width_px: int = 256,
    ) -> TinyDecoder:
        """Read a folder with `config.json` and `model.safetensors`.

        Raises:
            ValueError: the folder's content does not fit.
            FileNotFoundError: a file is missing.
        """
        vae = TinyVae.from_pretrained(source, dtype=dtype, device=device)
        return cls(vae, height_px=height_px, width_px=width_px)

    def new_state(self, first_latent: int = 0) -> DecoderState:
        """Return the state before latent `first_latent`: empty memories."""
        return DecoderState(first_latent, self._network.empty_memories(*self._latent_shape[2:]))

    @torch.no_grad()
    def push(self, state: DecoderState, latent_BCHW: Tensor) -> tuple[FrameChunk, ...]:
        """Decode the next latent frame; see `StreamingDecoder`."""
        check_latent(state, latent_BCHW, self._latent_shape)
        index = state.latent_index
        raw_TCHW, memories = self._network.step(
            latent_BCHW.to(self._network.device),
            state.tensors,
            last_frame_only=index % BLOCK_LATENTS == 0,
        )
        state.latent_index = index + 1
        state.tensors = memories
        return (frame_chunk(to_uint8(raw_TCHW), index),)

    def flush(self, state: DecoderState) -> tuple[FrameChunk, ...]:
        """End the stream; nothing waits."""
        check_open(state)
        state.values["is_flushed"] = 1
        return ()

    def state_bytes(self) -> int:
        """Memory of one state."""
        memories = self._network.empty_memories(*self._latent_shape[2:])
        return sum(each.numel() * each.element_size() for each in memories.values())

    def close(self) -> None:
        """Nothing is kept beside the weights."""

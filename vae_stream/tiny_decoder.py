"""Streaming decoder of tiny causal networks: pictures of a latent come with it.

Owns the order of calls into the network, and the memory of streams. Invariants: a latent and the
memories lie at fixed addresses, so that a call can be recorded (class X: the same kernels on the
same numbers); the network writes no memory before it has read them all; a snapshot is a copy.
There are two calls: the first latent of a block gives one picture, each other one four.
Legend: T frames, C channels, H height, W width.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from graphs.buffers import StaticBuffers
from graphs.key import GraphKey, Phase
from graphs.runner import GraphRunner
from vae_stream.convolutions import convolutions_by_rule
from vae_stream.decoder import (
    DecoderSnapshot,
    DecoderState,
    FrameChunk,
    check_latent,
    check_open,
    frame_chunk,
    latent_shape,
)
from vae_stream.geometry import BLOCK_LATENTS, frame_count
from vae_stream.pixels import to_uint8
from vae_stream.recorded import Lender, decode_runner
from vae_stream.taehv import TinyVae

_LATENT = "latent"


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


class TinyState(DecoderState):
    """A stream of a tiny decoder.

    Args:
        first_latent: absolute index of its first latent.
        lender: where its memory comes from, and goes when nobody holds the state any more.
    """

    def __init__(self, first_latent: int, *, lender: Lender[StaticBuffers]) -> None:
        super().__init__(first_latent, {})
        self.lender = lender
        self.buffers = lender.take()
        weakref.finalize(self, lender.give, self.buffers)
        self.tensors = {name: self.buffers[name] for name in self.buffers.names if name != _LATENT}
        for memory in self.tensors.values():
            memory.zero_()

    def snapshot(self) -> DecoderSnapshot:
        """Return a copy of the memories."""
        return DecoderSnapshot(
            latent_index=self.latent_index,
            values=dict(self.values),
            tensors={name: memory.clone() for name, memory in self.tensors.items()},
        )

    def restore(self, snapshot: DecoderSnapshot) -> None:
        """Go back (or on) to a snapshot of the same decoder, from whatever device.

        Raises:
            ValueError: it is of another decoder.
        """
        self._check(snapshot)
        self.latent_index, self.values = snapshot.latent_index, dict(snapshot.values)
        for name, memory in self.tensors.items():
            memory.copy_(snapshot.tensors[name])


class TinyDecoder:
    """Decodes normalised latent frames of one picture size.

    Args:
        network: on its device and in its dtype.
        height_px: picture height, a multiple of 16.
        width_px: picture width, a multiple of 16.
        runner: records the calls, see `decode_runner`; None runs each anew.
    """

    lookahead_latents = 0

    def __init__(
        self,
        network: TinyNetwork,
        *,
        height_px: int = 160,
        width_px: int = 256,
        runner: GraphRunner | None = None,
    ) -> None:
        self._latent_shape = latent_shape(network.latent_channels, height_px, width_px)
        self.height_px, self.width_px = height_px, width_px
        self.name = network.name
        self._network, self.runner = network, runner
        network.prepare_streaming()
        # Not a method: the weights would hold themselves.
        self._lender = Lender(partial(_buffers, network, self._latent_shape))
        first = self._lender.take()
        self._state_bytes = first.size_bytes
        self._lender.give(first)

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
        runner = decode_runner(vae.device)
        return cls(vae, height_px=height_px, width_px=width_px, runner=runner)

    def new_state(self, first_latent: int = 0) -> TinyState:
        """Return the state before latent `first_latent`: empty memories."""
        return TinyState(first_latent, lender=self._lender)

    @torch.no_grad()
    def push(self, state: DecoderState, latent_BCHW: Tensor) -> tuple[FrameChunk, ...]:
        """Decode the next latent frame; see `StreamingDecoder`."""
        state = self._own(state)
        check_latent(state, latent_BCHW, self._latent_shape)
        state.buffers.copy_in(latent=latent_BCHW.to(self._network.device, torch.float32))
        index = state.latent_index
        frames_THWC = self._make(state.buffers, last_frame_only=index % BLOCK_LATENTS == 0)
        state.latent_index = index + 1
        return (frame_chunk(frames_THWC, index),)

    def flush(self, state: DecoderState) -> tuple[FrameChunk, ...]:
        """End the stream; nothing waits."""
        check_open(state)
        state.values["is_flushed"] = 1
        return ()

    def state_bytes(self) -> int:
        """Memory of one state."""
        return self._state_bytes

    def close(self) -> None:
        """Free recorded calls, and memory that no state holds."""
        if self.runner is not None:
            self.runner.close()
        self._lender.clear()

    def _make(self, buffers: StaticBuffers, *, last_frame_only: bool) -> Tensor:
        """Decode the latent in `buffers`, put the memories after it there; the caller's frames."""
        memories = {name: buffers[name] for name in buffers.names if name != _LATENT}

        def call() -> Tensor:
            with convolutions_by_rule(self._network.device):
                raw_TCHW, after = self._network.step(
                    buffers[_LATENT], memories, last_frame_only=last_frame_only
                )
            for name, memory in memories.items():
                memory.copy_(after[name])
            return to_uint8(raw_TCHW)

        if self.runner is None:
            return call()
        key = self._key(buffers, last_frame_only=last_frame_only)
        self.runner.allow([key])
        self.runner.begin_turn()
        fixed = [buffers[name] for name in buffers.names]
        frames_THWC = self.runner.run(key, call, fixed)
        assert frames_THWC is not None
        # A graph writes its frames to the same place each time; a copy is the reader's own.
        return frames_THWC.clone()

    def _key(self, buffers: StaticBuffers, *, last_frame_only: bool) -> GraphKey:
        """Rows are places of the latent, once for each picture; the latent before is history."""
        places = self._latent_shape[2] * self._latent_shape[3]
        dtype = buffers[buffers.names[-1]].dtype
        return GraphKey(
            phase=Phase.DECODE, rows=frame_count(0 if last_frame_only else 1) * places,
            history_rows=places, prefix_rows=0, dtype=dtype, batch=1,
        )  # fmt: skip

    def _own(self, state: DecoderState) -> TinyState:
        if not isinstance(state, TinyState) or state.lender is not self._lender:
            raise ValueError("state: of another decoder; expected one of new_state()")
        return state


def _buffers(network: TinyNetwork, latent_shape: tuple[int, int, int, int]) -> StaticBuffers:
    latent_BCHW = torch.zeros(latent_shape, device=network.device)
    return StaticBuffers({_LATENT: latent_BCHW, **network.empty_memories(*latent_shape[2:])})

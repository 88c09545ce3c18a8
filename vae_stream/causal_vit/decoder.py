"""The causal ViT as a streaming decoder: latents go in one by one, modes decide what is decoded.

Owns the order: latent into its buffer, the mode's plan, the call, the slice of its frames. A call
writes the ring before the state moves on; what a preview wrote is overwritten by the pair that
follows. Legend: C latents of a call, F latent channels, T frames, H height, W width.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from graphs.compile import CompileMode
from graphs.runner import GraphRunner
from vae_stream.causal_vit.fused import FusedCalls
from vae_stream.causal_vit.modes import (
    Mode,
    Step,
    kinds,
    lookahead_of,
    plan_flush,
    plan_push,
)
from vae_stream.causal_vit.places import CallKind, CausalConfig
from vae_stream.causal_vit.plain import PlainCalls
from vae_stream.causal_vit.state import CausalVitState, RingLender, ring_shape
from vae_stream.decoder import (
    DecoderState,
    FrameChunk,
    check_latent,
    check_open,
    frame_chunk,
    latent_shape,
)
from vae_stream.geometry import BLOCK_LATENTS, RAW_FRAMES, frame_count
from vae_stream.kernel_contract import kernels_run_on
from vae_stream.recorded import decode_runner
from vae_stream.vit import Block, Vit


class Form(StrEnum):
    """How calls run."""

    PLAIN = "plain"
    """Plain torch, on any device."""
    COMPILED = "compiled"
    """Compiled parts and fused attention, on CUDA with Triton."""
    RECORDED = "recorded"
    """The same, each kind of call as one graph."""


class _Calls(Protocol):
    @property
    def runner(self) -> GraphRunner | None: ...

    def run(self, state: CausalVitState, kind: CallKind) -> Tensor: ...

    def close(self) -> None: ...


class CausalVitDecoder:
    """Decodes normalised latent frames of one picture size.

    Args:
        vit: network on its device and in its dtype.
        height_px: picture height, a multiple of 16.
        width_px: picture width, a multiple of 16.
        mode: how latents are advanced.
        causal: how the network is used.
        form: how calls run; None for the fastest that the device has.

    Raises:
        ValueError: a size that 16 does not divide, or a form that the device has not.
    """

    def __init__(
        self,
        vit: Vit,
        *,
        height_px: int,
        width_px: int,
        mode: Mode = Mode.HYBRID_A3,
        causal: CausalConfig | None = None,
        form: Form | None = None,
    ) -> None:
        config, causal = vit.config, causal or CausalConfig()
        self._latent_shape = latent_shape(config.latent_channels, height_px, width_px)
        self.height_px, self.width_px = height_px, width_px
        self.mode = Mode(mode)
        self.name = f"causal ViT, {self.mode}"
        self.lookahead_latents = lookahead_of(self.mode)
        _, _, height, width = self._latent_shape
        device = vit.register_tokens.device
        self.form = form or _best_form(device)
        self._calls = _calls(self.form, vit, causal, height=height, width=width)
        shape = ring_shape(config, block_dtype(vit), height=height, width=width)
        self._lender = RingLender(shape, device)
        self._past = max(kind.past for kind in kinds(self.mode))

    def new_state(self, first_latent: int = 0) -> CausalVitState:
        """Return the state before latent `first_latent`: an empty ring."""
        return CausalVitState(first_latent, lender=self._lender, past=self._past)

    @torch.no_grad()
    def push(self, state: DecoderState, latent_BCHW: Tensor) -> tuple[FrameChunk, ...]:
        """Take the next latent frame; see `StreamingDecoder`."""
        state = self._own(state)
        check_latent(state, latent_BCHW, self._latent_shape)
        was_waiting = state.values["is_waiting"]
        step = plan_push(
            self.mode,
            is_odd=state.place % 2 == 1,
            ends_chunk=(state.latent_index + 1) % BLOCK_LATENTS == 0,
            is_waiting=bool(was_waiting),
            is_shown=bool(state.values["is_shown"]),
        )
        state.buffers.latents_CFHW[was_waiting].copy_(latent_BCHW[0], non_blocking=True)
        frames = self._make(state, step)
        state.latent_index += 1
        state.values |= {
            "is_waiting": int(step.waits), "is_shown": int(step.waits and bool(step.shown))
        }  # fmt: skip
        return frames

    @torch.no_grad()
    def flush(self, state: DecoderState) -> tuple[FrameChunk, ...]:
        """End the stream; a latent that waits for its partner gives its pictures."""
        state = self._own(state)
        check_open(state)
        step = plan_flush(
            self.mode,
            is_waiting=bool(state.values["is_waiting"]),
            is_shown=bool(state.values["is_shown"]),
        )
        if step.kind is not None:
            latents_CFHW = state.buffers.latents_CFHW
            latents_CFHW[1:].copy_(latents_CFHW[:1])
        frames = self._make(state, step)
        state.values["is_flushed"] = 1
        return frames

    def state_bytes(self) -> int:
        """Memory of one state."""
        return self._lender.shape.size_bytes

    @property
    def runner(self) -> GraphRunner | None:
        """What records calls: one a kind of call and a stream's memory."""
        return self._calls.runner

    def close(self) -> None:
        """Free recorded calls, and memory that no state holds."""
        self._calls.close()
        self._lender.clear()

    def _make(self, state: CausalVitState, step: Step) -> tuple[FrameChunk, ...]:
        """Run the call of a step, if it has one, and cut its frames."""
        if step.kind is None:
            return ()
        begin = state.next_latent
        state.buffers.clock_2[0].fill_(begin)
        frames_THWC = self._calls.run(state, step.kind)
        chunks = []
        for offset in step.shown:
            end = RAW_FRAMES * (offset + 1)
            # A graph writes its frames to the same place each time; a copy is the reader's own.
            own_THWC = frames_THWC[end - frame_count(begin + offset) : end].clone()
            chunks.append(frame_chunk(own_THWC, begin + offset))
        return tuple(chunks)

    def _own(self, state: DecoderState) -> CausalVitState:
        if not isinstance(state, CausalVitState) or state.lender is not self._lender:
            raise ValueError("state: of another decoder; expected one of new_state()")
        return state


def block_dtype(vit: Vit) -> torch.dtype:
    """Return the dtype of the blocks' products."""
    block = vit.blocks[0]
    assert isinstance(block, Block)
    return block.ff.w1.weight.dtype


def _best_form(device: torch.device) -> Form:
    return Form.RECORDED if device.type == "cuda" and kernels_run_on(device) else Form.PLAIN


def _calls(form: Form, vit: Vit, causal: CausalConfig, *, height: int, width: int) -> _Calls:
    if form == Form.PLAIN:
        return PlainCalls(vit, causal, height=height, width=width)
    device = vit.register_tokens.device
    if device.type != "cuda" or not kernels_run_on(device):
        raise ValueError(f"form: {form} on {device}; allowed: {Form.PLAIN}, or cuda with triton")
    runner = decode_runner(device) if form == Form.RECORDED else None
    return FusedCalls(
        vit, causal, height=height, width=width, compile_mode=CompileMode.BLOCKS, runner=runner
    )

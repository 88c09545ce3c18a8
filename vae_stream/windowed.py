"""Streaming decoder of the original H3 autoencoder, which decodes windows of 7 latents.

Owns the modes, the cutting into windows and tiles, the fades in time. Every latent gives the same
number of pictures as in other decoders; the modes differ in when, and in what the window saw:

    official        a block's pictures once its window is complete, 2 latents into the next block
    prefix_chunk    a block's pictures at its last latent, as if the stream ended there
    prefix_latent   a latent's pictures at once, as if the stream ended there; a window a latent

Invariants: pushing any latents and flushing gives what `decode_clip` makes of them in the mode
official, and in the others what it makes of the stream so far, to the bit where batches are equal;
state tensors are replaced, never written.
Source: MiniMax-H3 video autoencoder. Legend: B batch, C channels, T latents or frames, H height,
W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from graphs.compile import CompileMode
from graphs.runner import GraphRunner
from vae_stream.decoder import (
    DecoderState,
    FrameChunk,
    check_latent,
    check_open,
    frame_chunk,
    latent_shape,
)
from vae_stream.geometry import (
    BLOCK_LATENTS,
    RAW_FRAMES,
    SPATIAL_RATIO,
    TRIM_FRAMES,
    frame_count,
)
from vae_stream.pixels import from_imagenet, to_uint8
from vae_stream.tile_batches import TileBatches
from vae_stream.tiling import Tiling, cross_fade, plan_tiles
from vae_stream.vit import Vit
from vae_stream.window_fused import FusedWindows
from vae_stream.windows import (
    FADE_FRAMES,
    WINDOW_LATENTS,
    BlockPart,
    block_parts,
    window_slots,
    windows,
)

MODES = ("official", "prefix_chunk", "prefix_latent")
_TIME_AXIS = -3
_MAIN_FRAMES = RAW_FRAMES * BLOCK_LATENTS
_KEPT_LATENTS = {"official": 6, "prefix_chunk": 9, "prefix_latent": 6}
"""Latents before the next one that a window can still need."""


def lookahead_of(mode: str) -> int:
    """Return the latents of the next chunk that pictures of a chunk may wait for."""
    return WINDOW_LATENTS - BLOCK_LATENTS if mode == "official" else 0


class WindowedDecoder:
    """Decodes normalised latents of one picture size.

    Args:
        vit: network on its device.
        height_px: picture height, a multiple of 16.
        width_px: picture width, a multiple of 16.
        mode: one of `MODES`.
        tiling: part of what the pictures are; the default is the released one.
        tile_batch: most tiles decoded at once; None for all. With more than one, a GPU adds up in
            another order.
        compile_mode: of the network; compiled at the first window.
        group: ranks that share the tiles; each gets the same latents and has the same pictures.
    """

    def __init__(
        self,
        vit: Vit,
        *,
        height_px: int,
        width_px: int,
        mode: str = "official",
        tiling: Tiling | None = None,
        tile_batch: int | None = 1,
        compile_mode: CompileMode = CompileMode.EAGER,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode: {mode!r}; allowed: {', '.join(MODES)}")
        self._latent_shape = latent_shape(vit.config.latent_channels, height_px, width_px)
        self.height_px, self.width_px, self.mode = height_px, width_px, mode
        self.name = f"windowed H3, {mode}"
        self.lookahead_latents = lookahead_of(mode)
        self.runner: GraphRunner | None = None
        self._device = vit.register_tokens.device
        self._plan_px = plan_tiles(height_px, width_px, tiling or Tiling())
        self._plan = self._plan_px.scaled(SPATIAL_RATIO)
        is_eager = compile_mode == CompileMode.EAGER
        decode = vit if is_eager else FusedWindows(vit, compile_mode)
        self._batches = TileBatches(decode, limit=tile_batch, group=group)

    def new_state(self, first_latent: int = 0) -> DecoderState:
        """Return the state before latent `first_latent`, the first one of a block."""
        if first_latent < 0 or first_latent % BLOCK_LATENTS:
            raise ValueError(
                f"first_latent: {first_latent}; allowed: multiples of {BLOCK_LATENTS}, from 0"
            )
        _, channels, height, width = self._latent_shape
        kept = _KEPT_LATENTS[self.mode]
        tensors = {"latents": torch.zeros(1, channels, kept, height, width, device=self._device)}
        if self.mode == "official":
            size = 1, 3, FADE_FRAMES, self.height_px, self.width_px
            tensors["tail"] = torch.zeros(size, device=self._device)
        state = DecoderState(first_latent, tensors)
        state.values["first_latent"] = first_latent
        return state

    @torch.no_grad()
    def push(self, state: DecoderState, latent_BCHW: Tensor) -> tuple[FrameChunk, ...]:
        """Take the next latent; see `StreamingDecoder`."""
        check_latent(state, latent_BCHW, self._latent_shape)
        newest_BCTHW = latent_BCHW.to(self._device, torch.float32).unsqueeze(2)
        latents_BCTHW = torch.cat([state.tensors["latents"], newest_BCTHW], dim=2)
        count = state.latent_index + 1 - state.values["first_latent"]
        chunks: tuple[FrameChunk, ...] = ()
        tensors = {"latents": latents_BCTHW[:, :, 1:]}
        if self.mode == "official":
            tensors["tail"] = state.tensors["tail"]
            block, position = divmod(count - WINDOW_LATENTS, BLOCK_LATENTS)
            if block >= 0 and position == 0:
                raw = self._decode((block,), latents_BCTHW, count)
                before = {block - 1: tensors["tail"]}
                tensors["tail"] = _tail(raw[block])
                first = BLOCK_LATENTS * block
                parts = block_parts(first, first + BLOCK_LATENTS)
                chunks = self._chunks(state, first, parts, raw, before)
        else:
            first = count - 1 if self.mode == "prefix_latent" else count - BLOCK_LATENTS
            if self.mode == "prefix_latent" or count % BLOCK_LATENTS == 0:
                chunks = self._prefix(state, first, count, latents_BCTHW)
        state.latent_index += 1
        state.tensors = tensors
        return chunks

    @torch.no_grad()
    def flush(self, state: DecoderState) -> tuple[FrameChunk, ...]:
        """End the stream: pictures of the latents that waited, as if it had been meant so."""
        check_open(state)
        count = state.latent_index - state.values["first_latent"]
        chunks: tuple[FrameChunk, ...] = ()
        latents_BCTHW = state.tensors["latents"]
        if self.mode == "official":
            done = max(0, (count - WINDOW_LATENTS) // BLOCK_LATENTS + 1)
            first = BLOCK_LATENTS * done
            if first < count:
                parts = block_parts(first, count)
                needed = tuple(w for w in windows(parts) if w >= done)
                raw = self._decode(needed, latents_BCTHW, count)
                chunks = self._chunks(state, first, parts, raw, {done - 1: state.tensors["tail"]})
        elif self.mode == "prefix_chunk" and count % BLOCK_LATENTS:
            first = count - count % BLOCK_LATENTS
            chunks = self._prefix(state, first, count, latents_BCTHW)
        state.values["is_flushed"] = 1
        return chunks

    def decode_clip(self, latents_BCTHW: Tensor) -> Tensor:
        """Return all pictures [F, H, W, 3], uint8, of a stream that is known as a whole.

        Raises:
            ValueError: another shape.
        """
        return self._pictures(self.clip_frames(latents_BCTHW))

    @torch.no_grad()
    def clip_frames(self, latents_BCTHW: Tensor) -> Tensor:
        """Return the frames [1, 3, F, H, W] of a whole stream, fp32, ImageNet-normalised.

        All its windows' tiles form the batches together, which `tile_batch` limits.

        Raises:
            ValueError: another shape.
        """
        batch, channels, count, *size = latents_BCTHW.shape
        if (batch, channels, *size) != self._latent_shape or count < 1:
            raise ValueError(
                f"latents_BCTHW: shape {tuple(latents_BCTHW.shape)}; allowed: 1 or more latents of "
                f"shape {self._latent_shape}"
            )
        parts = block_parts(0, count)
        raw = self._decode(windows(parts), latents_BCTHW.to(self._device, torch.float32), count)
        return _assemble(parts, raw, {})

    def state_bytes(self) -> int:
        """Memory of one state."""
        state = self.new_state()
        return sum(each.numel() * each.element_size() for each in state.tensors.values())

    def close(self) -> None:
        """Nothing is kept beside the weights."""

    def _prefix(
        self, state: DecoderState, first: int, count: int, latents_BCTHW: Tensor
    ) -> tuple[FrameChunk, ...]:
        """Pictures of latents from `first` on, of a stream that would end at `count`."""
        parts = block_parts(first, count)
        raw = self._decode(windows(parts), latents_BCTHW, count)
        return self._chunks(state, first, parts, raw, {})

    def _decode(
        self, chosen: Sequence[int], latents_BCTHW: Tensor, count: int
    ) -> dict[int, Tensor]:
        """Raw frames [1, 3, 28, H, W] of windows; the latents are the last ones before `count`."""
        offset = latents_BCTHW.shape[2] - count
        tiles: list[Tensor] = []
        for window in chosen:
            slots = [latents_BCTHW[:, :, slot + offset] for slot in window_slots(window, count)]
            tiles += (tile[0] for tile in self._plan.cut(torch.stack(slots, dim=2)))
        if not tiles:
            return {}
        made = self._batches.run(tiles)
        each = self._plan.tile_count
        return {
            window: self._plan_px.join(made[at * each : (at + 1) * each]).unsqueeze(0)
            for at, window in enumerate(chosen)
        }

    def _chunks(
        self,
        state: DecoderState,
        first: int,
        parts: tuple[BlockPart, ...],
        raw: Mapping[int, Tensor],
        tails: Mapping[int, Tensor],
    ) -> tuple[FrameChunk, ...]:
        frames_FHWC = self._pictures(_assemble(parts, raw, tails))
        index = state.values["first_latent"] + first
        chunks, taken = [], 0
        while taken < frames_FHWC.shape[0]:
            more = frame_count(index)
            chunks.append(frame_chunk(frames_FHWC[taken : taken + more], index))
            index, taken = index + 1, taken + more
        return tuple(chunks)

    @staticmethod
    def _pictures(frames_BCTHW: Tensor) -> Tensor:
        return to_uint8(from_imagenet(frames_BCTHW[0].transpose(0, 1)))


def _assemble(
    parts: Sequence[BlockPart], raw: Mapping[int, Tensor], tails: Mapping[int, Tensor]
) -> Tensor:
    """Join pictures of blocks, faded in time; `tails` are of windows that `raw` lacks."""
    joined = []
    for part in parts:
        before = None
        if part.before is not None:
            before = tails[part.before] if part.before in tails else _tail(raw[part.before])
        if part.own is None:
            assert before is not None
            block = before
        else:
            block = raw[part.own][:, :, TRIM_FRAMES:_MAIN_FRAMES]
            if before is not None:
                block = cross_fade(before, block, FADE_FRAMES, _TIME_AXIS)
        joined.append(block[:, :, part.frames])
    return torch.cat(joined, dim=2)


def _tail(raw_BCTHW: Tensor) -> Tensor:
    """Pictures of a window that belong to the next block."""
    return raw_BCTHW[:, :, _MAIN_FRAMES + TRIM_FRAMES :]

"""Decoding beside the model: on a GPU in a stream of its own, whose pictures come to the host.

    model     denoise, denoise, denoise, denoise |        | refresh, slide     | denoise of the next
    decoder                                      | 0, 1   | 2, 3, 4 |
    host      latch, launch                      | waits for 0, 1, 2, 3, 4     | latch, launch

Owns the order of launches and copies. Invariants: pictures come in order, and those of a latent as
soon as they are there; nobody waits for the refresh; pictures are copied to the host before the
decoder's outputs change. On a CPU a latent is decoded when its pictures are asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from engine.device import fetch
from engine.side_work import SideWork

if TYPE_CHECKING:
    import torch

    from engine.types import SpanClock
    from vae_stream.decoder import DecoderState, FrameChunk, StreamingDecoder

_AHEAD = 2
"""Latents that are launched before any picture is taken: a pair."""
_HIGH = -1
"""Priority before the refresh, whose end nobody waits for while somebody waits for a picture."""


class DecodeLane:
    """The decoder's stream.

    Args:
        device: of the decoder.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._work = SideWork(device, priority=_HIGH)

    def start(
        self,
        decoder: StreamingDecoder,
        state: DecoderState,
        latents_BCTHW: Tensor,
        clock: SpanClock,
    ) -> Iterator[FrameChunk]:
        """Begin with the latents of a chunk.

        On CUDA what gives the first frames is launched before this returns.

        Args:
            decoder: whose calls go through this lane alone, or after `join`.
            state: of the stream.
            latents_BCTHW: of the chunk; what makes them may still run.
            clock: gets the marks `decode`; `first_frames`, when the first ones are in host
                memory; and, for each latent that is taken, `decoded_INDEX`.

        Returns the pictures that are due, in host memory.
        """
        has_frames = False

        def push(index: int) -> Callable[[], tuple[FrameChunk, ...]]:
            nonlocal has_frames
            with self._work.beside(latents_BCTHW):
                if index == 0:
                    clock.mark("decode")
                frames = decoder.push(state, latents_BCTHW[:, :, index])
                take = _to_host(frames)
                clock.mark(f"decoded_{index}")
                if frames and not has_frames:
                    clock.mark("first_frames")
                    has_frames = True
                return take

        count = latents_BCTHW.shape[2]
        launched: deque[Callable[[], tuple[FrameChunk, ...]]] = deque()
        while self._is_cuda and not has_frames and len(launched) < min(count, _AHEAD):
            launched.append(push(len(launched)))
        return self._take(launched, push, count)

    def flush(self, decoder: StreamingDecoder, state: DecoderState) -> tuple[FrameChunk, ...]:
        """Return the pictures that wait for latents which will not come."""
        with self._work.beside():
            take = _to_host(decoder.flush(state))
        return take()

    def join(self) -> None:
        """Let what is launched next, in the current stream, come after what is decoded."""
        self._work.join()

    def _take(
        self,
        launched: deque[Callable[[], tuple[FrameChunk, ...]]],
        push: Callable[[int], Callable[[], tuple[FrameChunk, ...]]],
        count: int,
    ) -> Iterator[FrameChunk]:
        ahead = len(launched)
        for index in range(ahead, count + ahead):
            if index < count:
                launched.append(push(index))
            yield from launched.popleft()()


def _to_host(chunks: tuple[FrameChunk, ...]) -> Callable[[], tuple[FrameChunk, ...]]:
    """Begin to copy pictures; the result waits for them."""
    copies = [fetch(each.frames_THWC) for each in chunks]
    return lambda: tuple(
        replace(each, frames_THWC=copy()) for each, copy in zip(chunks, copies, strict=True)
    )

"""Pictures of a chunk: when each latent is decoded, and that nothing but time depends on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.clock import HostClock
from stream.decode_lane import DecodeLane
from vae_stream.decoder import DecoderState, FrameChunk
from vae_stream.taehv import TinyVae, TinyVaeConfig
from vae_stream.tiny_decoder import TinyDecoder

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")


class WatchedDecoder(TinyDecoder):
    """Notes which latents were pushed."""

    def __init__(self) -> None:
        super().__init__(TinyVae(TinyVaeConfig()).eval(), height_px=32, width_px=32)
        self.pushed: list[int] = []

    def push(self, state: DecoderState, latent_BCHW: Tensor) -> tuple[FrameChunk, ...]:
        self.pushed.append(state.latent_index)
        return super().push(state, latent_BCHW)


@pytest.fixture
def decoder() -> WatchedDecoder:
    return WatchedDecoder()


def _latents() -> Tensor:
    return torch.randn(1, 24, 5, 2, 2, generator=torch.Generator().manual_seed(1))


def test_a_latent_is_decoded_when_its_pictures_are_asked_for(decoder: WatchedDecoder) -> None:
    frames = DecodeLane(CPU).start(decoder, decoder.new_state(), _latents(), HostClock())
    assert decoder.pushed == []
    next(frames)
    assert decoder.pushed == [0]
    assert [each.latent_index for each in frames] == [1, 2, 3, 4]


def test_pictures_are_those_of_the_decoder_alone(decoder: WatchedDecoder) -> None:
    lane, state, latents = DecodeLane(CPU), decoder.new_state(), _latents()
    expected = [decoder.push(state, each)[0].frames_THWC for each in latents.unbind(2)]
    found = lane.start(decoder, decoder.new_state(), latents, HostClock())
    for frames, each in zip(expected, found, strict=True):
        assert torch.equal(frames, each.frames_THWC)


@pytest.mark.parametrize("name", ["decode", "first_frames", "decoded_4"])
def test_the_clock_of_the_step_is_marked(decoder: WatchedDecoder, name: str) -> None:
    clock = HostClock()
    list(DecodeLane(CPU).start(decoder, decoder.new_state(), _latents(), clock))
    assert clock.between_ms("decode", name) >= 0.0


def _flush(lane: DecodeLane, decoder: WatchedDecoder, state: DecoderState) -> object:
    return lane.flush(decoder, state)


def _start(lane: DecodeLane, decoder: WatchedDecoder, state: DecoderState) -> object:
    return list(lane.start(decoder, state, _latents(), HostClock()))


@pytest.mark.parametrize("call", [_flush, _start])
def test_a_stream_that_has_ended_is_refused(
    decoder: WatchedDecoder, call: Callable[[DecodeLane, WatchedDecoder, DecoderState], object]
) -> None:
    lane, state = DecodeLane(CPU), decoder.new_state()
    assert lane.flush(decoder, state) == ()
    with pytest.raises(ValueError, match="flushed"):
        call(lane, decoder, state)

"""Recorded calls of tiny decoders against calls that run anew: the same bits."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from graphs.runner import GraphRunner, RunnerLimits
from tests.graphs.tape import TapeCapture
from tests.vae_stream.convolutions_seen import ConvolutionsSeen
from tests.vae_stream.streams import assert_equal, decode
from vae_stream import TinyDecoder, TinyVae, TinyVaeConfig, tiny_decoder
from vae_stream.convolutions import convolutions_by_rule
from vae_stream.recorded import decode_runner
from vae_stream.taeh3 import Taeh3, Taeh3Config

pytestmark = pytest.mark.cpu

SIZE = {"height_px": 32, "width_px": 48}
SHAPE = (1, 24, 2, 3)
CUDA = torch.device("cuda")


@pytest.fixture(scope="module", params=["tiny", "taeh3"])
def network(request: pytest.FixtureRequest) -> TinyVae | Taeh3:
    torch.manual_seed(4)
    if request.param == "taeh3":
        made = Taeh3(Taeh3Config(decoder_widths=(16, 12, 8, 8), encoder_width=8))
        return made.eval().requires_grad_(False)
    config = TinyVaeConfig(
        decoder_widths=(16, 12, 8), head_width=4, encoder_widths=(8, 8, 16), latents_std=(2.0,) * 24
    )
    return TinyVae(config).eval().requires_grad_(False)


@pytest.fixture
def tape() -> TapeCapture:
    return TapeCapture()


@pytest.fixture
def runner(tape: TapeCapture) -> GraphRunner:
    return GraphRunner(tape, RunnerLimits(captures_per_turn=1, is_strict=True))


@pytest.fixture
def recorded(network: TinyVae | Taeh3, runner: GraphRunner) -> Iterator[TinyDecoder]:
    decoder = TinyDecoder(network, **SIZE, runner=runner)
    yield decoder
    decoder.close()


@pytest.fixture
def plain(network: TinyVae | Taeh3) -> TinyDecoder:
    return TinyDecoder(network, **SIZE)


def latents(count: int, seed: int = 1) -> list[Tensor]:
    return list(torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed)))


def test_a_stream_has_two_recordings_and_the_bits_of_plain_calls(
    plain: TinyDecoder, recorded: TinyDecoder, runner: GraphRunner
) -> None:
    z = latents(12)

    # Frames are compared at the end: later replays do not write into those handed out.
    assert_equal(decode(recorded, z), decode(plain, z))

    assert (runner.counts.plain, runner.counts.captures, runner.counts.replays) == (2, 2, 8)
    assert sorted(entry.key.rows for entry in runner.entries) == [6, 24]


def test_a_stream_after_another_replays_from_its_first_latent(
    plain: TinyDecoder, recorded: TinyDecoder, runner: GraphRunner
) -> None:
    decode(recorded, latents(7))
    gc.collect()
    z = latents(6, seed=2)

    assert_equal(decode(recorded, z), decode(plain, z))

    assert (runner.counts.plain, runner.counts.captures) == (2, 2)


def test_memories_lie_from_the_first_as_the_network_leaves_them(
    plain: TinyDecoder, network: TinyVae | Taeh3
) -> None:
    # Kernels choose by strides: a first latent would have the bits of other ones.
    memories = plain.new_state().tensors
    _, after = network.step(latents(1)[0], memories, last_frame_only=False)

    strides = {name: memory.stride()[1:] for name, memory in memories.items()}
    assert strides == {name: memory.stride()[1:] for name, memory in after.items()}


def test_two_streams_in_turn_do_not_touch_each_other(
    plain: TinyDecoder, recorded: TinyDecoder, runner: GraphRunner
) -> None:
    streams = latents(8), latents(8, seed=2)
    states = recorded.new_state(), recorded.new_state()
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for pair in zip(*streams, strict=True):
        for frames, state, one in zip(found, states, pair, strict=True):
            frames += [chunk.frames_THWC for chunk in recorded.push(state, one)]

    for frames, z in zip(found, streams, strict=True):
        assert_equal(frames, decode(plain, z))
    assert len(runner.entries) == 4


def test_a_recording_goes_on_from_a_snapshot(plain: TinyDecoder, recorded: TinyDecoder) -> None:
    z, state = latents(9), recorded.new_state()
    for one in z[:7]:
        recorded.push(state, one)
    point = state.snapshot()
    for one in latents(4, seed=2):
        recorded.push(state, one)

    state.restore(point)

    found = [chunk.frames_THWC for one in z[7:] for chunk in recorded.push(state, one)]
    assert_equal(found, decode(plain, z)[7:])


def test_a_device_that_cannot_record_says_so_once_and_decodes(
    network: TinyVae | Taeh3, plain: TinyDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    runner = GraphRunner(TapeCapture(refuse="no graphs here"), RunnerLimits(captures_per_turn=1))
    decoder, z = TinyDecoder(network, **SIZE, runner=runner), latents(12)

    with caplog.at_level(logging.WARNING):
        assert_equal(decode(decoder, z), decode(plain, z))

    refused = [record.getMessage() for record in caplog.records]
    assert len(refused) == 2  # one a call
    assert all("no graphs here" in each for each in refused)


def test_a_call_is_recorded_with_the_convolutions_that_it_was_warmed_up_with(
    plain: TinyDecoder, recorded: TinyDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(
        tiny_decoder, "convolutions_by_rule", lambda device: convolutions_by_rule(CUDA)
    )
    z = latents(6)
    with ConvolutionsSeen() as seen:
        found = decode(recorded, z)

    assert_equal(found, decode(plain, z))
    assert seen.calls
    assert all(call.told is not None and not call.told["benchmark"] for call in seen.calls)
    assert all(call.switches["benchmark"] for call in seen.calls)


def test_closing_gives_recordings_up(recorded: TinyDecoder, tape: TapeCapture) -> None:
    state = recorded.new_state()
    for one in latents(6):
        recorded.push(state, one)

    recorded.close()

    assert tape.log.count("release") == 2
    with pytest.raises(RuntimeError, match="the runner is closed"):
        recorded.push(state, latents(1)[0])


def test_closing_frees_the_memory_of_streams_that_ended(recorded: TinyDecoder) -> None:
    states = recorded.new_state(), recorded.new_state()
    held, lent = (weakref.ref(state.buffers) for state in states)
    state = states[0]
    del states
    gc.collect()
    assert lent() is not None

    recorded.close()

    assert lent() is None
    assert held() is state.buffers


def test_latents_in_bf16_are_taken_as_they_are(plain: TinyDecoder, recorded: TinyDecoder) -> None:
    z = [one.bfloat16() for one in latents(7)]

    assert_equal(decode(recorded, z), decode(plain, [one.float() for one in z]))


def test_a_cpu_records_nothing() -> None:
    assert decode_runner(torch.device("cpu")) is None

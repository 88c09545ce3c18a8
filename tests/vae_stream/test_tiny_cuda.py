"""Tiny decoders on a GPU: recorded calls have the bits of those that run anew."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from graphs.runner import GraphRunner
from tests.vae_stream.h3_tiny import randomise
from tests.vae_stream.streams import assert_equal, decode
from vae_stream import TinyDecoder, TinyVae, TinyVaeConfig
from vae_stream.recorded import decode_runner
from vae_stream.taeh3 import Taeh3, Taeh3Config

pytestmark = pytest.mark.gpu

SIZE = {"height_px": 160, "width_px": 256}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(autouse=True)
def _as_in_use() -> None:
    torch.use_deterministic_algorithms(False)


@pytest.fixture(
    scope="module", params=[(kind, dtype) for kind in ("tiny", "taeh3") for dtype in DTYPES]
)
def network(request: pytest.FixtureRequest) -> TinyVae | Taeh3:
    kind, dtype = request.param
    torch.manual_seed(4)
    made = TinyVae(TinyVaeConfig()) if kind == "tiny" else Taeh3(Taeh3Config())
    if kind == "taeh3":
        randomise(made)
    made = made.eval().requires_grad_(False).cuda()
    return made.cast(DTYPES[dtype]) if isinstance(made, TinyVae) else made.to(DTYPES[dtype])


@pytest.fixture
def runner() -> GraphRunner:
    made = decode_runner(torch.device("cuda"))
    assert made is not None
    return made


@pytest.fixture
def recorded(network: TinyVae | Taeh3, runner: GraphRunner) -> Iterator[TinyDecoder]:
    decoder = TinyDecoder(network, **SIZE, runner=runner)
    yield decoder
    decoder.close()


@pytest.fixture
def plain(network: TinyVae | Taeh3) -> TinyDecoder:
    return TinyDecoder(network, **SIZE)


def latents(count: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, 1, 24, 10, 16, generator=generator).cuda())


@pytest.mark.parametrize("measures", [False, True], ids=["by rule", "cuDNN measures"])
def test_a_recorded_stream_has_the_bits_of_a_plain_one(
    plain: TinyDecoder,
    recorded: TinyDecoder,
    runner: GraphRunner,
    monkeypatch: pytest.MonkeyPatch,
    measures: bool,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", measures)
    z = latents(25)

    assert_equal(decode(recorded, z), decode(plain, z))

    assert (runner.counts.captures, runner.counts.failures) == (2, 0)
    assert float(torch.cat(decode(plain, z)).float().std()) > 1.0


def test_a_stream_after_a_reset_replays_from_its_first_latent(
    plain: TinyDecoder, recorded: TinyDecoder, runner: GraphRunner
) -> None:
    decode(recorded, latents(7))
    gc.collect()
    z = latents(11, seed=2)

    assert_equal(decode(recorded, z), decode(plain, z))

    assert (runner.counts.plain, runner.counts.captures) == (2, 2)


def test_two_streams_in_turn_do_not_touch_each_other(
    plain: TinyDecoder, recorded: TinyDecoder
) -> None:
    streams = latents(12), latents(12, seed=2)
    states = recorded.new_state(), recorded.new_state()
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for pair in zip(*streams, strict=True):
        for frames, state, one in zip(found, states, pair, strict=True):
            frames += [chunk.frames_THWC for chunk in recorded.push(state, one)]

    for frames, z in zip(found, streams, strict=True):
        assert_equal(frames, decode(plain, z))


def test_a_recording_goes_on_from_a_snapshot(plain: TinyDecoder, recorded: TinyDecoder) -> None:
    z, state = latents(14), recorded.new_state()
    for one in z[:12]:
        recorded.push(state, one)
    point = state.snapshot()
    for one in latents(4, seed=2):
        recorded.push(state, one)

    state.restore(point)

    found = [chunk.frames_THWC for one in z[12:] for chunk in recorded.push(state, one)]
    assert_equal(found, decode(plain, z)[12:])


def test_steady_pushes_allocate_nothing(recorded: TinyDecoder) -> None:
    state, z = recorded.new_state(), latents(30)
    for one in z[:10]:
        recorded.push(state, one)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for one in z[10:]:
        recorded.push(state, one)
    assert torch.cuda.memory_reserved() == before

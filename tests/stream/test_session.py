import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

from engine.config import FRAMES_PER_LATENT, EngineConfig, Geometry, preset
from engine.engine import Engine
from engine.errors import ConfigError, StateError
from engine.model.dit import MiniMaxH3Transformer
from engine.rollout import Rollout
from engine.speed import speed_parts
from engine.types import Action, Control
from graphs.runner import GraphRunner
from stream.renderer import RendererWorld
from stream.session import ModelWorld, Session
from stream.world_spec import Start
from stream.worlds import default_prompt
from tests.graphs.tape import TapeCapture
from tests.vae_stream.h3_tiny import random_vit
from vae_stream.causal_vit import CausalVitDecoder, Mode
from vae_stream.decoder import DecoderState, FrameChunk
from vae_stream.taehv import TinyVae, TinyVaeConfig
from vae_stream.tiny_decoder import TinyDecoder
from vae_stream.vit import VitConfig

pytestmark = pytest.mark.cpu

FORWARD = Action.from_keys([[Control.FORWARD]] * 17)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.from_random(preset("tiny").model, EngineConfig(device="cpu", dtype="float32"))
    yield engine
    engine.close()


@pytest.fixture
def world(engine: Engine) -> ModelWorld:
    return _world(engine, TinyDecoder)


class LateDecoder(TinyDecoder):
    """Gives the pictures of a latent when the two after it are there, or at the end."""

    lookahead_latents = 2

    def new_state(self, first_latent: int = 0) -> DecoderState:
        state = super().new_state(first_latent)
        state.values["waiting"] = 0
        self.waiting: list[FrameChunk] = []
        return state

    def push(self, state: DecoderState, latent_BCHW: torch.Tensor) -> tuple[FrameChunk, ...]:
        self.waiting += super().push(state, latent_BCHW)
        due, self.waiting = self.waiting[:-2], self.waiting[-2:]
        return tuple(due)

    def flush(self, state: DecoderState) -> tuple[FrameChunk, ...]:
        super().flush(state)
        return tuple(self.waiting)


def _world(engine: Engine, kind: type[TinyDecoder]) -> ModelWorld:
    size = engine.model_config.geometry
    anchor_BCTHW = torch.zeros(1, 24, 1, size.latent_height, size.latent_width)
    return ModelWorld(engine, _decoder(engine, kind), anchor_BCTHW=anchor_BCTHW)


def _decoder(engine: Engine, kind: type[TinyDecoder]) -> TinyDecoder:
    size = engine.model_config.geometry
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = TinyVae(TinyVaeConfig()).eval().requires_grad_(False)
    return kind(vae, height_px=size.height_px, width_px=size.width_px)


def _frames(session: Session, action: Action = FORWARD) -> torch.Tensor:
    return torch.cat([chunk.frames_THWC for chunk in session.step(action)])


def test_a_step_yields_frames_latent_by_latent(world: ModelWorld) -> None:
    session = Session(world, prompt="a lake", seed=0)
    for chunk_index in range(2):
        portions = list(session.step(FORWARD))
        counts = [len(portion.frames_THWC) for portion in portions]
        assert counts == list(FRAMES_PER_LATENT)
        assert portions[0].first_frame == 17 * chunk_index
    assert session.chunk_index == 2


def test_a_world_tells_what_records_its_passes_and_what_attends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _world(engine, TinyDecoder)
    assert plain.runners == {}
    assert set(plain.attention_names) == {"conditioning", "audio", "video"}

    def recorded_parts(model: MiniMaxH3Transformer, config: EngineConfig, **named: int) -> object:
        runner = GraphRunner(TapeCapture())
        return dataclasses.replace(speed_parts(model, config, **named), runner=runner)

    monkeypatch.setattr("engine.engine.speed_parts", recorded_parts)
    recorded = Engine.from_random(engine.model_config, engine.config)
    world = _world(recorded, TinyDecoder)
    assert world._decoder is not None
    world._decoder.runner = GraphRunner(TapeCapture())
    session, expected = (Session(each, prompt="a lake", seed=0) for each in (world, plain))
    for _ in range(2):
        assert torch.equal(_frames(session), _frames(expected))
    counts = {part: runner.counts for part, runner in world.runners.items()}
    # Windows of one chunk and of two are new, each in its only turn; latents are of two kinds.
    assert counts["transformer"].plain == 2 * (engine.model_config.sampler.steps + 1)
    assert (counts["decoder"].plain, counts["decoder"].captures) == (2, 2)
    recorded.close()
    assert world.runners.keys() == {"decoder"}


def test_frames_come_before_the_chunk_is_history(world: ModelWorld) -> None:
    session = Session(world, prompt="a lake", seed=0)
    portions = session.step(FORWARD)
    assert len([next(portions) for _ in FRAMES_PER_LATENT]) == len(FRAMES_PER_LATENT)
    assert world._begun().chunk_index == 0
    assert list(portions) == []
    assert world._begun().chunk_index == 1


def test_a_device_has_the_refresh_before_the_host_waits_for_the_latents(
    engine: Engine, world: ModelWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Session(world, prompt="a lake", seed=0)
    frames = _frames(expected)
    order: list[str] = []
    commit, settle, join = engine.commit, engine.settle, world._lane.join

    def launch(rollout: Rollout, *, beside: bool = False) -> None:
        order.append("refresh beside" if beside else "refresh")
        commit(rollout, beside=beside)

    def settle_last(rollout: Rollout) -> None:
        order.append("settle")
        settle(rollout)

    def copy_later(value: torch.Tensor) -> Callable[[], torch.Tensor]:
        def wait() -> torch.Tensor:
            order.append("wait")
            return value

        order.append("copy")
        return wait

    def wait_for_frames() -> None:
        order.append("first frames")
        join()

    session = Session(world, prompt="a lake", seed=0)
    world.device = "cuda:0"
    monkeypatch.setattr(engine, "commit", launch)
    monkeypatch.setattr(engine, "settle", settle_last)
    monkeypatch.setattr(world._lane, "join", wait_for_frames)
    monkeypatch.setattr("engine.device.fetch", copy_later)
    portions = session.step(FORWARD)
    first = next(portions).frames_THWC
    assert order == ["copy", "first frames", "refresh beside", "wait"]
    assert session.digest.hex() == expected.digest.hex()
    assert torch.equal(torch.cat([first, *(each.frames_THWC for each in portions)]), frames)
    assert order[4:] == ["settle"]
    assert world._begun().chunk_index == 1


def test_equal_inputs_make_equal_digests(world: ModelWorld) -> None:
    session = Session(world, prompt="a lake", seed=5)
    first = _frames(session)
    digest = session.digest.hex()
    session.reset()
    assert torch.equal(_frames(session), first)
    assert session.digest.hex() == digest


@pytest.mark.parametrize("change", ["seed", "prompt", "action"])
def test_each_input_changes_the_digest(world: ModelWorld, change: str) -> None:
    session = Session(world, prompt="a lake", seed=5)
    _frames(session)
    _frames(session)
    before = session.digest.hex()
    session.reset("snow" if change == "prompt" else None, seed=6 if change == "seed" else None)
    _frames(session, Action.still() if change == "action" else FORWARD)
    _frames(session)
    assert session.digest.hex() != before


def test_reset_raises_the_epoch(world: ModelWorld) -> None:
    session = Session(world, prompt="", seed=0)
    assert session.epoch == 0
    assert session.reset() == 1
    assert session.chunk_index == 0


def test_reset_ends_the_frames_of_the_old_epoch(world: ModelWorld) -> None:
    session = Session(world, prompt="", seed=0)
    old = session.step(FORWARD)
    next(old)
    session.reset()
    assert list(old) == []
    assert session.chunk_index == 0
    assert len(_frames(session)) == 17


def test_one_step_at_a_time(world: ModelWorld) -> None:
    session = Session(world, prompt="", seed=0)
    next(session.step(FORWARD))
    with pytest.raises(StateError, match="step is under way"):
        next(session.step(FORWARD))
    with pytest.raises(StateError, match="step is under way"):
        session.switch_prompt("snow")


def test_prompt_switch_changes_the_next_chunk_only(world: ModelWorld) -> None:
    session = Session(world, prompt="a lake", seed=0)
    plain = [_frames(session), _frames(session)]
    session.reset()
    switched = [_frames(session)]
    session.switch_prompt("snow")
    switched.append(_frames(session))
    assert torch.equal(plain[0], switched[0])
    assert not torch.equal(plain[1], switched[1])


def test_without_a_decoder_there_are_latents_only(engine: Engine, world: ModelWorld) -> None:
    size = engine.model_config.geometry
    anchor_BCTHW = torch.zeros(1, 24, 1, size.latent_height, size.latent_width)
    latents_only = Session(ModelWorld(engine, None, anchor_BCTHW=anchor_BCTHW), prompt="", seed=0)
    whole = Session(world, prompt="", seed=0)
    _frames(whole)
    assert not latents_only.world.has_frames
    assert list(latents_only.step(FORWARD)) == []
    assert latents_only.digest.hex() == whole.digest.hex()


def test_frames_that_wait_for_later_latents_come_in_order(engine: Engine) -> None:
    prompt = Session(_world(engine, TinyDecoder), prompt="a lake", seed=0)
    late = Session(_world(engine, LateDecoder), prompt="a lake", seed=0)
    expected = [*prompt.step(FORWARD), *prompt.step(FORWARD)]
    assert late.world.lookahead_latents == 2

    chunks = [list(late.step(FORWARD)), list(late.step(FORWARD)), list(late.finish())]

    assert [len(portions) for portions in chunks] == [3, 5, 2]
    made = [portion for portions in chunks for portion in portions]
    assert [each.first_frame for each in made] == [each.first_frame for each in expected]
    assert all(
        torch.equal(a.frames_THWC, b.frames_THWC) for a, b in zip(made, expected, strict=True)
    )


def test_a_decoder_takes_over_at_the_border_of_a_chunk(engine: Engine) -> None:
    world = _world(engine, LateDecoder)
    session = Session(world, prompt="a lake", seed=0)
    portions = list(session.step(FORWARD))

    portions += world.swap_decoder(_decoder(engine, TinyDecoder))
    portions += [*session.step(FORWARD), *session.finish()]

    assert [each.latent_index for each in portions] == list(range(10))
    assert world.lookahead_latents == 0


def _causal(engine: Engine, mode: Mode) -> CausalVitDecoder:
    size = engine.model_config.geometry
    vit = random_vit(VitConfig(layer_count=2, head_count=1, ffn_width=32))
    return CausalVitDecoder(vit, height_px=size.height_px, width_px=size.width_px, mode=mode)


def _causal_world(engine: Engine, mode: Mode) -> ModelWorld:
    world = _world(engine, TinyDecoder)
    Session(world, prompt="a lake", seed=0)
    world.swap_decoder(_causal(engine, mode))
    return world


def test_pairs_of_latents_cross_the_border_of_chunks(engine: Engine) -> None:
    world = _causal_world(engine, Mode.PAIR)
    session = Session(world, prompt="a lake", seed=0)
    chunks = [list(session.step(FORWARD)) for _ in range(3)] + [list(session.finish())]
    assert [len(portions) for portions in chunks] == [4, 6, 4, 1]
    made = [portion for portions in chunks for portion in portions]
    assert [each.latent_index for each in made] == list(range(15))
    assert [len(each.frames_THWC) for each in made] == [*FRAMES_PER_LATENT] * 3


def test_a_chunk_shows_with_its_last_latent_in_the_default_mode(engine: Engine) -> None:
    world = _causal_world(engine, Mode.HYBRID_A3)
    assert world.lookahead_latents == 0
    session = Session(world, prompt="a lake", seed=0)
    for _ in range(3):
        assert len(_frames(session)) == 17
    assert list(session.finish()) == []


@pytest.mark.parametrize("mode", [Mode.PAIR, Mode.HYBRID_A3])
def test_a_causal_decoder_comes_back_with_its_world(engine: Engine, mode: Mode) -> None:
    world = _causal_world(engine, mode)
    session = Session(world, prompt="a lake", seed=0)
    for _ in range(3):  # an odd number of latents, one of which waits
        _frames(session)
    state, digest = world.state(), session.digest.hex()
    expected = _frames(session)
    other = Session(world, prompt="a lake", seed=0)
    other.resume(state, chunk_index=3, digest=digest)
    assert torch.equal(_frames(other), expected)


def test_a_causal_decoder_takes_over_in_the_middle(engine: Engine) -> None:
    world = _world(engine, TinyDecoder)
    session = Session(world, prompt="a lake", seed=0)
    portions = list(session.step(FORWARD))
    portions += world.swap_decoder(_causal(engine, Mode.PAIR))
    portions += session.step(FORWARD)
    portions += world.swap_decoder(_decoder(engine, TinyDecoder))
    portions += session.step(FORWARD)
    assert [each.latent_index for each in portions] == list(range(15))
    assert [each.first_frame for each in portions][-5:] == [34, 35, 39, 43, 47]


def test_a_world_of_latents_takes_no_decoder(engine: Engine) -> None:
    size = engine.model_config.geometry
    anchor_BCTHW = torch.zeros(1, 24, 1, size.latent_height, size.latent_width)
    world = ModelWorld(engine, None, anchor_BCTHW=anchor_BCTHW)
    Session(world, prompt="", seed=0)
    with pytest.raises(StateError, match="latents only"):
        world.swap_decoder(_decoder(engine, TinyDecoder))


def test_a_state_of_another_decoder_is_refused(engine: Engine, world: ModelWorld) -> None:
    Session(world, prompt="", seed=0)
    state = world.state()
    other = _world(engine, LateDecoder)
    Session(other, prompt="", seed=0)
    with pytest.raises(StateError, match=r"set_state: snapshot: values .*'waiting'"):
        other.set_state(state)


def test_nothing_finishes_in_the_middle_of_a_step(world: ModelWorld) -> None:
    session = Session(world, prompt="", seed=0)
    next(session.step(FORWARD))
    with pytest.raises(StateError, match="finish: a step is under way"):
        next(session.finish())


@pytest.fixture
def renderer() -> RendererWorld:
    return RendererWorld("meadow-forest", Geometry(height_px=32, width_px=64))


def test_renderer_has_the_portions_of_a_decoder(renderer: RendererWorld) -> None:
    session = Session(renderer, prompt="", seed=0)
    portions = list(session.step(FORWARD))
    assert [len(portion.frames_THWC) for portion in portions] == list(FRAMES_PER_LATENT)
    assert portions[0].frames_THWC.shape[1:] == (32, 64, 3)
    assert portions[0].frames_THWC.dtype == torch.uint8


def test_renderer_begins_at_the_first_picture(renderer: RendererWorld) -> None:
    session = Session(renderer, prompt="", seed=0)
    first = _frames(session)[0]
    assert torch.equal(first, renderer.first_picture())


def test_renderer_stands_still_without_keys(renderer: RendererWorld) -> None:
    session = Session(renderer, prompt="", seed=0)
    still = _frames(session, Action.still())
    assert torch.equal(still[0], still[-1])
    assert not torch.equal(_frames(session)[-1], still[0])


def test_renderer_follows_the_words_of_the_prompt(renderer: RendererWorld) -> None:
    session = Session(renderer, prompt="", seed=0)
    day = _frames(session, Action.still()).float().mean()
    session.switch_prompt("at night")
    night = _frames(session, Action.still()).float().mean()
    assert night < 0.8 * day


def test_unknown_scene_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"'moon'.*meadow-forest"):
        RendererWorld("moon", Geometry(height_px=32, width_px=64))


def test_prompt_of_a_job_without_one() -> None:
    assert default_prompt(Start(image=None, image_path=None, scene="snow-forest"))
    assert default_prompt(Start(image=None, image_path="a.png", scene=None)) == ""

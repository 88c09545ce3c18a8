from collections.abc import Iterator

import pytest
import torch

from engine.config import FRAMES_PER_LATENT, EngineConfig, Geometry, preset
from engine.engine import Engine
from engine.errors import ConfigError, StateError
from engine.types import Action, Control
from stream.jobs import Start
from stream.renderer import RendererWorld
from stream.session import ModelWorld, Session
from stream.worlds import default_prompt
from vae_stream.decoder import StreamingDecoder
from vae_stream.taehv import TinyVae, TinyVaeConfig

pytestmark = pytest.mark.cpu

FORWARD = Action.from_keys([[Control.FORWARD]] * 17)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.from_random(preset("tiny").model, EngineConfig(device="cpu", dtype="float32"))
    yield engine
    engine.close()


@pytest.fixture
def world(engine: Engine) -> ModelWorld:
    size = engine.model_config.geometry
    vae = TinyVae(TinyVaeConfig()).eval().requires_grad_(False)
    decoder = StreamingDecoder(vae, height_px=size.height_px, width_px=size.width_px)
    anchor_BCTHW = torch.zeros(1, 24, 1, size.latent_height, size.latent_width)
    return ModelWorld(engine, decoder, anchor_BCTHW=anchor_BCTHW)


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


def test_frames_come_before_the_chunk_is_history(world: ModelWorld) -> None:
    session = Session(world, prompt="a lake", seed=0)
    portions = session.step(FORWARD)
    assert len([next(portions) for _ in FRAMES_PER_LATENT]) == len(FRAMES_PER_LATENT)
    assert world._begun().chunk_index == 0
    assert list(portions) == []
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

"""Decoding beside the refresh on a GPU: the pictures of one after the other, earlier."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from stream.session import ModelWorld, Session
from stream.trace import Digest
from tests.tiny import random_action, random_anchor, tiny_config
from vae_stream.recorded import decode_runner
from vae_stream.taehv import TinyVae, TinyVaeConfig
from vae_stream.tiny_decoder import TinyDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

CONFIG = tiny_config()
CHUNKS = 12


@pytest.fixture(autouse=True)
def _as_in_use() -> None:
    torch.use_deterministic_algorithms(False)


def _decoder(*, is_recorded: bool) -> TinyDecoder:
    torch.manual_seed(3)
    vae = TinyVae(TinyVaeConfig()).cuda().eval().requires_grad_(False)
    size = CONFIG.geometry
    runner = decode_runner(vae.device) if is_recorded else None
    return TinyDecoder(vae, height_px=size.height_px, width_px=size.width_px, runner=runner)


def _in_turn(engine: Engine, decoder: TinyDecoder) -> tuple[list[Tensor], str]:
    """Frames of a rollout in which everything waits for everything, and digest of its latents."""
    rollout = engine.new_rollout("night", anchor_BCTHW=random_anchor(CONFIG), seed=5)
    state, frames, digest = decoder.new_state(), [], Digest()
    for index in range(CHUNKS):
        latents_BCTHW = engine.step(rollout, random_action(index)).latents_BCTHW
        torch.cuda.synchronize()
        digest.update(latents_BCTHW)
        for latent_BCHW in latents_BCTHW.unbind(2):
            frames += [each.frames_THWC.cpu() for each in decoder.push(state, latent_BCHW)]
        torch.cuda.synchronize()
    return frames, digest.hex()


@pytest.mark.parametrize("compiling", ["off", "full"])
def test_frames_beside_the_refresh_are_those_of_one_after_the_other(compiling: str) -> None:
    engine = Engine.from_random(
        CONFIG, EngineConfig(device="cuda", dtype="bfloat16", compile=compiling)
    )
    expected, digest = _in_turn(engine, _decoder(is_recorded=False))
    decoder = _decoder(is_recorded=True)
    world = ModelWorld(engine, decoder, anchor_BCTHW=random_anchor(CONFIG))
    session = Session(world, prompt="night", seed=5)
    found = [
        each.frames_THWC for index in range(CHUNKS) for each in session.step(random_action(index))
    ]
    assert all(each.device.type == "cpu" for each in found)
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"latent {index}"
    assert session.digest.hex() == digest
    decoder.close()
    engine.close()


def test_a_world_goes_on_from_a_state_that_was_taken_beside_the_decoder() -> None:
    engine = Engine.from_random(CONFIG, EngineConfig(device="cuda", dtype="bfloat16"))
    decoder = _decoder(is_recorded=True)
    world = ModelWorld(engine, decoder, anchor_BCTHW=random_anchor(CONFIG))
    session = Session(world, prompt="night", seed=5)
    for index in range(8):
        list(session.step(random_action(index)))
    state = world.state()
    kept = {name: tensor.clone() for name, tensor in state.tensors.items()}
    expected = [each.frames_THWC for each in session.step(random_action(8))]
    session.reset()
    world.set_state(type(state)(tensors=kept, values=state.values))
    found = [each.frames_THWC for each in world.step(random_action(8))]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    decoder.close()
    engine.close()

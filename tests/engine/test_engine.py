"""The public engine: steps, prompts, seeds, undo, loading, refusals."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine import device
from engine.checkpoint.folder import save_model
from engine.config import EngineConfig, preset
from engine.device import choose_dtype, resolve_device, use
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, DeviceError, StateError
from engine.types import Action, Control
from tests.tiny import random_action, random_anchor, tiny_config, tiny_engine

pytestmark = pytest.mark.cpu

FLOAT32 = EngineConfig(device="cpu", dtype="float32")


def _rollout(engine: Engine | None = None, prompt: str = "meadow", seed: int = 1, **more):
    engine = engine or tiny_engine()
    anchor = random_anchor(engine.model_config)
    return engine.new_rollout(prompt, anchor_BCTHW=anchor, seed=seed, **more)


def _roll(rollout, chunks: int, engine: Engine | None = None) -> torch.Tensor:
    engine = engine or tiny_engine()
    made = [torch.zeros(1, 24, 0, 4, 6)]
    made += [engine.step(rollout, random_action(i)).latents_BCTHW for i in range(chunks)]
    return torch.cat(made, dim=2)


def test_a_step_makes_a_chunk():
    rollout = _rollout(epoch=3)
    chunks = [tiny_engine().step(rollout, Action.still()) for _ in range(2)]
    assert [chunk.chunk_index for chunk in chunks] == [0, 1]
    assert chunks[0].epoch == 3
    assert chunks[0].latents_BCTHW.shape == (1, 24, 5, 4, 6)
    assert chunks[0].latents_BCTHW.dtype == torch.float32
    assert chunks[0].poses_F44.shape == (17, 4, 4)
    assert rollout.chunk_index == 2


def test_timings_add_up():
    timings = tiny_engine().step(_rollout(), Action.still()).timings
    assert len(timings.denoise_ms) == 4
    assert 0 < sum(timings.denoise_ms) <= timings.latents_ms
    assert timings.refresh_ms > 0


def test_same_seed_same_bits():
    assert torch.equal(_roll(_rollout(), 7), _roll(_rollout(), 7))


@pytest.mark.parametrize("change", [{"seed": 2}, {"prompt": "night"}])
def test_seed_and_prompt_matter(change):
    assert not torch.equal(_roll(_rollout(**change), 1), _roll(_rollout(), 1))


def test_anchor_matters():
    other = tiny_engine().new_rollout(
        "meadow", anchor_BCTHW=random_anchor(tiny_config(), 9), seed=1
    )
    assert not torch.equal(_roll(other, 1), _roll(_rollout(), 1))


def test_a_tap_of_one_frame_changes_the_picture():
    tap = Action.from_keys([{Control.FORWARD}] + [set()] * 16)
    made = [
        tiny_engine().step(_rollout(), action).latents_BCTHW for action in (tap, Action.still())
    ]
    assert not torch.equal(*made)


def test_a_tap_in_the_last_frame_reaches_the_next_chunk():
    tap = Action.from_keys([set()] * 16 + [{Control.FORWARD}])
    made = []
    for action in (tap, Action.still()):
        rollout = _rollout()
        made.append(
            [tiny_engine().step(rollout, a).latents_BCTHW for a in (action, Action.still())]
        )
    assert torch.equal(made[0][0], made[1][0])
    assert not torch.equal(made[0][1], made[1][1])


def test_poses_go_on_over_chunks():
    rollout = _rollout()
    forward = Action.from_keys([[Control.FORWARD]] * 17)
    poses = np.concatenate([tiny_engine().step(rollout, forward).poses_F44 for _ in range(3)])
    assert np.array_equal(poses[0], np.eye(4))
    assert all(later > earlier for earlier, later in pairwise(poses[:, 2, 3]))


def test_prompt_switch_before_the_first_chunk_is_a_fresh_prefix():
    switched = _rollout(prompt="night")
    tiny_engine().set_prompt(switched, "meadow")
    assert torch.equal(_roll(switched, 2), _roll(_rollout(), 2))


def test_prompt_switch_keeps_history_and_changes_what_follows():
    rollouts = [_rollout(), _rollout()]
    before = [_roll(rollout, 6) for rollout in rollouts]
    tiny_engine().set_prompt(rollouts[0], "snow night")
    after = [tiny_engine().step(rollout, Action.still()).latents_BCTHW for rollout in rollouts]
    assert torch.equal(*before)
    assert not torch.equal(*after)


def test_prompt_switch_to_the_same_prompt_changes_nothing():
    rollouts = [_rollout(), _rollout()]
    for rollout in rollouts:
        _roll(rollout, 6)
    tiny_engine().set_prompt(rollouts[0], "meadow")
    after = [tiny_engine().step(rollout, Action.still()).latents_BCTHW for rollout in rollouts]
    assert torch.equal(*after)


@pytest.mark.parametrize("chunks", [1, 5, 7])
def test_undo_and_the_same_action_give_the_same_chunk(chunks):
    rollout = _rollout()
    _roll(rollout, chunks - 1)
    first = tiny_engine().step(rollout, random_action(50))
    tiny_engine().undo(rollout)
    again = tiny_engine().step(rollout, random_action(50))
    assert torch.equal(first.latents_BCTHW, again.latents_BCTHW)
    assert np.array_equal(first.poses_F44, again.poses_F44)
    after = tiny_engine().step(rollout, random_action(51)).latents_BCTHW
    other = _rollout()
    _roll(other, chunks - 1)
    tiny_engine().step(other, random_action(50))
    assert torch.equal(after, tiny_engine().step(other, random_action(51)).latents_BCTHW)


def test_a_chunk_made_again_from_its_middle_keeps_its_beginning():
    rollout = _rollout()
    _roll(rollout, 6)
    first = tiny_engine().step(rollout, Action.still()).latents_BCTHW
    tiny_engine().undo(rollout)
    turn = Action.from_keys([set()] * 6 + [{Control.LOOK_RIGHT}] * 11)
    again = tiny_engine().step(rollout, turn, leading_BCTHW=first[:, :, :3]).latents_BCTHW
    assert torch.equal(again[:, :, :3], first[:, :, :3])
    assert not torch.equal(again[:, :, 3:], first[:, :, 3:])


@pytest.mark.parametrize("chunks", [2, 7])
def test_a_settled_rollout_goes_on_the_same_and_keeps_its_last_step(chunks):
    settled = _rollout()
    made = []
    for i in range(chunks):
        made.append(tiny_engine().step(settled, random_action(i)).latents_BCTHW)
        tiny_engine().settle(settled)
    tiny_engine().set_prompt(settled, "night")
    made.append(tiny_engine().step(settled, random_action(chunks)).latents_BCTHW)
    other = _rollout()
    expected = [_roll(other, chunks)]
    tiny_engine().set_prompt(other, "night")
    expected.append(tiny_engine().step(other, random_action(chunks)).latents_BCTHW)
    assert torch.equal(torch.cat(made, dim=2), torch.cat(expected, dim=2))
    tiny_engine().settle(settled)
    with pytest.raises(StateError, match="undo works once"):
        tiny_engine().undo(settled)


def test_undo_without_a_step_is_refused():
    with pytest.raises(StateError, match="undo works once"):
        tiny_engine().undo(_rollout())


def test_a_refused_step_leaves_the_rollout_usable():
    rollout = _rollout()
    with pytest.raises(ConfigError, match="leading latents"):
        tiny_engine().step(rollout, random_action(0), leading_BCTHW=torch.zeros(1, 24, 5, 4, 6))
    assert torch.equal(_roll(rollout, 2), _roll(_rollout(), 2))


def test_a_chunk_that_is_not_committed_is_made_again():
    rollout = _rollout()
    _roll(rollout, 6)
    dropped = tiny_engine().denoise(rollout, random_action(90)).latents_BCTHW
    kept = tiny_engine().denoise(rollout, random_action(6)).latents_BCTHW
    assert not torch.equal(dropped, kept)
    tiny_engine().commit(rollout)
    after = tiny_engine().step(rollout, random_action(7)).latents_BCTHW
    assert torch.equal(torch.cat([kept, after], dim=2), _roll(_rollout(), 8)[:, :, 30:])


def test_commit_without_a_chunk_is_refused():
    rollout = _rollout()
    _roll(rollout, 1)
    with pytest.raises(StateError, match=r"expected denoise\(\) first"):
        tiny_engine().commit(rollout)


def test_two_rollouts_do_not_meet():
    one, two = _rollout(), _rollout(prompt="night", seed=5)
    mixed = []
    for i in range(7):
        mixed.append(tiny_engine().step(one, random_action(i)).latents_BCTHW)
        tiny_engine().step(two, random_action(100 + i))
    assert torch.equal(torch.cat(mixed, dim=2), _roll(_rollout(), 7))


def test_a_world_needs_an_image():
    with pytest.raises(ConfigError, match="needs an image"):
        tiny_engine().new_rollout("meadow")


@pytest.mark.parametrize(
    ("anchor", "message"),
    [
        (torch.zeros(1, 24, 1, 4, 4), r"shape \(1, 24, 1, 4, 4\); allowed: \(1, 24, 1, 4, 6\)"),
        (torch.full((1, 24, 1, 4, 6), torch.nan), "not finite"),
    ],
    ids=["shape", "nan"],
)
def test_bad_anchors_are_refused(anchor, message):
    with pytest.raises(ConfigError, match=message):
        tiny_engine().new_rollout("meadow", anchor_BCTHW=anchor)


def test_any_prompt_works():
    for prompt in ("", "zzz qqq", "MEADOW!", "夜 🌙", "word " * 5000):
        assert torch.isfinite(_roll(_rollout(prompt=prompt), 1)).all()


def test_saved_and_loaded_engine_makes_the_same_world(tmp_path):
    engine = tiny_engine("bfloat16")
    save_model(
        tmp_path,
        engine.core.model,
        engine.model_config,
        text_encoder=engine._text_encoder,
        int8=False,
    )
    config = EngineConfig(device="cpu", dtype="bfloat16")
    first = Engine.from_pretrained(tmp_path, config)
    second = Engine.from_pretrained(str(tmp_path), config)
    assert first.model_hash == second.model_hash
    made = [_roll(_rollout(each), 2, each) for each in (first, second)]
    assert torch.equal(*made)
    assert torch.isfinite(made[0]).all()


def test_tiny_loads_by_name():
    engine = Engine.from_pretrained("tiny", FLOAT32)
    assert engine.model_config == preset("tiny").model
    assert engine.model_hash == Engine.from_pretrained("tiny", FLOAT32).model_hash


def test_config_is_resolved():
    engine = Engine.from_pretrained("tiny", EngineConfig(device="cpu"))
    assert engine.config.dtype in ("float32", "bfloat16")
    assert str(engine.dtype) == f"torch.{engine.config.dtype}"


def test_a_preset_without_weights_says_so():
    with pytest.raises(CheckpointError, match="h3_33b ships no weights"):
        Engine.from_pretrained("h3_33b", FLOAT32)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        Engine.from_pretrained(tmp_path / "nowhere", FLOAT32)


def test_too_large_a_model_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr("engine.device.available_gib", lambda device: 8.0)
    found = preset("h3_33b")
    config = EngineConfig(device="cpu", dtype="bfloat16")
    with pytest.raises(
        DeviceError, match=r"needs about 1\d\d\.\d GiB .* 8\.0 GiB are free; no pict"
    ):
        Engine.from_random(found.model, config, geometries=found.geometries)


def test_auto_dtype_of_a_cpu_without_bfloat16_products(monkeypatch):
    monkeypatch.setattr(device, "_has_bfloat16_products", lambda: False)
    choice = choose_dtype(tiny_config(), torch.device("cpu"))
    assert (choice.dtype, choice.reason) == ("float32", "not measured")


@pytest.mark.parametrize(("slow", "fast"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_auto_dtype_is_the_faster_one(monkeypatch, slow, fast):
    monkeypatch.setattr(device, "_has_bfloat16_products", lambda: True)
    monkeypatch.setattr(device, "_block_times_ms", lambda model: {slow: 2.0, fast: 1.0})
    assert choose_dtype(tiny_config(), torch.device("cpu")).dtype == fast


def test_a_missing_cuda_device_is_refused():
    with pytest.raises(DeviceError, match=r"device is 'cuda:99'; this machine has \d+ CUDA"):
        resolve_device("cuda:99")


def test_a_thread_uses_the_device_that_was_asked_for(monkeypatch):
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    for name in ("cpu", "cuda", "cuda:1"):
        use(torch.device(name))
    assert used == [torch.device("cuda:1")]


def test_warm_up_reports_each_window():
    events = []
    tiny_engine().warm_up(events.append)
    assert [event.done for event in events] == [1, 2, 3, 4, 5, 6]
    assert {event.total for event in events} == {6}


def test_a_closed_engine_refuses():
    engine = Engine.from_pretrained("tiny", FLOAT32)
    rollout = _rollout(engine)
    snapshot = engine.snapshot(rollout)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.step(rollout, Action.still()),
        lambda: engine.set_prompt(rollout, ""),
        lambda: engine.undo(rollout),
        lambda: engine.snapshot(rollout),
        lambda: engine.restore(rollout, snapshot),
        lambda: _rollout(engine),
    ):
        with pytest.raises(StateError, match="the engine is closed"):
            call()


@pytest.mark.parametrize("switch", ["prefix_cache", "adaln_tables", "packed_history"])
def test_each_shortcut_can_be_left_out(switch):
    config = dataclasses.replace(FLOAT32, **{switch: False})
    engine = Engine.from_random(tiny_config(), config)
    torch.testing.assert_close(_roll(_rollout(engine), 7, engine), _roll(_rollout(), 7))


def test_warm_up_leaves_nothing_behind():
    engine = Engine.from_random(tiny_config(), FLOAT32)
    cold = _roll(_rollout(engine), 7, engine)
    engine.warm_up()
    assert torch.equal(_roll(_rollout(engine), 7, engine), cold)

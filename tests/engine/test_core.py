"""The rollout core against the naive oracle, and each shortcut against its plain form."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.core import CoreOptions, RolloutCore
from engine.errors import ConfigError
from tests.oracles import NaiveRollout
from tests.tiny import chunk_noise, random_prefix, tiny_config, tiny_model, walk_views
from tests.tolerances import FP32_ROLLOUT_ATOL

pytestmark = pytest.mark.cpu

PLAIN = CoreOptions(prefix_cache=False, adaln_tables=False, packed_history=False)


def _roll(core, inputs, chunks, *, batch_size=1, views=None, leading=None):
    config = core.config
    views = walk_views(config, chunks).expand(batch_size, -1, -1, -1) if views is None else views
    state, made = core.begin(inputs), []
    for chunk in range(chunks):
        noise = chunk_noise(config, chunk, batch_size)
        span = views[:, 5 * chunk : 5 * chunk + 5]
        given = None if leading is None else leading.get(chunk)
        latents = core.denoise(state, noise[0], noise[1:], span, leading_BCTHW=given)
        core.refresh(state, latents)
        made.append(latents)
    return torch.stack(made)


@pytest.mark.parametrize("camera_dtype", ["attention", "float32"])
def test_twelve_chunks_equal_naive_oracle(camera_dtype):
    config = tiny_config(camera_dtype=camera_dtype)
    model, inputs, views = tiny_model(config), random_prefix(config), walk_views(config, 12)
    fast = _roll(RolloutCore(model), inputs, 12)
    oracle = NaiveRollout(model, inputs)
    for chunk in range(12):
        slow = oracle.step(chunk_noise(config, chunk), views[:, 5 * chunk : 5 * chunk + 5])
        assert (fast[chunk] - slow).abs().max() <= FP32_ROLLOUT_ATOL, f"chunk {chunk}"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_tables_and_packing_are_bit_exact(prefix_cache):
    config = tiny_config()
    model, inputs = tiny_model(config), random_prefix(config)
    made = [
        _roll(
            RolloutCore(
                model,
                CoreOptions(prefix_cache=prefix_cache, adaln_tables=tables, packed_history=packed),
            ),
            inputs,
            8,
        )
        for tables, packed in itertools.product((True, False), repeat=2)
    ]
    assert all(torch.equal(made[0], other) for other in made[1:])


def test_prefix_cache_equals_plain():
    # Not bit-exact by right: the linears see 45 rows in one form and 30 or 15 in the other.
    config = tiny_config()
    model, inputs = tiny_model(config), random_prefix(config)
    cached = _roll(RolloutCore(model), inputs, 8)
    plain = _roll(RolloutCore(model, PLAIN), inputs, 8)
    assert (cached - plain).abs().max() <= FP32_ROLLOUT_ATOL


@pytest.mark.parametrize("options", [CoreOptions(), PLAIN], ids=["fast", "plain"])
def test_batch_of_different_worlds_equals_single_ones(options):
    config = tiny_config()
    model = tiny_model(config)
    core = RolloutCore(model, options)
    inputs = random_prefix(config, batch_size=3)
    views = torch.cat([walk_views(config, 7, seed) for seed in range(3)])
    together = _roll(core, inputs, 7, batch_size=3, views=views)
    oracle = NaiveRollout(model, inputs)
    for chunk in range(7):
        noise = chunk_noise(config, chunk, 3)
        slow = oracle.step(noise, views[:, 5 * chunk : 5 * chunk + 5])
        assert (together[chunk] - slow).abs().max() <= FP32_ROLLOUT_ATOL, f"chunk {chunk}"


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("options", [CoreOptions(), PLAIN], ids=["fast", "plain"])
def test_leading_clean_latents_stay_and_condition_the_rest(options, count):
    config = tiny_config()
    model, inputs, views = tiny_model(config), random_prefix(config), walk_views(config, 2)
    given = chunk_noise(config, 77)[0][:, :, :count]
    made = _roll(RolloutCore(model, options), inputs, 2, leading={1: given})
    oracle = NaiveRollout(model, inputs)
    oracle.step(chunk_noise(config, 0), views[:, :5])
    slow = oracle.step(chunk_noise(config, 1), views[:, 5:10], leading_BCTHW=given)
    assert torch.equal(made[1][:, :, :count], given)
    assert (made[1] - slow).abs().max() <= FP32_ROLLOUT_ATOL


def test_leading_latents_change_what_follows_them():
    config = tiny_config()
    core, inputs = RolloutCore(tiny_model(config)), random_prefix(config)
    one = _roll(core, inputs, 1, leading={0: chunk_noise(config, 77)[0][:, :, :2]})
    two = _roll(core, inputs, 1, leading={0: chunk_noise(config, 78)[0][:, :, :2]})
    assert (one - two)[0, :, :, 2:].abs().max() > 100 * FP32_ROLLOUT_ATOL


def test_all_five_latents_given_is_refused():
    config = tiny_config()
    core, inputs = RolloutCore(tiny_model(config)), random_prefix(config)
    with pytest.raises(ConfigError, match="leading latents are 5; allowed: 0 to 4"):
        _roll(core, inputs, 1, leading={0: chunk_noise(config, 77)[0]})


def test_prefix_switch_before_any_history_equals_a_fresh_prefix():
    config = tiny_config()
    core = RolloutCore(tiny_model(config))
    first, second = random_prefix(config, 1), random_prefix(config, 2, text_rows=9)
    state = core.begin(first)
    core.switch_prefix(state, second)
    noise, views = chunk_noise(config, 0), walk_views(config, 1)
    switched = core.denoise(state, noise[0], noise[1:], views)
    assert torch.equal(switched, _roll(core, second, 1)[0])


@pytest.mark.parametrize("text_rows", [5, 9, 3])
@pytest.mark.parametrize("chunks", [2, 7])
def test_prefix_switch_keeps_history(chunks, text_rows):
    config = tiny_config()
    model, views = tiny_model(config), walk_views(config, 9)
    first, second = random_prefix(config, 1), random_prefix(config, 2, text_rows=text_rows)
    core = RolloutCore(model)
    state, oracle = core.begin(first), NaiveRollout(model, first)
    for chunk in range(chunks + 2):
        if chunk == chunks:
            core.switch_prefix(state, second)
            oracle.inputs = second
        noise, span = chunk_noise(config, chunk), views[:, 5 * chunk : 5 * chunk + 5]
        latents = core.denoise(state, noise[0], noise[1:], span)
        core.refresh(state, latents)
        slow = oracle.step(noise, span)
        assert (latents - slow).abs().max() <= FP32_ROLLOUT_ATOL, f"chunk {chunk}"


def test_moving_the_whole_world_changes_nothing_but_rounding():
    from engine.camera import invert_rigid, relative_views

    config = tiny_config()
    core, inputs = RolloutCore(tiny_model(config)), random_prefix(config)
    views = walk_views(config, 6)
    poses = invert_rigid(views.double())
    move = torch.eye(4, dtype=torch.float64)
    angle = torch.tensor(0.7, dtype=torch.float64)
    move[0, 0] = move[2, 2] = angle.cos()
    move[0, 2], move[2, 0] = angle.sin(), -angle.sin()
    move[:3, 3] = torch.tensor([3.0, -1.0, 2.0])
    moved = relative_views(move @ poses, (move @ poses)[:, 0])
    stayed = _roll(core, inputs, 6, views=views)
    assert (_roll(core, inputs, 6, views=moved) - stayed).abs().max() <= FP32_ROLLOUT_ATOL


def test_given_history_enters_without_denoise():
    config = tiny_config()
    core, inputs, views = (
        RolloutCore(tiny_model(config)),
        random_prefix(config),
        walk_views(config, 2),
    )
    made = _roll(core, inputs, 2)
    state = core.begin(inputs)
    core.refresh(state, made[0], views[:, :5])
    noise = chunk_noise(config, 1)
    assert torch.equal(core.denoise(state, noise[0], noise[1:], views[:, 5:10]), made[1])


def test_wrong_shapes_are_refused():
    config = tiny_config()
    core = RolloutCore(tiny_model(config))
    state, noise = core.begin(random_prefix(config)), chunk_noise(config, 0)
    with pytest.raises(ConfigError, match=r"views have shape \(1, 4, 4, 4\)"):
        core.denoise(state, noise[0], noise[1:], walk_views(config, 1)[:, :4])
    with pytest.raises(ConfigError, match="noise have shape"):
        core.denoise(state, noise[0][:, :, :4], noise[1:], walk_views(config, 1))

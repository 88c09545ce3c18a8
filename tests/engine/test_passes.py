"""Recorded passes against plain ones, on a tape: the same rollout bit for bit, whatever happens."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from engine.config import EngineConfig
from engine.core import CoreOptions, RolloutCore
from engine.engine import Engine
from engine.errors import ConfigError
from graphs.runner import GraphRunner, RunnerLimits
from tests.graphs.tape import TapeCapture
from tests.tiny import chunk_noise, narrow_config, random_prefix, tiny_model, walk_views

pytestmark = pytest.mark.cpu

CONFIG = narrow_config()


def _recorded(model, **limits) -> tuple[RolloutCore, GraphRunner, TapeCapture]:
    backend = TapeCapture()
    runner = GraphRunner(backend, RunnerLimits(is_strict=True, **limits))
    return RolloutCore(model, runner=runner), runner, backend


def _chunk(core, state, index, views, batch_size=1):
    noise = chunk_noise(CONFIG, index, batch_size)
    latents = core.denoise(state, noise[0], noise[1:], views[:, 5 * index : 5 * index + 5])
    core.refresh(state, latents)
    return latents


def _eventful(core: RolloutCore, batch_size: int) -> list[torch.Tensor]:
    """Twelve chunks with a shorter and a longer prompt, an undo, and given latents."""
    views = torch.cat([walk_views(CONFIG, 14, seed) for seed in range(batch_size)])
    state = core.begin(random_prefix(CONFIG, 1, batch_size=batch_size))
    made = []
    for index in range(12):
        if index in (3, 7, 9):
            rows = {3: 3, 7: 9, 9: 9}[index]
            core.switch_prefix(
                state, random_prefix(CONFIG, index, batch_size=batch_size, text_rows=rows)
            )
        made.append(_chunk(core, state, index, views, batch_size))
        if index in (4, 10):
            state.cache.undo()
            made.append(_chunk(core, state, index, views, batch_size))
        if index == 10:
            state.cache.undo()
            noise = chunk_noise(CONFIG, 50, batch_size)
            span = views[:, 5 * index : 5 * index + 5]
            again = core.denoise(state, noise[0], noise[1:], span, leading_BCTHW=made[-1][:, :, :2])
            core.refresh(state, again)
            made.append(again)
    return made


@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_eventful_rollout_is_the_same_bit_for_bit(batch_size):
    model = tiny_model(CONFIG)
    plain = _eventful(RolloutCore(model), batch_size)
    core, runner, _ = _recorded(model)
    for _ in range(2):  # the second time over the memory and the recordings of the first
        recorded = _eventful(core, batch_size)
        assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert runner.counts.replays > 40
    assert runner.counts.unlisted == runner.counts.failures == 0


def test_every_pass_is_recorded_once_and_serves_every_rollout():
    model, views = tiny_model(CONFIG), walk_views(CONFIG, 9)
    core, runner, _ = _recorded(model)
    plain = RolloutCore(model)
    for seed in range(3):
        inputs = random_prefix(CONFIG, seed)
        state, expected = core.begin(inputs), plain.begin(inputs)
        for index in range(9):
            assert torch.equal(
                _chunk(core, state, index, views), _chunk(plain, expected, index, views)
            )
        del state
    passes = [entry.key for entry in runner.entries]
    assert len(passes) == len(set(passes)) == runner.counts.captures == 12


def test_a_prompt_of_a_known_length_records_nothing_anew():
    model, views = tiny_model(CONFIG), walk_views(CONFIG, 17)
    core, runner, _ = _recorded(model)
    plain = RolloutCore(model)
    state, expected = (each.begin(random_prefix(CONFIG)) for each in (core, plain))
    captures = []
    for index in range(17):
        if index in (8, 11, 14):
            inputs = random_prefix(CONFIG, index, text_rows=5 if index == 11 else 3)
            core.switch_prefix(state, inputs)
            plain.switch_prefix(expected, inputs)
        assert torch.equal(_chunk(core, state, index, views), _chunk(plain, expected, index, views))
        captures.append(runner.counts.captures)
    assert captures[5:] == [0, 2, 2, 2] + [4] * 8  # a first chunk of each length is not recorded


def test_the_steady_window_is_recorded_first():
    core, runner, _ = _recorded(tiny_model(CONFIG))
    state, views = core.begin(random_prefix(CONFIG)), walk_views(CONFIG, 8)
    for index in range(6):
        _chunk(core, state, index, views)
    assert runner.counts.captures == 0
    for index in (6, 7):
        _chunk(core, state, index, views)
    steady = 5 * CONFIG.rows_per_chunk
    assert {(entry.key.phase, entry.key.history_rows) for entry in runner.entries} == {
        ("denoise", steady),
        ("refresh", steady),
    }


def test_two_rollouts_at_a_time_do_not_meet():
    model, views = tiny_model(CONFIG), walk_views(CONFIG, 8)
    core, runner, _ = _recorded(model)
    plain = RolloutCore(model)
    inputs = [random_prefix(CONFIG, seed) for seed in (1, 2)]
    states, expected = [[each.begin(given) for given in inputs] for each in (core, plain)]
    for index in range(8):
        for which in (0, 1):
            made = _chunk(core, states[which], index, views)
            assert torch.equal(made, _chunk(plain, expected[which], index, views))
    assert runner.counts.captures > 1


def test_new_weights_are_seen_after_renew():
    model, views = tiny_model(CONFIG), walk_views(CONFIG, 8)
    core, runner, _ = _recorded(model)
    state = core.begin(random_prefix(CONFIG))
    for index in range(8):
        _chunk(core, state, index, views)
    assert runner.entries
    model.transformer_blocks[0].adaln_proj.linear.bias.add_(0.5)
    core.renew()
    assert runner.entries == ()
    fresh, plain = core.begin(random_prefix(CONFIG)), RolloutCore(model)
    expected = plain.begin(random_prefix(CONFIG))
    for index in range(3):
        assert torch.equal(_chunk(core, fresh, index, views), _chunk(plain, expected, index, views))


def test_evicted_passes_are_recorded_again():
    model, views = tiny_model(CONFIG), walk_views(CONFIG, 10)
    core, runner, _ = _recorded(model, max_entries=2)
    plain = RolloutCore(model)
    for _ in range(2):
        state, expected = core.begin(random_prefix(CONFIG)), plain.begin(random_prefix(CONFIG))
        for index in range(8):
            assert torch.equal(
                _chunk(core, state, index, views), _chunk(plain, expected, index, views)
            )
        del state
    assert runner.counts.evictions > 2
    assert len(runner.entries) <= 2


@pytest.mark.parametrize("name", ["prefix_cache", "adaln_tables", "packed_history"])
def test_whole_passes_need_every_shortcut(name):
    with pytest.raises(ConfigError, match=f"{name}=False"):
        RolloutCore(
            tiny_model(CONFIG),
            CoreOptions(**{name: False}),
            runner=GraphRunner(TapeCapture()),
        )


@pytest.mark.parametrize("is_strict", [True, False])
def test_strict_passes_see_inputs_that_moved(is_strict):
    runner = GraphRunner(TapeCapture(), RunnerLimits(is_strict=is_strict))
    core = RolloutCore(tiny_model(CONFIG), runner=runner)
    state, views = core.begin(random_prefix(CONFIG)), walk_views(CONFIG, 2)
    _chunk(core, state, 0, views)
    (buffers, _) = core._passes._inputs[1]
    buffers["rows"].data = torch.empty_like(buffers["rows"])
    with pytest.raises(RuntimeError, match="rows: moved from") if is_strict else nullcontext():
        _chunk(core, state, 1, views)


def test_close_gives_recordings_up_before_the_weights():
    core, runner, backend = _recorded(tiny_model(CONFIG))
    state, views = core.begin(random_prefix(CONFIG)), walk_views(CONFIG, 7)
    for index in range(7):
        _chunk(core, state, index, views)
    assert runner.entries
    core.close()
    assert runner.entries == ()
    assert backend.log[-1] == "release_pool"


def test_two_compiled_forms_serve_every_window_and_every_length_of_prompt(monkeypatch):
    # Traced and made functional as for any compiler, but run by torch: the same bits, no C++.
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda fn, **more: compiler(fn, **more | {"backend": "aot_eager"})
    )
    config = EngineConfig(device="cpu", dtype="float32", compile="full")
    compiled = Engine.from_random(CONFIG, config).core
    plain, views = RolloutCore(compiled.model), walk_views(CONFIG, 7)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (5, 9, 3):
        inputs = random_prefix(CONFIG, text_rows=rows)
        state, expected = compiled.begin(inputs), plain.begin(inputs)
        for index in range(7):
            made = _chunk(compiled, state, index, views)
            assert torch.equal(made, _chunk(plain, expected, index, views))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2

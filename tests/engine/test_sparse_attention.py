"""Rollouts whose attention reads a part of the window: caches, recordings, gates, memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine import loading
from engine.attention.base import AttentionNeed, AttentionPlan, AttentionShape, select_backend
from engine.attention.sparse import (
    SparseAttention,
    check_density,
    route_all_errors,
    with_sparse,
)
from engine.cache_buffers import BufferShape, allocate
from engine.config import SPARSE_DENSE_LAYERS, EngineConfig, Geometry, ModelConfig
from engine.core import CoreOptions, RolloutCore
from engine.engine import Engine
from engine.errors import ConfigError, UnsupportedError
from engine.kernels import sparse
from engine.kernels.sparse import KeySummary
from engine.kv_cache import PackedCache
from engine.memory import engine_parts, prefix_row_count, summary_bytes
from engine.model.prope import projective
from graphs.runner import GraphRunner, RunnerLimits
from tests.graphs.tape import TapeCapture
from tests.tiny import chunk_noise, random_prefix, tiny_config, tiny_model, walk_views
from tests.tolerances import FP32_ATOL, FP32_ROLLOUT_ATOL, FP32_RTOL

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
STRICT = RunnerLimits(captures_per_turn=3, is_strict=True)
CONFIG = tiny_config(
    attention_head_dim=32, rope_freq_dim=4, geometry=Geometry(height_px=64, width_px=256)
)
"""A window of 9 blocks, of which 4 may be read or not."""
NEED = AttentionNeed(device_type="cpu", dtype=torch.float32, head_dim=32)
SHAPE = AttentionShape(group="video", rows=80, keys=523, heads=2, need=NEED)


def _plan(tau: float = 1.0, block: int = 64, steps: int = 2) -> AttentionPlan:
    dense = AttentionPlan.of(select_backend(NEED))
    return dataclasses.replace(dense, sparse=SparseAttention(tau, block, CPU), sparse_steps=steps)


def _eventful(core: RolloutCore) -> list[torch.Tensor]:
    """Eight chunks with a longer prompt, an undo, and given latents."""
    views, made = walk_views(CONFIG, 9), []
    state = core.begin(random_prefix(CONFIG, 1))
    for index in range(8):
        if index == 3:
            core.switch_prefix(state, random_prefix(CONFIG, index, text_rows=70))
        for again in range(2 if index == 6 else 1):
            if again:
                state.cache.undo()
            noise, span = chunk_noise(CONFIG, index), views[:, 5 * index : 5 * index + 5]
            leading = made[-1][:, :, :2] if index == 7 else None
            latents = core.denoise(state, noise[0], noise[1:], span, leading_BCTHW=leading)
            core.refresh(state, latents)
            made.append(latents)
    return made


@pytest.fixture(scope="module")
def model():
    return tiny_model(CONFIG)


@pytest.fixture(scope="module")
def deep():
    # Keys of the last layer follow attention of the one before, which can be sparse here.
    return tiny_model(dataclasses.replace(CONFIG, num_layers=SPARSE_DENSE_LAYERS + 2))


@pytest.fixture(scope="module")
def packed(model):
    return _eventful(RolloutCore(model, attention=_plan()))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_plain_cache_gives_the_same_bits(model, packed, steps):
    plan = _plan(steps=steps)
    core = RolloutCore(model, CoreOptions(packed_history=False), attention=plan)
    made = packed if steps == 2 else _eventful(RolloutCore(model, attention=plan))
    assert all(torch.equal(*pair) for pair in zip(made, _eventful(core), strict=True))
    assert torch.equal(made[-1], packed[-1]) == (steps == 2)


def _recorded(model, plan: AttentionPlan) -> RolloutCore:
    return RolloutCore(model, attention=plan, runner=GraphRunner(TapeCapture(), STRICT))


def _velocities(core: RolloutCore, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Velocity at each denoise step of the chunk after the given ones."""
    views, state = walk_views(CONFIG, len(given) + 1), core.begin(random_prefix(CONFIG, 1))
    for index, latents in enumerate(given):
        core.refresh(state, latents, views[:, 5 * index : 5 * index + 5])
    core.open_chunk(state, views[:, -5:])
    x = chunk_noise(CONFIG, 99)[0]
    return [core.velocity(state, x, step).clone() for step in range(len(core.times))]


@pytest.mark.parametrize("form", ["packed", "plain", "prefix_in_every_pass", "recorded"])
def test_later_steps_and_the_refresh_have_the_bits_of_dense_attention(deep, packed, form):
    options = CoreOptions(packed_history=form != "plain", prefix_cache=form[:6] != "prefix")
    plan, dense = _plan(), RolloutCore(deep, options)
    core = _recorded(deep, plan) if form == "recorded" else None
    core = core or RolloutCore(deep, options, attention=plan)
    pairs = zip(_velocities(core, packed[:6]), _velocities(dense, packed[:6]), strict=True)
    assert [torch.equal(*pair) for pair in pairs] == [False, False, True, True]


def test_a_restored_window_is_summarized_anew(model):
    core, views, caches, made = RolloutCore(model, attention=_plan()), walk_views(CONFIG, 7), [], []
    states = [core.begin(random_prefix(CONFIG, 1)) for _ in range(2)]
    for seed, state in enumerate(states):
        for index in range(6):
            latents, span = (
                chunk_noise(CONFIG, 10 * seed + index)[0],
                slice(5 * index, 5 * index + 5),
            )
            core.refresh(state, latents, views[:, span])
        assert isinstance(state.cache, PackedCache)
        caches.append(state.cache)
    caches[1].restore(6, caches[0].snapshot())
    for state in states:
        core.open_chunk(state, views[:, -5:])
        made.append(core.velocity(state, chunk_noise(CONFIG, 99)[0], 0))
    assert torch.equal(*made)


def test_both_caches_keep_short_blocks(model, packed):
    made = _eventful(RolloutCore(model, attention=_plan(block=8)))
    plain = RolloutCore(model, CoreOptions(packed_history=False), attention=_plan(block=8))
    assert all(torch.equal(*pair) for pair in zip(made, _eventful(plain), strict=True))
    assert not torch.equal(made[-1], packed[-1])


def test_recorded_passes_give_the_same_bits(model, packed):
    core = _recorded(model, _plan())
    runner = core.runner
    assert runner is not None
    for _ in range(2):  # the second time over the memory and the recordings of the first
        assert all(torch.equal(*pair) for pair in zip(packed, _eventful(core), strict=True))
    assert runner.counts.replays > 10
    assert runner.counts.failures == 0


@pytest.mark.parametrize(
    ("steps", "phases"),
    [
        (1, ["sparse denoise", "denoise", "refresh"]),
        (3, ["sparse denoise", "denoise", "refresh"]),
        (4, ["sparse denoise", "refresh"]),
    ],
)
def test_each_kind_of_pass_is_recorded_once_a_window(model, steps, phases):
    core, views = _recorded(model, _plan(steps=steps)), walk_views(CONFIG, 8)
    state = core.begin(random_prefix(CONFIG, 1))
    for index in range(8):
        noise, span = chunk_noise(CONFIG, index), views[:, 5 * index : 5 * index + 5]
        core.refresh(state, core.denoise(state, noise[0], noise[1:], span))
    assert core.runner is not None
    keys = [entry.key for entry in core.runner.entries]
    assert {key.history_rows for key in keys} == {5 * CONFIG.rows_per_chunk}
    assert sorted(key.phase for key in keys) == sorted(phases)
    replays = {entry.key.phase: entry.replay_count for entry in core.runner.entries}
    # Seven chunks to fill the window; the next one records them.
    assert replays["sparse denoise"] == 2 * steps
    assert replays.get("denoise", 0) == (8 - 2 * steps)


def test_a_prefix_in_every_pass_is_summarized_in_every_pass(model, packed):
    core = RolloutCore(model, CoreOptions(prefix_cache=False), attention=_plan())
    for made, expected in zip(_eventful(core), packed, strict=True):
        torch.testing.assert_close(made, expected, atol=FP32_ROLLOUT_ATOL, rtol=0.0)


def test_it_approximates_what_reads_everything(model, packed):
    exact = _eventful(RolloutCore(model))
    every = _eventful(RolloutCore(model, attention=_plan(tau=-8.0)))
    for part, dense, full in zip(packed, exact, every, strict=True):
        torch.testing.assert_close(full, dense, atol=FP32_ROLLOUT_ATOL, rtol=0.0)
        assert (part - dense).norm() < 0.2 * dense.norm()
    assert not torch.equal(packed[-1], exact[-1])


def test_three_compiled_forms_serve_every_window(model, packed, monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda fn, **more: compiler(fn, **more | {"backend": "aot_eager"})
    )
    core = RolloutCore(model, attention=_plan(), is_compiled=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert all(torch.equal(*pair) for pair in zip(packed, _eventful(core), strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 3


def test_the_first_layers_read_everything(model):
    core = RolloutCore(model, attention=_plan())
    cache = core.begin(random_prefix(CONFIG)).cache
    camera = projective(walk_views(CONFIG, 1)[:, :5], torch.float32)
    cache.begin(0, camera)
    assert [summary is None for summary in cache.views.summaries] == [True, True, False]


def test_the_share_that_is_read_is_known_and_taken_once(model):
    plan = _plan()
    _eventful(RolloutCore(model, attention=plan))
    assert plan.sparse is not None
    check_density(plan.sparse.take_density())
    assert plan.sparse.take_density() == 0.0
    assert plan.names == {"conditioning": "sdpa", "audio": "sdpa", "video": "sparse"}
    assert plan.dense.names["video"] == "sdpa"


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_passes_that_read_everything_neither_count_to_the_share_nor_summarize(
    model, has_prefix_cache, monkeypatch
):
    plan = _plan()
    core = RolloutCore(model, CoreOptions(prefix_cache=has_prefix_cache), attention=plan)
    state, views = core.begin(random_prefix(CONFIG, 1)), walk_views(CONFIG, 2)
    core.refresh(state, chunk_noise(CONFIG, 0)[0], views[:, :5])
    core.open_chunk(state, views[:, 5:10])
    renewed, renew = [], KeySummary.renew
    monkeypatch.setattr(
        KeySummary, "renew", lambda self, *given: renewed.append(step) or renew(self, *given)
    )
    for step in (2, 3):
        core.velocity(state, chunk_noise(CONFIG, 1)[0], step)
    assert plan.sparse is not None
    assert plan.sparse.take_density() == 0.0
    assert renewed == []
    for step in (1, 2):
        core.velocity(state, chunk_noise(CONFIG, 1)[0], step)
    assert set(renewed) == {1}


@pytest.mark.parametrize("density", [0.0, 0.01, 0.99, 1.0])
def test_routes_that_choose_nothing_are_refused(density):
    with pytest.raises(UnsupportedError, match=r"of the blocks; allowed: 0.02 to 0.98"):
        check_density(density)


def test_heads_are_independent_so_that_ranks_can_share_them():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 4, 32, generator=generator) for n in (80, 523, 523))

    def run(heads: slice) -> torch.Tensor:
        parts = [part[:, :, heads] for part in (q, k, v)]
        summary = KeySummary.of(parts[1], 70, 64)
        summary.renew(parts[1], parts[2])
        return SparseAttention(1.0, 64, CPU)(*parts, summary)

    halves = torch.cat([run(slice(0, 2)), run(slice(2, 4))], dim=2)
    torch.testing.assert_close(halves, run(slice(0, 4)), atol=FP32_ATOL, rtol=FP32_RTOL)


def test_it_serves_once_it_agrees_with_torch():
    plan = with_sparse(
        AttentionPlan.of(select_backend(NEED)),
        SHAPE,
        CONFIG,
        tau=1.25,
        block=8,
        steps=3,
        device=CPU,
    )
    assert plan.sparse is not None
    assert (plan.sparse.tau, plan.sparse.block, plan.sparse_steps) == (1.25, 8, 3)
    assert plan.video.name == "sdpa"


def test_what_does_not_agree_is_refused_with_its_figures(monkeypatch):
    monkeypatch.setattr(sparse, "attend", lambda q, *others: torch.zeros_like(q))
    assert route_all_errors(SHAPE, 64, CPU)["rel_l2"] == pytest.approx(1.0)
    with pytest.raises(UnsupportedError, match=r"differs from sdpa: .*rel_l2 1.00e\+00 \(at most"):
        with_sparse(_plan(), SHAPE, CONFIG, tau=1.0, block=64, steps=2, device=CPU)


@pytest.mark.parametrize(
    ("changes", "layers", "reason"),
    [
        ({"dtype": torch.float16}, 3, "made for float32 and bfloat16, not torch.float16"),
        ({"device_type": "mps"}, 3, "made for cpu and cuda, not mps"),
        ({}, 2, "the first 2 layers read everything, and there are 2"),
    ],
    ids=["dtype", "device", "layers"],
)
def test_what_it_cannot_serve_is_refused(changes, layers, reason):
    shape = dataclasses.replace(SHAPE, need=dataclasses.replace(NEED, **changes))
    model = dataclasses.replace(CONFIG, num_layers=layers)
    with pytest.raises(UnsupportedError, match=reason):
        with_sparse(_plan(), shape, model, tau=1.0, block=64, steps=2, device=CPU)


@pytest.mark.parametrize("tau", [8.5, -9.0, float("nan"), float("inf")])
def test_a_threshold_that_is_none_is_refused(tau):
    with pytest.raises(ConfigError, match=r"sparse_tau is .*; allowed: -8.0 to 8.0"):
        EngineConfig(attention="sparse", sparse_tau=tau)


@pytest.mark.parametrize("block", [0, 12, 128])
def test_a_size_of_blocks_that_is_none_is_refused(block):
    with pytest.raises(ConfigError, match=f"sparse_block is {block}; allowed: 8, 16, 32, 64"):
        EngineConfig(attention="sparse", sparse_block=block)


@pytest.mark.parametrize("steps", [0, -1, 1.5, 65])
def test_a_count_of_steps_that_is_none_is_refused(steps):
    with pytest.raises(ConfigError, match=f"sparse_steps is {steps}; allowed: 1 to 64, of those"):
        EngineConfig(attention="sparse", sparse_steps=steps)


def test_more_steps_than_the_model_has_are_refused_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(loading, "empty_model", lambda *given, **named: pytest.fail("built"))
    config = EngineConfig(device="cpu", dtype="float32", attention="sparse", sparse_steps=5)
    with pytest.raises(ConfigError, match="sparse_steps is 5; allowed: 1 to 4, the denoise steps"):
        Engine.from_random(CONFIG, config)


@pytest.mark.parametrize(
    ("name", "value"), [("sparse_tau", 0.5), ("sparse_block", 8), ("sparse_steps", 3)]
)
def test_options_of_it_are_refused_where_it_is_not_asked_for(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value} with attention 'auto'; allowed: "):
        EngineConfig(**{name: value})


def test_an_engine_has_it_by_its_name():
    config = EngineConfig(
        device="cpu", dtype="float32", attention="sparse", sparse_tau=1.5, sparse_block=16,
        sparse_steps=3,
    )  # fmt: skip
    engine = Engine.from_random(CONFIG, config)
    assert engine.core.attention.sparse is not None
    assert engine.core.attention.sparse.tau == 1.5
    assert engine.core.attention.sparse.block == 16
    assert engine.core.attention.sparse_steps == 3
    assert engine.core.attention.audio.name == "sdpa"
    engine.close()


@pytest.mark.parametrize("block", [8, 64])
def test_the_plan_counts_what_is_allocated(block):
    config: ModelConfig = CONFIG
    shape = BufferShape(
        batch_size=1, heads=config.num_attention_heads, prefix_room=prefix_row_count(config)
    )
    buffers = allocate(config, shape, device=CPU, dtype=torch.bfloat16, sparse_block=block)
    found = sum(
        part.nbytes
        for each in buffers.summaries
        if each is not None
        for part in (each.mean_BNJK, each.sum_BNJK, each.reach_BNJ)
    )
    assert summary_bytes(config, 2, block) == found
    asked = EngineConfig(
        dtype="bfloat16", linear="bf16", attention="sparse", sparse_block=block, free_adaln=False
    )
    parts = {part.name: part.playing for part in engine_parts(config, asked, is_cuda=False)}
    assert parts["summaries"] == found

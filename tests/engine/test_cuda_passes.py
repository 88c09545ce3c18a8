"""Passes on a GPU: compiled, recorded, replayed, beside the decoder; the same bits, flat memory."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig, Geometry, ModelConfig
from engine.engine import Engine
from tests.tiny import random_action, random_anchor, tiny_config

pytestmark = [
    pytest.mark.gpu,
    # The compiler gives advice about settings that would change the numbers.
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

CONFIG = tiny_config(num_layers=2)  # each block takes seconds to compile, and the last is another
CHUNKS = 9
SOAK_CHUNKS = 1_000
FAST = EngineConfig(device="cuda", dtype="bfloat16", compile="full", kernels="off")


@pytest.fixture(autouse=True)
def _as_in_use() -> None:
    """Leave the checks of determinism off: they fill fresh memory, which a graph would record."""
    torch.use_deterministic_algorithms(False)


def _engine(**changes: object) -> Engine:
    return Engine.from_random(CONFIG, dataclasses.replace(FAST, **changes))


def _roll(engine: Engine, chunks: int = CHUNKS, *, seed: int = 0, beside: bool = False):
    model: ModelConfig = engine.model_config
    rollout = engine.new_rollout("night", anchor_BCTHW=random_anchor(model, seed), seed=seed)
    made = []
    for index in range(chunks):
        if index == 7:
            engine.set_prompt(rollout, "snow meadow")
        made.append(engine.denoise(rollout, random_action(index)).latents_BCTHW)
        engine.commit(rollout, beside=beside)
        if index == 4:
            engine.undo(rollout)
            made.append(engine.step(rollout, random_action(index)).latents_BCTHW)
    return torch.cat(made, dim=2).cpu()


@pytest.mark.parametrize("compiling", ["off", "full"])
def test_replays_equal_plain_passes_bit_for_bit(compiling):
    plain = _engine(compile=compiling, graphs=False)
    recorded = _engine(compile=compiling)
    expected = [_roll(plain, seed=seed) for seed in range(5)]
    for seed in range(5):  # each rollout finds more passes recorded than the one before
        assert torch.equal(_roll(recorded, seed=seed), expected[seed]), f"seed {seed}"
    runner = recorded.core.runner
    assert runner.counts.captures == 12
    assert runner.counts.failures == runner.counts.unlisted == 0
    for engine in (plain, recorded):
        engine.close()


def test_replays_of_sparse_attention_equal_plain_passes_bit_for_bit():
    # More layers than read everything, and blocks that may be read or not.
    config = tiny_config(geometry=Geometry(height_px=64, width_px=256))
    fast = dataclasses.replace(FAST, compile="off", kernels="fast", attention="sparse")
    plain = Engine.from_random(config, dataclasses.replace(fast, graphs=False))
    recorded = Engine.from_random(config, fast)
    recorded.warm_up()
    phases = sorted(entry.key.phase for entry in recorded.core.runner.entries)
    assert phases == ["denoise", "refresh", "sparse denoise"]
    for seed in range(3):
        assert torch.equal(_roll(recorded, seed=seed), _roll(plain, seed=seed)), f"seed {seed}"
    assert recorded.core.attention.sparse.take_density() < 0.98
    for engine in (plain, recorded):
        engine.close()


def test_a_refresh_beside_other_work_makes_the_same_bits():
    engine = _engine(compile="off")
    expected = [_roll(engine, seed=seed) for seed in range(3)]
    for seed in range(3):
        assert torch.equal(_roll(engine, seed=seed, beside=True), expected[seed])
    engine.close()


def test_compiled_bf16_is_as_near_to_fp32_as_eager_bf16():
    exact = _roll(_engine(dtype="float32", compile="off", graphs=False), 7)
    eager = _roll(_engine(compile="off", graphs=False), 7)
    compiled = _roll(_engine(), 7)
    floor = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert (compiled - exact).abs().max() <= 2 * (eager - exact).abs().max() + floor


def test_two_compiled_forms_serve_every_window_and_prompt():
    torch.compiler.reset()  # other tests have compiled the same functions in this process
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    _roll(_engine(graphs=False))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2


def test_a_long_walk_allocates_nothing_and_waits_for_nothing():
    engine = _engine()
    engine.warm_up()
    rollout = engine.new_rollout("night", anchor_BCTHW=random_anchor(CONFIG))
    actions = [random_action(index) for index in range(SOAK_CHUNKS)]
    for index in range(20):  # the shorter windows are recorded, and nothing after them
        engine.step(rollout, actions[index])
    gc.collect()  # what other tests left, which would go at any time
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for action in actions:
            engine.step(rollout, action)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for name in ("segment.all.allocated", "reserved_bytes.all.current", "num_ooms"):
        assert after[name] == before[name], name
    grown = after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"]
    assert abs(grown) < 2**20
    engine.close()


def test_memory_of_graphs_comes_back():
    _roll(_engine(compile="off", graphs=False), 2)  # contexts, workspaces
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    engine = _engine(compile="off")
    _roll(engine)
    assert all(entry.capture_ms > 0 for entry in engine.core.runner.entries)
    engine.close()
    del engine
    torch.cuda.empty_cache()
    # The stream that records keeps the workspace of its products, and a segment of small tensors.
    assert torch.cuda.memory_reserved() <= before + (32 + 2) * 2**20


def test_graphs_pay_where_passes_are_short():
    times_ms = {}
    for graphs in (False, True):
        engine = _engine(compile="off", graphs=graphs)
        _roll(engine)
        rollout = engine.new_rollout("night", anchor_BCTHW=random_anchor(CONFIG))
        chunks = [engine.step(rollout, random_action(index)) for index in range(20)]
        times_ms[graphs] = sorted(sum(chunk.timings.denoise_ms) for chunk in chunks[10:])[5]
        engine.close()
    assert times_ms[False] >= 3 * times_ms[True], times_ms


_STARTS = """
import json, time, torch
from engine.config import EngineConfig
from engine.engine import Engine
from tests.tiny import tiny_config
begin_s = time.perf_counter()
config = EngineConfig(device="cuda", dtype="bfloat16", compile="full")
Engine.from_random(tiny_config(num_layers=2), config).warm_up()
inductor = torch._dynamo.utils.counters["inductor"]
print(json.dumps({
    "s": time.perf_counter() - begin_s,
    "hits": inductor["fxgraph_cache_hit"],
    "misses": inductor["fxgraph_cache_miss"],
}))
"""


def test_the_second_start_finds_compiled_code(tmp_path):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    starts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _STARTS], env=environment, capture_output=True, text=True,
            check=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        starts.append(json.loads(done.stdout.splitlines()[-1]))
    # Both passes, and the little that is compiled to see whether anything can be.
    assert starts[1]["hits"] == starts[0]["misses"] >= 3
    assert starts[1]["misses"] == 0
    assert starts[1]["s"] < 0.7 * starts[0]["s"], starts

"""The memory plan against a GPU: blocks of the released width, a real window, recorded passes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.config import EngineConfig, Geometry, preset
from engine.engine import Engine
from engine.memory import CUDA_LIBRARY_BYTES, GIB, engine_parts
from engine.types import Action
from tests.tiny import random_anchor
from tests.tolerances import MEMORY_PLAN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

LAYERS, CHUNKS = 6, 9


@pytest.fixture(autouse=True)
def _as_in_use() -> None:
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "changes",
    [{}, {"free_adaln": True}, {"linear": "fp8_rowwise"}],
    ids=["whole", "tables", "eight-bits"],
)
def test_the_peak_is_as_planned(changes):
    model = dataclasses.replace(
        preset("h3_33b", Geometry(height_px=480, width_px=832)).model, num_layers=LAYERS
    )
    asked = {"free_adaln": False, "linear": "bf16"} | changes
    config = EngineConfig(device="cuda", dtype="bfloat16", compile="off", **asked)
    parts = engine_parts(model, config, is_cuda=True)
    loading = sum(part.loading for part in parts) - CUDA_LIBRARY_BYTES
    playing = sum(part.playing for part in parts) - CUDA_LIBRARY_BYTES
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = Engine.from_random(model, config)
    rollout = engine.new_rollout("night", anchor_BCTHW=random_anchor(model))
    for _ in range(CHUNKS):
        engine.step(rollout, Action.still())
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    engine.close()
    assert peak / GIB == pytest.approx(max(loading, playing) / GIB, rel=MEMORY_PLAN)

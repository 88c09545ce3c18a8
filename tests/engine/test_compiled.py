"""Compiled blocks against eager ones. Manual: it needs a C++ compiler and most of a minute."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from tests.tiny import narrow_config, random_action, random_anchor

pytestmark = pytest.mark.manual


def _roll(config: EngineConfig) -> torch.Tensor:
    engine = Engine.from_random(narrow_config(), config)
    rollout = engine.new_rollout("night", anchor_BCTHW=random_anchor(narrow_config()))
    made = [engine.step(rollout, random_action(i)).latents_BCTHW for i in range(7)]
    return torch.cat(made, dim=2)


def test_compiled_bf16_is_as_near_to_fp32_as_eager_bf16():
    exact = _roll(EngineConfig(device="cpu", dtype="float32"))
    low = EngineConfig(device="cpu", dtype="bfloat16")
    eager = _roll(low)
    compiled = _roll(dataclasses.replace(low, compile="blocks"))
    floor = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    bound = 2 * (eager - exact).abs().max() + floor
    assert (compiled - exact).abs().max() <= bound

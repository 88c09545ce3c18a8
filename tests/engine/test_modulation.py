"""Modulation tables: what remains when the weights behind them are given up."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, StateError
from engine.modulation import AudioAdaLN, ModulationTables
from tests.tiny import random_action, random_anchor, tiny_config, tiny_engine, tiny_model
from tests.tolerances import FP32_ROLLOUT_ATOL

pytestmark = pytest.mark.cpu

CONFIG = tiny_config()
FREED = EngineConfig(device="cpu", dtype="float32", free_adaln=True)


def _roll(engine: Engine) -> torch.Tensor:
    rollout = engine.new_rollout("meadow", anchor_BCTHW=random_anchor(CONFIG))
    made = [engine.step(rollout, random_action(index)).latents_BCTHW for index in range(3)]
    engine.set_prompt(rollout, "night")
    made.append(engine.step(rollout, random_action(9)).latents_BCTHW)
    return torch.cat(made, dim=2)


def _count(engine: Engine) -> int:
    blocks = engine.core.model.transformer_blocks
    return sum(each.numel() for block in blocks for each in block.adaln_proj.parameters())


def test_a_rollout_needs_no_more_than_the_third_for_audio():
    freed, whole = Engine.from_random(CONFIG, FREED), tiny_engine()
    # One product with a third of the outputs may order its sums otherwise.
    assert (_roll(freed) - _roll(whole)).abs().max() <= FP32_ROLLOUT_ATOL
    assert 3 * _count(freed) == _count(whole)


def test_the_third_is_read_once_a_session_and_not_again_for_a_prompt(monkeypatch):
    engine = Engine.from_random(CONFIG, FREED)
    read: list[torch.device] = []
    original = AudioAdaLN.audio

    def watched(self: AudioAdaLN, temb_BC: torch.Tensor) -> torch.Tensor:
        read.append(temb_BC.device)
        return original(self, temb_BC)

    monkeypatch.setattr(AudioAdaLN, "audio", watched)
    _roll(engine)
    assert read == [torch.device("cpu")] * CONFIG.num_layers
    _roll(engine)
    assert len(read) == 2 * CONFIG.num_layers


def test_another_audio_time_has_vectors_of_its_own():
    tables = ModulationTables(tiny_model(CONFIG), keeps_shared=True, keeps_audio=False)
    tables.free_weights()
    first = tables.audio(torch.tensor([0.5]))
    assert tables.audio(torch.tensor([0.5]), first) is first
    other = tables.audio(torch.tensor([0.25]), first)
    assert not torch.equal(other.kept_B6D[0], first.kept_B6D[0])


def test_weights_that_were_given_up_cannot_be_renewed():
    engine = Engine.from_random(CONFIG, FREED)
    with pytest.raises(StateError, match="renew: the modulation weights were given up"):
        engine.core.renew()
    with pytest.raises(StateError, match="modulation: the weights were given up"):
        engine.core.model.modulation(0, torch.zeros(1, CONFIG.time_embed_dim))


def test_weights_stay_where_no_tables_are_kept():
    tables = ModulationTables(tiny_model(CONFIG), keeps_shared=False, keeps_audio=False)
    with pytest.raises(StateError, match="expected adaln_tables"):
        tables.free_weights()
    with pytest.raises(ConfigError, match="free_adaln is True; allowed with prefix_cache"):
        dataclasses.replace(FREED, adaln_tables=False)


def test_renew_sees_new_weights():
    model = tiny_model(CONFIG)
    tables = ModulationTables(model, keeps_shared=True, keeps_audio=False)
    before = tables.of_passes().blocks_LM6D
    assert tables.of_passes().blocks_LM6D is before
    with torch.no_grad():
        model.transformer_blocks[0].adaln_proj.linear.bias.add_(1.0)
    tables.renew()
    after = tables.of_passes().blocks_LM6D
    assert torch.equal(before[1:], after[1:])
    torch.testing.assert_close(before[0] + 1.0, after[0])

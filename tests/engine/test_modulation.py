"""Modulation tables: what remains when the weights behind them are given up."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.audio_modulation import KEPT_TIMES, AudioAdaLN
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, StateError
from engine.layout import prefix_layout
from engine.model.dit import TAG_AUDIO, AdaLN
from engine.model.lora_linear import LoraLinear
from engine.modulation import ModulationTables
from engine.streamed_rows import StreamedRows
from tests.tiny import (
    random_action,
    random_anchor,
    random_prefix,
    tiny_config,
    tiny_engine,
    tiny_model,
)
from tests.tolerances import FP32_ROLLOUT_ATOL

pytestmark = pytest.mark.cpu

CONFIG = tiny_config()
FREED = EngineConfig(device="cpu", dtype="float32", free_adaln=True)


def _roll(engine: Engine, seed: int = 0) -> torch.Tensor:
    rollout = engine.new_rollout("meadow", anchor_BCTHW=random_anchor(CONFIG), seed=seed)
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


def test_the_third_is_read_once_for_each_seed(monkeypatch):
    engine = Engine.from_random(CONFIG, FREED)
    read: list[AudioAdaLN] = []
    original = AudioAdaLN.audio

    def watched(self: AudioAdaLN, temb_BC: torch.Tensor) -> torch.Tensor:
        read.append(self)
        return original(self, temb_BC)

    monkeypatch.setattr(AudioAdaLN, "audio", watched)
    made = _roll(engine)
    # Once a session, though that has two prompts; once a layer, though a block asks twice.
    assert read == [block.adaln_proj for block in engine.core.model.transformer_blocks]
    for seed in range(1, KEPT_TIMES):
        _roll(engine, seed)
    assert len(read) == KEPT_TIMES * CONFIG.num_layers
    assert torch.equal(_roll(engine), made)
    assert len(read) == KEPT_TIMES * CONFIG.num_layers
    # Seed 0 came last; what is forgotten for another one is seed 1.
    _roll(engine, KEPT_TIMES)
    _roll(engine, 1)
    assert len(read) == (KEPT_TIMES + 2) * CONFIG.num_layers


def test_a_prefix_that_broke_off_leaves_the_next_one_whole(monkeypatch):
    engine, expected = Engine.from_random(CONFIG, FREED), _roll(Engine.from_random(CONFIG, FREED))
    last = engine.core.model.block(CONFIG.num_layers - 1).adaln_proj

    def fail(temb_BC: torch.Tensor) -> torch.Tensor:
        raise StateError("broken off")

    with monkeypatch.context() as patch:
        patch.setattr(last, "audio", fail)
        with pytest.raises(StateError, match="broken off"):
            _roll(engine)
    assert torch.equal(_roll(engine), expected)


@pytest.mark.parametrize("has_branch", [False, True], ids=["plain", "adapter"])
def test_streamed_rows_make_the_vectors_of_whole_weights(has_branch):
    width = CONFIG.time_embed_dim
    layers = [AdaLN(CONFIG, 18 * CONFIG.hidden_size) for _ in range(CONFIG.num_layers)]
    if has_branch:
        a_RK, b_NR = torch.randn(4, width), torch.randn(18 * CONFIG.hidden_size, 4)
        layers[1].add_module("linear", LoraLinear(layers[1].linear, a_RK, b_NR, 0.5))
    weight = layers[0].linear.weight
    stream = StreamedRows(len(layers), weight.shape[0] // 3, weight)
    with torch.no_grad():
        left = [AudioAdaLN(whole, layer, stream) for layer, whole in enumerate(layers)]
        stream.open()
        temb_BC = torch.randn(2, width)
        for whole, audio in zip(layers, left, strict=True):
            assert torch.equal(audio.audio(temb_BC), whole(temb_BC, 6)[:, TAG_AUDIO])


def test_another_audio_time_has_vectors_of_its_own():
    tables = ModulationTables(tiny_model(CONFIG), keeps_shared=True)
    tables.free_weights()
    inputs = random_prefix(CONFIG)
    layout = prefix_layout(CONFIG, inputs.text_BRE.shape[1])
    first, other = (tables.audio(torch.tensor([t])) for t in (0.5, 0.25))
    assert tables.audio(torch.tensor([0.5])) is first
    rows = [tables.prefix(0, inputs, layout, audio) for audio in (first, other)]
    assert torch.equal(*(each[:, : -layout.audio_rows] for each in rows))
    assert not torch.equal(*(each[:, -layout.audio_rows :] for each in rows))


def test_weights_that_were_given_up_cannot_be_renewed():
    engine = Engine.from_random(CONFIG, FREED)
    with pytest.raises(StateError, match="renew: the modulation weights were given up"):
        engine.core.renew()
    with pytest.raises(StateError, match="modulation: the weights were given up"):
        engine.core.model.modulation(0, torch.zeros(1, CONFIG.time_embed_dim))


def test_weights_are_given_up_once():
    core = Engine.from_random(CONFIG, FREED).core
    left = [block.adaln_proj for block in core.model.transformer_blocks]
    core.free_adaln()
    assert [block.adaln_proj for block in core.model.transformer_blocks] == left


def test_weights_stay_where_no_tables_are_kept():
    tables = ModulationTables(tiny_model(CONFIG), keeps_shared=False)
    with pytest.raises(StateError, match="expected adaln_tables"):
        tables.free_weights()
    with pytest.raises(ConfigError, match="free_adaln is True; allowed with prefix_cache"):
        dataclasses.replace(FREED, adaln_tables=False)


def test_renew_sees_new_weights():
    model = tiny_model(CONFIG)
    tables = ModulationTables(model, keeps_shared=True)
    before = tables.of_passes().blocks_LM6D
    assert tables.of_passes().blocks_LM6D is before
    with torch.no_grad():
        model.transformer_blocks[0].adaln_proj.linear.bias.add_(1.0)
    tables.renew()
    after = tables.of_passes().blocks_LM6D
    assert torch.equal(before[1:], after[1:])
    torch.testing.assert_close(before[0] + 1.0, after[0])

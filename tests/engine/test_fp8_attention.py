"""Attention of the chunk's rows in eight bits, as an engine runs it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine import speed
from engine.attention.base import AttentionNeed
from engine.attention.fp8 import Fp8Backend
from engine.config import EngineConfig, preset
from engine.engine import Engine
from engine.errors import UnsupportedError
from engine.kernels.fp8_attention import window_codes
from engine.memory import code_bytes, engine_parts, prefix_row_count
from engine.quant import sqnr_db
from tests.tiny import narrow_config, random_action, random_anchor
from tests.tolerances import FP8_OUTPUT_SQNR_DB

pytestmark = pytest.mark.cpu

HOPPER = AttentionNeed(
    device_type="cuda", dtype=torch.bfloat16, head_dim=128, capability=(9, 0)
)  # fmt: skip


def _chunks(count: int, **changes: object) -> torch.Tensor:
    config = EngineConfig(device="cpu", dtype="float32", **changes)
    engine = Engine.from_random(narrow_config(), config)
    rollout = engine.new_rollout("night", anchor_BCTHW=random_anchor(engine.model_config))
    made = [engine.step(rollout, random_action(i)).latents_BCTHW for i in range(count)]
    engine.close()
    return torch.cat(made, dim=2)


def test_a_rollout_is_near_the_exact_one_and_is_not_it():
    exact, made = _chunks(2), _chunks(2, attention="fp8")
    assert not torch.equal(made, exact)
    assert sqnr_db(exact, made) >= FP8_OUTPUT_SQNR_DB


def test_every_switch_of_the_plain_path_makes_the_same():
    packed = _chunks(2, attention="fp8")
    plain = {"prefix_cache": False, "adaln_tables": False, "packed_history": False}
    # Codes are of the same windows; other sums of the layers below may flip a few of them.
    assert sqnr_db(packed, _chunks(2, attention="fp8", **plain)) >= 2 * FP8_OUTPUT_SQNR_DB


def test_rows_of_the_chunk_alone_have_it():
    engine = Engine.from_random(
        narrow_config(), EngineConfig(device="cpu", dtype="float32", attention="fp8")
    )
    names = engine.core.attention.names
    assert names == {"conditioning": "sdpa", "audio": "sdpa", "video": "fp8"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"device_type": "cpu", "dtype": torch.float32, "head_dim": 32}, None),
        ({"device_type": "mps"}, "made for cpu and cuda, not mps"),
        ({"dtype": torch.float16}, "made for bfloat16, not torch.float16"),
        ({"head_dim": 96}, "heads are 96 wide; allowed: 64 or 128"),
        ({"capability": (8, 0)}, "the device has capability (8, 0); needed: (8, 9)"),
    ],
)
def test_refusals(monkeypatch, changes, reason):
    monkeypatch.setattr("engine.attention.fp8.find_spec", lambda name: object())
    assert Fp8Backend().refusal(dataclasses.replace(HOPPER, **changes)) == reason


def test_a_machine_without_triton_says_so(monkeypatch):
    monkeypatch.setattr("engine.attention.fp8.find_spec", lambda name: None)
    assert Fp8Backend().refusal(HOPPER) == "the package triton is not installed"


def test_what_cannot_serve_is_refused_before_weights_are_read(monkeypatch):
    monkeypatch.setattr(
        speed.AttentionNeed, "on", lambda *given: dataclasses.replace(HOPPER, capability=(8, 0))
    )
    config = EngineConfig(attention="fp8")
    with pytest.raises(UnsupportedError, match=r"attention fp8 refuses bfloat16 .*\(8, 0\)"):
        speed.check_attention(config, narrow_config(), torch.device("cpu"), torch.bfloat16)


def test_the_plan_of_memory_has_the_codes_of_one_layer():
    model = preset("mini").model
    window_rows = prefix_row_count(model) + model.window_chunks * model.rows_per_chunk
    size = (1, model.num_attention_heads, window_rows, model.attention_head_dim)
    k = torch.zeros(size, dtype=torch.bfloat16).transpose(1, 2)
    codes = window_codes(k, k)
    assert code_bytes(model) == sum(each.nbytes for each in codes)
    config = EngineConfig(dtype="bfloat16", linear="bf16", free_adaln=False, attention="fp8")
    parts = {part.name: part.playing for part in engine_parts(model, config, is_cuda=True)}
    assert parts["codes of a window"] == code_bytes(model)

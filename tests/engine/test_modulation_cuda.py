"""Modulation of audio rows on a GPU: streamed from the machine's memory or there, the same bits."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from engine.config import EngineConfig, Geometry, preset
from engine.engine import Engine
from engine.types import Action
from tests.tiny import random_anchor, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

SEEDS = (3, 4)
WIDE = dataclasses.replace(
    preset("h3_33b", Geometry(height_px=64, width_px=96)).model, num_layers=5, num_refiner_layers=1
)


@pytest.fixture(autouse=True)
def _as_in_use() -> None:
    torch.use_deterministic_algorithms(False)


def _made(model, free_adaln, dtype):
    """Vectors of two sessions, in each layer, and the first latents of the second."""
    config = EngineConfig(
        device="cuda", dtype=dtype, linear="bf16", free_adaln=free_adaln, compile="off"
    )
    engine = Engine.from_random(model, config)
    vectors = []
    for seed in SEEDS:
        rollout = engine.new_rollout("night", anchor_BCTHW=random_anchor(model), seed=seed)
        vectors.append([rollout.core.audio.kept_B6D[layer] for layer in range(model.num_layers)])
    latents = engine.step(rollout, Action.still()).latents_BCTHW
    engine.close()
    return vectors, latents


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "ordinary"])
@pytest.mark.parametrize(
    ("model", "dtype"),
    [(WIDE, "bfloat16"), (tiny_config(), "bfloat16"), (tiny_config(), "float32")],
    ids=["released-width", "tiny", "tiny-fp32"],
)
def test_vectors_are_those_of_weights_that_stay(model, dtype, is_pinned, monkeypatch, caplog):
    if not is_pinned:
        original = torch.empty

        def refuse(*sizes, pin_memory=False, **options):
            if pin_memory:
                raise RuntimeError("CUDA error: out of memory")
            return original(*sizes, **options)

        monkeypatch.setattr("engine.streamed_rows.torch.empty", refuse)
    vectors, latents = _made(model, False, dtype)
    with caplog.at_level(logging.INFO, logger="engine"):
        streamed, made = _made(model, True, dtype)
    told = " ".join(record.message for record in caplog.records)
    assert ("memory_not_pinned" in told) is not is_pinned
    for seed, whole, found in zip(SEEDS, vectors, streamed, strict=True):
        for layer, (expected, vector) in enumerate(zip(whole, found, strict=True)):
            assert torch.equal(vector, expected), f"seed {seed}, layer {layer}"
    assert not torch.equal(streamed[0][0], streamed[1][0])
    assert torch.equal(made, latents)

"""A prompt is encoded on the GPU that makes chunks: neither disturbs the other, even a capture."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading import random_parts
from engine.text import PromptEncoder, PromptEncoding
from tests.tiny import random_action, random_anchor, tiny_config

pytestmark = pytest.mark.gpu

CONFIG = tiny_config()
FAST = EngineConfig(device="cuda", dtype="bfloat16", compile="off")


@pytest.fixture(autouse=True)
def _as_in_use() -> None:
    """Leave the checks of determinism off: they fill fresh memory, which a graph would record."""
    torch.use_deterministic_algorithms(False)


class _Busy:
    """Rows of another encoder, after work of tens of milliseconds on a stream of its own."""

    def __init__(self, words: PromptEncoder) -> None:
        self._words = words
        self._stream = torch.cuda.Stream()
        self.count = 0

    def encode(self, prompt: str, picture_HWC: Tensor | None = None) -> PromptEncoding:
        with torch.cuda.stream(self._stream):
            hidden = torch.ones(2048, 4096, device="cuda", dtype=torch.bfloat16)
            for _ in range(20):
                weight = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
                hidden = (hidden @ weight).tanh()
            hidden.cpu()
            self.count += 1
            found = self._words.encode(prompt)
            return PromptEncoding(rows_BRE=found.rows_BRE.cpu(), tags_R=found.tags_R.cpu())

    def is_at_hand(self, prompt: str, picture_HWC: Tensor | None = None) -> bool:
        return False

    def close(self) -> None:
        pass


@contextmanager
def _encoding_all_the_time(encoder: _Busy) -> Iterator[None]:
    is_done = threading.Event()

    def loop() -> None:
        while not is_done.is_set():
            encoder.encode("night")

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _roll(engine: Engine, seed: int) -> Tensor:
    rollout = engine.new_rollout("night", anchor_BCTHW=random_anchor(CONFIG, seed), seed=seed)
    made = [engine.step(rollout, random_action(index)).latents_BCTHW for index in range(9)]
    return torch.cat(made, dim=2).cpu()


def test_chunks_are_recorded_and_replayed_while_prompts_are_encoded() -> None:
    calm = Engine.from_random(CONFIG, FAST)
    parts = random_parts(CONFIG, FAST)
    encoder = _Busy(parts.text_encoder)
    engine = Engine(dataclasses.replace(parts, text_encoder=encoder))
    expected = [_roll(calm, seed) for seed in range(4)]
    with _encoding_all_the_time(encoder):
        for seed in range(4):
            assert torch.equal(_roll(engine, seed), expected[seed]), f"seed {seed}"
    runner = engine.core.runner
    assert runner is not None
    assert runner.counts.captures == calm.core.runner.counts.captures
    assert runner.counts.failures == 0
    assert encoder.count > 4
    for each in (calm, engine):
        each.close()

"""A world that two GPUs share over NCCL: played, reset, killed, brought back, made again."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from stream.trace import read_trace
from stream.worker_messages import SessionStarted
from tests.stream.test_followers import SPEC, play
from tests.stream.test_ranks import by_ranks

pytestmark = pytest.mark.gpu


def test_two_gpus_play_what_two_make_again(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    engine = EngineConfig(device="cuda", dtype="bfloat16", is_long_lived=True)
    story = asyncio.run(play(tmp_path, dataclasses.replace(SPEC, engine=engine)))
    assert story.all(SessionStarted)[-1].is_same_world
    assert not any(story.survivors.values())
    trace = read_trace(story.trace)
    assert (trace.header.device, trace.header.rank_count) == ("cuda:0", 2)
    result = by_ranks(tmp_path, "replay", str(story.trace))
    assert result.returncode == 0, result.stderr

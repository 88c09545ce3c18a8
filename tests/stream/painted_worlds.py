"""Worlds that paint numbers instead of running a model: quick, and able to fail on request.

A scripted failure is named in the prompt, so that it crosses the border of the worker process:
"nan 5" has latents without numbers in chunk 5, "black 5" black frames, "frozen 5" equal frames,
"raise 5" raises, "hang 5" never returns, "slow 0.2" takes that many seconds a chunk. A prompt that
begins with "late" is encoded when `PaintedWorld.may_encode` is set, one with "refused" never.
What enters the digest goes through a pass that is recorded, as far as a runner can see.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import torch

from engine.config import FRAMES_PER_LATENT, EngineConfig, Geometry
from engine.errors import CheckpointError, ConfigError
from engine.types import Action
from graphs.capture import Captured, Pass
from graphs.key import GraphKey, Phase
from graphs.runner import GraphRunner
from stream.load_news import LoadNews
from stream.session import WorldSpeed, WorldState
from stream.trace import Digest
from stream.world_source import FollowerUse
from stream.world_spec import Start, WorldSpec
from vae_stream.decoder import FrameChunk

GEOMETRY = Geometry(height_px=32, width_px=64)
SPEC = WorldSpec(
    source="renderer",
    preset="mini",
    geometry=GEOMETRY,
    weights="shipped",
    engine=EngineConfig(device="cpu", dtype="float32"),
)

_PASS = GraphKey(
    phase=Phase.DENOISE, rows=2, history_rows=0, prefix_rows=0, dtype=torch.float32, batch=1
)


class _Repeated:
    """A pass that is run again; its output has room of its own."""

    def __init__(self, run: Pass) -> None:
        made = run()
        assert made is not None
        self._run, self.output = run, torch.zeros_like(made)

    def replay(self) -> None:
        made = self._run()
        assert made is not None
        self.output.copy_(made)

    def release(self) -> None:
        pass


class _Repeats:
    """Capture backend for passes that write nothing: quick to begin, unlike a tape."""

    def __init__(self) -> None:
        self._used_bytes = 0

    def warm_up(self, run: Pass) -> torch.Tensor | None:
        return run()

    def capture(self, run: Pass) -> Captured:
        self._used_bytes += 100
        return _Repeated(run)

    def used_bytes(self) -> int:
        return self._used_bytes

    def synchronize(self) -> None:
        pass

    def release_pool(self) -> None:
        pass


class PaintedWorld:
    """Frame f of chunk k shows k in red, f in green, and the walk so far in blue."""

    geometry = GEOMETRY
    has_frames = True
    lookahead_latents = 0
    digest_of = "latents"
    model_hash = "painted"
    device = "cpu"
    dtype = "float32"
    speed = WorldSpeed()
    note = ""
    is_finite = True
    state_bytes = 0
    may_encode = threading.Event()
    attention_names: ClassVar = {"video": "painted"}

    def __init__(self) -> None:
        self._numbers, self._runner = torch.zeros(2), GraphRunner(_Repeats())
        self._runner.allow([_PASS])
        self.runners = {"transformer": self._runner}

    def begin(self, prompt: str, seed: int, digest: Digest) -> None:
        self._digest, self._chunk, self._walked = digest, 0, 0.0
        self.set_prompt(prompt)

    def is_prompt_at_hand(self, prompt: str) -> bool:
        return not prompt.startswith(("late", "refused"))

    def prepare_prompt(self, prompt: str) -> None:
        if prompt.startswith("late"):
            assert self.may_encode.wait(20.0)
        if prompt.startswith("refused"):
            raise ConfigError("prompt: 900 tokens; allowed: at most 512")

    def set_prompt(self, prompt: str) -> None:
        kind, _, when = prompt.partition(" ")
        self._slow_s = float(when) if kind == "slow" else 0.0
        self._fault = kind if when.isdigit() else ""
        self._fault_chunk = int(when) if when.isdigit() else -1

    def finish(self) -> Iterator[FrameChunk]:
        yield from ()

    def state(self) -> WorldState:
        values = {"chunk": float(self._chunk), "walked": self._walked}
        return WorldState(tensors={}, values=values)

    def set_state(self, state: WorldState) -> None:
        self._chunk, self._walked = int(state.values["chunk"]), state.values["walked"]

    def step(self, action: Action) -> Iterator[FrameChunk]:
        fault = self._fault if self._chunk == self._fault_chunk else ""
        time.sleep(self._slow_s)
        if fault == "raise":
            raise RuntimeError("this device caught fire")
        if fault == "hang":
            time.sleep(3600.0)
        self.is_finite = fault != "nan"
        self._walked += float(action.axes_FA[:, 0].sum())
        self._numbers.copy_(torch.tensor([self._chunk, self._walked]))
        self._runner.begin_turn()
        made = self._runner.run(_PASS, self._numbers.clone, [self._numbers])
        assert made is not None
        self._digest.update(made)
        frames_THWC = torch.zeros(17, 32, 64, 3, dtype=torch.uint8)
        frames_THWC[..., 0] = self._chunk % 200 + 50
        frames_THWC[..., 1] = torch.arange(17).to(torch.uint8)[:, None, None]
        frames_THWC[..., 2] = int(self._walked) % 200
        if fault == "frozen":
            frames_THWC[..., 1] = 0
        if fault == "black":
            frames_THWC[5:] = 0
        begin = 0
        for index, count in enumerate(FRAMES_PER_LATENT):
            yield FrameChunk(
                frames_THWC=frames_THWC[begin : begin + count],
                first_frame=self._chunk * 17 + begin,
                latent_index=self._chunk * 5 + index,
            )
            begin += count
        self._chunk += 1


class PaintedWorlds:
    """Source of the one world."""

    def __init__(self, spec: WorldSpec, news: LoadNews) -> None:
        self._world = PaintedWorld()

    def open(self, start: Start) -> PaintedWorld:
        return self._world

    @property
    def followers(self) -> FollowerUse:
        return FollowerUse()

    def close(self) -> None:
        pass


class NoWorlds(PaintedWorlds):
    """Source whose weights are damaged."""

    def open(self, start: Start) -> PaintedWorld:
        raise CheckpointError("weights: damaged")


class DeadlyWorlds(PaintedWorlds):
    """Source that takes its process with it, as a machine without memory does."""

    def open(self, start: Start) -> PaintedWorld:
        os._exit(9)

"""The engine: a loaded model, and rollouts that step through it.

Owns the resolved configuration, and the order of one step: camera, draws, denoise,
commit. Invariants: weights live here and never change; everything that changes lives in `Rollout`;
a step that raises leaves the rollout as it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.camera import FIRST_FRAMES, CameraState, integrate, relative_views
from engine.checkpoint.reading import OnLoad
from engine.clock import new_clock
from engine.config import EngineConfig, Geometry, ModelConfig
from engine.core import CoreOptions, RolloutCore
from engine.device import send, within_memory
from engine.errors import ConfigError, StateError, UnsupportedError
from engine.kv_cache import PackedCache
from engine.loading import ModelParts, pretrained_parts, random_parts
from engine.parallel import Alone, Exchange
from engine.prefix import PrefixDraws, PrefixInputs, anchor_shape, make_prefix
from engine.rollout import ChunkDraws, Draws, OpenChunk, Rollout, RolloutSnapshot, SeededDraws
from engine.side_work import SideWork
from engine.speed import speed_parts
from engine.text import PromptEncoder, PromptEncoding
from engine.types import Action, LatentChunk, StepTimings, WarmUpEvent
from graphs.runner import GraphRunner

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Engine:
    """A model that is ready to make chunks. Use one from one thread at a time.

    Raises: StateError from every method after `close`.
    """

    def __init__(self, parts: ModelParts, *, exchange: Exchange | None = None) -> None:
        model, config = parts.model, parts.config
        self.model_config: ModelConfig = model.config
        self.config = config
        """As asked for, with every "auto" resolved."""
        self.model_hash = parts.model_hash
        self.dtype_choice = parts.dtype_choice
        self.device = model.proj_in.weight.device
        self.dtype = model.dtype
        self._exchange: Exchange = exchange or Alone()
        self._text_encoder = parts.text_encoder
        self._silence_GCT = parts.silence_GCT
        self._side_work = SideWork(self.device)
        speed = speed_parts(model, config, world_size=self._exchange.world_size)
        options = CoreOptions(
            prefix_cache=config.prefix_cache,
            adaln_tables=config.adaln_tables,
            packed_history=config.packed_history,
        )
        self._core: RolloutCore | None = RolloutCore(
            model,
            options,
            attention=speed.attention,
            ops=speed.ops,
            block_ops=speed.block_ops,
            exchange=self._exchange,
            is_compiled=speed.is_compiled,
            runner=speed.runner,
        )
        if config.free_adaln is True:
            self._core.free_adaln()

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        config: EngineConfig | None = None,
        *,
        model_config: ModelConfig | None = None,
        exchange: Exchange | None = None,
        on_progress: OnLoad | None = None,
    ) -> Engine:
        """Load a preset that ships weights, a folder of weights, or one file of them.

        Args:
            source: "mini", "tiny" (random by definition), or where the weights are, in any layout
                that `checkpoint.source` knows.
            config: what the run chooses.
            model_config: of the preset, for weights without a `config.json` of ours.
            exchange: where ranks share each rollout; every rank loads the weights.
            on_progress: called a few times a second while weights are read.

        Raises: CheckpointError, ConfigError, DeviceError; before weights are read where possible.
        """
        parts = pretrained_parts(
            source,
            config or EngineConfig(),
            model_config=model_config,
            world_size=1 if exchange is None else exchange.world_size,
            on_progress=on_progress,
        )
        return cls(parts, exchange=exchange)

    @classmethod
    def from_random(
        cls,
        model_config: ModelConfig,
        config: EngineConfig | None = None,
        *,
        seed: int = 0,
        geometries: tuple[Geometry, ...] = (),
        exchange: Exchange | None = None,
    ) -> Engine:
        """Build a model with random weights: for tests, and to measure speed and memory.

        Args:
            model_config: the model.
            config: what the run chooses.
            seed: of the weights; they repeat on the same kind of device.
            geometries: picture sizes to name when memory does not suffice, besides smaller ones.
            exchange: where ranks share each rollout; every rank has all weights.

        Raises: DeviceError before anything is allocated.
        """
        parts = random_parts(
            model_config,
            config or EngineConfig(),
            seed=seed,
            geometries=geometries,
            world_size=1 if exchange is None else exchange.world_size,
        )
        return cls(parts, exchange=exchange)

    @property
    def core(self) -> RolloutCore:
        """The batched passes below.

        Raises: StateError after `close`.
        """
        self._side_work.join()
        if self._core is None:
            raise StateError("the engine is closed; expected calls before close()")
        return self._core

    @property
    def runner(self) -> GraphRunner | None:
        """What records passes, for its figures; from any thread. None without graphs, or closed."""
        core = self._core
        return None if core is None else core.runner

    def warm_up(self, on_progress: Callable[[WarmUpEvent], None] | None = None) -> None:
        """Run every window shape once on a rollout that is thrown away; record the steady one.

        Shorter windows are recorded while somebody plays. `graphs` lists what is recorded.
        """
        start_s = time.perf_counter()
        size = self.model_config.geometry
        rollout = self.new_rollout(
            "",
            anchor_BCTHW=torch.zeros(anchor_shape(self.model_config)),
            picture_HWC=torch.zeros(size.height_px, size.width_px, 3, dtype=torch.uint8),
        )
        windows = self.model_config.window_chunks
        # The steady window comes once more: its passes are recorded then.
        total = windows + (1 if self.config.records_passes else 0)
        for done in range(total):
            self.step(rollout, Action.still())
            label = f"window of {min(done + 1, windows)} chunks"
            if done >= windows:
                label += ", recorded"
            elapsed_s = time.perf_counter() - start_s
            _log.info("warm_up done=%d total=%d %s s=%.1f", done + 1, total, label, elapsed_s)
            if on_progress is not None:
                on_progress(
                    WarmUpEvent(done=done + 1, total=total, label=label, elapsed_s=elapsed_s)
                )
        _log.info("graphs %s", self.graphs)

    @property
    def graphs(self) -> str:
        """Recorded passes with their times and memory, for people.

        Raises: StateError after `close`.
        """
        runner = self.core.runner
        return "none: each pass runs anew" if runner is None else runner.describe()

    def new_rollout(
        self,
        prompt: str,
        *,
        anchor_BCTHW: Tensor | None = None,
        picture_HWC: Tensor | None = None,
        seed: int = 0,
        epoch: int = 0,
        draws: Draws | None = None,
        encoding: PromptEncoding | None = None,
    ) -> Rollout:
        """Start a world from a prompt and the latent of its first picture.

        Args:
            prompt: any text.
            anchor_BCTHW: the encoded picture [1, 24, 1, H, W]; needed.
            picture_HWC: the picture itself, uint8 RGB, for a prompt encoder that looks at it.
            seed: 0 to 2^64 - 1.
            epoch: what the chunks will carry; a reset raises it.
            draws: random numbers from elsewhere, instead of the seed's.
            encoding: of the prompt, where it is there already.

        Raises: ConfigError, OutOfMemoryError.
        """
        core = self.core
        draws = draws or SeededDraws(self.model_config, seed)
        prefix_draws = draws.prefix()
        if anchor_BCTHW is None:
            raise ConfigError("anchor is None; the world needs an image: pass its latent frame")
        if encoding is None:
            encoding = self._text_encoder.encode(prompt, picture_HWC)
        inputs = self._inputs(encoding, anchor_BCTHW, prefix_draws)
        return Rollout(
            prompt=prompt,
            seed=seed,
            epoch=epoch,
            draws=draws,
            prefix_draws=prefix_draws,
            anchor_BCTHW=anchor_BCTHW,
            picture_HWC=picture_HWC,
            core=self._within_memory("the start of a rollout", lambda: core.begin(inputs)),
            camera=CameraState(),
            camera_before=CameraState(),
        )

    def set_prompt(
        self, rollout: Rollout, prompt: str, *, encoding: PromptEncoding | None = None
    ) -> None:
        """Change the prompt from the next chunk on; picture, silence and history stay.

        Args:
            rollout: whose prompt it is.
            prompt: any text.
            encoding: of the prompt, where it is there already.

        Raises: ConfigError for a prompt that the encoder does not take, OutOfMemoryError.
        """
        core = self.core
        if encoding is None:
            encoding = self._text_encoder.encode(prompt, rollout.picture_HWC)
        inputs = self._inputs(encoding, rollout.anchor_BCTHW, rollout.prefix_draws)
        self._within_memory("a new prompt", lambda: core.switch_prefix(rollout.core, inputs))
        rollout.prompt = prompt

    @property
    def prompts(self) -> PromptEncoder:
        """What encodes prompts; may be used from any thread, so ahead of the rollout's."""
        return self._text_encoder

    def step(
        self, rollout: Rollout, action: Action, *, leading_BCTHW: Tensor | None = None
    ) -> LatentChunk:
        """Make the next chunk and let it become history: `denoise`, then `commit`.

        Args:
            rollout: moved on by one chunk.
            action: controls over the 17 frames of the chunk.
            leading_BCTHW: the first 0 to 4 latents where they are given, so that a chunk can be
                made again from its middle (see `undo`).

        Raises: ConfigError for leading latents of a wrong shape, OutOfMemoryError.
        """
        chunk = self.denoise(rollout, action, leading_BCTHW=leading_BCTHW)
        self.commit(rollout)
        return chunk

    def denoise(
        self, rollout: Rollout, action: Action, *, leading_BCTHW: Tensor | None = None
    ) -> LatentChunk:
        """Make the latents of the next chunk; they can be decoded before `commit` follows.

        The rollout moves on with `commit`; without it, the next call makes the same chunk.

        Args:
            rollout: where the chunk is made.
            action: as for `step`.
            leading_BCTHW: as for `step`.

        Raises: ConfigError for leading latents of a wrong shape, OutOfMemoryError.
        """
        core, config = self.core, self.model_config
        clock = new_clock(self.device)
        clock.mark("begin")
        path = integrate(rollout.camera, action, config.camera)
        poses_T44 = torch.from_numpy(path.poses_F44[np.array(FIRST_FRAMES)])
        views_BT44 = relative_views(poses_T44[None], torch.eye(4, dtype=torch.float64)[None])
        draws, chunk_index = self._draw(rollout), rollout.chunk_index

        def make() -> Tensor:
            return core.denoise(
                rollout.core,
                draws.noise_BCTHW,
                draws.step_noise,
                views_BT44,
                leading_BCTHW=None if leading_BCTHW is None else send(leading_BCTHW, self.device),
                on_step=lambda step: clock.mark(f"step_{step}"),
            )

        latents_BCTHW = self._within_memory(f"chunk {chunk_index}", make)
        steps = config.sampler.steps
        clock.mark(f"step_{steps}")
        rollout.open_chunk = OpenChunk(latents_BCTHW=latents_BCTHW, camera=path.end, clock=clock)
        return LatentChunk(
            chunk_index=chunk_index,
            epoch=rollout.epoch,
            latents_BCTHW=latents_BCTHW,
            poses_F44=path.poses_F44,
            timings=StepTimings(clock=clock, steps=steps),
        )

    def commit(self, rollout: Rollout, *, beside: bool = False) -> None:
        """Write keys and values of the denoised chunk, so that later ones see it.

        Args:
            rollout: whose chunk it is.
            beside: on CUDA, let that run beside what is launched next, such as the decoder; the
                next call of the engine comes after it.

        Raises: StateError when there is none, OutOfMemoryError.
        """
        core, open_chunk = self.core, rollout.open_chunk
        if open_chunk is None:
            raise StateError("commit: no chunk is denoised; expected denoise() first")
        latents_BCTHW = open_chunk.latents_BCTHW
        with self._side_work.beside(latents_BCTHW) if beside else nullcontext():
            open_chunk.clock.mark("refresh")
            self._within_memory(
                f"the refresh of chunk {rollout.chunk_index}",
                lambda: core.refresh(rollout.core, latents_BCTHW),
            )
            open_chunk.clock.mark("end")
        rollout.open_chunk = None
        rollout.camera_before, rollout.camera = rollout.camera, open_chunk.camera

    @torch.no_grad()
    def settle(self, rollout: Rollout) -> None:
        """Do now what the next step would begin with: its action then has to wait for less.

        The last step cannot be taken back any more. May be left out.
        """
        _ = self.core
        rollout.core.cache.settle()
        self._draw(rollout)

    def undo(self, rollout: Rollout) -> None:
        """Take the last step back, once, so that its chunk can be made again.

        The chunk's random numbers are the same the second time.

        Raises: StateError when there is no step to take back.
        """
        _ = self.core
        rollout.core.cache.undo()
        rollout.camera = rollout.camera_before

    def snapshot(self, rollout: Rollout) -> RolloutSnapshot:
        """Return the point that the rollout is at, between two chunks; whole on every rank.

        Raises: StateError in the middle of a chunk, UnsupportedError without `packed_history`.
        """
        _ = self.core
        if rollout.open_chunk is not None:
            raise StateError("snapshot: a chunk is denoised; expected its commit() first")
        return RolloutSnapshot(
            chunk_index=rollout.chunk_index,
            camera=rollout.camera,
            buffers={
                name: self._exchange.whole_heads(buffer)
                for name, buffer in _packed(rollout).snapshot().items()
            },
        )

    @torch.no_grad()
    def restore(self, rollout: Rollout, snapshot: RolloutSnapshot) -> None:
        """Move a rollout of the same seed, prompt and picture to a snapshot.

        Raises: StateError for a snapshot of another model, UnsupportedError as above.
        """
        _ = self.core
        buffers = {
            name: self._exchange.own_heads(buffer) for name, buffer in snapshot.buffers.items()
        }
        _packed(rollout).restore(snapshot.chunk_index, buffers)
        rollout.open_chunk = None
        rollout.camera = rollout.camera_before = snapshot.camera

    def close(self) -> None:
        """Give graphs and weights up. Calling it again does nothing."""
        self._side_work.join()
        if self._core is not None:
            self._core.close()
        self._core = None
        self._text_encoder.close()

    def _draw(self, rollout: Rollout) -> ChunkDraws:
        """Random numbers of the next chunk, where the model is; drawn and sent once."""
        index = rollout.chunk_index
        if rollout.drawn is None or rollout.drawn[0] != index:
            drawn = rollout.draws.chunk(index)
            sent = ChunkDraws(
                noise_BCTHW=send(drawn.noise_BCTHW, self.device),
                step_noise=tuple(send(noise, self.device) for noise in drawn.step_noise),
            )
            rollout.drawn = index, sent
        return rollout.drawn[1]

    def _within_memory(self, what: str, work: Callable[[], T]) -> T:
        return within_memory(self.device, what, work)

    def _inputs(
        self, encoding: PromptEncoding, anchor_BCTHW: Tensor, prefix_draws: PrefixDraws
    ) -> PrefixInputs:
        return make_prefix(
            self.model_config,
            encoding.rows_BRE.to(self.device),
            encoding.tags_R,
            anchor_BCTHW,
            prefix_draws,
            silence_BGCT=None if self._silence_GCT is None else self._silence_GCT[None],
        )


def _packed(rollout: Rollout) -> PackedCache:
    cache = rollout.core.cache
    if not isinstance(cache, PackedCache):
        raise UnsupportedError("snapshot: packed_history is off; allowed: on")
    return cache

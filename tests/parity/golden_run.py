"""A rollout on the golden data with everything recorded that the golden file holds."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.camera import camera_indices, relative_views
from engine.config import preset
from engine.core import CoreOptions, RolloutCore
from engine.model.dit import MiniMaxH3Transformer
from engine.prefix import PrefixDraws, PrefixInputs, make_prefix
from tests.tiny import DATA

CHUNKS, TEXT_ROWS, PREFIX_ROWS = 9, 17, 45
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@cache
def golden() -> dict[str, Tensor]:
    """Return every tensor of the golden file."""
    return load_file(DATA / "golden_solarwm_tiny_1.safetensors")


def golden_model(name: str) -> MiniMaxH3Transformer:
    """Return the golden weights in one of the two dtypes."""
    weights = {
        key.removeprefix("weights."): value.float()
        for key, value in golden().items()
        if key.startswith("weights.")
    }
    model = MiniMaxH3Transformer(preset("tiny").model)
    model.load_state_dict(weights)
    model.cast_blocks(DTYPES[name])
    return model.requires_grad_(False)


def golden_prefix() -> PrefixInputs:
    """Return the golden prefix made by our own preparation."""
    data = golden()
    draws = PrefixDraws(
        anchor_eps_BCTHW=data["in.anchor_eps"],
        audio_u_B=data["in.audio_u"],
        audio_eps_BRC=data["in.audio_eps"],
    )
    return make_prefix(
        preset("tiny").model,
        data["in.prompt_embeds"].float()[None],
        data["in.text_tags"],
        data["in.anchor_latent"],
        draws,
        silence_BGCT=data["in.silence_latent"][None],
    )


def golden_views() -> Tensor:
    """Return the views of the 45 latents [1, 45, 4, 4] from the absolute poses."""
    poses = golden()["in.c2w"]
    return relative_views(poses[camera_indices(45, 158)][None], poses[:1])


class Recorder:
    """Wraps the passes of a model and keeps rows by the names of the golden file."""

    def __init__(self, model: MiniMaxH3Transformer) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.label: str | None = None
        self._run_blocks = model.run_blocks
        model.run_blocks = self._recorded_run  # type: ignore[method-assign]
        for layer, block in enumerate(model.transformer_blocks):
            block.finish = self._recorded_finish(layer, block.finish)

    def _keep(self, name: str, layer: int, value: Tensor) -> None:
        if self.label is not None:
            self.tensors[f"{name}.{self.label}.L{layer}"] = value[0].clone()

    def _recorded_finish(self, layer: int, finish: Any) -> Any:
        def wrapped(*args: Tensor) -> Tensor:
            out = finish(*args)
            self._keep("block_out", layer, out)
            return out

        return wrapped

    def _recorded_run(
        self, x: Tensor, modulations: Any, attend: Any, halves: Any, **options: Any
    ) -> Tensor:
        recorder = self

        class Wrapped:
            def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out = attend(layer, q, k, v)
                for name, value in (("q", q), ("k", k), ("v", v), ("out", out)):
                    recorder._keep(f"attn_{name}", layer, value)
                return out

            def store(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
                attend.store(layer, q, k, v)

        return self._run_blocks(x, modulations, Wrapped(), halves, **options)


@cache
def record(dtype_name: str, options: CoreOptions) -> dict[str, Tensor]:
    """Return the tensors of a whole golden rollout, under the golden names without the dtype."""
    data, config = golden(), preset("tiny").model
    model = golden_model(dtype_name)
    recorder = Recorder(model)
    core, inputs, views = RolloutCore(model, options), golden_prefix(), golden_views()
    kept: dict[str, Tensor] = {"text_refined": model.refine_text(inputs.text_BRE)[0]}
    recorder.label = "prefix"
    state = core.begin(inputs)
    velocity_of = core.velocity
    x_exit = []
    for chunk in range(CHUNKS):

        def velocity(state_: Any, x: Tensor, step: int, chunk: int = chunk, **more: Any) -> Tensor:
            recorder.label = f"c{chunk}.s{step}" if step == 0 else None
            out = velocity_of(state_, x, step, **more)
            recorder.label = None
            kept[f"x_in.c{chunk}.s{step}"] = x.clone()
            kept[f"vel.c{chunk}.s{step}"] = out
            if step == config.sampler.steps - 1:
                x_exit.append(x.clone())
            return out

        core.velocity = velocity  # type: ignore[method-assign]
        span = slice(5 * chunk, 5 * chunk + 5)
        latents = core.denoise(
            state, data["in.rollout_noise"][:, :, span], list(data["in.step_eps"][chunk]),
            views[:, span],
        )  # fmt: skip
        core.refresh(state, latents)
        kept[f"x0.c{chunk}"] = latents
        if not options.packed_history:
            for layer in range(config.num_layers):
                raw = state.cache.raw(layer)
                kept[f"cache_k.c{chunk}.L{layer}"] = torch.cat([pair[0] for pair in raw])
                kept[f"cache_v.c{chunk}.L{layer}"] = torch.cat([pair[1] for pair in raw])
    kept["x_exit"] = torch.cat(x_exit, dim=2)
    kept |= recorder.tensors
    if not options.prefix_cache:
        for chunk in (0, 6):
            _keep_prefix_velocities(core, kept, chunk)
    return kept


def _keep_prefix_velocities(core: RolloutCore, kept: dict[str, Tensor], chunk: int) -> None:
    model, rows = core.model, kept[f"block_out.c{chunk}.s0.L2"]
    anchor = model.final_modulation(model.time_embedding(torch.tensor([0.999])))[None]
    audio = model.final_modulation(model.time_embedding(golden()["table.audio_t"]))[None]
    kept[f"anchor_velocity_rows.c{chunk}.s0"] = model.head_video(rows[None, 17:23], anchor)[0]
    kept[f"audio_velocity_rows.c{chunk}.s0"] = model.head_audio(rows[None, 23:45], audio)[0]

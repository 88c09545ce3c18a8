"""Stage "flow": flow matching with chunk-causal teacher forcing.

Owns the noise recipe, the loss and the loop of the first transformer stage. Invariant: the model
trains with the very numerics of inference: bf16 blocks, fp32 islands, fp32 masters beside them.

What the loss asks for, each from a measured lesson:
- per-chunk times: a share exactly on the sampler's grid, the rest from a shifted uniform;
- a history with faults that claims to be clean, so that the model mends its own mistakes instead
  of adding to them: noise, colours that drift, blur;
- sometimes the first latents of a chunk are clean, so that a chunk can be made again from its
  middle;
- rows with objects count more, or thin things dissolve;
- the first chunk of a clip from the middle of a session has no history here as it would have in
  use, so it serves as history only.

Shape suffixes: B clips, N chunks, T latent frames, R rows, C features.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from engine.config import ModelConfig
from engine.denoise import model_times
from engine.layout import patchify, unpatchify
from engine.model.dit import MiniMaxH3Transformer
from engine.text import WordEncoder
from miniworld.stages.latents import ClipCache, LatentClips
from miniworld.stages.optim import (
    Ema,
    MasterWeights,
    cosine_scale,
    optimizer_pair,
    scale_learning_rate,
)
from miniworld.stages.packed import PackedInputs, PackedLayout, packed_block, packed_velocity
from miniworld.stages.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowConfig:
    """Recipe of the stage."""

    batch: int = 16
    """Clips of one step on one process."""
    muon_lr: float = 2e-3
    adamw_lr: float = 1.5e-3
    weight_decay: float = 0.01
    warm_up_steps: int = 200
    floor: float = 0.04
    """Share of the learning rate at the end of the cosine."""
    clip_norm: float = 1.0
    ema_decay: float = 0.998
    grid_share: float = 0.35
    """Share of chunks whose time lies on the sampler's grid."""
    shift: float = 3.0
    """Shift of the uniform sigma of the other chunks."""
    history_noise: float = 0.25
    """Largest sigma of the history's noise."""
    history_noise_share: float = 0.75
    """Share of clips whose history is noisy."""
    history_tint: float = 0.15
    """Deviation of a channel's shift in a tinted history; each chunk takes a share of it."""
    history_tint_share: float = 0.3
    history_blur: float = 0.6
    """Largest share of a 3 x 3 box filter in a blurred history."""
    history_blur_share: float = 0.3
    leading_share: float = 0.2
    """Share of chunks that begin with one to four clean latents."""
    coverage_weight: float = 1.5
    """Extra weight of a row that is all object."""


class TrainedModel:
    """Transformer and word encoder as they train: working weights, masters, EMA, optimisers."""

    def __init__(
        self,
        config: ModelConfig,
        recipe: FlowConfig,
        device: torch.device,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        use_muon: bool = True,
    ) -> None:
        self.model = MiniMaxH3Transformer(config).to(device)
        self.text = WordEncoder.of(config).to(device)
        _start_quiet(self.model)
        if device.type == "cuda":
            self.model.cast_blocks(torch.bfloat16)
        self.prepare(recipe, betas=betas, use_muon=use_muon)

    def prepare(self, recipe: FlowConfig, *, betas: tuple[float, float], use_muon: bool) -> None:
        """(Re)build masters, EMA and optimisers from the present weights."""
        names, params = zip(*self.named_parameters(), strict=True)
        self.masters = MasterWeights(params)
        self.ema = Ema(self.masters.masters, recipe.ema_decay)
        splits = muon_splits(self.model) if use_muon else {}
        named_masters = zip(names, self.masters.masters, strict=True)
        if use_muon:
            self.optimizers = optimizer_pair(
                named_masters,
                splits,
                muon_lr=recipe.muon_lr,
                adamw_lr=recipe.adamw_lr,
                betas=betas,
                weight_decay=recipe.weight_decay,
            )
        else:
            plain = torch.optim.AdamW(
                [master for _, master in named_masters],
                lr=recipe.adamw_lr,
                betas=betas,
                weight_decay=recipe.weight_decay,
                fused=next(self.model.parameters()).is_cuda or None,
            )
            for group in plain.param_groups:
                group["base_lr"] = group["lr"]
            self.optimizers = [plain]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield transformer weights under their own names and the word table as ``text.*``."""
        yield from self.model.named_parameters()
        for name, parameter in self.text.named_parameters():
            yield f"text.{name}", parameter

    def update(self, ranks: Ranks, *, scale: float, clip_norm: float) -> Tensor:
        """Apply the gradients of the working weights; return their norm before clipping."""
        ranks.mean_([p.grad for p in self.masters.working if p.grad is not None])
        scale_learning_rate(self.optimizers, scale)
        norm = self.masters.step(self.optimizers, max_norm=clip_norm)
        self.masters.zero_grad()
        self.ema.update()
        return norm

    def averaged_state(self) -> dict[str, Tensor]:
        """Return the EMA weights, fp32 on the CPU, by name."""
        names = [name for name, _ in self.named_parameters()]
        return {
            name: shadow.detach().to("cpu", copy=True)
            for name, shadow in zip(names, self.ema.shadow, strict=True)
        }

    @torch.no_grad()
    def load_weights(self, state: dict[str, Tensor]) -> None:
        """Set working weights, masters and EMA."""
        names = [name for name, _ in self.named_parameters()]
        for name, master, shadow in zip(names, self.masters.masters, self.ema.shadow, strict=True):
            master.copy_(state[name])
            shadow.copy_(state[name])
        self.masters.copy_back()

    def checkpoint(self) -> dict[str, Any]:
        """Return everything that a resumed run needs."""
        return {
            "masters": self.masters.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Restore what ``checkpoint`` returned."""
        self.masters.load_state_dict(state["masters"])
        self.ema.load_state_dict(state["ema"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def _start_quiet(model: MiniMaxH3Transformer) -> None:
    """Zero modulation and heads, so that every block starts as the identity."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("adaln_proj.", "norm_out.linear.", "proj_out.")):
            torch.nn.init.zeros_(parameter)


def muon_splits(model: MiniMaxH3Transformer) -> dict[str, int]:
    """Name the matrices that Muon trains; [value ; gate] counts as two."""
    splits = {}
    for name, parameter in model.named_parameters():
        if name.startswith("transformer_blocks.") and parameter.dim() == 2:
            if ".attn." in name or ".ff.net.2." in name:
                splits[name] = 1
            elif ".ff.net.0." in name:
                splits[name] = 2
    return splits


def prefix_inputs(
    clips: LatentClips, config: ModelConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    """Anchor, audio and text of a batch, noised as a session noises them.

    anchor = 0.999 latent + 0.001 noise; audio is silence noised to one level per session.
    """
    anchor, device = clips.anchor_BRC, clips.anchor_BRC.device
    noise = torch.randn(anchor.shape, generator=generator, device=device)
    anchor_t = config.sampler.anchor_t
    batch = anchor.shape[0]
    u_B = torch.rand(batch, generator=generator, device=device)
    sigma_B = 3 * u_B / (1 + 2 * u_B)
    audio = torch.randn(
        batch, config.audio_rows, config.audio_in_channels, generator=generator, device=device
    )
    return {
        "text_ids_BPR": clips.text_ids_BPR,
        "anchor_BRC": anchor_t * anchor + (1 - anchor_t) * noise,
        "audio_BRC": sigma_B[:, None, None] * audio,
        "audio_t_B": 1 - sigma_B,
    }


def _worn(
    x0_BNRC: Tensor, config: ModelConfig, recipe: FlowConfig, generator: torch.Generator
) -> Tensor:
    """Blur and tint the histories of some clips, as long rollouts do."""
    batch, chunks, _, features = x0_BNRC.shape
    channels, device = config.in_channels, x0_BNRC.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    pictures = unpatchify(x0_BNRC.flatten(0, 1), config.geometry)
    soft = F.avg_pool2d(
        rearrange(pictures, "n c t h w -> (n t) c h w"), 3, 1, 1, count_include_pad=False
    )
    soft_rows = patchify(rearrange(soft, "(n t) c h w -> n c t h w", n=batch * chunks))
    is_blurred = uniform(batch, 1, 1, 1) < recipe.history_blur_share
    blur = recipe.history_blur * uniform(batch, chunks, 1, 1) * is_blurred
    tint = torch.randn((batch, 1, 1, channels), generator=generator, device=device)
    is_tinted = uniform(batch, 1, 1, 1) < recipe.history_tint_share
    tint = recipe.history_tint * uniform(batch, chunks, 1, 1) * is_tinted * tint
    # Features are channel-major: all positions of a patch share their channel's shift.
    shift = tint.repeat_interleave(features // channels, dim=-1)
    return x0_BNRC + blur * (soft_rows.view_as(x0_BNRC) - x0_BNRC) + shift


def flow_batch(
    clips: LatentClips, config: ModelConfig, recipe: FlowConfig, generator: torch.Generator
) -> tuple[PackedInputs, Tensor, Tensor]:
    """Noise a batch; return inputs, target velocity and row weights (mean about 1)."""
    x0_BNRC = clips.latents_BNRC.float()
    batch, chunks, rows, _ = x0_BNRC.shape
    device, latents = x0_BNRC.device, config.latents_per_chunk

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def normal() -> Tensor:
        return torch.randn(x0_BNRC.shape, generator=generator, device=device)

    is_noisy_history = uniform(batch, 1, 1, 1) < recipe.history_noise_share
    history_sigma = uniform(batch, chunks, 1, 1) * recipe.history_noise * is_noisy_history
    faulty = _worn(x0_BNRC, config, recipe, generator)
    clean = (1 - history_sigma) * faulty + history_sigma * normal()

    u_BN = uniform(batch, chunks)
    sigma_BN = recipe.shift * u_BN / (1 + (recipe.shift - 1) * u_BN)
    grid = model_times(config.sampler).to(device)
    grid_BN = grid[(uniform(batch, chunks) * len(grid)).long().clamp(max=len(grid) - 1)]
    t_BN = torch.where(uniform(batch, chunks) < recipe.grid_share, grid_BN, 1 - sigma_BN)

    leading_BN = 1 + (uniform(batch, chunks) * (latents - 1)).long()
    leading_BN = leading_BN * (uniform(batch, chunks) < recipe.leading_share)
    is_given_BNT = torch.arange(latents, device=device) < leading_BN[..., None]
    t_BNT = torch.where(is_given_BNT, 1.0, t_BN[..., None])
    t_rows = t_BNT.repeat_interleave(rows // latents, dim=2)[..., None]

    noise = normal()
    inputs = PackedInputs(
        clean_BNRC=clean,
        noisy_BNRC=t_rows * x0_BNRC + (1 - t_rows) * noise,
        t_BT=t_BNT.flatten(1),
        views_BT44=clips.views_BT44,
        **prefix_inputs(clips, config, generator),
    )
    weight = 1 + recipe.coverage_weight * clips.coverage_BTR.float().view(batch, chunks, rows)
    weight = weight * (~is_given_BNT).repeat_interleave(rows // latents, dim=2)
    weight[:, 0] *= ~clips.is_mid_session_B[:, None]
    return inputs, x0_BNRC - noise, weight / weight.mean().clamp(min=1e-3)


def compiled_block(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return ``packed_block``, compiled for its one shape on CUDA."""
    if device.type != "cuda":
        return packed_block
    return torch.compile(packed_block, dynamic=False)


def train_flow(
    out_dir: Path,
    cache: ClipCache,
    config: ModelConfig,
    *,
    recipe: FlowConfig,
    budget_s: float,
    seed: int,
    ranks: Ranks,
    resume: bool,
    log: Callable[[str], None],
    start: dict[str, Tensor] | None = None,
    max_steps: int | None = None,
) -> TrainedModel:
    """Train until the budget is spent: from scratch, from given weights, or resumed.

    ``out_dir/flow.ckpt`` is what a resumed run goes on from.

    Args:
        out_dir: folder of the checkpoint.
        cache: encoded clips.
        config: of the model.
        budget_s: seconds of the whole stage, resumed parts counted; the cosine follows them.
        recipe: hyperparameters.
        seed: of weights, noise and batches; processes derive theirs from it.
        ranks: processes that train together.
        resume: go on from the checkpoint if there is one.
        log: takes a line about every 15 s.
        start: weights to begin with, by name, as ``averaged_state`` returns them.
        max_steps: stop earlier, for tests.
    """
    device = ranks.device
    torch.manual_seed(seed)
    trained = TrainedModel(config, recipe, device)
    if start is not None:
        trained.load_weights({name: value.to(device) for name, value in start.items()})
    generator = torch.Generator(device).manual_seed(seed + 1 + 1000 * ranks.rank)
    dice = random.Random(seed + 1 + 1000 * ranks.rank)
    chunks = cache.groups[0].latents_BNRC.shape[1]
    layout = PackedLayout(config, chunks=chunks, prompts=2, device=device)
    run_block = compiled_block(device)
    step, spent_s = 0, 0.0
    path = out_dir / "flow.ckpt"
    if resume and path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        trained.resume(saved["trained"])
        step, spent_s = int(saved["step"]), float(saved["spent_s"])
        if ranks.is_first:
            generator.set_state(saved["generator"].cpu())
        else:
            generator.manual_seed(seed + 1 + 1000 * ranks.rank + step)
        dice.seed(seed + 1 + 1000 * ranks.rank + step)
        log(f"flow resumed at step {step} after {spent_s:.0f} s")
    started_s, logged_s, first_step = time.monotonic() - spent_s, time.monotonic(), step
    losses: list[Tensor] = []
    while True:
        elapsed_s = ranks.first_says(time.monotonic() - started_s)
        if elapsed_s >= budget_s or (max_steps is not None and step >= max_steps):
            break
        clips = cache.batch(recipe.batch, dice, device)
        inputs, target, weight = flow_batch(clips, config, recipe, generator)
        velocity = packed_velocity(
            trained.model, trained.text, layout, inputs, clips.switch_chunk, run_block
        )
        per_chunk = ((velocity - target).square().mean(-1) * weight).mean((0, 2))
        per_chunk.mean().backward()
        scale = cosine_scale(
            elapsed_s / budget_s, step, warm_up_steps=recipe.warm_up_steps, floor=recipe.floor
        )
        norm = trained.update(ranks, scale=scale, clip_norm=recipe.clip_norm)
        losses.append(per_chunk.detach())
        step += 1
        if time.monotonic() - logged_s > 15 or step in (1, 20):
            logged_s = time.monotonic()
            recent = torch.stack(losses[-100:]).mean(0)
            rate = (time.monotonic() - started_s - spent_s) / (step - first_step)
            log(
                f"flow step {step} {1e3 * rate:.0f} ms/step loss {recent.mean():.4f} "
                f"by chunk {' '.join(f'{x:.3f}' for x in recent.tolist())} "
                f"norm {norm:.2f} left {budget_s - elapsed_s:.0f} s"
            )
    if ranks.is_first:
        out_dir.mkdir(parents=True, exist_ok=True)
        spent_s = time.monotonic() - started_s
        state = {
            "trained": trained.checkpoint(),
            "step": step,
            "spent_s": spent_s,
            "generator": generator.get_state(),
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)
        final = f" loss {torch.stack(losses[-200:]).mean():.4f}" if losses else ""
        log(f"flow done: {step} steps in {spent_s:.0f} s{final}")
    return trained

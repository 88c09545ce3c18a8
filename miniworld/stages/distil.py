"""Stage "distil": distribution matching on the model's own rollouts.

Owns the last training stage. The student rolls out exactly as it will be used (4-step sampler,
own history, refresh); every chunk stops being followed at one random step of the sampler, and one
packed pass with gradients replays that step for all chunks at once. Two score models judge what it
gives, both looking at the student's own history: the teacher (frozen, from stage "flow") and the
critic (starts as the teacher, learns the student's own distribution). Their difference is the
gradient:

    grad = (x0_critic - x0_teacher) / mean |x_student - x0_teacher|
    loss = 0.5 (x_student - stopgrad(x_student - grad))^2 + truth_weight (x_student - truth)^2

Rollouts may be longer than the pass that replays them: then the pass looks at their later chunks,
and the chunks before those are history only. So the student also learns to mend what a longer
history of its own has done to it.

So blur, which a plain regression likes, is punished: it is unlikely under the teacher.
Source: distribution matching distillation on self-generated history, as in SolarWM stage 2.

Shape suffixes: B clips, N chunks, T latent frames, R rows, C features.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.core import RolloutCore
from engine.denoise import denoise_chunk
from engine.layout import patchify, unpatchify
from engine.prefix import PrefixInputs
from miniworld.stages.flow import FlowConfig, TrainedModel, compiled_block, prefix_inputs
from miniworld.stages.latents import ClipCache, LatentClips
from miniworld.stages.packed import PackedInputs, PackedLayout, packed_velocity
from miniworld.stages.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilConfig:
    """Recipe of the stage."""

    batch: int = 16
    """Clips of one update on one process."""
    rollouts: int = 128
    """Clips rolled out at once; each serves one critic update for each replay of it."""
    replays: int = 1
    """Replays of each rollout, each of another part of it where it is longer than the pass."""
    replay_chunks: int = 10
    """Chunks of the packed pass; clips may be longer."""
    student_lr: float = 1e-4
    critic_lr: float = 2e-4
    critic_updates: int = 3
    """Critic updates for each update of the student."""
    critic_warm_up: int = 24
    """Critic updates before the student moves."""
    truth_weight: float = 0.2
    score_shift: float = 3.0
    score_sigma: tuple[float, float] = (0.02, 0.98)
    leading_share: float = 0.15
    """Share of chunks whose first latents are given clean in the replay."""
    smallest_scale: float = 0.02
    """Floor of the gradient's normaliser."""
    clip_norm: float = 1.0
    ema_decay: float = 0.98
    decay_from: float = 0.7
    """Share of the budget after which the student's rate falls to a tenth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """Own rollouts and, for each chunk, the input of the step that will be replayed."""

    clips: LatentClips
    prefix: dict[str, Tensor]
    history_BNRC: Tensor
    exit_input_BNRC: Tensor
    exit_t_BN: Tensor
    history_only_B: Tensor
    """Leading chunks of each clip that nothing is asked of."""

    def cut(self, start: int, chunks: int, window_chunks: int) -> Rollouts:
        """Return ``chunks`` chunks from ``start`` on.

        Past the start, the first chunks lack a part of the window that they were made in, so as
        many as the window's history are history only. What those had seen before the cut is lost,
        which makes the replay approximate; without a cut it is exact.
        """
        span, is_later = slice(start, start + chunks), start > 0
        least = torch.full_like(self.history_only_B, window_chunks - 1)
        return replace(
            self,
            clips=self.clips.cut(start, chunks),
            history_BNRC=self.history_BNRC[:, span],
            exit_input_BNRC=self.exit_input_BNRC[:, span],
            exit_t_BN=self.exit_t_BN[:, span],
            history_only_B=least if is_later else self.history_only_B,
        )

    def take(self, index: slice) -> Rollouts:
        """Select clips."""
        rows = torch.arange(self.history_BNRC.shape[0], device=self.history_BNRC.device)[index]
        return Rollouts(
            clips=self.clips.take(rows),
            prefix={name: value[index] for name, value in self.prefix.items()},
            history_BNRC=self.history_BNRC[index],
            exit_input_BNRC=self.exit_input_BNRC[index],
            exit_t_BN=self.exit_t_BN[index],
            history_only_B=self.history_only_B[index],
        )


def prompt_prefix(trained: TrainedModel, prefix: dict[str, Tensor], prompt: int) -> PrefixInputs:
    """Prefix of one of the two prompts, as the engine's core takes it."""
    text_BRE = trained.text(prefix["text_ids_BPR"][:, prompt])
    return PrefixInputs(
        text_BRE=text_BRE,
        text_tags_R=torch.ones(text_BRE.shape[1], dtype=torch.int64, device=text_BRE.device),
        anchor_rows_BRC=prefix["anchor_BRC"],
        audio_rows_BRC=prefix["audio_BRC"],
        audio_t_B=prefix["audio_t_B"],
    )


@torch.no_grad()
def roll_out(
    trained: TrainedModel,
    clips: LatentClips,
    config: ModelConfig,
    generator: torch.Generator,
    dice: random.Random,
) -> Rollouts:
    """Roll the student out over whole clips with the engine's own loop.

    A clip from the middle of a session gets its true first chunk as history, as it has no other.
    """
    core = RolloutCore(trained.model)
    batch, chunks = clips.latents_BNRC.shape[:2]
    latents, device = config.latents_per_chunk, clips.latents_BNRC.device
    grid = config.geometry
    shape = (batch, config.in_channels, latents, grid.latent_height, grid.latent_width)
    prefix = prefix_inputs(clips, config, generator)
    times = torch.tensor(core.times, device=device)
    history, exit_inputs, exit_times = [], [], []

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    state = core.begin(prompt_prefix(trained, prefix, 0 if clips.switch_chunk > 0 else 1))
    for chunk in range(chunks):
        if 0 < chunk == clips.switch_chunk:
            core.switch_prefix(state, prompt_prefix(trained, prefix, 1))
        exit_step = dice.randrange(len(core.times))

        def velocity(x_BCTHW: Tensor, step: int, exit_step: int = exit_step) -> Tensor:
            if step == exit_step:
                exit_inputs.append(patchify(x_BCTHW))
                exit_times.append(times[step].expand(batch))
            return core.velocity(state, x_BCTHW, step)

        core.open_chunk(state, clips.views_BT44[:, latents * chunk : latents * (chunk + 1)])
        step_noise = [normal() for _ in core.times[1:]]
        x0 = patchify(denoise_chunk(velocity, normal(), step_noise, core.times))
        if chunk == 0:
            x0 = torch.where(
                clips.is_mid_session_B[:, None, None], clips.latents_BNRC[:, 0].float(), x0
            )
        history.append(x0)
        core.refresh(state, unpatchify(x0, grid))
    return Rollouts(
        clips=clips,
        prefix=prefix,
        history_BNRC=torch.stack(history, dim=1),
        exit_input_BNRC=torch.stack(exit_inputs, dim=1),
        exit_t_BN=torch.stack(exit_times, dim=1),
        history_only_B=clips.is_mid_session_B.long(),
    )


class Replay:
    """One batch of rollouts under the packed pass: who is given, what is predicted."""

    def __init__(
        self,
        rollouts: Rollouts,
        config: ModelConfig,
        recipe: DistilConfig,
        layout: PackedLayout,
        run_block: Callable[..., tuple[Tensor, Tensor]],
        generator: torch.Generator,
    ) -> None:
        self._rollouts, self._layout, self._run_block = rollouts, layout, run_block
        self._recipe, self._generator = recipe, generator
        batch, chunks, rows, _ = rollouts.history_BNRC.shape
        self._latents = config.latents_per_chunk
        self._rows_per_latent = rows // self._latents
        device = rollouts.history_BNRC.device
        u_BN = torch.rand((batch, chunks), generator=generator, device=device)
        count_BN = 1 + (u_BN / recipe.leading_share * (self._latents - 1)).long()
        count_BN = count_BN * (u_BN < recipe.leading_share)
        self._is_given_BNT = torch.arange(self._latents, device=device) < count_BN[..., None]
        self._given_rows = self._is_given_BNT.repeat_interleave(self._rows_per_latent, 2)[..., None]
        counts = ~self._given_rows.expand(-1, -1, -1, 1)
        counts = counts & ~self._is_history_only(chunks)
        self.weight_BNR1 = counts / counts.float().mean().clamp(min=1e-3)

    def _is_history_only(self, chunks: int) -> Tensor:
        chunk = torch.arange(chunks, device=self._layout.device)
        return (chunk < self._rollouts.history_only_B[:, None])[..., None, None]

    def predict(self, trained: TrainedModel, rows_BNRC: Tensor, t_BN: Tensor) -> Tensor:
        """x0 by one model of noisy rows at per-chunk times; given latents stay as they are."""
        history = self._rollouts.history_BNRC
        noisy = torch.where(self._given_rows, history, rows_BNRC)
        t_BNT = torch.where(self._is_given_BNT, 1.0, t_BN[..., None])
        inputs = PackedInputs(
            clean_BNRC=history,
            noisy_BNRC=noisy,
            t_BT=t_BNT.flatten(1),
            views_BT44=self._rollouts.clips.views_BT44,
            **self._rollouts.prefix,
        )
        velocity = packed_velocity(
            trained.model,
            trained.text,
            self._layout,
            inputs,
            self._rollouts.clips.switch_chunk,
            self._run_block,
        )
        sigma = (1 - t_BNT).repeat_interleave(self._rows_per_latent, dim=2)[..., None]
        return noisy + sigma * velocity

    def student(self, trained: TrainedModel) -> Tensor:
        """Replay the exit step of every chunk."""
        return self.predict(trained, self._rollouts.exit_input_BNRC, self._rollouts.exit_t_BN)

    def noised(self, x0_BNRC: Tensor) -> tuple[Tensor, Tensor]:
        """Draw score times and noise; return noisy rows and times."""
        low, high = self._recipe.score_sigma
        shift = self._recipe.score_shift
        device = x0_BNRC.device
        u_BN = torch.rand(x0_BNRC.shape[:2], generator=self._generator, device=device)
        sigma_BN = (shift * u_BN / (1 + (shift - 1) * u_BN)).clamp(low, high)
        noise = torch.randn(x0_BNRC.shape, generator=self._generator, device=device)
        sigma = sigma_BN[..., None, None]
        return (1 - sigma) * x0_BNRC + sigma * noise, 1 - sigma_BN


def _critic_loss(replay: Replay, critic: TrainedModel, student_x0: Tensor) -> Tensor:
    """Velocity error of the critic on the student's own chunks."""
    noisy, t_BN = replay.noised(student_x0)
    error = (replay.predict(critic, noisy, t_BN) - student_x0) / (1 - t_BN)[..., None, None]
    return (error.square() * replay.weight_BNR1).mean()


def _student_loss(
    replay: Replay,
    student: TrainedModel,
    teacher: TrainedModel,
    critic: TrainedModel,
    truth_BNRC: Tensor,
    recipe: DistilConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, mean size of the matching gradient, error against the truth."""
    student_x0 = replay.student(student)
    with torch.no_grad():
        noisy, t_BN = replay.noised(student_x0)
        real = replay.predict(teacher, noisy, t_BN)
        fake = replay.predict(critic, noisy, t_BN)
        scale = (student_x0 - real).abs().mean((2, 3), keepdim=True)
        grad = (fake - real) / scale.clamp(min=recipe.smallest_scale)
    weight = replay.weight_BNR1
    match = 0.5 * ((student_x0 - (student_x0 - grad).detach()).square() * weight).mean()
    truth = ((student_x0 - truth_BNRC).square() * weight).mean()
    return match + recipe.truth_weight * truth, grad.abs().mean(), truth.detach()


def _as_flow_recipe(recipe: DistilConfig, lr: float) -> FlowConfig:
    return FlowConfig(adamw_lr=lr, weight_decay=0.0, ema_decay=recipe.ema_decay)


def _start_from(
    flow: dict[str, Tensor], config: ModelConfig, recipe: DistilConfig, lr: float, ranks: Ranks
) -> TrainedModel:
    trained = TrainedModel(
        config, _as_flow_recipe(recipe, lr), ranks.device, betas=(0.0, 0.99), use_muon=False
    )
    trained.load_weights({name: value.to(ranks.device) for name, value in flow.items()})
    return trained


def train_distil(
    out_dir: Path,
    cache: ClipCache,
    config: ModelConfig,
    flow: dict[str, Tensor],
    *,
    recipe: DistilConfig,
    budget_s: float,
    seed: int,
    ranks: Ranks,
    resume: bool,
    log: Callable[[str], None],
    max_steps: int | None = None,
) -> TrainedModel:
    """Distil from the weights of stage "flow", or go on from ``out_dir/distil.ckpt``.

    Args:
        out_dir: folder of the checkpoint.
        cache: encoded clips.
        config: of the model.
        flow: averaged weights of stage "flow".
        recipe: hyperparameters.
        budget_s: seconds of the whole stage, resumed parts counted.
        seed: of noise and batches; processes derive theirs from it.
        ranks: processes that train together.
        resume: go on from the checkpoint if there is one.
        log: takes a line every ten updates of the student.
        max_steps: stop after so many updates of the student, for tests.
    """
    device = ranks.device
    torch.manual_seed(seed)
    student = _start_from(flow, config, recipe, recipe.student_lr, ranks)
    critic = _start_from(flow, config, recipe, recipe.critic_lr, ranks)
    teacher = _start_from(flow, config, recipe, recipe.critic_lr, ranks)
    for _, parameter in teacher.named_parameters():
        parameter.requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed + 1 + 1000 * ranks.rank)
    dice = random.Random(seed + 1 + 1000 * ranks.rank)
    clip_chunks = cache.groups[0].latents_BNRC.shape[1]
    chunks = min(recipe.replay_chunks, clip_chunks)
    starts = range(0, clip_chunks - chunks + 1, config.window_chunks - 1)
    layout = PackedLayout(config, chunks=chunks, prompts=2, device=device)
    run_block = compiled_block(device)
    updates, student_updates, spent_s = 0, 0, 0.0
    path = out_dir / "distil.ckpt"
    if resume and path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        student.resume(saved["student"])
        critic.resume(saved["critic"])
        updates, student_updates = int(saved["updates"]), int(saved["student_updates"])
        spent_s = float(saved["spent_s"])
        if ranks.is_first:
            generator.set_state(saved["generator"].cpu())
        dice.seed(seed + 1 + 1000 * ranks.rank + updates)
        log(f"distil resumed after {student_updates} student updates, {spent_s:.0f} s")
    started_s = time.monotonic() - spent_s
    buffer: list[Rollouts] = []
    rollout_s = 0.0
    while True:
        elapsed_s = ranks.first_says(time.monotonic() - started_s)
        if elapsed_s >= budget_s or (max_steps is not None and student_updates >= max_steps):
            break
        if not buffer:
            before_s = time.monotonic()
            made = roll_out(
                student, cache.batch(recipe.rollouts, dice, device), config, generator, dice
            )
            size = recipe.batch
            firsts = range(0, recipe.rollouts - size + 1, size)
            for first in firsts:
                batch = made.take(slice(first, first + size))
                chosen = dice.sample(starts, min(recipe.replays, len(starts)))
                buffer += [batch.cut(start, chunks, config.window_chunks) for start in chosen]
            dice.shuffle(buffer)
            rollout_s += time.monotonic() - before_s
        rollouts = buffer.pop()
        replay = Replay(rollouts, config, recipe, layout, run_block, generator)
        with torch.no_grad():
            student_x0 = replay.student(student)
        critic_loss = _critic_loss(replay, critic, student_x0)
        critic_loss.backward()
        critic.update(ranks, scale=1.0, clip_norm=recipe.clip_norm)
        updates += 1
        if updates % recipe.critic_updates or updates <= recipe.critic_warm_up:
            continue
        truth = rollouts.clips.latents_BNRC.float()
        loss, grad_size, truth_error = _student_loss(
            replay, student, teacher, critic, truth, recipe
        )
        loss.backward()
        left = (1 - elapsed_s / budget_s) / (1 - recipe.decay_from)
        scale = min(1.0, (student_updates + 1) / 30) * min(1.0, max(0.1, left))
        norm = student.update(ranks, scale=scale, clip_norm=recipe.clip_norm)
        student_updates += 1
        if student_updates % 10 == 1:
            log(
                f"distil update {student_updates} critic {critic_loss:.4f} truth {truth_error:.4f} "
                f"grad {grad_size:.4f} norm {norm:.3f} rollouts {rollout_s:.0f} s "
                f"left {budget_s - elapsed_s:.0f} s"
            )
    if ranks.is_first:
        out_dir.mkdir(parents=True, exist_ok=True)
        state = {
            "student": student.checkpoint(),
            "critic": critic.checkpoint(),
            "updates": updates,
            "student_updates": student_updates,
            "spent_s": time.monotonic() - started_s,
            "generator": generator.get_state(),
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)
        log(f"distil done: {student_updates} student updates")
    return student

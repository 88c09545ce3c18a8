"""Training stage of the autoencoder: reconstruction first, then crisp edges with a critic.

Owns: the schedule, the step, the resumable checkpoint, the log.
Invariants: progress is the share of the time budget (or of `step_limit`) that is spent, so the
budget is kept; one compiled shape; from `critic_start` on the encoder is frozen at its average
weights and the decoder alone goes on learning; step N sees the same data however often it resumed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miniworld.stages.optim import (
    Ema,
    MasterWeights,
    cosine_scale,
    optimizer_pair,
    scale_learning_rate,
)
from miniworld.stages.ranks import Ranks
from miniworld.stages.vae_data import FeedSettings, FrameFeed, held_out_frames, held_out_photos
from miniworld.stages.vae_losses import (
    GROUP_FRAMES,
    LossWeights,
    PatchCritic,
    critic_loss,
    decoder_loss,
    frame_groups,
    motion_weights,
    reconstruction_terms,
    sharpness,
    total_loss,
)
from miniworld.stages.vae_report import evaluate, write_sheet
from vae_stream.taehv import TinyVae, TinyVaeConfig

_LOG_EVERY_S = 10.0
_SAVE_EVERY_S = 60.0
_PARTS = ("model", "average", "optimizers", "critic")
_TERM_NAMES = ("l1", "mse", "grad", "motion", "z2")


@dataclass(frozen=True, kw_only=True, slots=True)
class VaeStageSettings:
    """What the stage does; the defaults are those of the shipped weights."""

    vae: TinyVaeConfig = field(default_factory=TinyVaeConfig)
    start_from: Path | None = None
    """Autoencoder to begin with; its shape counts instead of `vae`. Its encoder and the statistics
    of its latents stay as they are, so that a transformer trained on them stays valid."""
    feed: FeedSettings = field(default_factory=FeedSettings)
    weights: LossWeights = field(default_factory=LossWeights)
    muon_lr: float = 1.5e-3
    adamw_lr: float = 1.5e-3
    weight_decay: float = 1e-3
    warm_up_steps: int = 100
    ema_decay: float = 0.995
    noise_std: float = 0.05
    """Added to latents, so that the decoder forgives the transformer's errors."""
    critic_start: float = 0.65
    """Progress from which the encoder is frozen and the critic helps; 1 turns the critic off."""
    critic_lr: float = 3e-4
    critic_gamma: float = 0.5
    """Strength of the critic's gradient penalties."""
    critic_share: float = 0.05
    """Norm of the critic's gradient on pixels over that of the reconstruction loss."""
    critic_groups: int = 3
    """Groups of three frames that the critic sees of each clip."""
    target_sharpness: float = 0.98
    """The critic's share grows below this sharpness and shrinks above it."""
    step_limit: int | None = None
    """Progress counts steps to this limit instead of seconds."""
    held_out_clips: int = 64
    compiles: bool | None = None
    """Compile the networks; None: on CUDA only."""


def train_vae(
    out_dir: Path,
    *,
    budget_s: float,
    seed: int,
    device: torch.device | str,
    batch: int,
    resume: bool,
    log: Callable[[str], None],
    settings: VaeStageSettings | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Train the autoencoder and write `out_dir/vae/{config.json,model.safetensors}`.

    Also writes `out_dir/vae_checkpoint/` (every 60 s and at the end) and the sheet
    `out_dir/vae.png`.

    Args:
        out_dir: folder for everything that the stage writes.
        budget_s: time in all, that of earlier runs with `resume` included.
        seed: of weights, data and noise.
        device: that the networks and the data live on.
        batch: clips a step and process.
        resume: go on from `out_dir/vae_checkpoint` where it exists.
        log: takes one line; called about every 10 s by the first process.
        settings: None is the defaults.
        ranks: processes that train together; None is this one alone.

    Raises:
        ValueError: the checkpoint does not fit the settings.
    """
    settings = settings or VaeStageSettings()
    ranks = ranks or Ranks(rank=0, count=1, device=torch.device(device))
    run = _Run(settings, seed=seed, device=torch.device(device), batch=batch, ranks=ranks)
    folder = Path(out_dir)
    if resume and run.load(folder):
        log(f"vae resumes at step {run.step}, {run.elapsed_s:.0f} s")
    say = log if ranks.is_first else _silent
    # One shape for the whole stage: letting cuDNN time its kernels pays at once.
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        _loop(run, folder, budget_s=budget_s, log=say)
    if ranks.is_first:
        run.save(folder)
        _report(run, folder, log=say)


def _silent(_line: str) -> None:
    """Take a line and drop it."""


def _loop(run: _Run, folder: Path, *, budget_s: float, log: Callable[[str], None]) -> None:
    before_s = run.elapsed_s
    start_s = time.monotonic()
    logged_s, saved_s, logged_step = start_s, start_s, run.step
    while True:
        run.elapsed_s = before_s + time.monotonic() - start_s
        limit = run.settings.step_limit
        progress = run.elapsed_s / budget_s if limit is None else run.step / limit
        progress = run.ranks.first_says(progress)
        if progress >= 1.0:
            break
        run.train_step(progress)
        now_s = time.monotonic()
        is_early = run.step in (10, 50)
        if now_s - logged_s >= _LOG_EVERY_S or is_early:
            ms = (now_s - logged_s) / max(run.step - logged_step, 1) * 1e3
            left_s = (now_s - start_s + before_s) * (1 - progress) / max(progress, 1e-6)
            log(f"vae step {run.step} {ms:.1f} ms {run.describe()} left {left_s:.0f} s")
            logged_s, logged_step = time.monotonic(), run.step
        if now_s - saved_s >= _SAVE_EVERY_S and run.ranks.is_first:
            run.save(folder)
            saved_s = time.monotonic()
    run.feed.close()


def _report(run: _Run, folder: Path, *, log: Callable[[str], None]) -> None:
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    vae = TinyVae.from_pretrained(folder / "vae", dtype=dtype, device=run.device)
    feed, count = run.settings.feed, run.settings.held_out_clips
    frames = held_out_frames(feed, count, run.device)
    for line in evaluate(vae, frames).lines():
        log(f"vae held-out worlds: {line}")
    photos = held_out_photos(feed, min(count, 16), run.device)
    for line in evaluate(vae, photos).lines():
        log(f"vae held-out photographs: {line}")
    half = 3 if frames.shape[0] > 3 else frames.shape[0]
    write_sheet(vae, torch.cat([frames[:half], photos[:half]]), folder / "vae.png")


class _Run:
    """Everything that a step changes."""

    def __init__(
        self,
        settings: VaeStageSettings,
        *,
        seed: int,
        device: torch.device,
        batch: int,
        ranks: Ranks,
    ) -> None:
        self.settings = settings
        self.device = device
        self.ranks = ranks
        self.step = 0
        self.elapsed_s = 0.0
        self.is_frozen = False
        self._seed = seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            vae = TinyVae(settings.vae)
            if settings.start_from is not None:
                vae = TinyVae.from_pretrained(settings.start_from).train().requires_grad_(True)
                self.is_frozen = True
            critic = PatchCritic()
        layout: Any = {"memory_format": torch.channels_last}
        self.vae = vae.to(device).to(**layout)
        self.critic = critic.to(device).to(**layout)
        named = list(self.vae.named_parameters())
        self.masters = MasterWeights([p for _, p in named])
        self.optimizers = optimizer_pair(
            named,
            muon_splits(self.vae),
            muon_lr=settings.muon_lr,
            adamw_lr=settings.adamw_lr,
            betas=(0.9, 0.98),
            weight_decay=settings.weight_decay,
        )
        self.average = Ema(self.vae.parameters(), settings.ema_decay)
        self.critic_masters = MasterWeights(self.critic.parameters())
        self.critic_optimizer = torch.optim.AdamW(
            self.critic.parameters(), lr=settings.critic_lr, betas=(0.0, 0.99), weight_decay=1e-4
        )
        feed_seed = seed * ranks.count + ranks.rank
        self.feed = FrameFeed(settings.feed, batch=batch, seed=feed_seed, device=device)
        self._motion_T = motion_weights(17 * settings.feed.chunks).to(device)
        self._terms = torch.zeros(len(_TERM_NAMES), device=device)
        self._sharp_ratio = torch.ones((), device=device)
        self._critic_value = torch.zeros((), device=device)
        compiles = device.type == "cuda" if settings.compiles is None else settings.compiles
        wrap: Callable[[Any], Any] = _compiled if compiles else _as_is
        self._encode = wrap(self.vae.encode_unnormalised)
        self._decode = wrap(self._decode_plain)
        self._reconstruction_terms = wrap(reconstruction_terms)

    def _decode_plain(self, latents_BTCHW: Tensor) -> Tensor:
        return self.vae.decode_unnormalised(latents_BTCHW)[0]

    def _autocast(self) -> torch.autocast:
        on_gpu = self.device.type == "cuda"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on_gpu)

    def train_step(self, progress: float) -> None:
        """Take one optimiser step at `progress` 0..1."""
        settings = self.settings
        uses_critic = progress >= settings.critic_start
        if uses_critic and not self.is_frozen:
            self._freeze_encoder()
        scale_learning_rate(
            self.optimizers,
            cosine_scale(progress, self.step, warm_up_steps=settings.warm_up_steps, floor=0.01),
        )
        frames = self.feed.batch(self.step)
        dice = torch.Generator(self.device).manual_seed(
            (self._seed * 1_000_003 + self.step) * self.ranks.count + self.ranks.rank
        )
        with self._autocast():
            latents = self._encode(frames)
        if self.is_frozen:
            latents = latents.detach()
        noise = torch.randn(latents.shape, generator=dice, device=self.device)
        with self._autocast():
            made = self._decode(latents + settings.noise_std * noise)
        self.masters.zero_grad()
        if uses_critic:
            self._backward_with_critic(made, frames, latents, progress, dice)
        else:
            terms = self._reconstruction_terms(made, frames, latents, self._motion_T)
            total_loss(terms, settings.weights).backward()
            self._terms = terms.detach()
        self._apply(self.masters, self.optimizers)
        self.average.update()
        self.step += 1

    def _apply(self, masters: MasterWeights, optimizers: list[torch.optim.Optimizer]) -> None:
        self.ranks.mean_([p.grad for p in masters.working if p.grad is not None])
        masters.step(optimizers, max_norm=1.0)

    def _backward_with_critic(
        self, made: Tensor, true: Tensor, latents: Tensor, progress: float, dice: torch.Generator
    ) -> None:
        """Add the critic's gradient on pixels, scaled to a share of the reconstruction's."""
        settings = self.settings
        leaf = made.detach().float().requires_grad_()
        terms = self._reconstruction_terms(leaf, true, latents, self._motion_T)
        loss = total_loss(terms, settings.weights)
        (gradient,) = torch.autograd.grad(loss, leaf)
        starts = self._group_starts(true.shape[1])
        true_GCHW, made_GCHW = frame_groups(true, starts), frame_groups(leaf, starts)
        self._train_critic(true_GCHW, made_GCHW.detach(), dice)
        with self._autocast():
            judged = decoder_loss(self.critic, true_GCHW, made_GCHW)
        (push,) = torch.autograd.grad(judged, leaf)
        seen = frame_groups(gradient, starts).norm()
        now = sharpness(leaf.detach()) / sharpness(true)
        self._sharp_ratio = self._sharp_ratio.lerp(now, 0.05)
        boost = (1.0 + 10.0 * (settings.target_sharpness - self._sharp_ratio)).clamp(0.0, 2.0)
        warm_up = (progress - settings.critic_start) / max(1.0 - settings.critic_start, 1e-6)
        share = settings.critic_share * min(1.0, warm_up / 0.15) * boost
        made.backward((gradient + share * seen / (push.norm() + 1e-12) * push).to(made.dtype))
        self._terms = terms.detach()

    def _train_critic(self, true_GCHW: Tensor, made_GCHW: Tensor, dice: torch.Generator) -> None:
        self.critic_masters.zero_grad()
        noise = 0.02 * torch.randn(true_GCHW.shape, generator=dice, device=self.device)
        with self._autocast():
            loss = critic_loss(self.critic, true_GCHW, made_GCHW, noise, self.settings.critic_gamma)
        loss.backward()
        self._apply(self.critic_masters, [self.critic_optimizer])
        self._critic_value = loss.detach()

    def _group_starts(self, frames: int) -> list[int]:
        dice = torch.Generator().manual_seed(self._seed * 31 + self.step)
        count = self.settings.critic_groups
        return torch.randint(0, frames - GROUP_FRAMES + 1, (count,), generator=dice).tolist()

    def _freeze_encoder(self) -> None:
        """Fix the encoder at its average weights, and the latents' statistics with it."""
        self.average.copy_to(self.vae.parameters())
        self.average = Ema(self.vae.parameters(), self.settings.ema_decay)
        self._measure_latents(self.vae)
        self.is_frozen = True

    @torch.no_grad()
    def _measure_latents(self, vae: TinyVae) -> None:
        """Set mean and std of each channel from whole pictures of clips kept for this."""
        count = min(self.settings.held_out_clips, 32)
        frames = held_out_frames(self.settings.feed, count, self.device, offset=1)
        with self._autocast():
            latents = torch.cat([vae.encode_unnormalised(part) for part in frames.split(8)])
        vae.latents_mean.copy_(latents.mean((0, 1, 3, 4))[:, None, None])
        vae.latents_std.copy_(latents.std((0, 1, 3, 4))[:, None, None] + 1e-3)

    def describe(self) -> str:
        """Return the last losses as text (synchronises)."""
        terms = dict(zip(_TERM_NAMES, self._terms.tolist(), strict=True))
        psnr = -10.0 * torch.log10(self._terms[1].clamp(min=1e-10)).item()
        text = " ".join(f"{name} {value:.4f}" for name, value in terms.items())
        text = f"{text} psnr {psnr:.2f}"
        if self.is_frozen:
            text += f" critic {self._critic_value.item():.3f} sharp {self._sharp_ratio.item():.3f}"
        return text

    def averaged(self) -> TinyVae:
        """Return a copy with average weights and measured statistics."""
        vae = copy.deepcopy(self.vae)
        self.average.copy_to(vae.parameters())
        if not self.is_frozen:
            self._measure_latents(vae)
        return vae

    def save(self, folder: Path) -> None:
        """Write the weights to ship and the checkpoint to resume from."""
        self.averaged().save_pretrained(folder / "vae")
        parts: dict[str, Any] = {
            "model": {
                "weights": self.vae.state_dict(),
                "mean": self.vae.latents_mean,
                "std": self.vae.latents_std,
                "is_frozen": self.is_frozen,
                "elapsed_s": self.elapsed_s,
            },
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "critic": {
                "weights": self.critic.state_dict(),
                "optimizer": self.critic_optimizer.state_dict(),
                "sharp_ratio": self._sharp_ratio,
            },
        }
        checkpoint = folder / "vae_checkpoint"
        checkpoint.mkdir(parents=True, exist_ok=True)
        for name in _PARTS:
            torch.save({"step": self.step, "part": parts[name]}, checkpoint / f"{name}.pt.part")
        for name in _PARTS:
            (checkpoint / f"{name}.pt.part").replace(checkpoint / f"{name}.pt")

    def load(self, folder: Path) -> bool:
        """Restore a checkpoint; return whether there is one.

        Raises:
            ValueError: its files are of different steps, or do not fit these settings.
        """
        paths = [folder / "vae_checkpoint" / f"{name}.pt" for name in _PARTS]
        if not all(path.exists() for path in paths):
            return False
        files = [torch.load(p, map_location=self.device, weights_only=True) for p in paths]
        steps = [file["step"] for file in files]
        if len(set(steps)) > 1:
            raise ValueError(f"vae_checkpoint: files of steps {steps}; allowed: one step")
        model, average, optimizers, critic = (file["part"] for file in files)
        try:
            self.vae.load_state_dict(model["weights"])
            self.average.load_state_dict(average)
            for optimizer, state in zip(self.optimizers, optimizers, strict=True):
                optimizer.load_state_dict(state)
            self.critic.load_state_dict(critic["weights"])
            self.critic_optimizer.load_state_dict(critic["optimizer"])
        except RuntimeError as error:
            raise ValueError(f"vae_checkpoint: {error}") from error
        self.vae.latents_mean.copy_(model["mean"])
        self.vae.latents_std.copy_(model["std"])
        self._sharp_ratio = critic["sharp_ratio"]
        self.is_frozen, self.elapsed_s = model["is_frozen"], model["elapsed_s"]
        self.step = steps[0]
        return True


def muon_splits(vae: TinyVae) -> dict[str, int]:
    """Return the convolutions that Muon trains, and how many matrices each one stacks.

    First and last layers stay with AdamW: their rows are colours, not a basis.
    """
    ends = {"encoder.stem", "encoder.latents", "decoder.stem", "decoder.pixels"}
    two = {"decoder.to_fine", "decoder.to_half"}
    return {
        f"{name}.weight": 2 if name in two else 1
        for name, module in vae.named_modules()
        if isinstance(module, nn.Conv2d) and name not in ends
    }


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function

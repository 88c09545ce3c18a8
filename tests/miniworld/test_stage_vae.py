"""The autoencoder's training stage, small and on a CPU."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from miniworld.stages.ranks import Ranks
from miniworld.stages.vae import VaeStageSettings, _Run, muon_splits, train_vae
from miniworld.stages.vae_data import FeedSettings, FrameFeed, crop_columns
from miniworld.stages.vae_losses import (
    LossWeights,
    PatchCritic,
    critic_loss,
    decoder_loss,
    motion_weights,
    reconstruction_terms,
)
from miniworld.stages.vae_report import evaluate, grid_score
from vae_stream import TinyVae, TinyVaeConfig

pytestmark = pytest.mark.cpu

FEED = FeedSettings(
    chunks=1,
    height_px=32,
    width_px=32,
    crop_px=16,
    supersample=1,
    photo_share=0.25,
    pool_clips=4,
    pool_photos=2,
    pool_steps=4,
)
SETTINGS = VaeStageSettings(
    vae=TinyVaeConfig(decoder_widths=(16, 16, 16), head_width=8, encoder_widths=(16, 16, 16)),
    feed=FEED,
    step_limit=6,
    warm_up_steps=2,
    critic_start=0.5,
    held_out_clips=2,
)


def train(folder: Path, settings: VaeStageSettings, *, resume: bool = False) -> list[str]:
    lines: list[str] = []
    train_vae(
        folder,
        budget_s=1e6,
        seed=5,
        device="cpu",
        batch=2,
        resume=resume,
        log=lines.append,
        settings=settings,
    )
    return lines


def new_run() -> _Run:
    device = torch.device("cpu")
    ranks = Ranks(rank=0, count=1, device=device)
    return _Run(SETTINGS, seed=5, device=device, batch=2, ranks=ranks)


def train_until(folder: Path, stop: int) -> None:
    """Run the first steps of the whole schedule and save, as a cut run would."""
    run = new_run()
    for step in range(stop):
        run.train_step(step / (SETTINGS.step_limit or 1))
    run.feed.close()
    run.save(folder)


def same(one: nn.Module, two: nn.Module) -> bool:
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def l1_of(folder: Path, frames: torch.Tensor) -> float:
    vae = TinyVae.from_pretrained(folder / "vae")
    return float((vae.decode(vae.encode(frames))[0] - frames).abs().mean())


def test_training_lowers_the_loss_and_reports_it(tmp_path: Path) -> None:
    one_clip = replace(FEED, pool_clips=1, pool_steps=100, photo_share=0.0)
    settings = replace(
        SETTINGS,
        feed=one_clip,
        weights=LossWeights(gradient=0.0, motion=0.0),
        noise_std=0.0,
        critic_start=1.0,
        ema_decay=0.5,
    )
    feed = FrameFeed(one_clip, batch=2, seed=5, device=torch.device("cpu"))
    frames = feed.batch(1)
    feed.close()

    train(tmp_path / "one", replace(settings, step_limit=1))
    lines = train(tmp_path / "many", replace(settings, step_limit=30))

    assert l1_of(tmp_path / "many", frames) < 0.8 * l1_of(tmp_path / "one", frames)
    assert any(line.startswith("vae step 10 ") for line in lines)
    assert any("held-out worlds: PSNR mean" in line for line in lines)
    assert any("held-out photographs: PSNR mean" in line for line in lines)
    assert (tmp_path / "many" / "vae.png").stat().st_size > 0
    assert (tmp_path / "many" / "vae" / "model.safetensors").stat().st_size < 16 << 20


@pytest.mark.parametrize("stop", [2, 4], ids=["before-critic", "with-critic"])
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, stop: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, SETTINGS)

    train_until(parts, stop)
    train(parts, SETTINGS, resume=True)

    first, second = (TinyVae.from_pretrained(folder / "vae") for folder in (whole, parts))
    assert first.config == second.config
    assert same(first, second)


def test_the_critic_stage_leaves_the_encoder_alone() -> None:
    run = new_run()
    run.train_step(0.5)
    run.train_step(0.8)
    before = copy.deepcopy(run.vae)

    run.train_step(0.9)

    run.feed.close()
    assert same(before.encoder, run.vae.encoder)
    assert not same(before.decoder, run.vae.decoder)


def test_going_on_from_an_autoencoder_keeps_its_latents(tmp_path: Path) -> None:
    train(tmp_path / "first", SETTINGS)
    start = tmp_path / "first" / "vae"

    train(tmp_path / "second", replace(SETTINGS, start_from=start))

    first, second = (TinyVae.from_pretrained(tmp_path / n / "vae") for n in ("first", "second"))
    assert first.config == second.config
    assert same(first.encoder, second.encoder)
    assert not same(first.decoder, second.decoder)


def test_checkpoint_files_of_different_steps_are_refused(tmp_path: Path) -> None:
    train_until(tmp_path, 1)
    path = tmp_path / "vae_checkpoint" / "average.pt"
    file = torch.load(path, weights_only=True)
    torch.save({**file, "step": 7}, path)

    with pytest.raises(ValueError, match=r"files of steps \[1, 7, 1, 1\]"):
        train(tmp_path, SETTINGS, resume=True)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    device = torch.device("cpu")
    one, two = (FrameFeed(FEED, batch=3, seed=2, device=device) for _ in range(2))
    first = [one.batch(step) for step in (0, 1, 5)]

    again = two.batch(5)
    for feed in (one, two):
        feed.close()

    assert all(frames.shape == (3, 17, 3, 32, 16) for frames in first)
    assert torch.equal(first[2], again)
    assert not torch.equal(first[0], first[1])
    assert first[0].min() >= 0
    assert first[0].max() <= 1


def test_crops_prefer_columns_with_edges() -> None:
    frames = torch.zeros(400, 1, 3, 4, 64)
    frames[..., 48:64:2] = 1.0
    dice = torch.Generator().manual_seed(0)

    cropped = crop_columns(frames, 16, dice)

    # Even odds would show edges in fewer than half of the crops (starts 33..48 of 0..48).
    assert (cropped.amax((1, 2, 3, 4)) > 0).float().mean() > 0.6
    assert cropped.shape == (400, 1, 3, 4, 16)


def test_motion_counts_thrice_where_a_latent_ends() -> None:
    edges = [f for f in range(34) if f % 17 in (0, 1, 5, 9, 13)][1:]

    weights = motion_weights(34)

    assert [i + 1 for i, w in enumerate(weights.tolist()) if w == 3] == edges
    assert weights.sum() == 33 + 2 * len(edges)


def test_a_constant_error_costs_no_gradient_and_no_motion() -> None:
    true = torch.rand(1, 17, 3, 16, 16)

    terms = reconstruction_terms(
        true + 0.25, true, torch.full((1, 5, 24, 1, 1), 2.0), motion_weights(17)
    )

    expected = torch.tensor([0.25, 0.0625, 0.0, 0.0, 4.0])
    torch.testing.assert_close(terms, expected, atol=1e-6, rtol=0)  # rounding of sums near 1


def test_the_critic_learns_to_tell_and_its_gradient_points_to_truth() -> None:
    torch.manual_seed(0)
    critic = PatchCritic(width=8)
    true = torch.rand(4, 9, 16, 16)
    made = torch.nn.functional.avg_pool2d(true, 3, stride=1, padding=1)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=2e-3, betas=(0.0, 0.99))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = critic_loss(critic, true, made, 0.02 * torch.randn_like(true), gamma=0.05)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    leaf = made.clone().requires_grad_()
    (push,) = torch.autograd.grad(decoder_loss(critic, true, leaf), leaf)

    assert losses[-1] < 0.8 * losses[0]
    assert (-push * (true - made)).sum() > 0


@pytest.mark.parametrize("period", [2, 4])
def test_the_grid_score_finds_a_grid_and_nothing_in_noise(period: int) -> None:
    noise = 0.01 * torch.randn(2, 4, 3, 160, 256)
    grid = torch.zeros_like(noise)
    grid[..., ::period] = 0.01

    assert grid_score(noise) < 1.3  # 10,000 spectra and more in each bin: 1 within a few per cent
    assert grid_score(noise + grid) > 10


def test_a_perfect_network_would_score_perfectly() -> None:
    class Copy(TinyVae):
        def encode(self, frames_BTCHW: torch.Tensor) -> torch.Tensor:
            return frames_BTCHW

        def decode(self, latents_BTCHW, state=None):  # type: ignore[no-untyped-def]
            return latents_BTCHW, []

    report = evaluate(Copy(TinyVaeConfig()), torch.rand(2, 17, 3, 32, 32))

    assert report.psnr_mean_db == 100  # the floor of the squared error, 1e-10
    assert report.sharpness_ratio == 1
    assert len(report.psnr_by_frame_db) == 17


def test_muon_takes_convolutions_between_the_ends() -> None:
    vae = TinyVae(TinyVaeConfig())

    splits = muon_splits(vae)

    names = {name for name, p in vae.named_parameters() if p.dim() == 4}
    assert names - set(splits) == {
        "encoder.stem.weight",
        "encoder.latents.weight",
        "decoder.stem.weight",
        "decoder.pixels.weight",
    }
    assert {n for n, s in splits.items() if s == 2} == {
        "decoder.to_fine.weight",
        "decoder.to_half.weight",
    }

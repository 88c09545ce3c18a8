"""Stage "flow": what the batch asks for, learning, resuming."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.denoise import model_times
from miniworld.stages.flow import FlowConfig, TrainedModel, flow_batch, muon_splits, train_flow
from miniworld.stages.ranks import Ranks
from tests.miniworld.clips import CHUNKS, random_cache, random_clips, stage_config

pytestmark = pytest.mark.cpu
ALONE = Ranks(rank=0, count=1, device=torch.device("cpu"))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_noise_lies_on_the_flow_between_noise_and_data() -> None:
    config, clips = stage_config(), random_clips(stage_config(), batch=8)
    inputs, target, _ = flow_batch(clips, config, FlowConfig(), generator())
    rows = config.rows_per_latent
    t = inputs.t_BT.view(8, CHUNKS, -1).repeat_interleave(rows, 2)[..., None]
    x0 = clips.latents_BNRC.float()
    torch.testing.assert_close(inputs.noisy_BNRC + (1 - t) * target, x0, atol=1e-5, rtol=0)


def test_all_times_lie_on_the_grid_when_asked() -> None:
    config, clips = stage_config(), random_clips(stage_config(), batch=8)
    recipe = FlowConfig(grid_share=1.0, leading_share=0.0)
    inputs, _, _ = flow_batch(clips, config, recipe, generator())
    assert torch.isin(inputs.t_BT, model_times(config.sampler)).all()


def test_leading_latents_are_clean_and_without_loss() -> None:
    config, clips = stage_config(), random_clips(stage_config(), batch=8)
    recipe = FlowConfig(leading_share=1.0)
    inputs, _, weight = flow_batch(clips, config, recipe, generator())
    rows = config.rows_per_latent
    is_given = (inputs.t_BT == 1).repeat_interleave(rows, 1).view(weight.shape)
    assert is_given.any()
    assert (weight[is_given] == 0).all()
    x0 = clips.latents_BNRC.float()
    assert torch.equal(inputs.noisy_BNRC[is_given], x0[is_given])


def test_a_tinted_history_shifts_each_channel_as_a_whole() -> None:
    config, clips = stage_config(), random_clips(stage_config(), batch=4)
    recipe = FlowConfig(history_noise=0.0, history_tint_share=1.0, history_blur_share=0.0)
    inputs, _, _ = flow_batch(clips, config, recipe, generator())
    shift = inputs.clean_BNRC - clips.latents_BNRC.float()
    by_channel = shift.unflatten(-1, (config.in_channels, -1)).transpose(2, 3).flatten(3)
    assert by_channel.std(-1).max() < 1e-6
    assert by_channel.mean(-1).abs().max() > 0.01


def test_a_blurred_history_keeps_what_is_even() -> None:
    config, clips = stage_config(), random_clips(stage_config(), batch=4)
    even = dataclasses.replace(clips, latents_BNRC=torch.ones_like(clips.latents_BNRC))
    recipe = FlowConfig(history_noise=0.0, history_tint_share=0.0, history_blur_share=1.0)
    for given, spread in ((even, 0.0), (clips, 0.95)):
        inputs, _, _ = flow_batch(given, config, recipe, generator())
        made, true = inputs.clean_BNRC, given.latents_BNRC.float()
        assert made.std() <= spread * true.std() + 1e-6


def test_first_chunk_of_a_mid_session_clip_is_history_only() -> None:
    config, clips = stage_config(), random_clips(stage_config(), batch=4)
    _, _, weight = flow_batch(clips, config, FlowConfig(leading_share=0.0), generator())
    assert (weight[-1, 0] == 0).all()
    assert (weight[:-1, 0] > 0).all()


def test_muon_trains_the_matrices_of_the_blocks_only() -> None:
    model = TrainedModel(stage_config(), FlowConfig(), ALONE.device).model
    splits = muon_splits(model)
    assert all(name.startswith("transformer_blocks.") for name in splits)
    assert len(splits) == 6 * model.config.num_layers
    assert {n.split(".ff.")[-1] for n, s in splits.items() if s == 2} == {"net.0.proj.weight"}


def test_loss_falls(tmp_path: Path) -> None:
    lines: list[str] = []
    train_flow(
        tmp_path,
        random_cache(stage_config()),
        stage_config(),
        recipe=FlowConfig(batch=4, warm_up_steps=1),
        budget_s=600.0,
        seed=0,
        ranks=ALONE,
        resume=False,
        log=lines.append,
        max_steps=20,
    )
    losses = [float(line.split(" loss ")[1].split()[0]) for line in lines if " loss " in line]
    assert losses[-1] < losses[0]


def test_resumed_run_has_the_same_masters_as_saved(tmp_path: Path) -> None:
    def train(steps: int, *, resume: bool) -> TrainedModel:
        return train_flow(
            tmp_path,
            random_cache(stage_config()),
            stage_config(),
            recipe=FlowConfig(batch=2),
            budget_s=600.0,
            seed=0,
            ranks=ALONE,
            resume=resume,
            log=lambda _line: None,
            max_steps=steps,
        )

    first = train(2, resume=False)
    again = train(2, resume=True)
    for name, value in first.averaged_state().items():
        assert torch.equal(value, again.averaged_state()[name]), name
    further = train(3, resume=True)
    moved = first.averaged_state()["proj_in.weight"]
    assert not torch.equal(moved, further.averaged_state()["proj_in.weight"])

"""The packed training pass against the streaming loop that it stands for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from engine.core import RolloutCore
from engine.layout import patchify, unpatchify
from miniworld.stages.distil import prompt_prefix
from miniworld.stages.flow import FlowConfig, TrainedModel, prefix_inputs
from miniworld.stages.packed import PackedInputs, PackedLayout, packed_velocity
from tests.miniworld.clips import CHUNKS, random_clips, stage_config, stir
from tests.tolerances import FP32_ROLLOUT_ATOL

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained() -> TrainedModel:
    torch.manual_seed(0)
    made = TrainedModel(stage_config(), FlowConfig(), CPU)
    stir(list(made.named_parameters()))
    return made


def packed(trained: TrainedModel, inputs: PackedInputs, switch_chunk: int) -> Tensor:
    layout = PackedLayout(trained.model.config, chunks=CHUNKS, prompts=2, device=CPU)
    with torch.no_grad():
        return packed_velocity(trained.model, trained.text, layout, inputs, switch_chunk)


def random_inputs(trained: TrainedModel, switch_chunk: int) -> PackedInputs:
    config, generator = trained.model.config, torch.Generator().manual_seed(5)
    clips = random_clips(config, switch_chunk=switch_chunk)
    shape = clips.latents_BNRC.shape
    step_t = RolloutCore(trained.model).times[2]
    return PackedInputs(
        clean_BNRC=torch.randn(shape, generator=generator),
        noisy_BNRC=torch.randn(shape, generator=generator),
        t_BT=torch.full(clips.views_BT44.shape[:2], step_t),
        views_BT44=clips.views_BT44,
        **prefix_inputs(clips, config, generator),
    )


def streamed(
    trained: TrainedModel, inputs: PackedInputs, switch_chunk: int, leading: int = 0
) -> Tensor:
    config = trained.model.config
    core = RolloutCore(trained.model)
    prefix = {
        name: getattr(inputs, name)
        for name in ("text_ids_BPR", "anchor_BRC", "audio_BRC", "audio_t_B")
    }
    state = core.begin(prompt_prefix(trained, prefix, 0 if switch_chunk else 1))
    velocities = []
    for chunk in range(CHUNKS):
        if 0 < chunk == switch_chunk:
            core.switch_prefix(state, prompt_prefix(trained, prefix, 1))
        latents = config.latents_per_chunk
        core.open_chunk(state, inputs.views_BT44[:, latents * chunk : latents * (chunk + 1)])
        noisy = unpatchify(inputs.noisy_BNRC[:, chunk], config.geometry)
        velocities.append(patchify(core.velocity(state, noisy, 2, leading_count=leading)))
        core.refresh(state, unpatchify(inputs.clean_BNRC[:, chunk], config.geometry))
    return torch.stack(velocities, dim=1)


@pytest.mark.parametrize("switch_chunk", [0, 3, CHUNKS], ids=["at-once", "midway", "never"])
def test_packed_equals_streaming(trained: TrainedModel, switch_chunk: int) -> None:
    inputs = random_inputs(trained, switch_chunk)
    expected = streamed(trained, inputs, switch_chunk)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(
        packed(trained, inputs, switch_chunk), expected, atol=FP32_ROLLOUT_ATOL, rtol=0
    )


def test_leading_clean_latents_equal_streaming(trained: TrainedModel) -> None:
    inputs = random_inputs(trained, CHUNKS)
    t_BNT = inputs.t_BT.clone().view(2, CHUNKS, -1)
    t_BNT[..., :2] = 1.0
    inputs = dataclasses.replace(inputs, t_BT=t_BNT.flatten(1))
    torch.testing.assert_close(
        packed(trained, inputs, CHUNKS),
        streamed(trained, inputs, CHUNKS, leading=2),
        atol=FP32_ROLLOUT_ATOL,
        rtol=0,
    )


def test_a_chunk_outside_the_window_does_not_matter(trained: TrainedModel) -> None:
    inputs = random_inputs(trained, CHUNKS)
    clean = inputs.clean_BNRC.clone()
    clean[:, 0] += 1.0
    changed = packed(trained, dataclasses.replace(inputs, clean_BNRC=clean), CHUNKS)
    same = packed(trained, inputs, CHUNKS)
    # Chunk 6 sees chunks 1..5 directly, and chunk 0 only through what those saw of it.
    assert torch.equal(changed[:, 0], same[:, 0])
    assert not torch.allclose(changed[:, 1], same[:, 1])


def test_the_noisy_chunk_stays_out_of_other_chunks(trained: TrainedModel) -> None:
    inputs = random_inputs(trained, CHUNKS)
    noisy = inputs.noisy_BNRC.clone()
    noisy[:, 2] += 1.0
    changed = packed(trained, dataclasses.replace(inputs, noisy_BNRC=noisy), CHUNKS)
    same = packed(trained, inputs, CHUNKS)
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(changed[:, others], same[:, others])
    assert not torch.allclose(changed[:, 2], same[:, 2])

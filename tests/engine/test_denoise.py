"""The sampler on models whose answer is known."""

from __future__ import annotations

import pytest
import torch

from engine.config import SamplerConfig
from engine.denoise import denoise_chunk, model_times
from tests.tolerances import FP32_ATOL

pytestmark = pytest.mark.cpu

TIMES = model_times(SamplerConfig()).tolist()
SHAPE = (2, 3, 5, 2, 2)


def test_times_are_the_released_fp32_numbers():
    expected = torch.tensor([0.0, 0.0270270109, 0.0769230723, 0.1999999881])
    assert torch.equal(model_times(SamplerConfig()), expected)


def _noise() -> list[torch.Tensor]:
    return [torch.randn(SHAPE) for _ in range(4)]


def test_a_model_that_knows_the_data_gives_the_data():
    data, noise = torch.randn(SHAPE), _noise()

    def velocity(x, step):
        return (data - x) / (1 - TIMES[step])

    made = denoise_chunk(velocity, noise[0], noise[1:], TIMES)
    assert (made - data).abs().max() <= FP32_ATOL


def test_each_step_starts_from_fresh_noise_at_its_level():
    data, noise, seen = torch.randn(SHAPE), _noise(), []

    def velocity(x, step):
        seen.append(x)
        return (data - x) / (1 - TIMES[step])

    denoise_chunk(velocity, noise[0], noise[1:], TIMES)
    assert len(seen) == 4
    for step, x in enumerate(seen):
        expected = TIMES[step] * data + (1 - TIMES[step]) * noise[step]
        assert (x - expected).abs().max() <= FP32_ATOL, f"step {step}"


def test_last_x0_is_the_result_and_not_an_euler_step():
    noise = _noise()
    made = denoise_chunk(lambda x, step: torch.ones_like(x), noise[0], noise[1:], TIMES[:1])
    assert torch.equal(made, noise[0] + 1.0)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_leading_latents_are_fixed_in_every_step(count):
    clean, noise = torch.randn(2, 3, count, 2, 2), _noise()

    def velocity(x, step):
        assert torch.equal(x[:, :, :count], clean)
        return torch.randn_like(x)

    made = denoise_chunk(velocity, noise[0], noise[1:], TIMES, clean)
    assert torch.equal(made[:, :, :count], clean)

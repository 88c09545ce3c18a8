"""The H3 decoder network: one window."""

from __future__ import annotations

import pytest
import torch

from tests.vae_stream.convolutions_seen import ConvolutionsSeen
from tests.vae_stream.h3_tiny import random_vit
from vae_stream.vit import Vit, VitConfig, window_rotary

pytestmark = pytest.mark.cpu


def test_the_released_model_has_as_many_parameters_as_released() -> None:
    with torch.device("meta"):
        vit = Vit(VitConfig())

    assert sum(each.numel() for each in vit.parameters()) == 2_423_531_096


def test_a_window_of_one_latent_is_refused() -> None:
    with pytest.raises(ValueError, match="1 latents in the window; allowed: 2 or more"):
        random_vit()(torch.zeros(1, 24, 1, 2, 2))


def test_a_window_begins_with_exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with ConvolutionsSeen() as seen:
        random_vit()(torch.zeros(1, 24, 2, 2, 2))

    (call,) = seen.calls
    assert call.told is not None
    assert not call.told["allow_tf32"]


def test_tiles_of_a_batch_do_not_see_each_other() -> None:
    vit, z_BCTHW = random_vit(), torch.randn(3, 24, 7, 2, 3)

    together = vit(z_BCTHW)

    assert together.shape == (3, 3, 28, 32, 48)
    for tile in range(3):
        torch.testing.assert_close(together[tile : tile + 1], vit(z_BCTHW[tile : tile + 1]))


def test_positions_are_those_of_the_tile_and_the_suffix_is_at_zero() -> None:
    cos_R1A, sin_R1A = window_rotary(VitConfig(), 7, 16, 16, torch.device("cpu"))

    assert cos_R1A.shape == (7 * 256 + 5, 1, 24)
    assert torch.equal(cos_R1A[-5:], torch.ones(5, 1, 24))
    # Frequency 1 of the first token: time -6/7, row and column -15/16 of the way to -1.
    angles = torch.tensor([-6 / 7, -15 / 16, -15 / 16]) * 2 * torch.pi
    torch.testing.assert_close(sin_R1A[0, 0, ::8], angles.sin(), atol=1e-6, rtol=0)


def test_blocks_in_bf16_stay_near_fp32() -> None:
    z_BCTHW = torch.randn(1, 24, 7, 3, 2)
    exact = random_vit()(z_BCTHW)

    half = random_vit().cast_blocks(torch.bfloat16)(z_BCTHW)

    assert half.dtype == torch.float32
    # Eight bits of mantissa: 0.2 % a rounding, some ten roundings that add up at random.
    assert (half - exact).square().mean().sqrt() < 0.01 * exact.square().mean().sqrt()

"""Compiled windows of the original H3 decoder against the plain network."""

from __future__ import annotations

import pytest
import torch

from graphs.compile import CompileMode
from tests.tolerances import FP32_ATOL, VIT_KERNEL_RATIO
from tests.vae_stream.h3_tiny import random_vit
from vae_stream.window_fused import FusedWindows

pytestmark = pytest.mark.cpu


def test_in_fp32_they_are_those_of_the_network() -> None:
    vit, z_BCTHW = random_vit(), torch.randn(2, 24, 3, 2, 3)

    frames = FusedWindows(vit, CompileMode.EAGER)(z_BCTHW)

    torch.testing.assert_close(frames, vit(z_BCTHW), atol=FP32_ATOL, rtol=FP32_ATOL)


def test_in_bf16_they_are_as_near_to_fp32_as_the_network() -> None:
    z_BCTHW = torch.randn(2, 24, 3, 2, 3)
    exact = random_vit()(z_BCTHW)
    vit = random_vit().cast_blocks(torch.bfloat16)

    frames = FusedWindows(vit, CompileMode.EAGER)(z_BCTHW)

    far, allowed = ((each - exact).square().mean().sqrt() for each in (frames, vit(z_BCTHW)))
    assert far <= VIT_KERNEL_RATIO * allowed


def test_a_window_of_one_latent_is_refused() -> None:
    windows = FusedWindows(random_vit(), CompileMode.EAGER)
    with pytest.raises(ValueError, match="1 latents in the window; allowed: 2 or more"):
        windows(torch.zeros(1, 24, 1, 2, 2))

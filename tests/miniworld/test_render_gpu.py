"""The ray-caster's kernel on a GPU against the torch oracle, whole pictures."""

import pytest

from miniworld import scene
from miniworld.render import render
from tests.tolerances import RAYCAST_GPU_EDGE_SHARE, RAYCAST_GPU_SHADE_ATOL

pytestmark = pytest.mark.gpu


def test_kernel_agrees_with_the_oracle_on_whole_pictures() -> None:
    clips = scene.sample_clips(12, 1, seed=21, palette_share=0.3)
    c2w = clips.c2w_CF44[:, ::16]
    oracle, oracle_cover = render(clips.scenes, c2w, clips.style_before_CS, coverage=True)
    kernel, kernel_cover = render(
        clips.scenes.to("cuda"), c2w, clips.style_before_CS, coverage=True
    )
    gap = (oracle - kernel.cpu()).abs().amax(2)
    share = (gap > RAYCAST_GPU_SHADE_ATOL).float().mean().item()
    assert share <= RAYCAST_GPU_EDGE_SHARE
    assert (oracle_cover - kernel_cover.cpu()).abs().mean().item() <= RAYCAST_GPU_EDGE_SHARE

"""Where tiles lie, and how they are joined."""

from __future__ import annotations

import pytest
import torch

from tests.tolerances import FP32_ATOL, FP32_RTOL
from vae_stream.tiling import Stitch, TilePlan, Tiling, cross_fade, plan_tiles

pytestmark = pytest.mark.cpu

# Published layouts of the released 256 px tiles: length, starts, overlaps.
LAYOUTS = {
    128: ((0,), ()),
    256: ((0,), ()),
    384: ((0, 128), (128,)),
    480: ((0, 112, 224), (144, 144)),
    544: ((0, 144, 288), (112, 112)),
    672: ((0, 128, 272, 416), (128, 112, 112)),
    720: ((0, 144, 304, 464), (112, 96, 96)),
    768: ((0, 160, 336, 512), (96, 80, 80)),
    832: ((0, 192, 384, 576), (64, 64, 64)),
    960: ((0, 176, 352, 528, 704), (80, 80, 80, 80)),
    1024: ((0, 192, 384, 576, 768), (64, 64, 64, 64)),
    1280: ((0, 160, 320, 496, 672, 848, 1024), (96, 96, 80, 80, 80, 80)),
    1344: ((0, 176, 352, 528, 704, 896, 1088), (80, 80, 80, 80, 64, 64)),
}


@pytest.mark.parametrize("length", LAYOUTS)
def test_tiles_lie_where_the_released_model_has_them(length: int) -> None:
    plan = plan_tiles(length, 256, Tiling())

    assert (plan.rows.starts, plan.rows.overlaps) == LAYOUTS[length]
    assert plan.rows.size == min(length, 256)


@pytest.mark.parametrize("length", range(16, 900, 16))
def test_tiles_cover_the_whole_length_and_overlap_enough(length: int) -> None:
    axis = plan_tiles(64, length, Tiling(tile_px=64, overlap_px=16)).columns

    ends = [start + axis.size for start in axis.starts]
    assert ends[-1] == length
    assert [end - overlap for end, overlap in zip(ends, axis.overlaps, strict=False)] == list(
        axis.starts[1:]
    )
    assert all(overlap >= 16 for overlap in axis.overlaps)


def test_a_picture_may_be_one_tile() -> None:
    assert plan_tiles(480, 832, Tiling(tile_px=None)).tile_count == 1


def cut(plan: TilePlan, height: int, width: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    picture = torch.randn(2, height, width)
    return picture, plan.cut(picture)


@pytest.mark.parametrize("stitch", list(Stitch))
@pytest.mark.parametrize("size", [(480, 832), (768, 256), (128, 144)])
def test_tiles_of_a_picture_join_to_the_picture(stitch: Stitch, size: tuple[int, int]) -> None:
    plan = plan_tiles(*size, Tiling(stitch=stitch))
    picture, tiles = cut(plan, *size)

    torch.testing.assert_close(plan.join(tiles), picture, atol=FP32_ATOL, rtol=FP32_RTOL)


def test_the_released_rule_blends_with_the_tile_as_decoded() -> None:
    plan = plan_tiles(112, 112, Tiling(tile_px=64, overlap_px=16)).scaled(16)
    tiles = [torch.full((4, 4), float(value)) for value in (1, 2, 3, 4)]

    joined = plan.join(tiles)

    # One latent of overlap has weight 0: the tile before alone; at the corner the one on the left.
    above, corner, below = [1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 3, 2, 2, 2], [3, 3, 3, 3, 4, 4, 4]
    assert joined.tolist() == [above] * 3 + [corner] + [below] * 3


def test_a_cross_fade_is_linear_and_starts_with_the_older() -> None:
    faded = cross_fade(torch.zeros(6), torch.full((8,), 10.0), 5, -1)

    assert faded.tolist() == [0, 2, 4, 6, 8, 10, 10, 10]


def test_a_cross_fade_is_as_long_as_the_shorter() -> None:
    assert cross_fade(torch.zeros(2), torch.full((4,), 10.0), 5, 0).tolist() == [0, 5, 10, 10]


@pytest.mark.parametrize(
    ("tile_px", "overlap_px"), [(250, 64), (0, 64), (64, 64), (64, 0), (64, 24)]
)
def test_other_tile_sizes_are_refused(tile_px: int, overlap_px: int) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Tiling(tile_px=tile_px, overlap_px=overlap_px)


def test_other_picture_sizes_and_tile_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="width_px: 100"):
        plan_tiles(96, 100, Tiling())
    plan = plan_tiles(480, 832, Tiling())
    with pytest.raises(ValueError, match="tiles: 2; allowed: 12"):
        plan.join([torch.zeros(256, 256)] * 2)

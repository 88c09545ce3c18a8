"""The benchmark of the windowed decoder: what a row says. No time is asserted."""

from __future__ import annotations

import pytest
import torch

from benchmarks.windowed import AUTOCAST, Bench, random_vit, rows_in_bf16
from engine.config import Geometry
from vae_stream.vit import VitConfig

pytestmark = pytest.mark.cpu


def test_rows_stand_against_fp32_and_against_the_first_in_bf16() -> None:
    vit = random_vit(VitConfig(layer_count=1, head_count=1, ffn_width=32), torch.device("cpu"))
    bench = Bench(vit, Geometry(height_px=32, width_px=288), blocks=2, dropped=0)
    control, batched, *_ = rows_in_bf16(2, with_all=False)

    autocast = bench.run(AUTOCAST)
    vit.cast_blocks(torch.bfloat16)
    first, second = bench.run(control), bench.run(batched)

    assert [each.block.n for each in (autocast, first, second)] == [2, 2, 2]
    assert not autocast.is_exact
    assert first.is_exact
    assert first.gain(first) == 1.0
    # Rounded to 8 bits in some places, and under autocast in the head too.
    assert 0 < first.error_max <= autocast.error_max < 0.1
    assert autocast.psnr_db < first.psnr_db
    assert "eager, tile by tile" in first.line(autocast, first)

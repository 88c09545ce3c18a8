"""Rows: positions of the specification, patches, the order of audio rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.config import Geometry, preset
from engine.layout import (
    pack_audio,
    patchify,
    prefix_layout,
    prefix_positions,
    spatial_positions,
    unpatchify,
    window_positions,
)

pytestmark = pytest.mark.cpu

H3 = preset("h3_33b").model
TINY = preset("tiny").model


def test_released_grid():
    y, x = spatial_positions(H3.geometry)
    assert y[0].item() == pytest.approx(3.905137, abs=1e-6)
    assert y[-1].item() == pytest.approx(27.086958, abs=1e-6)
    assert x[0].item() == pytest.approx(-5.166010, abs=1e-6)
    assert x[-1].item() == pytest.approx(36.158105, abs=1e-6)
    assert (y[1] - y[0]).item() == pytest.approx(1.007905, abs=1e-6)


def test_times_of_a_full_window():
    rows = window_positions(TINY, 17).reshape(30, TINY.rows_per_latent, 3)
    expected = [
        0, 1.6667, 8.3333, 15, 21.6667, 28.3333, 30, 36.6667, 43.3333, 50, 56.6667, 58.3333, 65,
        71.6667, 78.3333, 85, 86.6667, 93.3333, 100, 106.6667, 113.3333, 115, 121.6667, 128.3333,
        135, 141.6667, 143.3333, 150, 156.6667, 163.3333,
    ]  # fmt: skip
    assert rows[0, 0, 0] == 17
    torch.testing.assert_close(
        rows[:, 0, 0] - 17, torch.tensor(expected).double(), atol=5e-5, rtol=0
    )


def test_anchor_and_oldest_latent_share_a_place():
    prefix, window = prefix_positions(TINY, 17), window_positions(TINY, 17)
    assert torch.equal(prefix[17:23], window[:6])


def test_text_rows_have_no_place_in_the_picture():
    text = prefix_positions(TINY, 4)[:4]
    assert text.tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0]]


def test_audio_rows_are_channel_after_channel_at_the_edges():
    _, x = spatial_positions(TINY.geometry)
    audio = prefix_positions(TINY, 4)[10:]
    assert audio[:, 0].tolist() == [4.0 + j for j in range(11)] * 2
    assert set(audio[:11, 2].tolist()) == {x[0].item()}
    assert set(audio[11:, 2].tolist()) == {x[-1].item()}


def test_row_counts():
    layout = prefix_layout(H3, 537)
    assert (layout.conditioning_rows, layout.rows) == (537 + 1008, 537 + 1008 + 526)
    assert prefix_positions(TINY, 9).shape == (prefix_layout(TINY, 9).rows, 3)


@pytest.mark.parametrize(("height_px", "width_px"), [(64, 96), (160, 256), (32, 32)])
def test_patches_round_trip_and_are_channel_major(height_px, width_px):
    geometry = Geometry(height_px=height_px, width_px=width_px)
    latents = torch.randn(2, 24, 5, geometry.latent_height, geometry.latent_width)
    rows = patchify(latents)
    assert rows.shape == (2, 5 * geometry.rows_per_latent, 96)
    assert torch.equal(unpatchify(rows, geometry), latents)
    assert torch.equal(rows[0, 0, 4:8], latents[0, 1, 0, :2, :2].flatten())


def test_rows_are_latent_after_latent():
    config = dataclasses.replace(TINY, geometry=Geometry(height_px=64, width_px=64))
    latents = torch.zeros(1, 24, 5, 4, 4)
    latents[:, :, 2] = 1.0
    ones = patchify(latents)[0, :, 0].nonzero()[:, 0]
    assert ones.tolist() == list(range(2 * config.rows_per_latent, 3 * config.rows_per_latent))


def test_audio_packing_order():
    latents = torch.arange(12.0).reshape(1, 2, 3, 2)
    assert pack_audio(latents)[0].tolist() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]

"""Ranges and rounding."""

import numpy as np
import pytest
import torch

from vae_stream.pixels import from_uint8, to_uint8

pytestmark = pytest.mark.cpu


def test_rounding_agrees_with_numpy_for_every_kind_of_value() -> None:
    values = np.concatenate(
        [
            np.arange(0, 256, 0.5, dtype=np.float32) / 255,
            np.float32([-3.0, -1e-9, 1.0000001, 7.0]),
            np.random.default_rng(0).uniform(-0.2, 1.2, 3 * 700 - 516).astype(np.float32),
        ]
    ).reshape(1, 3, 20, 35)

    made = to_uint8(torch.from_numpy(values))

    expected = np.rint(np.clip(values, 0, 1) * np.float32(255)).astype(np.uint8)
    assert np.array_equal(made.numpy(), expected.transpose(0, 2, 3, 1))


def test_layout_is_contiguous_channel_last_whatever_the_input_strides() -> None:
    frames = torch.rand(2, 3, 4, 6).to(memory_format=torch.channels_last)

    assert to_uint8(frames).is_contiguous()


def test_bytes_survive_the_round_trip() -> None:
    frames = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(1, 16, 16, 3)

    assert torch.equal(to_uint8(from_uint8(frames)), frames)


@pytest.mark.parametrize(
    "frames",
    [torch.zeros(1, 4, 4, 3), torch.zeros(4, 4, 3).byte(), torch.zeros(1, 4, 4, 4).byte()],
    ids=["float", "three-axes", "four-channels"],
)
def test_other_layouts_are_refused(frames: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="allowed: uint8"):
        from_uint8(frames)

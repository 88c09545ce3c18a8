"""The H3 encoder of first pictures: its file, its rules, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.vae_stream.h3_tiny import randomise, write_folder
from vae_stream.encoder import open_encoder
from vae_stream.h3_encoder import H3Encoder, H3EncoderConfig, Posterior, load_h3_encoder
from vae_stream.pixels import to_imagenet
from vae_stream.tiling import Tiling
from vae_stream.weight_files import WeightFiles

pytestmark = pytest.mark.cpu

CONFIG = H3EncoderConfig(widths=(8, 8, 16, 16, 16, 16), block_count=1, norm_groups=4)
SETTINGS = {"norm_num_groups": 4}


def make(posterior: Posterior = Posterior.SAMPLE) -> H3Encoder:
    encoder = H3Encoder(CONFIG, posterior=posterior, tiling=Tiling(tile_px=64, overlap_px=16))
    randomise(encoder)
    return encoder.eval().requires_grad_(False)


def test_the_released_sizes_have_as_many_parameters_as_released() -> None:
    with torch.device("meta"):
        encoder = H3Encoder(H3EncoderConfig())

    assert sum(each.numel() for each in encoder.encoder.parameters()) == 180_335_536


def test_a_picture_has_the_latent_of_a_clip_that_starts_with_it() -> None:
    encoder = make(Posterior.MODE)
    clip_BCTHW = torch.rand(1, 3, 17, 96, 80)

    latent = encoder.encode_picture(clip_BCTHW[:, :, 0])

    frames = to_imagenet(clip_BCTHW[0].transpose(0, 1)).transpose(0, 1)[None]
    first = encoder.moments(frames)[:, :24, :1]
    assert latent.shape == (1, 24, 1, 6, 5)
    # Another number of frames: the kernel may add in another order.
    expected = (first - encoder.latents_mean) / encoder.latents_std
    torch.testing.assert_close(latent, expected, atol=1e-5, rtol=1e-5)


def test_the_latent_is_one_draw_with_its_own_seed_rounded_as_the_model_knows_it() -> None:
    picture_1CHW = torch.rand(1, 3, 32, 48)
    encoder = make()

    torch.manual_seed(1)
    latent = encoder.encode_picture(picture_1CHW)
    torch.manual_seed(2)
    again = encoder.encode_picture(picture_1CHW)

    assert torch.equal(latent, again)
    unscaled = latent * encoder.latents_std + encoder.latents_mean
    torch.testing.assert_close(unscaled, unscaled.half().float(), atol=1e-5, rtol=1e-5)
    mean, log_variance = encoder.moments(to_imagenet(picture_1CHW).unsqueeze(2)).chunk(2, dim=1)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(42))
    drawn = mean + torch.exp(log_variance / 2) * noise
    torch.testing.assert_close(unscaled, drawn, atol=1e-2, rtol=1e-3)  # fp16


@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_a_folder_of_either_layout_opens(layout: str, tmp_path: Path) -> None:
    tensors = dict(make().state_dict())
    if layout == "diffusers":
        tensors = {diffusers_name(name): tensor for name, tensor in tensors.items()}
    beside = {"decoder.anything": torch.zeros(1), "post_quant_conv.bias": torch.zeros(24)}
    write_folder(tmp_path, tensors | beside, SETTINGS)
    rgb_HWC = torch.randint(0, 256, (48, 32, 3), dtype=torch.uint8)

    latent = open_encoder(tmp_path, device="cpu").encode_image(rgb_HWC)

    expected = make().encode_picture(rgb_HWC.permute(2, 0, 1)[None] / 255)
    assert torch.equal(latent, expected)


def diffusers_name(name: str) -> str:
    if not name.startswith("encoder.down."):
        return name
    _, _, level, kind, *rest = name.split(".")
    start = f"encoder.down_blocks.{level}"
    if kind == "downsample":
        return ".".join([start, "downsamplers.0", *rest])
    return ".".join([start, "resnets", *rest]).replace("nin_shortcut", "conv_shortcut")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("encoder.norm_out.bias", None, r"lacks encoder\.norm_out\.bias"),
        ("encoder.extra", torch.zeros(1), r"has encoder\.extra; not expected"),
        ("encoder.conv_out.bias", torch.zeros(4), r"conv_out\.bias has shape \(4,\); .*\(48,\)"),
        ("encoder.down.3.downsample.conv.weight", None, "expected levels that halve the size"),
    ],
    ids=["missing", "unknown", "shape", "strides"],
)
def test_wrong_tensors_are_named(
    name: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    tensors = dict(make().state_dict())
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    write_folder(tmp_path, tensors, SETTINGS)

    with pytest.raises(ValueError, match=message):
        load_h3_encoder(WeightFiles(tmp_path), device="cpu")


def test_a_damaged_config_and_another_network_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, make().state_dict(), SETTINGS)
    (tmp_path / "config.json").write_text(json.dumps([1]), encoding="utf-8")
    with pytest.raises(ValueError, match="holds list; expected a json object"):
        open_encoder(tmp_path, device="cpu")

    write_folder(tmp_path / "other", {"stem": torch.zeros(1)})
    with pytest.raises(ValueError, match="tensors of no known encoder"):
        open_encoder(tmp_path / "other", device="cpu")

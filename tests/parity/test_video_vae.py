"""The original H3 video autoencoder against the public implementation, on small random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3
from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition
from torch import Tensor

from tests.vae_stream.h3_tiny import randomise
from vae_stream.encoder import open_encoder
from vae_stream.geometry import first_frame
from vae_stream.opening import open_decoder
from vae_stream.pixels import from_imagenet, to_uint8
from vae_stream.tiling import Tiling
from vae_stream.vit import H3_LATENTS_MEAN, H3_LATENTS_STD
from vae_stream.vit_weights import load_vit
from vae_stream.weight_files import WeightFiles
from vae_stream.windowed import WindowedDecoder

pytestmark = pytest.mark.cpu

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def theirs() -> AutoencoderKLMiniMaxH3:
    vae = AutoencoderKLMiniMaxH3(
        block_out_channels=(8, 8, 16, 16, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        latents_mean=H3_LATENTS_MEAN,
        latents_std=H3_LATENTS_STD,
    )
    randomise(vae)
    return vae.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folder(theirs: AutoencoderKLMiniMaxH3, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("vae")
    theirs.save_pretrained(target)
    return target


def decoded_by(theirs: AutoencoderKLMiniMaxH3, latents_BCTHW: Tensor) -> Tensor:
    mean, std = (
        torch.tensor(each).view(1, -1, 1, 1, 1)
        for each in (theirs.config.latents_mean, theirs.config.latents_std)
    )
    frames_BCTHW = theirs.decode(latents_BCTHW * std + mean).sample
    return to_uint8(from_imagenet(frames_BCTHW[0].transpose(0, 1)))


def test_a_window_has_the_same_bits(theirs: AutoencoderKLMiniMaxH3, folder: Path) -> None:
    vit = load_vit(WeightFiles(folder), dtype=torch.float32, device="cpu")
    latents_BCTHW = torch.randn(1, 24, 7, 4, 3)
    unscaled = latents_BCTHW * vit.latents_std + vit.latents_mean

    assert torch.equal(vit(latents_BCTHW), theirs.decoder(theirs.post_quant_conv(unscaled)))


@pytest.mark.parametrize("count", [3, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("tile", [(64, 16), (64, 48), (None, 64)], ids=["16", "48", "untiled"])
def test_pictures_have_the_same_bits(
    theirs: AutoencoderKLMiniMaxH3, folder: Path, tile: tuple[int | None, int], count: int
) -> None:
    latents_BCTHW = torch.randn(1, 24, count, 7, 6)
    tile_px, overlap_px = tile
    theirs.use_tiling = tile_px is not None
    if tile_px is not None:
        theirs.enable_tiling(tile_px, tile_px, overlap_px, overlap_px)
    decoder = WindowedDecoder(
        load_vit(WeightFiles(folder), dtype=torch.float32, device="cpu"),
        height_px=112,
        width_px=96,
        tiling=Tiling(tile_px=tile_px, overlap_px=overlap_px),
    )

    ours = decoder.decode_clip(latents_BCTHW)

    assert ours.shape[0] == first_frame(count)
    assert torch.equal(ours, decoded_by(theirs, latents_BCTHW))


def test_a_folder_of_diffusers_opens_with_the_released_tiles(
    theirs: AutoencoderKLMiniMaxH3, folder: Path
) -> None:
    theirs.enable_tiling(256, 256, 64, 64)
    latents_BCTHW = torch.randn(1, 24, 7, 2, 18)

    decoder = open_decoder(
        folder, device="cpu", dtype=torch.float32, height_px=32, width_px=288, mode="official"
    )
    state = decoder.new_state()
    chunks = [c for n in range(7) for c in decoder.push(state, latents_BCTHW[:, :, n])]
    chunks += decoder.flush(state)

    streamed = torch.cat([chunk.frames_THWC for chunk in chunks])
    assert torch.equal(streamed, decoded_by(theirs, latents_BCTHW))


@pytest.mark.parametrize("width_px", [48, 288], ids=["tile", "tiles"])
def test_a_first_picture_has_the_latent_that_the_model_is_conditioned_on(
    theirs: AutoencoderKLMiniMaxH3, folder: Path, width_px: int
) -> None:
    theirs.enable_tiling(256, 256, 64, 64)
    rgb_HWC = torch.randint(0, 256, (32, width_px, 3), dtype=torch.uint8)

    ours = open_encoder(folder, device="cpu").encode_image(rgb_HWC)

    pixels_BCTHW = rgb_HWC.permute(2, 0, 1)[None, :, None]
    expected = encode_vae_condition(theirs, pixels_BCTHW, IMAGENET_MEAN, IMAGENET_STD)
    assert torch.equal(ours, expected)

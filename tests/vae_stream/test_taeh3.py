"""TAEH3 as decoder and encoder of a service."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tolerances import VAE_STREAMED_ATOL
from tests.vae_stream.h3_tiny import randomise, write_folder
from vae_stream import TinyDecoder, open_decoder
from vae_stream.encoder import open_encoder
from vae_stream.pixels import to_uint8
from vae_stream.taeh3 import MemoryBlock, Taeh3, Taeh3Config, load_taeh3
from vae_stream.weight_files import WeightFiles

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def network() -> Taeh3:
    made = Taeh3(Taeh3Config(decoder_widths=(12, 8, 8, 8), encoder_width=8))
    randomise(made)
    return made.eval().requires_grad_(False)


@pytest.fixture
def folder(network: Taeh3, tmp_path: Path) -> Path:
    return write_folder(tmp_path, network.state_dict())


def parallel(network: Taeh3, latents_TCHW: Tensor) -> Tensor:
    """Raw frames of all latents at once, layer by layer."""
    x = latents_TCHW
    for layer in network.decoder:
        if isinstance(layer, MemoryBlock):
            before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
            x = layer(x, before)
        else:
            x = layer(x)
            if isinstance(x, tuple):
                x = torch.stack(x, dim=1).flatten(0, 1)
    return torch.nn.functional.pixel_shuffle(x, 2)


def test_the_released_sizes_have_as_many_parameters_and_tensors_as_released() -> None:
    with torch.device("meta"):
        network = Taeh3(Taeh3Config())

    assert sum(each.numel() for each in network.decoder.parameters()) == 9_868_236
    assert sum(each.numel() for each in network.encoder.parameters()) == 1_480_728
    assert len(list(network.parameters())) == 128


def test_streamed_pictures_are_those_of_the_parallel_pass_trimmed_at_every_block(
    network: Taeh3,
) -> None:
    decoder = TinyDecoder(network, height_px=32, width_px=48)
    latents_TCHW, state = torch.randn(11, 24, 2, 3), decoder.new_state()

    chunks = [c for n in range(11) for c in decoder.push(state, latents_TCHW[n : n + 1])]

    raw = parallel(network, latents_TCHW)
    shown = torch.cat([raw[4 * n + (0 if n % 5 else 3) : 4 * n + 4] for n in range(11)])
    pictures = torch.cat([chunk.frames_THWC for chunk in chunks])
    apart = (pictures.int() - to_uint8(shown).int()).abs()
    assert [len(chunk.frames_THWC) for chunk in chunks] == [1, 4, 4, 4, 4, 1, 4, 4, 4, 4, 1]
    assert apart.max() <= 1
    assert apart.float().mean() < 255 * VAE_STREAMED_ATOL


def test_a_folder_opens_as_decoder_and_encoder(network: Taeh3, folder: Path) -> None:
    decoder = open_decoder(folder, device="cpu", dtype=torch.float32, height_px=32, width_px=48)
    latent = open_encoder(folder, device="cpu").encode_image(
        torch.randint(0, 256, (32, 48, 3), dtype=torch.uint8)
    )
    ours = TinyDecoder(network, height_px=32, width_px=48)

    made, expected = (
        each.push(each.new_state(), latent[:, :, 0])[0].frames_THWC for each in (decoder, ours)
    )

    assert decoder.name == "TAEH3"
    assert latent.shape == (1, 24, 1, 2, 3)
    assert torch.equal(made, expected)


@torch.no_grad()
def test_each_block_of_frames_is_encoded_alone(network: Taeh3) -> None:
    video_TCHW = torch.rand(34, 3, 32, 32)
    video_TCHW[17:] = video_TCHW[:17]
    state: dict[str, Tensor] = {}
    latents = []
    for n in range(34):
        latent, state = network.encode_frame(video_TCHW[n : n + 1], state, n)
        latents += [latent] if latent is not None else []

    assert len(latents) == 10
    assert all(torch.equal(a, b) for a, b in zip(latents[:5], latents[5:], strict=True))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("decoder.9.conv.0.bias", None, r"lacks decoder\.9\.conv\.0\.bias"),
        ("decoder.13.conv.weight", (12, 8, 1, 1), r"13\.conv\.weight has shape \(12, 8, 1, 1\)"),
        ("decoder.22.weight", (48, 8, 3, 3), "makes 48 channels; expected 12"),
        ("decoder.30.weight", (1,), r"has decoder\.30\.weight; not expected"),
    ],
    ids=["missing", "shape", "patch", "unknown"],
)
def test_weights_of_another_network_are_refused(
    network: Taeh3, tmp_path: Path, name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    tensors = dict(network.state_dict())
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(shape)
    write_folder(tmp_path, tensors)

    with pytest.raises(ValueError, match=message):
        load_taeh3(WeightFiles(tmp_path), dtype=torch.float32)

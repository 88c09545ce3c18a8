"""The original H3 autoencoder and TAEH3 against golden data of the public code.

WORLDSTREAM_GOLDEN_VAE names the folder of the complete set; without it the part in tests/data
serves: TAEH3 at small width with every fifth pixel, and the encoder with one picture. `_sK` in a
tensor's name says that it has every K-th pixel. What needs more is manual:

    WORLDSTREAM_GOLDEN_VAE=FOLDER python -m pytest -m "cpu or manual" tests/vae_stream
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.tiny import DATA
from tests.tolerances import VAE_GOLDEN_ATOL
from vae_stream.geometry import BLOCK_LATENTS, TRIM_FRAMES
from vae_stream.h3_encoder import Posterior, load_h3_encoder
from vae_stream.pixels import to_imagenet
from vae_stream.taeh3 import Taeh3, Taeh3Config
from vae_stream.tiling import Tiling
from vae_stream.vit import Vit
from vae_stream.vit_weights import load_vit
from vae_stream.weight_files import WeightFiles
from vae_stream.windowed import WindowedDecoder

FOLDER = Path(os.environ.get("WORLDSTREAM_GOLDEN_VAE", DATA))
WINDOWED = "h3_windowed_1"
TILED = "h3_windowed_1_default_tiles_and_encoder"
SMALL_TILES = Tiling(tile_px=64, overlap_px=16)
UNTILED = Tiling(tile_px=None)
TAEH3_SETS = [
    name for name in ("small", "full") if (FOLDER / f"golden_taeh3_1_{name}.safetensors").exists()
]


@cache
def golden(name: str) -> dict[str, Tensor]:
    path = FOLDER / f"golden_{name}.safetensors"
    return load_file(path) if path.exists() else {}


def config(name: str) -> dict[str, object]:
    with safe_open(FOLDER / f"golden_{name}.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["config"])


def near(ours: Tensor, name: str, tensors: dict[str, Tensor]) -> None:
    stride = re.search(r"_s(\d+)$", name)
    step = int(stride[1]) if stride else 1
    torch.testing.assert_close(
        ours[..., ::step, ::step], tensors[name], atol=VAE_GOLDEN_ATOL, rtol=0, msg=name
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> WeightFiles:
    """Golden weights of the original autoencoder as a folder of a release."""
    folder = tmp_path_factory.mktemp("golden")
    tensors = golden(f"{WINDOWED}_weights")
    save_file(
        {name.removeprefix("weights."): tensor for name, tensor in tensors.items()},
        folder / "weights.safetensors",
    )
    settings = json.dumps(config(f"{WINDOWED}_weights"))
    (folder / "config.json").write_text(settings, encoding="utf-8")
    return WeightFiles(folder)


@pytest.mark.cpu
@pytest.mark.parametrize("tiles", ["tiled", "untiled"])
def test_the_encoder_makes_the_moments_of_picture_and_clip(
    weights: WeightFiles, tiles: str
) -> None:
    tensors = golden(TILED)
    frames_TCHW = tensors["in.video_u8"].transpose(0, 1).float() / 255
    tiling = SMALL_TILES if tiles == "tiled" else UNTILED
    encoder = load_h3_encoder(weights, device="cpu", tiling=tiling)
    clip_BCTHW = to_imagenet(frames_TCHW).transpose(0, 1)[None]

    near(encoder.moments(clip_BCTHW[:, :, :1])[0], f"fp32.enc_image_moments_{tiles}", tensors)

    if clip_BCTHW.shape[2] > 1:  # two clips of 17, the second filled up with its last frame
        missing = clip_BCTHW[:, :, -1:].expand(-1, -1, -clip_BCTHW.shape[2] % 17, -1, -1)
        clips = torch.cat([clip_BCTHW, missing], dim=2).split(17, dim=2)
        moments = torch.cat([encoder.moments(clip) for clip in clips], dim=2)[0, :, :-TRIM_FRAMES]
        near(moments, f"fp32.enc_video_moments_{tiles}", tensors)


@pytest.mark.cpu
def test_a_picture_becomes_the_normalised_mode(weights: WeightFiles) -> None:
    tensors = golden(TILED)
    encoder = load_h3_encoder(weights, device="cpu", tiling=SMALL_TILES, posterior=Posterior.MODE)

    latent_BCTHW = encoder.encode_picture(tensors["in.video_u8"][None, :, 0].float() / 255)

    near(latent_BCTHW[0], "fp32.enc_image_norm_mode_tiled", tensors)


def vit_of(weights: WeightFiles) -> Vit:
    return load_vit(weights, dtype=torch.float32, device="cpu")


NEEDS_DECODER = pytest.mark.skipif(
    "in.z" not in golden(WINDOWED), reason="only the complete set has the decoder"
)


def decode(vit: Vit, latents_TCHW: Tensor, tiling: Tiling) -> Tensor:
    """Frames [3, F, H, W] before they become pictures."""
    latents_BCTHW = latents_TCHW.transpose(0, 1)[None]
    height, width = latents_BCTHW.shape[3:]
    decoder = WindowedDecoder(vit, height_px=16 * height, width_px=16 * width, tiling=tiling)
    return decoder.clip_frames(latents_BCTHW)[0]


@pytest.mark.manual
@NEEDS_DECODER
def test_the_windowed_decoder_makes_the_frames(weights: WeightFiles) -> None:
    vit, tensors = vit_of(weights), golden(WINDOWED)
    z_TCHW = tensors["in.z"]

    near(decode(vit, z_TCHW, SMALL_TILES), "fp32.tiled", tensors)
    near(decode(vit, z_TCHW, UNTILED), "fp32.untiled_s5", tensors)
    tile_BCTHW = z_TCHW[:7, :, :4, :4].transpose(0, 1)[None]
    near(vit(tile_BCTHW)[0], "fp32.window0_tile0_raw_s3", tensors)
    lengths = [name for name in tensors if name.startswith("fp32.len")]
    assert len(lengths) == 9
    for name in lengths:
        count = int(re.findall(r"len(\d+)", name)[0])
        near(decode(vit, torch.cat([z_TCHW, z_TCHW])[:count], SMALL_TILES), name, tensors)


@pytest.mark.manual
@NEEDS_DECODER
def test_the_released_tiles_make_the_frames(weights: WeightFiles) -> None:
    vit, tensors = vit_of(weights), golden(TILED)

    frames = decode(vit, tensors["in.z"], Tiling())

    near(frames, "fp32.tiled_s5", tensors)
    near(frames.mean(dim=(2, 3)), "fp32.tiled_frame_mean", tensors)
    near(decode(vit, tensors["in.z"], UNTILED), "fp32.untiled_s5", tensors)


@pytest.fixture(scope="module", params=TAEH3_SETS)
def taeh3(request: pytest.FixtureRequest) -> tuple[Taeh3, dict[str, Tensor]]:
    name = f"taeh3_1_{request.param}"
    tensors, sizes = golden(name), config(name)
    network = Taeh3(
        Taeh3Config(
            decoder_widths=tuple(sizes["decoder_widths"]),  # type: ignore[arg-type]
            encoder_width=sizes["encoder_width"],  # type: ignore[arg-type]
        )
    )
    for parameter, parameter_name in formula_or_stored(network, tensors):
        check = tensors.get(f"check.{parameter_name}")
        assert check is None or torch.equal(parameter.flatten()[:4], check)
    return network.eval().requires_grad_(False), tensors


def formula_or_stored(
    network: nn.Module, tensors: dict[str, Tensor]
) -> Iterator[tuple[Tensor, str]]:
    for name, parameter in network.named_parameters():
        stored = tensors.get(f"weights.{name}")
        parameter.data.copy_(formula(name, parameter.shape) if stored is None else stored)
        yield parameter.data, name


def formula(name: str, shape: torch.Size) -> Tensor:
    """Weights that need no file: FNV-1a of the name seeds splitmix64."""
    key = 0x811C9DC5
    for byte in name.encode("ascii"):
        key = (key ^ byte) * 0x01000193 % 2**32
    with np.errstate(over="ignore"):
        z = np.arange(shape.numel(), dtype=np.uint64) + np.uint64((key ^ 1) << 32)
        z += np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    uniform = (z >> np.uint64(40)) / 2**23 - 1
    if name.endswith("bias"):
        scale = 0.1
    else:
        gain = {"conv.4.weight": 0.5, "decoder.22.weight": 0.35}
        ends = [value for end, value in gain.items() if name.endswith(end)]
        scale = (ends or [1.25])[0] * (3 / shape[1:].numel()) ** 0.5
    values = torch.from_numpy((scale * uniform).astype(np.float32)).reshape(shape)
    return values + 0.5 if name == "decoder.22.bias" else values


@pytest.mark.cpu
@torch.no_grad()
def test_taeh3_decodes_and_remembers(taeh3: tuple[Taeh3, dict[str, Tensor]]) -> None:
    network, tensors = taeh3
    z_TCHW = tensors["in.z"]
    memories = network.empty_memories(*z_TCHW.shape[2:])
    raws = []
    for n in range(z_TCHW.shape[0]):
        last, same = network.step(z_TCHW[n : n + 1], memories, last_frame_only=True)
        raw, memories = network.step(z_TCHW[n : n + 1], memories, last_frame_only=False)
        raws.append(raw)
        near(last, "last", {"last": raw[-1:]})
        assert all(torch.equal(same[name], memories[name]) for name in memories)
        for name in tensors:
            if name.startswith(f"fp32.dec_state.after{n}."):
                place = int(name.rpartition("block")[2])
                near(memories[f"memory_{place:02}"][0], name, tensors)

    if "fp32.raw" in tensors:
        near(torch.cat(raws), "fp32.raw", tensors)
    shown = [raw[0 if n % BLOCK_LATENTS else TRIM_FRAMES :] for n, raw in enumerate(raws)]
    assert [len(raw) for raw in shown] == tensors["fp32.frames_per_latent"].tolist()
    frames = next(name for name in tensors if name.startswith("fp32.frames") and "per" not in name)
    near(torch.cat(shown).clamp(0, 1), frames, tensors)


@pytest.mark.cpu
@torch.no_grad()
def test_taeh3_encodes_frame_by_frame(taeh3: tuple[Taeh3, dict[str, Tensor]]) -> None:
    network, tensors = taeh3
    video_TCHW = tensors["in.video_u8"].float() / 255
    state: dict[str, Tensor] = {}
    latents, emitted = [], []
    for frame in range(video_TCHW.shape[0]):
        latent, state = network.encode_frame(video_TCHW[frame : frame + 1], state, frame)
        if latent is not None:
            latents.append(latent)
            emitted.append(frame)
        for name in tensors:
            if name.startswith(f"fp32.enc_state.after{frame}."):
                place = int(name.rpartition("block")[2])
                near(state[f"memory_{place:02}"][0], name, tensors)

    assert emitted[:10] == tensors["fp32.enc_emit_frame"].tolist()
    near(torch.cat(latents)[:10], "fp32.enc34", tensors)
    if "fp32.enc39" in tensors:
        near(torch.cat(latents), "fp32.enc39", tensors)
    near(network.encode_picture(video_TCHW[:1])[:, :, 0], "fp32.enc_image", tensors)

"""Latents of silence: computed once by the public class, kept, refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.folder import save_model
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import CheckpointError, UnsupportedError
from engine.silence import TENSOR, silence_latents
from engine.text import WordEncoder
from engine.types import Action
from tests.tiny import random_anchor, tiny_config, unpacked_model

if TYPE_CHECKING:
    from diffusers import AutoencoderKLMiniMaxH3Audio

pytestmark = pytest.mark.cpu

CONFIG = tiny_config()
SHAPE = (2, CONFIG.audio_in_channels, CONFIG.audio_latent_count)
STATISTICS = {
    "latents_mean": [0.25] * CONFIG.audio_in_channels,
    "latents_std": [2.0] * CONFIG.audio_in_channels,
}


@pytest.fixture(scope="module")
def theirs() -> AutoencoderKLMiniMaxH3Audio:
    from diffusers import AutoencoderKLMiniMaxH3Audio

    torch.manual_seed(3)
    return AutoencoderKLMiniMaxH3Audio(
        encoder_dim=2,
        encoder_rates=(2, 4),
        latent_dim=4 * CONFIG.audio_in_channels,
        latent_channels=CONFIG.audio_in_channels,
        num_attention_heads=4,
        decoder_dim=8,
        decoder_rates=(4, 2),
        decoder_kernel_sizes=(8, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1,),),
        **STATISTICS,
    ).eval()


@pytest.fixture
def folder(theirs: AutoencoderKLMiniMaxH3Audio, tmp_path: Path) -> Path:
    theirs.save_pretrained(tmp_path / "audio_vae")
    return tmp_path / "audio_vae"


@torch.no_grad()
def test_silence_is_the_normalised_mean_of_a_zero_waveform(
    theirs: AutoencoderKLMiniMaxH3Audio, folder: Path, tmp_path: Path
) -> None:
    silence_GCT = silence_latents(folder, CONFIG, kept_in=tmp_path / "kept")

    wave = torch.zeros(2, 1, 8 * CONFIG.audio_latent_count)
    expected = (theirs.encode(wave).latent_dist.mode() - 0.25) / 2.0
    assert silence_GCT.shape == SHAPE
    assert torch.equal(silence_GCT, expected.to(torch.bfloat16))


def test_it_is_computed_once_and_serves_without_the_public_class(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_in = tmp_path / "kept"
    first = silence_latents(folder, CONFIG, kept_in=kept_in)
    [file] = kept_in.iterdir()  # and no half file beside it
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)

    assert torch.equal(silence_latents(folder, CONFIG, kept_in=kept_in), first)
    assert torch.equal(silence_latents(file, CONFIG, kept_in=tmp_path / "other"), first)
    with pytest.raises(UnsupportedError, match="needs diffusers"):
        silence_latents(folder, CONFIG, kept_in=tmp_path / "other")


def test_interrupted_keeping_leaves_no_half_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(tensors: dict[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.silence.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        silence_latents(folder, CONFIG, kept_in=tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def test_it_serves_where_nothing_can_be_kept(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first = silence_latents(folder, CONFIG, kept_in=tmp_path / "file" / "kept")
    assert torch.equal(silence_latents(folder, CONFIG, kept_in=tmp_path / "kept"), first)


def test_an_engine_begins_its_worlds_with_the_silence_of_its_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loading.CACHE_FOLDER", tmp_path / "cache")
    words, weights = WordEncoder.of(CONFIG), tmp_path / "model"
    save_model(weights, unpacked_model(CONFIG), CONFIG, text_encoder=words)

    plain, sounding = (
        Engine.from_pretrained(
            weights, EngineConfig(device="cpu", dtype="float32", audio_vae=audio_vae)
        )
        for audio_vae in (None, str(folder))
    )

    anchor = random_anchor(CONFIG)
    latents = [
        each.step(each.new_rollout("a", anchor_BCTHW=anchor), Action.still()).latents_BCTHW
        for each in (plain, sounding)
    ]
    assert plain.model_hash != sounding.model_hash
    assert not torch.equal(*latents)


def test_other_weights_have_another_file(folder: Path, tmp_path: Path) -> None:
    kept_in = tmp_path / "kept"
    first = silence_latents(folder, CONFIG, kept_in=kept_in)
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["mean_proj.bias"] = tensors["mean_proj.bias"] + 1
    save_file(tensors, file)

    assert not torch.equal(silence_latents(folder, CONFIG, kept_in=kept_in), first)
    assert len(list(kept_in.iterdir())) == 2


def test_what_is_missing_or_of_another_model_is_named(folder: Path, tmp_path: Path) -> None:
    kept_in = tmp_path / "kept"
    with pytest.raises(CheckpointError, match="nowhere is not there"):
        silence_latents(tmp_path / "nowhere", CONFIG, kept_in=kept_in)

    file = tmp_path / "silence.safetensors"
    save_file({TENSOR: torch.zeros(2, 32, 5).bfloat16()}, file)
    with pytest.raises(
        CheckpointError, match=r"silence_GCT: expected BF16 .*got BF16 \[2, 32, 5\]"
    ):
        silence_latents(file, CONFIG, kept_in=kept_in)

    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changed = settings | {"latents_std": [1.0]}
    (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(CheckpointError, match="latents_std: expected 32 numbers"):
        silence_latents(folder, CONFIG, kept_in=kept_in)

    changed = settings | {"encoder_dim": 4}
    (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"no H3 audio autoencoder: .*size mismatch"):
        silence_latents(folder, CONFIG, kept_in=kept_in)

    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        silence_latents(folder, CONFIG, kept_in=kept_in)
    assert not kept_in.exists()

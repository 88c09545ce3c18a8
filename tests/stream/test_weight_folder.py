"""Folders of weights: which network lies where, told by names of tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.config import preset
from engine.errors import CheckpointError
from stream.weight_folder import Role, look_through

pytestmark = pytest.mark.cpu

NAMES = {
    Role.TRANSFORMER: ("blocks.0.adaln_proj.linear.weight", "blocks.0.attn.qkv_proj.weight"),
    Role.ADAPTER: ("base_model.model.transformer_blocks.0.attn.to_q.lora_A.weight",),
    Role.PROMPT_ENCODER: ("model.language_model.layers.0.self_attn.q_proj.weight",),
    Role.AUDIO_CODEC: ("decoder.conv_pre.weight_g",),
    Role.DECODER: ("x_embedder.weight", "blocks.0.attn.to_qkv.weight"),
    Role.PICTURE_ENCODER: ("encoder.conv_in.weight", "quant_conv.weight"),
}


def _write(file: Path, *names: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(1) for name in names}, file)
    return file


def test_each_network_is_known_by_its_tensors(tmp_path: Path) -> None:
    for index, names in enumerate(NAMES.values()):
        _write(tmp_path / f"folder{index}" / "a.safetensors", *names)
    found = look_through(tmp_path)
    for index, role in enumerate(NAMES):
        assert found.places[role] == (tmp_path / f"folder{index}",)


def test_the_weights_that_ship_are_looked_through_alike() -> None:
    weights = preset("mini").weights
    found = look_through(weights)
    assert found.need(Role.TRANSFORMER) == weights
    assert found.decoder(None) == found.picture_encoder() == weights / "vae"


def test_silence_that_was_kept_stands_for_the_audio_codec(tmp_path: Path) -> None:
    _write(tmp_path / "sound" / "a.safetensors", "silence_GCT")
    assert look_through(tmp_path).need(Role.AUDIO_CODEC) == tmp_path / "sound"


def test_shards_without_a_mark_belong_to_their_folder(tmp_path: Path) -> None:
    _write(tmp_path / "dit" / "1.safetensors", *NAMES[Role.TRANSFORMER])
    _write(tmp_path / "dit" / "2.safetensors", "blocks.7.norm1.weight")
    found = look_through(tmp_path)
    assert found.need(Role.TRANSFORMER) == tmp_path / "dit"
    assert not found.unknown


def test_an_index_tells_what_shards_belong_to(tmp_path: Path) -> None:
    """Encoder and decoder in two shards are one codec; a shard with the marks may be missing."""
    tensors = {"a": NAMES[Role.PICTURE_ENCODER], "b": NAMES[Role.DECODER]}
    for name, inside in tensors.items():
        _write(tmp_path / "vae" / f"{name}.safetensors", *inside)
    _write(tmp_path / "text" / "2.safetensors", "model.language_model.layers.7.mlp.up_proj.weight")
    weight_map = {
        each: f"{name}.safetensors" for name, inside in tensors.items() for each in inside
    }
    (tmp_path / "vae" / "x.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    (tmp_path / "text" / "x.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(NAMES[Role.PROMPT_ENCODER], "1.safetensors")})
    )
    found = look_through(tmp_path)
    assert found.places[Role.DECODER] == found.places[Role.PICTURE_ENCODER] == (tmp_path / "vae",)
    assert found.places[Role.PROMPT_ENCODER] == (tmp_path / "text",)
    assert not found.unknown


def test_single_files_side_by_side_are_told_apart(tmp_path: Path) -> None:
    transformer = _write(tmp_path / "dit.safetensors", *NAMES[Role.TRANSFORMER])
    decoder = _write(tmp_path / "vit.safetensors", *NAMES[Role.DECODER])
    other = _write(tmp_path / "other.safetensors", "something")
    found = look_through(tmp_path)
    assert found.need(Role.TRANSFORMER) == transformer
    assert found.decoder(None) == decoder
    assert found.unknown == (other,)


def test_two_that_would_serve_alike_are_both_named(tmp_path: Path) -> None:
    for name in ("transformer", "transformer_ref"):
        _write(tmp_path / name / "a.safetensors", *NAMES[Role.TRANSFORMER])
    found = look_through(tmp_path)
    with pytest.raises(CheckpointError, match=r"transformer, transformer_ref; expected one"):
        found.need(Role.TRANSFORMER)


def test_the_causal_decoder_is_wanted_before_the_windowed_one(tmp_path: Path) -> None:
    windowed = ("decoder.x_embedder.weight", "decoder.transformer_blocks.0.norm1.weight")
    _write(tmp_path / "a" / "vae.safetensors", *windowed)
    _write(tmp_path / "b" / "causal.safetensors", *NAMES[Role.DECODER])
    found = look_through(tmp_path)
    assert found.decoder(None) == tmp_path / "b"
    assert found.decoder("official") == tmp_path / "a"
    with pytest.raises(CheckpointError, match=r"mode: 'fast'; no decoder in .* has it; known: "):
        found.decoder("fast")


def test_the_h3_encoder_is_wanted_before_a_tiny_one(tmp_path: Path) -> None:
    tiny = _write(
        tmp_path / "a" / "taeh3.safetensors", "decoder.22.weight", "decoder.3.conv.0.weight"
    )
    assert look_through(tmp_path).picture_encoder() == tiny.parent
    _write(tmp_path / "b" / "vae.safetensors", *NAMES[Role.PICTURE_ENCODER])
    assert look_through(tmp_path).picture_encoder() == tmp_path / "b"


def test_what_is_missing_is_named_with_what_is_there(tmp_path: Path) -> None:
    _write(tmp_path / "decoder" / "a.safetensors", *NAMES[Role.DECODER])
    with pytest.raises(CheckpointError, match="has no transformer; found: decoder"):
        look_through(tmp_path).need(Role.TRANSFORMER)


class _Code:
    def __reduce__(self):
        return print, ("code ran",)


def test_averages_of_a_training_run_are_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factors = {name: torch.zeros(2, 2) for name in NAMES[Role.ADAPTER]}
    for folder in ("averages", "other", "beside"):
        (tmp_path / folder).mkdir()
    torch.save({"shadow": factors, "step": 7}, tmp_path / "averages" / "ema.pt")
    torch.save(factors, tmp_path / "averages" / "adapter.pt")
    torch.save({"shadow": {"a": _Code()}}, tmp_path / "other" / "ema.pt")
    assert look_through(tmp_path).need(Role.ADAPTER) == tmp_path / "averages"
    assert look_through(tmp_path).pickles == (tmp_path / "other" / "ema.pt",)

    _write(tmp_path / "beside" / "a.safetensors", *NAMES[Role.ADAPTER])
    torch.save(factors, tmp_path / "beside" / "ema.pt")
    found = look_through(tmp_path)
    assert found.places[Role.ADAPTER] == (tmp_path / "averages", tmp_path / "beside")
    assert tmp_path / "beside" / "ema.pt" in found.pickles
    assert capsys.readouterr().out == ""


def test_pickles_are_named_where_something_is_missing(tmp_path: Path) -> None:
    _write(tmp_path / "vit" / "a.safetensors", *NAMES[Role.DECODER])
    for number in range(5):
        (tmp_path / f"dit-{number}.bin").write_bytes(b"\x80")
    with pytest.raises(
        CheckpointError,
        match=r"no transformer; found: decoder, and 5 pickles \(dit-0\.bin, dit-1\.bin, "
        r"dit-2\.bin\); expected safetensors",
    ):
        look_through(tmp_path).need(Role.TRANSFORMER)


def test_a_release_is_found_as_it_was_fetched(tmp_path: Path) -> None:
    folder = tmp_path / "FL2VA"
    _write(folder / "transformer" / "a.safetensors", *NAMES[Role.TRANSFORMER])
    _write(folder / "video_vae" / "source" / "a.safetensors", *NAMES[Role.PICTURE_ENCODER])
    found = look_through(tmp_path)
    assert found.need(Role.TRANSFORMER) == folder / "transformer"
    assert found.picture_encoder() == folder / "video_vae" / "source"


def test_folders_far_below_are_left_alone(tmp_path: Path) -> None:
    _write(tmp_path / "a" / "b" / "c" / "d" / "a.safetensors", *NAMES[Role.TRANSFORMER])
    assert not look_through(tmp_path).places[Role.TRANSFORMER]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        look_through(tmp_path)


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none is no folder"):
        look_through(tmp_path / "none")

"""Weights on disk: round trips, hashes, int8 rows, and every way a file can be wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.folder import (
    quantize_rows,
    read_config,
    sampled_hash,
    save_model,
    verify_manifest,
    write_manifest,
)
from engine.checkpoint.reading import load_model
from engine.checkpoint.source import open_source
from engine.errors import CheckpointError
from engine.model.dit import FP32_MODULES
from engine.text import WordEncoder
from tests.tiny import tiny_config, tiny_model
from tests.tolerances import INT8_ROWS_SQNR_DB

pytestmark = pytest.mark.cpu

CONFIG = tiny_config()
CPU = torch.device("cpu")


def _words() -> WordEncoder:
    return WordEncoder.of(CONFIG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of bf16 weights in several shards."""
    model = tiny_model(CONFIG)
    save_model(tmp_path, model, CONFIG, text_encoder=_words(), int8=False, shard_bytes=500_000)
    return tmp_path


def _load(folder: Path, dtype: torch.dtype = torch.float32):
    return load_model(open_source(folder, read_config(folder)), dtype=dtype, device=CPU)


def _edit(folder: Path, edit) -> Path:
    """Change the tensors of the first shard."""
    path = min(folder.glob("*.safetensors"))
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    return path


def test_bf16_round_trip(folder):
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded, saved = _load(folder), tiny_model(CONFIG)
    assert read_config(folder) == CONFIG
    for name, parameter in saved.named_parameters():
        is_island = name.split(".")[0] in FP32_MODULES
        expected = parameter if is_island else parameter.bfloat16().float()
        assert torch.equal(loaded.get_parameter(name), expected), name


def test_dtypes_after_loading(folder):
    for name, parameter in _load(folder, torch.bfloat16).named_parameters():
        is_island = name.split(".")[0] in FP32_MODULES
        assert parameter.dtype == (torch.float32 if is_island else torch.bfloat16), name
        assert not parameter.requires_grad


def test_text_encoder_round_trip(tmp_path):
    words = _words()
    save_model(tmp_path, tiny_model(CONFIG), CONFIG, text_encoder=words, int8=False)
    fresh = _words()
    source = open_source(tmp_path, CONFIG)
    load_model(source, dtype=torch.float32, device=CPU, text_encoder=fresh)
    assert torch.equal(fresh.embedding.weight, words.embedding.weight.bfloat16().float())


def test_int8_rows_keep_the_weights(tmp_path):
    model = tiny_model(CONFIG)
    save_model(tmp_path, model, CONFIG)
    loaded = _load(tmp_path)
    for name, parameter in model.named_parameters():
        error = (loaded.get_parameter(name) - parameter).norm()
        if error > 0:
            sqnr_db = 20 * torch.log10(parameter.norm() / error)
            assert sqnr_db >= INT8_ROWS_SQNR_DB, name


def test_int8_rows_halve_the_shards(tmp_path):
    sizes = []
    for name, int8 in (("a", True), ("b", False)):
        save_model(tmp_path / name, tiny_model(CONFIG), CONFIG, int8=int8)
        sizes.append(sum(p.stat().st_size for p in (tmp_path / name).glob("*.safetensors")))
    assert sizes[0] < 0.6 * sizes[1]


def test_int8_error_is_at_most_half_a_step():
    weight = torch.randn(7, 41)
    weight[3] = 0.0
    rows, scale = quantize_rows(weight)
    assert ((rows * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()


def test_model_hash_follows_the_weights(folder):
    before = verify_manifest(folder)
    assert verify_manifest(folder) == before
    _edit(folder, lambda tensors: tensors[min(tensors)].add_(1.0))
    with pytest.raises(CheckpointError, match="is damaged or changed: expected sha256"):
        verify_manifest(folder)
    assert write_manifest(folder) == verify_manifest(folder) != before


def test_manifest_covers_folders_below(folder):
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text("{}")
    write_manifest(folder)
    (folder / "vae" / "config.json").write_text("{ }")
    with pytest.raises(CheckpointError, match=r"vae/config\.json is damaged"):
        verify_manifest(folder)


def test_a_listed_file_that_is_missing_is_named(folder):
    path = min(folder.glob("*.safetensors"))
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing; the manifest lists it"):
        verify_manifest(folder)


def test_a_broken_manifest_is_refused(folder):
    (folder / "MANIFEST.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a manifest"):
        verify_manifest(folder)


def test_without_a_manifest_samples_are_hashed(folder):
    (folder / "MANIFEST.json").unlink()
    assert verify_manifest(folder) is None
    before = sampled_hash(open_source(folder, CONFIG))
    assert sampled_hash(open_source(folder, CONFIG)) == before
    _edit(folder, lambda tensors: tensors[min(tensors)].add_(1.0))
    assert sampled_hash(open_source(folder, CONFIG)) != before


def test_missing_tensor_is_named(folder):
    taken = []
    _edit(folder, lambda tensors: taken.append(min(tensors)) or tensors.pop(min(tensors)))
    with pytest.raises(CheckpointError, match=f"1 tensors are missing, first {taken[0]}"):
        _load(folder)


def test_unknown_tensor_is_named_with_its_file(folder):
    path = _edit(folder, lambda tensors: tensors.update(stray=torch.zeros(1)))
    with pytest.raises(CheckpointError, match=f"{path.name}: unknown tensor stray; expected"):
        _load(folder)


def test_wrong_shape_names_expected_and_got(folder):
    name = "audio_proj_in.bias"
    _edit(folder, lambda tensors: tensors.update({name: torch.zeros(7)}))
    with pytest.raises(
        CheckpointError, match=rf"{name} has a wrong shape: expected \[96\], got \[7"
    ):
        _load(folder)


def test_int8_without_scale_is_refused(folder):
    name = "context_embedder.weight"
    _edit(folder, lambda tensors: tensors.update({name: torch.zeros(96, 64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=rf"int8 tensor {name} has no {name}\.scale"):
        _load(folder)


@pytest.mark.parametrize("size", [0, 4, 100, 100_000])
def test_truncated_file_is_named(folder, size):
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=f"{path.name} is truncated or not safetensors"):
        _load(folder)


def test_folder_without_shards_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(CONFIG.to_json())
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors files"):
        _load(tmp_path)


def test_missing_and_broken_config_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_config(tmp_path)
    data = json.loads(CONFIG.to_json()) | {"colour": 1}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="unknown key 'colour'"):
        read_config(tmp_path)


def test_weights_of_another_model_are_refused(folder):
    other = dataclasses.replace(CONFIG, num_layers=2)
    with pytest.raises(CheckpointError, match=r"unknown tensor transformer_blocks\.2"):
        open_source(folder, other)

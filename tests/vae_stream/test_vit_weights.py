"""Released layouts of H3 decoders, and files that are wrong."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.vae_stream.h3_tiny import CONFIG, random_vit, tensors_in, write_folder
from vae_stream.vit import Vit, VitConfig
from vae_stream.vit_weights import VitLayout, load_vit
from vae_stream.weight_files import WeightFiles

pytestmark = pytest.mark.cpu


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Vit:
    return load_vit(WeightFiles(folder), dtype=dtype, device="cpu")


@pytest.mark.parametrize("layout", list(VitLayout))
def test_every_layout_gives_the_same_decoder(layout: VitLayout, tmp_path: Path) -> None:
    vit = random_vit()
    write_folder(tmp_path, tensors_in(vit, layout))

    loaded = load(tmp_path)

    assert loaded.config == CONFIG
    for name, tensor in vit.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(loaded.latents_std, vit.latents_std)


def test_shards_are_read_together_with_the_encoder_left_aside(tmp_path: Path) -> None:
    vit = random_vit()
    tensors = tensors_in(vit, VitLayout.DIFFUSERS) | {"encoder.conv_in.bias": torch.zeros(8)}
    names = sorted(tensors)
    weight_map = {}
    for shard in range(2):
        file = f"part-{shard}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[shard::2]}
        save_file(part, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")

    loaded = load(tmp_path)

    assert torch.equal(loaded.blocks[1].ff.w1.weight, vit.blocks[1].ff.w1.weight)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index\.json: names part-1\.safetensors"):
        load(tmp_path)


def test_only_the_products_of_blocks_get_another_dtype(tmp_path: Path) -> None:
    write_folder(tmp_path, tensors_in(random_vit(), VitLayout.ORIGINAL))

    vit = load(tmp_path, torch.bfloat16)

    half = {name for name, each in vit.named_parameters() if each.dtype == torch.bfloat16}
    assert half == {name for name in vit.state_dict() if ".attn." in name or ".ff." in name}


def test_a_config_beside_the_weights_gives_the_statistics(tmp_path: Path) -> None:
    settings = {"latents_mean": [0.5] * 24, "latents_std": [2.0] * 24}
    write_folder(tmp_path, tensors_in(random_vit(), VitLayout.DIFFUSERS), settings)

    assert load(tmp_path).latents_mean.unique().tolist() == [0.5]
    (tmp_path / "config.json").write_text('{"latents_mean": [1.0]}', encoding="utf-8")
    with pytest.raises(ValueError, match="expected 24 of each"):
        load(tmp_path)


def test_weights_may_lie_one_folder_below_the_config(tmp_path: Path) -> None:
    settings = {"latents_mean": [0.5] * 24, "latents_std": [2.0] * 24}
    write_folder(tmp_path / "source", tensors_in(random_vit(), VitLayout.ORIGINAL))
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")

    assert load(tmp_path).latents_std.unique().tolist() == [2.0]
    assert load(tmp_path / "source").latents_std.unique().tolist() == [2.0]


def test_of_a_config_above_only_statistics_count(tmp_path: Path) -> None:
    above = {"latents_mean": [0.5] * 24, "latents_std": [2.0] * 24, "decoder_norm_eps": 0.5}
    own = {"latents_mean": [0.25] * 24}
    write_folder(tmp_path / "vae", tensors_in(random_vit(), VitLayout.ORIGINAL), own)
    (tmp_path / "config.json").write_text(json.dumps(above), encoding="utf-8")

    vit = load(tmp_path / "vae")

    assert vit.config.eps == VitConfig().eps
    assert (vit.latents_mean.unique().item(), vit.latents_std.unique().item()) == (0.25, 2.0)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("decoder.norm_out.weight", None, r"lacks decoder\.norm_out\.weight"),
        ("decoder.extra", torch.zeros(1), r"has decoder\.extra; not expected"),
        ("decoder.proj_out.bias", torch.zeros(9), r"proj_out\.bias has shape \(9,\); .*\(3072,\)"),
        (
            "decoder.proj_out.bias",
            torch.zeros(3072).long(),
            r"proj_out\.bias is I64; expected F32 or BF16 or F16",
        ),
        ("x_embedder.weight", torch.zeros(1), "layouts causal, diffusers in one place"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "mixed"],
)
def test_wrong_tensors_are_named(
    name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    tensors = tensors_in(random_vit(), VitLayout.DIFFUSERS)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    write_folder(tmp_path, tensors)

    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_damaged_file_and_a_pickle_are_told_apart(tmp_path: Path) -> None:
    file = next(write_folder(tmp_path, tensors_in(random_vit(), VitLayout.CAUSAL)).iterdir())
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(ValueError, match="damaged or cut off"):
        load(tmp_path)

    file.write_bytes(pickle.dumps({"x_embedder.weight": 1}))
    with pytest.raises(ValueError, match="a pickle; expected safetensors"):
        load(tmp_path)

    file.rename(tmp_path / "model.pth")
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors; found model\.pth"):
        load(tmp_path)


def test_a_file_cut_off_is_no_pickle_though_its_header_begins_like_one(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}})
    text = header.ljust(0x480).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))

    with pytest.raises(ValueError, match="damaged or cut off"):
        load(tmp_path)


@pytest.mark.parametrize("below", ["", "vae"])
def test_a_missing_shard_is_named_by_the_index(below: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / below, tensors_in(random_vit(), VitLayout.DIFFUSERS))
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    weight_map = {
        "decoder.a": "diffusion_pytorch_model.safetensors", "decoder.b": "b.safetensors",
    }  # fmt: skip
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"index\.json: names b\.safetensors, which the folder"):
        load(tmp_path)

    index.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"index\.json: .*; expected an index of safetensors"):
        load(tmp_path)


def test_tensors_of_another_network_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, {"stem.weight": torch.zeros(1)})

    with pytest.raises(ValueError, match="no H3 decoder"):
        load(tmp_path)

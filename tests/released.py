"""Small checkpoints in the layouts in which the large model is released and re-packed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint.layouts import QkvLayout, to_original
from engine.config import ModelConfig
from engine.kernels.reference import FP8_MAX
from engine.model.dit import FP32_MODULES, MiniMaxH3Transformer

FP8_LAYERS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


def released_state(model: MiniMaxH3Transformer) -> dict[str, Tensor]:
    """Return the tensors in the precision of a release: bf16, islands fp32."""
    return {
        name: tensor.detach() if name.split(".")[0] in FP32_MODULES else tensor.detach().bfloat16()
        for name, tensor in model.state_dict().items()
    }


def original_state(
    model: MiniMaxH3Transformer, config: ModelConfig, qkv: QkvLayout = "interleaved"
) -> dict[str, Tensor]:
    """Return the tensors in the original layout, the derived buffer among them."""
    frequencies = config.rope_theta ** (-torch.arange(config.rope_freq_dim) / config.rope_freq_dim)
    return to_original(released_state(model), config, qkv) | {"rope.inv_freq": frequencies}


def fp8_scaled(original: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors whose block linears are e4m3 with one factor a tensor, and say so."""
    stored: dict[str, Tensor] = {}
    for name, tensor in original.items():
        stem = name.removesuffix(".weight")
        if not name.startswith("blocks.") or not stem.endswith(FP8_LAYERS):
            stored[name] = tensor
            continue
        scale = tensor.float().abs().max() / FP8_MAX
        stored[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        stored[stem + ".weight_scale"] = scale
        text = json.dumps({"format": "float8_e4m3fn"}).encode()
        stored[stem + ".comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    return stored


def pruned(
    model: MiniMaxH3Transformer, original: Mapping[str, Tensor], points: int, rank: int
) -> dict[str, Tensor]:
    """Return tensors whose time embedder is a table of ``points`` times in ``rank`` directions."""
    times = torch.linspace(0.0, 1.0, points)
    temb_GC = model.time_embedding(times).detach()
    basis_CK = torch.linalg.svd(temb_GC, full_matrices=False)[2][:rank].mT
    stored = {name: tensor for name, tensor in original.items() if "time_embedder" not in name}
    for name, tensor in stored.items():
        if name.endswith("adaln_proj.linear.weight"):
            stored[name] = tensor.float() @ basis_CK
    return stored | {"adaln_t_table": temb_GC @ basis_CK}


def write_sharded(folder: Path, tensors: Mapping[str, Tensor], stem: str, count: int) -> Path:
    """Write shards and their index; tensors of a block may lie in two of them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    size = -(-len(names) // count)
    weight_map: dict[str, str] = {}
    for number in range(count):
        file = f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[number * size :][:size]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_single(file: Path, tensors: Mapping[str, Tensor], prefix: str = "") -> Path:
    """Write one file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file

"""Small H3 decoders with random weights that all matter, and files of them in released layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vae_stream.vit import Vit, VitConfig
from vae_stream.vit_weights import VitLayout

CONFIG = VitConfig(layer_count=2, head_count=2, ffn_width=96)


def randomise(network: nn.Module, seed: int = 0) -> None:
    """Fill parameters so that no path is weak: norms and scales near 1, the rest by its width."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            value = 1 + 0.25 * noise
        elif "scale" in name:
            value = 0.6 + 0.1 * noise
        elif parameter.dim() < 2:
            value = 0.25 * noise
        else:
            value = noise * parameter[0].numel() ** -0.5
        parameter.data.copy_(value)


def random_vit(config: VitConfig = CONFIG, seed: int = 0) -> Vit:
    """Return a decoder in fp32."""
    vit = Vit(config)
    randomise(vit, seed)
    return vit.eval().requires_grad_(False)


def tensors_in(vit: Vit, layout: VitLayout) -> dict[str, Tensor]:
    """Return a decoder's tensors as a release stores them, written here by hand."""
    tensors = dict(vit.state_dict())
    if layout == VitLayout.DIFFUSERS:
        return _as_diffusers(tensors, vit.config)
    if layout == VitLayout.CAUSAL:
        return tensors
    stored = {
        ("" if name.startswith("post_quant_conv") else "decoder.")
        + name.replace("blocks.", "transformer_blocks."): tensor
        for name, tensor in tensors.items()
    }
    return stored | {"decoder.mask_token": torch.zeros(1, 1, vit.config.width)}


def _as_diffusers(tensors: Mapping[str, Tensor], config: VitConfig) -> dict[str, Tensor]:
    """Queries, keys and values apart, the value before the gate."""
    stored: dict[str, Tensor] = {}
    for ours, tensor in tensors.items():
        name = ours if ours.startswith("post_quant_conv") else f"decoder.{ours}"
        for old, new in (
            ("decoder.blocks.", "decoder.transformer_blocks."), ("x_embedder.", "proj_in."),
            (".to_out.", ".to_out.0."), (".ff.w1.", ".ff.net.0.proj."), (".ff.w2.", ".ff.net.2."),
        ):  # fmt: skip
            name = name.replace(old, new)
        if ".to_qkv." in name:
            heads = tensor.unflatten(0, (config.head_count, 3, config.head_width))
            for letter, part in zip("qkv", heads.unbind(1), strict=True):
                stored[name.replace("to_qkv", f"to_{letter}")] = part.flatten(0, 1)
        else:
            is_gated = ".ff.net.0." in name
            stored[name] = tensor.roll(config.ffn_width, 0) if is_gated else tensor
    return stored


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, object] | None = None
) -> Path:
    """Write one safetensors file and, with settings, a config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "diffusion_pytorch_model.safetensors",
    )
    if settings is not None:
        (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder

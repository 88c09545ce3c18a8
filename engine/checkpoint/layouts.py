"""Names and orders of the transformer's tensors in the layouts that are around.

Owns the map between the diffusers layout, whose names the model has, and the original one, with its
two orders of queries, keys and values. Invariants: no value changes, no axis is transposed; a
reorder that is missed has the right shapes and ruins the pictures, so nothing here is optional.

| | original shards | re-packed single files | diffusers |
|---|---|---|---|
| queries, keys, values | one tensor, interleaved per head | one tensor, stacked | three |
| feed-forward halves | [gate ; value] | [gate ; value] | [value ; gate] |

Source: the release's index files; diffusers' conversion; ComfyUI's and SGLang's loaders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import CheckpointError

QkvLayout = Literal["interleaved", "stacked"]

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""Before every name in some single files."""
DERIVED = "rope.inv_freq"
"""Stored in the original layout and computed here."""
CURVE_TABLE = "adaln_t_table"
"""Stands for the time embedder in a pruned file."""
QKV = ".attn.qkv_proj."
UP = ".mlp.fc1."

_TO_DIFFUSERS = (
    ("video_patch_proj.", "proj_in."),
    ("audio_patch_proj.", "audio_proj_in."),
    ("condition_proj.", "context_embedder."),
    ("time_embedder.proj_in.", "time_embedder.linear_1."),
    ("time_embedder.proj_out.", "time_embedder.linear_2."),
    (CURVE_TABLE, "time_embedder.table"),
    ("token_refiner.blocks.", "token_refiner.refiner_blocks."),
    ("blocks.", "transformer_blocks."),
    ("final_layer.norm.", "norm_out.norm."),
    ("final_layer.adaln_proj.linear.", "norm_out.linear."),
    ("final_layer.video_out.", "proj_out."),
    ("final_layer.audio_out.", "audio_proj_out."),
)
_INNER_TO_DIFFUSERS = (
    (".attn.q_norm.", ".attn.norm_q."),
    (".attn.k_norm.", ".attn.norm_k."),
    (".attn.out_proj.", ".attn.to_out.0."),
    (UP, ".ff.net.0.proj."),
    (".mlp.fc2.", ".ff.net.2."),
)
_TO_ORIGINAL = tuple((new, old) for old, new in _TO_DIFFUSERS)
_INNER_TO_ORIGINAL = tuple((new, old) for old, new in _INNER_TO_DIFFUSERS)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class NamedTensor:
    """One tensor under its name."""

    name: str
    tensor: Tensor


def bare_name(name: str) -> str:
    """Name without the prefix that some single files put before all of them."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def to_diffusers(
    name: str, tensor: Tensor, config: ModelConfig, qkv: QkvLayout = "interleaved"
) -> list[NamedTensor]:
    """Map one tensor of the original layout; a fused qkv gives three, a derived buffer none.

    Only rows move, so anything with one entry for each output channel is mapped the same way. A
    tensor of the diffusers layout comes back as it is.
    """
    if name == DERIVED:
        return []
    new = diffusers_name(name)
    if QKV in name:
        heads, width = config.num_attention_heads, config.attention_head_dim
        if qkv == "interleaved":
            parts = tensor.unflatten(0, (heads, 3, width)).unbind(1)
            parts = tuple(part.flatten(0, 1) for part in parts)
        else:
            parts = tensor.chunk(3)
        return [
            NamedTensor(name=new.replace("qkv_proj", f"to_{letter}"), tensor=part)
            for letter, part in zip("qkv", parts, strict=True)
        ]
    if UP in name:
        tensor = tensor.roll(tensor.shape[0] // 2, 0)
    return [NamedTensor(name=new, tensor=tensor)]


def to_original(
    tensors: Mapping[str, Tensor], config: ModelConfig, qkv: QkvLayout = "interleaved"
) -> dict[str, Tensor]:
    """Map all tensors of the diffusers layout to the original one; the inverse of `to_diffusers`.

    Raises: CheckpointError when a q has no k or v beside it.
    """
    original: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".attn.to_k." in name or ".attn.to_v." in name:
            continue
        new = _renamed(name, _TO_ORIGINAL, _INNER_TO_ORIGINAL)
        if ".attn.to_q." in name:
            parts = []
            for letter in "qkv":
                part = name.replace("to_q", f"to_{letter}")
                if part not in tensors:
                    raise CheckpointError(f"tensor {part} is missing; expected beside {name}")
                parts.append(tensors[part])
            if qkv == "interleaved":
                heads = config.num_attention_heads
                split = [part.unflatten(0, (heads, -1)) for part in parts]
                fused = torch.stack(split, dim=1).flatten(0, 2)
            else:
                fused = torch.cat(parts)
            original[new.replace("to_q", "qkv_proj")] = fused
        elif ".ff.net.0.proj." in name:
            original[new] = tensor.roll(tensor.shape[0] // 2, 0)
        else:
            original[new] = tensor
    return original


def diffusers_name(name: str) -> str:
    """Name in the diffusers layout; of a fused qkv with `qkv_proj` left in it."""
    return _renamed(name, _TO_DIFFUSERS, _INNER_TO_DIFFUSERS)


def _renamed(
    name: str, outer: tuple[tuple[str, str], ...], inner: tuple[tuple[str, str], ...]
) -> str:
    for old, new in outer:
        if name.startswith(old):
            name = new + name[len(old) :]
            break
    for old, new in inner:
        if old in name:
            return name.replace(old, new)
    return name

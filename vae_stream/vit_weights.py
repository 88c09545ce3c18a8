"""Released weights of H3 decoders, in the layouts they come in.

Owns the layouts, how each is told by its tensor names, and what differs between them. Invariants:
sizes are read from tensor shapes; a config beside the weights adds what shapes cannot tell (head
width, statistics of the latents); every tensor is named, none is left over.

    causal     names of `Vit`, as the distilled causal decoder is released
    original   decoder.transformer_blocks.N.attn.to_qkv ...: same tensors under other names
    diffusers  attn.to_q, to_k, to_v apart; ff.net.0.proj makes [value | gate]

Shape suffixes: D model width, N heads, K head width.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vae_stream.vit import H3_LATENTS_MEAN, Vit, VitConfig
from vae_stream.weight_files import WeightFiles

_HEAD_WIDTH = 64
_EMBEDDERS = {
    "x_embedder.weight": "causal",
    "decoder.x_embedder.weight": "original",
    "decoder.proj_in.weight": "diffusers",
}
_STATISTICS = ("latents_mean", "latents_std")
ENCODER_PARTS = ("encoder.", "quant_conv.")
"""Names beside a decoder begin so."""
_BLOCK = re.compile(r"(?:decoder\.transformer_blocks|blocks)\.(\d+)\.")


class VitLayout(StrEnum):
    """Names and orders that the weights of a decoder are stored in."""

    CAUSAL = "causal"
    ORIGINAL = "original"
    DIFFUSERS = "diffusers"


def vit_layout(names: Iterable[str]) -> VitLayout | None:
    """Return the layout of these tensors, None when they are of no H3 decoder.

    Raises:
        ValueError: names of more than one layout.
    """
    found = sorted({_EMBEDDERS[name] for name in names if name in _EMBEDDERS})
    if len(found) > 1:
        raise ValueError(f"weights: layouts {', '.join(found)} in one place; expected one")
    return VitLayout(found[0]) if found else None


def read_vit_config(files: WeightFiles, layout: VitLayout) -> VitConfig:
    """Return the config of the decoder in `files`.

    Raises:
        ValueError: a tensor that tells a size is missing, or a config does not fit.
    """
    settings = read_settings(files.source)
    shapes = files.shapes
    blocks = {int(found[1]) for name in shapes if (found := _BLOCK.match(name))}
    first = _stored("blocks.0.ff.w2.weight", layout)[0]
    registers = _stored("register_tokens", layout)[0]
    embedder = next(name for name, kind in _EMBEDDERS.items() if kind == layout)
    for name in (first, registers, embedder):
        if name not in shapes:
            raise ValueError(f"{files.source}: lacks {name}")
    width, channels = shapes[embedder]
    head_width = int(settings.get("decoder_attention_head_dim", _HEAD_WIDTH))
    if width % head_width:
        raise ValueError(
            f"{files.file_of(embedder)}: {embedder} has shape {shapes[embedder]}; expected a "
            f"width that heads of {head_width} divide"
        )
    rotary_width = int(head_width * float(settings.get("decoder_rope_dim_ratio", 0.75)))
    return VitConfig(
        latent_channels=channels,
        layer_count=len(blocks),
        head_count=width // head_width,
        head_width=head_width,
        ffn_width=shapes[first][1],
        register_count=shapes[registers][1],
        rotary_width=rotary_width,
        theta=float(settings.get("decoder_rope_theta", 100.0)),
        eps=float(settings.get("decoder_norm_eps", 1e-5)),
        **latent_statistics(files.source, settings, channels),
    )


def empty_vit(files: WeightFiles) -> tuple[Vit, VitLayout]:
    """Return the decoder of `files` without memory, and their layout; heads alone are read.

    Raises:
        ValueError: no known layout, or a tensor is missing, left over, of another shape or dtype.
    """
    layout = vit_layout(files.shapes)
    if layout is None:
        raise ValueError(f"{files.source}: no H3 decoder; expected one of {', '.join(_EMBEDDERS)}")
    with torch.device("meta"):
        vit = Vit(read_vit_config(files, layout))
    expected: dict[str, tuple[int, ...]] = {}
    for name, parameter in vit.named_parameters():
        stored = _stored(name, layout)
        shape = parameter.shape[0] // len(stored), *parameter.shape[1:]
        expected |= dict.fromkeys(stored, shape)
    beside = [name for name in files.shapes if name.startswith(ENCODER_PARTS)]
    files.check(expected, ignored=[*beside, "decoder.mask_token"])
    return vit, layout


@torch.no_grad()
def load_vit(files: WeightFiles, *, dtype: torch.dtype, device: torch.device | str) -> Vit:
    """Read a decoder, one tensor at a time; `dtype` is that of the blocks' products.

    Raises:
        ValueError: as `empty_vit`, before there is memory for any weight; or a file is damaged.
    """
    vit, layout = empty_vit(files)
    vit = vit.cast_blocks(dtype).to_empty(device=device)
    vit.reset_statistics()
    for name, parameter in vit.named_parameters():
        parts = [files.read(each) for each in _stored(name, layout)]
        parameter.copy_(_ours(name, parts, vit.config, layout))
    return vit.eval().requires_grad_(False)


def _stored(name: str, layout: VitLayout) -> tuple[str, ...]:
    """Return the names under which a parameter of `Vit` is stored."""
    if layout == VitLayout.CAUSAL or name.startswith("post_quant_conv."):
        return (name,)
    name = f"decoder.{name}".replace("decoder.blocks.", "decoder.transformer_blocks.")
    if layout == VitLayout.ORIGINAL:
        return (name,)
    if ".attn.to_qkv." in name:
        return tuple(name.replace(".to_qkv.", f".to_{part}.") for part in "qkv")
    for ours, theirs in (
        ("decoder.x_embedder.", "decoder.proj_in."), (".attn.to_out.", ".attn.to_out.0."),
        (".ff.w1.", ".ff.net.0.proj."), (".ff.w2.", ".ff.net.2."),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return (name,)


def _ours(name: str, parts: list[Tensor], config: VitConfig, layout: VitLayout) -> Tensor:
    """Bring what is stored for a parameter into the order of `Vit`."""
    if len(parts) == 3:
        heads = [part.unflatten(0, (config.head_count, config.head_width)) for part in parts]
        return torch.stack(heads, dim=1).flatten(0, 2)
    if layout == VitLayout.DIFFUSERS and ".ff.w1." in name:
        return parts[0].roll(config.ffn_width, 0)  # [value | gate] -> [gate | value]
    return parts[0]


def read_settings(source: Path) -> dict[str, Any]:
    """Return what `config.json` beside the weights says, or one folder below; nothing without one.

    The statistics of latents may stand one folder above, as in the original release, where the
    weights lie in `source` of what wraps them; whatever else stands there is of something else.

    Raises:
        ValueError: it holds no json object.
    """
    folder = source if source.is_dir() else source.parent
    settings: dict[str, Any] = {}
    for file in (folder / "config.json", *sorted(folder.glob("*/config.json"))):
        settings = _read_object(file) | settings
    above = _read_object(folder.parent / "config.json")
    return {name: above[name] for name in _STATISTICS if name in above} | settings


def _read_object(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}; expected json") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: holds {type(found).__name__}; expected a json object")
    return found


def latent_statistics(
    source: Path, settings: dict[str, Any], channels: int
) -> dict[str, tuple[float, ...]]:
    """Return mean and standard deviation of latents: the config's, else the released ones.

    Raises:
        ValueError: another number of them than of channels, or none for another model.
    """
    found = {name: tuple(map(float, settings[name])) for name in _STATISTICS if name in settings}
    if not found and channels == len(H3_LATENTS_MEAN):
        return {}
    counts = {name: len(found.get(name, ())) for name in _STATISTICS}
    wrong = {name: count for name, count in counts.items() if count != channels}
    if wrong:
        raise ValueError(f"{source}: config.json has {wrong} values; expected {channels} of each")
    return found

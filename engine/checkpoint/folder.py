"""A folder of weights: its configuration, its hash, and how we write one.

Owns `config.json`, `MANIFEST.json` (the sha256 of every file), int8 rows and saving. Invariants: a
folder with a manifest is whole or refused; weights from elsewhere are hashed by their headers and
by samples of every tensor, because two models of one kind have the same headers.

A 2-D weight may be stored as I8 `name` with F32 `name.scale`, one per row.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.checkpoint.shards import digest_samples
from engine.checkpoint.source import INT8_SCALE, TEXT_PREFIX, Source
from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.model.dit import FP32_MODULES

CONFIG_NAME = "config.json"
MANIFEST_NAME = "MANIFEST.json"
INT8_LIMIT = 127
_FOREIGN_NAMES = {
    "token_refiner_num_layers": "num_refiner_layers",
    "ffn_hidden_size": "ffn_dim",
    "latents_dim": "in_channels",
    "audio_latents_dim": "audio_in_channels",
    "timestep_input_dim": "freq_dim",
    "time_embed_hidden_size": "time_embed_hidden_dim",
    "rope_inv_freq_len": "rope_freq_dim",
}
"""Keys of the original configuration that have other names here."""
_FOREIGN_KEYS = (
    "num_attention_heads", "attention_head_dim", "hidden_size", "num_layers",
    "num_refiner_layers", "ffn_dim", "in_channels", "audio_in_channels", "patch_size", "text_dim",
    "freq_dim", "time_embed_hidden_dim", "time_embed_dim", "rope_freq_dim", "rope_theta",
    "norm_eps", "qk_norm_eps", "final_norm_eps",
)  # fmt: skip
"""Keys that both know; the rest of a foreign configuration is its own affair."""


def read_config(folder: Path, default: ModelConfig | None = None) -> ModelConfig:
    """Read `config.json` of a folder.

    Args:
        folder: of the weights; a file stands for the folder that it is in.
        default: of the preset, for released weights: they come without a file of ours, and what
            they have instead only has to agree with it.

    Raises: CheckpointError when it is missing without a default, damaged, or of another model.
    """
    if folder.is_file():
        if default is None:
            raise CheckpointError(f"{folder} is a file; expected a folder with {CONFIG_NAME}")
        return default
    path = folder / CONFIG_NAME
    if not path.is_file():
        if default is not None:
            return default
        raise CheckpointError(f"{path} is missing; a folder of weights has one")
    try:
        text = path.read_text()
        data: Any = json.loads(text)
        if default is None or (isinstance(data, dict) and "geometry" in data):
            return ModelConfig.from_json(text, where=str(path))
    except (ConfigError, ValueError) as error:
        raise CheckpointError(f"{path} is not usable: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is {type(data).__name__}; expected an object")
    _check_foreign(path, data, default)
    return default


def _check_foreign(path: Path, data: dict[str, Any], config: ModelConfig) -> None:
    """Refuse a configuration of another tool that contradicts ours."""
    for key, value in data.items():
        name = _FOREIGN_NAMES.get(key, key)
        if name not in _FOREIGN_KEYS:
            continue
        expected = getattr(config, name)
        found = tuple(value) if isinstance(value, list) else value
        if found != expected:
            raise CheckpointError(
                f"{path} is of another model: {key}: expected {expected}, got {found}"
            )


def verify_manifest(folder: Path) -> str | None:
    """Check every file against `MANIFEST.json` and return the model hash, the manifest's sha256.

    None where there is no manifest: see `sampled_hash`.

    Raises: CheckpointError naming the file that is missing or differs.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    text = path.read_bytes()
    try:
        files: dict[str, str] = json.loads(text)["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a manifest: {error!r}") from error
    for name, expected in files.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing; the manifest lists it")
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if found != expected:
            raise CheckpointError(
                f"{folder / name} is damaged or changed: expected sha256 {expected[:16]}..., "
                f"got {found[:16]}..."
            )
    return hashlib.sha256(text).hexdigest()


def sampled_hash(source: Source) -> str:
    """Hash weights from elsewhere: what they are, and eight places of each tensor.

    The picture size is no part of it.
    """
    sizes = [getattr(source.config, key) for key in _FOREIGN_KEYS]
    digest = hashlib.sha256(f"{sizes} {source.layout} {source.qkv}".encode())
    pieces = (*source.pieces, *source.text_pieces)
    digest_samples(digest, (piece.record for piece in pieces))
    digest_samples(digest, (piece.scale for piece in pieces if piece.scale is not None))
    return digest.hexdigest()


def write_manifest(folder: Path) -> str:
    """Write `MANIFEST.json` over all json and safetensors files below a folder; return the hash."""
    files = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".json", ".safetensors") and path.name != MANIFEST_NAME
    }
    text = json.dumps({"version": 1, "files": files}, indent=2) + "\n"
    (folder / MANIFEST_NAME).write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 rows: weight [rows, columns] -> I8 and the fp32 scale of each row."""
    scale = weight.float().abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    scale = scale / INT8_LIMIT
    rounded = (weight.float() / scale[:, None]).round().clamp(-INT8_LIMIT, INT8_LIMIT)
    return rounded.to(torch.int8), scale


def save_model(
    folder: Path,
    model: nn.Module,
    config: ModelConfig,
    *,
    text_encoder: nn.Module | None = None,
    int8: bool = True,
    shard_bytes: int = 16 * 2**20,
) -> str:
    """Write config, shards and manifest; return the model hash.

    Islands stay F32. Of the rest, matrices are stored as int8 rows (BF16 with ``int8=False``) and
    vectors as BF16. Older shards of the folder are removed first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("dit-*.safetensors"):
        old.unlink()
    (folder / CONFIG_NAME).write_text(config.to_json())
    stored: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        stored |= _stored(name, tensor.detach().cpu(), int8=int8)
    if text_encoder is not None:
        for name, tensor in text_encoder.state_dict().items():
            stored |= _stored(TEXT_PREFIX + name, tensor.detach().cpu(), int8=int8)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in stored.items():
        if size + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    for number, shard in enumerate(shards, start=1):
        save_file(shard, folder / f"dit-{number:05d}-of-{len(shards):05d}.safetensors")
    return write_manifest(folder)


def _stored(name: str, tensor: Tensor, *, int8: bool) -> dict[str, Tensor]:
    if name.split(".")[0] in FP32_MODULES:
        return {name: tensor.float().contiguous()}
    if int8 and tensor.ndim == 2:
        rows, scale = quantize_rows(tensor)
        return {name: rows, name + INT8_SCALE: scale}
    return {name: tensor.to(torch.bfloat16).contiguous()}

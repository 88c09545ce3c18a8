"""Weights on disk: safetensors shards, their names, their hashes.

Owns reading (diffusers and original layout), the name map between the two, int8 rows, writing, and
the manifest. Invariants: names inside a model are those of diffusers; no pickle is ever read; a
damaged or foreign file is refused with its name, the tensor, what was expected and what was found.

A folder holds `config.json`, shards `*.safetensors`, and where we wrote it `MANIFEST.json`: the
sha256 of every file. A 2-D weight may be stored as I8 `name` with F32 `name.scale`, one per row.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.model.dit import FP32_MODULES, MiniMaxH3Transformer

CONFIG_NAME = "config.json"
MANIFEST_NAME = "MANIFEST.json"
TEXT_PREFIX = "text_encoder."
SCALE_SUFFIX = ".scale"
INT8_LIMIT = 127
QkvLayout = Literal["interleaved", "stacked"]

_TO_DIFFUSERS = (
    ("video_patch_proj.", "proj_in."),
    ("audio_patch_proj.", "audio_proj_in."),
    ("condition_proj.", "context_embedder."),
    ("time_embedder.proj_in.", "time_embedder.linear_1."),
    ("time_embedder.proj_out.", "time_embedder.linear_2."),
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
    (".mlp.fc1.", ".ff.net.0.proj."),
    (".mlp.fc2.", ".ff.net.2."),
)
_DERIVED = "rope.inv_freq"
_QKV = ".attn.qkv_proj."


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class NamedTensor:
    """One tensor under its name."""

    name: str
    tensor: Tensor


def to_diffusers(
    name: str, tensor: Tensor, config: ModelConfig, qkv: QkvLayout = "interleaved"
) -> list[NamedTensor]:
    """Map one tensor of the original layout; a fused qkv gives three, a derived buffer none.

    Original shards interleave q, k, v per head; re-packed single files stack them. The feed-forward
    halves are [gate ; value] there and [value ; gate] here. Both have equal shapes, so a missed
    reorder would go unnoticed.
    """
    if name == _DERIVED:
        return []
    new = _renamed(name, _TO_DIFFUSERS, _INNER_TO_DIFFUSERS)
    if _QKV in name:
        heads, width = config.num_attention_heads, config.attention_head_dim
        if qkv == "interleaved":
            parts = tensor.unflatten(0, (heads, 3, width)).unbind(1)
            parts = tuple(part.flatten(0, 1).contiguous() for part in parts)
        else:
            parts = tensor.chunk(3)
        return [
            NamedTensor(name=new.replace("qkv_proj", f"to_{letter}"), tensor=part)
            for letter, part in zip("qkv", parts, strict=True)
        ]
    if ".mlp.fc1." in name:
        tensor = tensor.roll(tensor.shape[0] // 2, 0)
    return [NamedTensor(name=new, tensor=tensor)]


def to_original(
    tensors: Mapping[str, Tensor], config: ModelConfig, qkv: QkvLayout = "interleaved"
) -> dict[str, Tensor]:
    """Map all tensors of the diffusers layout to the original one; the inverse of `to_diffusers`.

    Raises: CheckpointError when a q has no k or v beside it.
    """
    outer = tuple((new, old) for old, new in _TO_DIFFUSERS)
    inner = tuple((new, old) for old, new in _INNER_TO_DIFFUSERS)
    original: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".attn.to_k." in name or ".attn.to_v." in name:
            continue
        new = _renamed(name, outer, inner)
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


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 rows: weight [rows, columns] -> I8 and the fp32 scale of each row."""
    scale = weight.float().abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    scale = scale / INT8_LIMIT
    rounded = (weight.float() / scale[:, None]).round().clamp(-INT8_LIMIT, INT8_LIMIT)
    return rounded.to(torch.int8), scale


def dequantize_rows(weight_int8: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quantize_rows`, in fp32."""
    return weight_int8.float() * scale[:, None]


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json` of a folder.

    Raises: CheckpointError when it is missing or damaged.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a folder of weights has one")
    try:
        return ModelConfig.from_json(path.read_text(), where=str(path))
    except (ConfigError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not usable: {error}") from error


def verify_manifest(folder: Path) -> str:
    """Check every file against `MANIFEST.json` and return the model hash.

    The model hash is the sha256 of the manifest. A folder without one (weights from elsewhere) is
    hashed by its config and the headers and sizes of its shards.

    Raises: CheckpointError naming the file that is missing or differs.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        digest = hashlib.sha256((folder / CONFIG_NAME).read_bytes())
        for shard in _shards(folder):
            digest.update(f"{shard.name} {shard.stat().st_size}".encode())
            digest.update(_header_bytes(shard))
        return digest.hexdigest()
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


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    text_encoder: nn.Module | None = None,
) -> MiniMaxH3Transformer:
    """Build the transformer and fill it, one tensor at a time, straight on the device.

    Args:
        folder: shards in diffusers or original layout.
        config: what the shards must fit.
        dtype: of the blocks; the fp32 islands stay fp32.
        device: where the weights go.
        text_encoder: filled in place (fp32) from tensors named `text_encoder.*`.

    Raises: CheckpointError.
    """
    model = empty_model(config, dtype=dtype, device=device)
    targets = dict(model.named_parameters())
    if text_encoder is not None:
        named = text_encoder.named_parameters(prefix=TEXT_PREFIX.rstrip("."))
        targets |= dict(named)
    missing = set(targets)
    for path, item in _read_tensors(folder, config):
        target = targets.get(item.name)
        if target is None:
            if item.name.startswith(TEXT_PREFIX):
                continue
            raise CheckpointError(
                f"{path}: unknown tensor {item.name}; expected names of a transformer with "
                f"{config.num_layers} blocks and {config.num_refiner_layers} refiner blocks"
            )
        if target.shape != item.tensor.shape:
            raise CheckpointError(
                f"{path}: tensor {item.name} has a wrong shape: expected {list(target.shape)}, "
                f"got {list(item.tensor.shape)}"
            )
        with torch.no_grad():
            target.copy_(item.tensor)
        missing.discard(item.name)
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors are missing, first {min(missing)}; expected "
            f"{len(targets)} tensors"
        )
    return model.requires_grad_(False).eval()


def empty_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> MiniMaxH3Transformer:
    """Transformer with unwritten weights, allocated once in its final dtypes."""
    with torch.device("meta"):
        model = MiniMaxH3Transformer(config)
    model.cast_blocks(dtype)
    model.to_empty(device=device)
    return model


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
        return {name: rows, name + SCALE_SUFFIX: scale}
    return {name: tensor.to(torch.bfloat16).contiguous()}


def _shards(folder: Path) -> list[Path]:
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(f"{folder} has no *.safetensors files; expected the model's shards")
    return shards


def _header_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(8)
        if len(length) < 8:
            raise CheckpointError(
                f"{path} is truncated: expected a header, got {len(length)} bytes"
            )
        return file.read(min(struct.unpack("<Q", length)[0], path.stat().st_size))


def _read_tensors(folder: Path, config: ModelConfig) -> Iterator[tuple[Path, NamedTensor]]:
    """Tensors of all shards under diffusers names, int8 rows decoded."""
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as shard:
                names = set(shard.keys())
                for name in sorted(names):
                    base = name.removesuffix(SCALE_SUFFIX)
                    if base != name and base in names:
                        continue
                    tensor = shard.get_tensor(name)
                    if tensor.dtype == torch.int8:
                        if name + SCALE_SUFFIX not in names:
                            raise CheckpointError(
                                f"{path}: int8 tensor {name} has no {name + SCALE_SUFFIX}; "
                                "expected one scale for each row"
                            )
                        tensor = dequantize_rows(tensor, shard.get_tensor(name + SCALE_SUFFIX))
                    for item in to_diffusers(name, tensor, config):
                        yield path, item
        except SafetensorError as error:
            raise CheckpointError(f"{path} is truncated or not safetensors: {error}") from error

"""Latents of silence, which stand where a video with sound would have its sound.

Owns the rule: a zero stereo waveform of the length of the model's audio rows through the released
audio autoencoder, the mean of its posterior, normalised, bfloat16. They are constants of the
weights, so they are computed once and kept in a file of a few kilobytes, which also serves where
the autoencoder is not. Invariant: a kept file is complete or not there.
Shape suffixes: B batch, G audio channels, C channels, T latent frames, S samples.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.shards import find_shards, read_shard
from engine.config import ModelConfig
from engine.errors import CheckpointError, UnsupportedError

_log = logging.getLogger(__name__)

TENSOR = "silence_GCT"
"""Name of the only tensor of a kept file."""


def silence_latents(source: str | Path, config: ModelConfig, *, kept_in: Path) -> Tensor:
    """Return the latents of silence [G, C, T], bfloat16.

    Args:
        source: folder of the audio autoencoder with its `config.json`, or a file kept before.
        config: of the model that they are for.
        kept_in: folder where computed latents are kept.

    Raises:
        CheckpointError: what lies there is damaged, or of another model.
        UnsupportedError: they have to be computed, and diffusers is not installed.
    """
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"audio_vae: {path} is not there; expected a folder or a file")
    files = find_shards(path)
    shards = [read_shard(file) for file in files]
    if len(files) == 1 and TENSOR in shards[0].records:
        return _read(files[0], config)
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    name = f"silence_{digest.hexdigest()[:16]}_{config.audio_latent_count}.safetensors"
    kept = kept_in / name
    if not kept.exists():
        _log.info("silence_encoding source=%s", path)
        silence_GCT = _encode(path, files, config)
        _keep(kept, silence_GCT)
        return silence_GCT
    return _read(kept, config)


def hash_of_latents(silence_GCT: Tensor) -> str:
    """Return what tells one silence from another, beside the hash of the weights."""
    return hashlib.sha256(silence_GCT.view(torch.int16).numpy().tobytes()).hexdigest()


def _keep(path: Path, silence_GCT: Tensor) -> None:
    """Write a file; a folder that takes none is done without, with a warning."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({TENSOR: silence_GCT}, part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        _log.warning("silence_not_kept path=%s: %s", path, error)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _read(path: Path, config: ModelConfig) -> Tensor:
    record = read_shard(path).records.get(TENSOR)
    expected = _shape(config)
    if record is None or record.shape != expected or record.dtype != "BF16":
        found = "lacks it" if record is None else f"{record.dtype} {list(record.shape)}"
        raise CheckpointError(
            f"{path}: tensor {TENSOR}: expected BF16 {list(expected)}, got {found}"
        )
    return load_file(path)[TENSOR]


def _shape(config: ModelConfig) -> tuple[int, int, int]:
    return config.audio_channel_count, config.audio_in_channels, config.audio_latent_count


@torch.no_grad()
def _encode(path: Path, files: list[Path], config: ModelConfig) -> Tensor:
    try:
        from diffusers import AutoencoderKLMiniMaxH3Audio
    except ImportError as error:
        raise UnsupportedError(
            f"audio_vae: silence has to pass {path} once, which needs diffusers 0.42.1 or later: "
            "pip install 'worldstream[h3]'; or give a file of it that another machine kept"
        ) from error
    settings = _settings(path)
    known = set(inspect.signature(AutoencoderKLMiniMaxH3Audio.__init__).parameters) - {"self"}
    with warnings.catch_warnings():
        # The class is built from a form of weight norm that torch calls old.
        warnings.simplefilter("ignore", FutureWarning)
        autoencoder = AutoencoderKLMiniMaxH3Audio(
            **{name: value for name, value in settings.items() if name in known}
        )
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    try:
        autoencoder.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: no H3 audio autoencoder: {_first_lines(error)}") from error
    channels, width, count = _shape(config)
    statistics = [settings.get(name) for name in ("latents_mean", "latents_std")]
    if any(not isinstance(each, list) or len(each) != width for each in statistics):
        raise CheckpointError(
            f"{path}: config.json: latents_mean, latents_std: expected {width} numbers of each"
        )
    mean_C1, std_C1 = (torch.tensor(each, dtype=torch.float32)[:, None] for each in statistics)
    samples_GCS = torch.zeros(channels, 1, count * autoencoder.hop_length)
    latents_GCT = autoencoder.float().eval().encode(samples_GCS).latent_dist.mode()
    if tuple(latents_GCT.shape) != _shape(config):
        raise CheckpointError(
            f"{path}: makes latents {list(latents_GCT.shape)}; expected {list(_shape(config))}"
        )
    return ((latents_GCT - mean_C1) / std_C1).to(torch.bfloat16).contiguous()


def _settings(path: Path) -> dict[str, Any]:
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.exists():
        raise CheckpointError(f"{file} is missing; expected the audio autoencoder's config")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is no json: {error}") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file} holds {type(settings).__name__}; expected a json object")
    return settings


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

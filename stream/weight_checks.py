"""Whether the networks of a folder are whole, by the heads of their files.

Owns which package looks at which network. Invariant: no tensor is read and no device is touched, so
that what is wrong is known before the minutes that reading takes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from engine.checkpoint.folder import read_config, verify_manifest
from engine.checkpoint.source import open_source
from engine.config import EngineConfig, ModelConfig, Qwen3VlTextConfig
from engine.errors import CheckpointError, UnsupportedError
from engine.prompts.files import find_encoder
from stream.weight_folder import Role, WeightFolder
from stream.world_spec import WorldSpec
from vae_stream.encoder import check_encoder
from vae_stream.opening import DecoderKind, check_decoder

_GB = 1e9


def describe_network(role: Role, folder: WeightFolder, spec: WorldSpec, model: ModelConfig) -> str:
    """Check the network of a role and say what it is; nothing of roles whose content is free.

    Args:
        role: what it is good for.
        folder: which has it.
        spec: how it is to be opened.
        model: of the preset.

    Raises: CheckpointError naming file, tensor, expected and got; UnsupportedError.
    """
    if role == Role.TRANSFORMER:
        return _describe_transformer(folder, model, spec.engine)
    if role == Role.DECODER:
        kind = check_codec_decoder(folder, spec.decoder_mode)
        waits = ", which waits for later latents: to play needs --decoder with another mode"
        return f"{kind.network}, {kind.mode}{waits if kind.lookahead_latents else ''}"
    if role == Role.PICTURE_ENCODER:
        return check_picture_encoder(folder)
    if role == Role.PROMPT_ENCODER:
        return describe_prompt_encoder(folder.need(role), read_config(folder.path, model))
    return ""


def _describe_transformer(folder: WeightFolder, model: ModelConfig, config: EngineConfig) -> str:
    place = folder.need(Role.TRANSFORMER)
    model = read_config(place, read_config(folder.path, model))
    verify_manifest(place)
    source = open_source(place, model, qkv=config.qkv_layout)
    # Weights that bring their own words are of this project.
    assumed = "" if source.text_pieces else "; taken for FL2VA: files of Ref2VA look the same"
    return f"{source}{assumed}"


def describe_prompt_encoder(place: Path, model: ModelConfig) -> str:
    """Check a prompt encoder and say what it is.

    Args:
        place: folder of it.
        model: which reads it.

    Raises: CheckpointError.
    """
    text = model.text
    if not isinstance(text, Qwen3VlTextConfig):
        return "not used: this preset reads words of its own"
    files = find_encoder(place, layers=text.layer, text_dim=model.text_dim)
    size = f"Qwen3-VL, {files.size_bytes / _GB:.2f} GB in {text.layer} layers"
    if importlib.util.find_spec("transformers") is None:
        return f"{size}; shapes are not checked without transformers"
    from engine.prompts.qwen3_vl import Qwen3VlEncoder

    # One that reads its weights for each prompt has read none yet.
    Qwen3VlEncoder(
        files, layers=text.layer, caption_rows=text.caption_rows, device=torch.device("cpu"),
        residency="free",
    ).close()  # fmt: skip
    return size


def check_codec(folder: WeightFolder, mode: str | None, *, is_played: bool) -> None:
    """Check what turns latents into pictures, and the first picture into a latent.

    Args:
        folder: which has both, or no decoder.
        mode: of the decoder; None for the best.
        is_played: pictures are needed before the next chunk is steered.

    Raises: CheckpointError; UnsupportedError for a decoder that nobody can play with.
    """
    check_picture_encoder(folder)
    if not is_played and folder.decoder(mode) is None:
        return
    kind = check_codec_decoder(folder, mode)
    if is_played and kind.lookahead_latents:
        raise UnsupportedError(
            f"decoder: {kind.network}, {kind.mode}: pictures wait for {kind.lookahead_latents} "
            "latents of the next chunk, which nobody has steered yet; needed for play: --decoder "
            "with a mode without lookahead"
        )


def check_codec_decoder(folder: WeightFolder, mode: str | None) -> DecoderKind:
    """Check the decoder that would be opened.

    Raises: CheckpointError.
    """
    place = folder.decoder(mode) or folder.need(Role.DECODER)
    try:
        return check_decoder(place, mode)
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def check_picture_encoder(folder: WeightFolder) -> str:
    """Check the picture encoder that would be opened; return its network.

    Raises: CheckpointError.
    """
    place = folder.picture_encoder() or folder.need(Role.PICTURE_ENCODER)
    try:
        return check_encoder(place)
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error

"""Memory plan of a world: the engine, its decoder, the picture encoder, the prompt encoder.

Owns which sizes are asked for where; each package knows its own. Invariant: heads of files are read
and nothing else, so a plan comes before anything is loaded.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import torch

from engine.checkpoint.folder import read_config
from engine.checkpoint.source import find_curve
from engine.config import (
    EngineConfig,
    Geometry,
    ModelConfig,
    PromptOptions,
    Qwen3VlTextConfig,
    preset,
)
from engine.device import likely_dtype, resolve_device, torch_dtype
from engine.errors import CheckpointError
from engine.lora import adapter_of, adapter_parts
from engine.memory import MemoryPart, MemoryPlan, Present, choose_plan
from stream.weight_folder import Role, WeightFolder
from stream.world_spec import WorldSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedWorld:
    """What will be loaded."""

    plan: MemoryPlan
    model: ModelConfig
    """As the folder of weights says, else as the preset does."""
    engine: EngineConfig
    """As asked for, with precision and residency as planned."""


def plan_world(
    spec: WorldSpec, folder: WeightFolder | None, present: Present, *, world_size: int = 1
) -> PlannedWorld:
    """Plan what `worlds.load_models` will load.

    Args:
        spec: the world; of a model.
        folder: what lies in its weights; None for random ones, or ones that are not there yet.
        present: memory that is free.
        world_size: ranks that share a rollout.

    Raises: DeviceError where it does not fit, with what would; CheckpointError for heads of files.
    """
    from engine.prompts.cached import find_files, prompt_parts, residencies

    device = resolve_device(spec.engine.device)
    found = preset(spec.preset, spec.geometry)
    model, config = found.model, spec.engine
    if folder is not None:
        model = read_config(folder.path, model)
        config = _with_silence(_with_encoder(config, folder, model), folder)
        config = _with_adapter(config, folder)
    dtype = likely_dtype(device) if config.dtype == "auto" else config.dtype
    text, files = model.text, None
    if isinstance(text, Qwen3VlTextConfig) and (folder is not None or config.prompts.encoder):
        files = find_files(text, model.text_dim, config.prompts)
    places = residencies(config.prompts, device)

    place = None if folder is None or config.lora is None else folder.find(Role.TRANSFORMER)
    curve = None if place is None else find_curve(place, model)
    adapter = adapter_parts(adapter_of(config, model, curve), config.lora_mode, torch_dtype(dtype))

    def beside(options: PromptOptions, size: Geometry) -> tuple[MemoryPart, ...]:
        rows = dataclasses.replace(model, geometry=size).text_rows
        try:
            codec = _codec_parts(spec, folder, size, torch_dtype(dtype))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"weights: {error}") from error
        return (*codec, *adapter, *prompt_parts(files, options, device, rows=rows))

    plan = choose_plan(
        model,
        dataclasses.replace(config, dtype=dtype),
        present,
        geometries=[each for each in found.geometries if each != spec.geometry],
        world_size=world_size,
        beside=[partial(beside, options) for options in places],
    )
    config = dataclasses.replace(
        config,
        linear=plan.linear,
        free_adaln=plan.free_adaln,
        prompts=places[plan.beside_index],
    )
    return PlannedWorld(plan=plan, model=model, engine=config)


def _with_encoder(config: EngineConfig, folder: WeightFolder, model: ModelConfig) -> EngineConfig:
    """Name the prompt encoder that lies in the folder, where none was named."""
    if config.prompts.encoder is not None or not isinstance(model.text, Qwen3VlTextConfig):
        return config
    place = folder.find(Role.PROMPT_ENCODER)
    if place is None:
        return config
    prompts = dataclasses.replace(config.prompts, encoder=str(place))
    return dataclasses.replace(config, prompts=prompts)


def _with_silence(config: EngineConfig, folder: WeightFolder) -> EngineConfig:
    """Name the audio autoencoder that lies in the folder, where none was named."""
    place = folder.find(Role.AUDIO_CODEC) if config.audio_vae is None else None
    return config if place is None else dataclasses.replace(config, audio_vae=str(place))


def _with_adapter(config: EngineConfig, folder: WeightFolder) -> EngineConfig:
    """Name the adapter that lies in the folder, where none was named."""
    place = folder.find(Role.ADAPTER) if config.lora is None else None
    return config if place is None else dataclasses.replace(config, lora=str(place))


def _codec_parts(
    spec: WorldSpec, folder: WeightFolder | None, size: Geometry, dtype: torch.dtype
) -> tuple[MemoryPart, ...]:
    """Decoder and picture encoder; those that the preset would have at random where none lie."""
    from vae_stream.memory import decoder_memory, encoder_memory
    from vae_stream.random_codec import random_decoder_memory, random_encoder_memory

    px = {"height_px": size.height_px, "width_px": size.width_px}
    kind = preset(spec.preset).codec
    place = None if folder is None else folder.decoder(spec.decoder_mode)
    if place is None:
        decoder = random_decoder_memory(kind, dtype=dtype, **px)
    else:
        decoder = decoder_memory(place, dtype=dtype, mode=spec.decoder_mode, **px)
    place = None if folder is None else folder.picture_encoder()
    encoder = random_encoder_memory(kind, **px) if place is None else encoder_memory(place, **px)
    return (
        MemoryPart.kept("decoder", decoder.weights),
        MemoryPart.played("decoder, state", decoder.state),
        MemoryPart.played("decoder, working memory", decoder.working),
        MemoryPart.kept("picture encoder", encoder.weights, "for the first picture"),
        MemoryPart.played("picture encoder, working memory", encoder.working),
    )

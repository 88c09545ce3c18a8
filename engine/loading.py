"""What an engine is built from: a model from disk or at random, its prompt encoder, its settings.

Owns the order in which a start can fail: files and settings by what is written in them, then the
device and its memory, and only then are weights read. Does not own the speed of the model
(`engine.speed`) or its rollouts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.adapters import Adapter
from engine.checkpoint.folder import read_config, sampled_hash, verify_manifest
from engine.checkpoint.reading import OnLoad, empty_model, load_model
from engine.checkpoint.source import open_source
from engine.config import (
    PRESET_NAMES,
    EngineConfig,
    Geometry,
    ModelConfig,
    PromptOptions,
    TextConfig,
    preset,
)
from engine.device import (
    DtypeChoice,
    choose_dtype,
    present_memory,
    resolve_device,
    smaller_geometries,
    torch_dtype,
    use,
)
from engine.errors import CheckpointError, ConfigError
from engine.linears import QuantCache, check_linears, kept_fp8, prepare_linears
from engine.lora import adapter_of, adapter_parts, resolve_mode
from engine.memory import DtypeName, MemoryPart, MemoryPlan, choose_plan
from engine.model.dit import MiniMaxH3Transformer
from engine.prompts.cached import (
    CachedPrompts,
    find_files,
    open_prompts,
    prompt_parts,
    residencies,
)
from engine.prompts.files import PromptFiles
from engine.silence import hash_of_latents, silence_latents
from engine.speed import CACHE_FOLDER, check_attention, resolve_speed
from engine.text import PromptEncoder, WordEncoder

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ModelParts:
    """A model that no rollout has used yet."""

    model: MiniMaxH3Transformer
    text_encoder: PromptEncoder
    config: EngineConfig
    """With every "auto" resolved."""
    model_hash: str
    dtype_choice: DtypeChoice
    silence_GCT: Tensor | None = None
    """Audio latents of silence; None for the mean of all audio latents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSource:
    """Where an engine comes from; equal for all ranks but for the device in `config`."""

    weights: Path | None
    """None: random."""
    model: ModelConfig
    config: EngineConfig
    geometries: tuple[Geometry, ...] = ()
    """Picture sizes to name when memory does not suffice."""

    def parts(self, *, world_size: int = 1, on_progress: OnLoad | None = None) -> ModelParts:
        """Load. Errors: see `Engine.from_pretrained`."""
        if self.weights is None:
            return random_parts(
                self.model, self.config, geometries=self.geometries, world_size=world_size
            )
        return pretrained_parts(
            self.weights,
            self.config,
            model_config=self.model,
            world_size=world_size,
            on_progress=on_progress,
        )


def pretrained_parts(
    source: str | Path,
    config: EngineConfig,
    *,
    model_config: ModelConfig | None = None,
    world_size: int = 1,
    on_progress: OnLoad | None = None,
) -> ModelParts:
    """Load a preset that ships weights, a folder of weights, or one file of them.

    Arguments and errors: see `Engine.from_pretrained`.
    """
    path = Path(source)
    geometries: tuple[Geometry, ...] = ()
    if str(source) in PRESET_NAMES:
        found = preset(str(source))
        if found.name == "tiny":
            return random_parts(found.model, config, world_size=world_size)
        if found.weights is None:
            raise CheckpointError(
                f"preset {found.name} ships no weights; pass a folder of weights, or build it "
                "with random ones"
            )
        path, geometries = found.weights, found.geometries
    if not path.exists():
        raise CheckpointError(f"{path} is not a folder; expected one with weights")
    root = path if path.is_dir() else path.parent
    model_config = read_config(path, model_config)
    known_hash = verify_manifest(path)
    weights = open_source(path, model_config, qkv=config.qkv_layout)
    has_words = isinstance(model_config.text, TextConfig)
    if has_words and not weights.text_pieces:
        raise CheckpointError(f"{path} has no text encoder; expected tensors text_encoder.*")
    adapter = adapter_of(config, model_config, weights.curve)
    files = _prompt_files(model_config, config, beside=(root, root.parent))
    silence_GCT = _silence(model_config, config)
    device = resolve_device(config.device)
    use(device)
    config, choice = _resolve(
        model_config,
        config,
        device,
        geometries,
        world_size=world_size,
        files=files,
        adapter=adapter,
    )
    config = _with_lora_mode(config, adapter, world_size)
    weights_hash = _adapted_hash(known_hash or sampled_hash(weights), adapter)
    cache = QuantCache(CACHE_FOLDER.expanduser() / "linears", weights_hash, config)
    words = WordEncoder.of(model_config) if has_words else None
    prompts = _prompts(files, model_config, config, device, on_progress)
    model = load_model(
        weights,
        dtype=torch_dtype(choice.dtype),
        device=device,
        text_encoder=words,
        eight_bits=cache.find(),
        fp8_weights=kept_fp8(weights, config, adapter),
        on_progress=on_progress,
    )
    prepare_linears(model, config, adapter=adapter, cache=cache)
    text_encoder: PromptEncoder
    if words is not None:
        text_encoder = words.to(device)
    else:
        assert prompts is not None
        text_encoder = prompts
    return ModelParts(
        model=model,
        text_encoder=text_encoder,
        config=config,
        model_hash=_joint_hash(weights_hash, text_encoder, silence_GCT),
        dtype_choice=choice,
        silence_GCT=silence_GCT,
    )


def _prompt_files(
    model_config: ModelConfig, config: EngineConfig, *, beside: tuple[Path, ...]
) -> PromptFiles | None:
    """Files of the prompt encoder, of which a model with words of its own has none.

    Raises: ConfigError where one is given that is not used, CheckpointError as `find_files`.
    """
    if not isinstance(model_config.text, TextConfig):
        return find_files(model_config.text, model_config.text_dim, config.prompts, beside)
    if config.prompts.encoder is not None:
        raise ConfigError(
            f"prompt_encoder is {config.prompts.encoder!r}; allowed: none, because this model has "
            "words of its own"
        )
    return None


def _prompts(
    files: PromptFiles | None,
    model_config: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    on_progress: OnLoad | None = None,
) -> CachedPrompts | None:
    """Prompt encoder, or None for a model with words of its own."""
    text = model_config.text
    if isinstance(text, TextConfig):
        return None
    return open_prompts(files, text, config.prompts, device=device, on_progress=on_progress)


def _silence(model_config: ModelConfig, config: EngineConfig) -> Tensor | None:
    """Audio latents of silence, where there is an audio autoencoder to tell."""
    if config.audio_vae is None:
        return None
    kept_in = CACHE_FOLDER.expanduser() / "silence"
    return silence_latents(config.audio_vae, model_config, kept_in=kept_in)


def _joint_hash(model_hash: str, text_encoder: PromptEncoder, silence_GCT: Tensor | None) -> str:
    """Hash of transformer, prompt encoder and silence, which make a world together."""
    hashes = [model_hash]
    if isinstance(text_encoder, CachedPrompts):
        hashes.append(text_encoder.model_hash)
    if silence_GCT is not None:
        hashes.append(hash_of_latents(silence_GCT))
    if len(hashes) == 1:
        return model_hash
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def random_parts(
    model_config: ModelConfig,
    config: EngineConfig,
    *,
    seed: int = 0,
    geometries: tuple[Geometry, ...] = (),
    world_size: int = 1,
) -> ModelParts:
    """Build a model with random weights. Arguments and errors: see `Engine.from_random`."""
    adapter = adapter_of(config, model_config)
    device = resolve_device(config.device)
    use(device)
    sizes = (*geometries, *smaller_geometries(model_config.geometry))
    # A prompt encoder is never random: without one, words stand in for it.
    files = None
    if config.prompts.encoder is not None:
        files = _prompt_files(model_config, config, beside=())
    silence_GCT = _silence(model_config, config)
    config, choice = _resolve(
        model_config, config, device, sizes, world_size=world_size, files=files, adapter=adapter
    )
    config = _with_lora_mode(config, adapter, world_size)
    model = empty_model(model_config, dtype=torch_dtype(choice.dtype), device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        _randomize(name, parameter, generator)
    words = WordEncoder.of(model_config).to(device)
    words.embedding.weight.data.normal_(0.0, 0.5, generator=generator)
    prompts = None if files is None else _prompts(files, model_config, config, device)
    text_encoder: PromptEncoder = words if prompts is None else prompts
    prepare_linears(model, config, adapter=adapter)
    label = f"random {seed} {model_config.to_json()}"
    model_hash = "random-" + hashlib.sha256(label.encode()).hexdigest()
    return ModelParts(
        model=model.requires_grad_(False).eval(),
        text_encoder=text_encoder,
        config=config,
        model_hash=_joint_hash(_adapted_hash(model_hash, adapter), text_encoder, silence_GCT),
        dtype_choice=choice,
        silence_GCT=silence_GCT,
    )


def _with_lora_mode(config: EngineConfig, adapter: Adapter | None, world_size: int) -> EngineConfig:
    """Resolve how the adapter is used."""
    if adapter is None:
        return config
    mode = resolve_mode(config, adapter, world_size=world_size)
    return dataclasses.replace(config, lora_mode=mode)


def _adapted_hash(model_hash: str, adapter: Adapter | None) -> str:
    """Hash of weights and of what is added to them."""
    if adapter is None:
        return model_hash
    return hashlib.sha256(f"{model_hash} {adapter.content_hash}".encode()).hexdigest()


def _resolve(
    model_config: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    geometries: tuple[Geometry, ...],
    *,
    world_size: int,
    files: PromptFiles | None,
    adapter: Adapter | None,
) -> tuple[EngineConfig, DtypeChoice]:
    """Choose dtype, precision, residency and speed, and refuse what cannot be had.

    What costs more comes later: measuring a block may already need too much memory, and speed is
    found by trying the compiler.
    """
    present = present_memory(device)
    places = residencies(config.prompts, device)

    def beside(options: PromptOptions, dtype: DtypeName, size: Geometry) -> tuple[MemoryPart, ...]:
        rows = dataclasses.replace(model_config, geometry=size).text_rows
        factors = adapter_parts(adapter, config.lora_mode, torch_dtype(dtype))
        return (*factors, *prompt_parts(files, options, device, rows=rows))

    def plan(dtype: DtypeName) -> MemoryPlan:
        return choose_plan(
            model_config,
            dataclasses.replace(config, dtype=dtype),
            present,
            geometries=geometries,
            world_size=world_size,
            beside=[functools.partial(beside, each, dtype) for each in places],
        )

    if config.dtype != "auto":
        choice = DtypeChoice(dtype=config.dtype)
    else:
        plan("bfloat16")
        choice = choose_dtype(model_config, device)
        _log.info("dtype_chosen dtype=%s device=%s (%s)", choice.dtype, device, choice.reason)
    found = plan(choice.dtype)
    _log.info(
        "memory_planned peak_gib=%.1f playing_gib=%.1f present_gib=%.1f free_adaln=%s linear=%s",
        found.peak_gib, found.playing_gib, present.device_gib, found.free_adaln,
        found.linear_words,
    )  # fmt: skip
    resolved = dataclasses.replace(
        config,
        device=str(device),
        dtype=choice.dtype,
        linear=found.linear,
        free_adaln=found.free_adaln,
        prompts=places[found.beside_index],
    )
    check_linears(resolved.linear, model_config, device, torch_dtype(choice.dtype))
    check_attention(resolved, model_config, device, torch_dtype(choice.dtype))
    return resolve_speed(resolved, device, model_config), choice


def _randomize(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Fill a parameter so that activations keep their size: norms near 1, linears 1/sqrt(width).

    Drawn in fp32 whatever the dtype, so that models of two dtypes differ by rounding alone.
    """
    drawn = torch.zeros(parameter.shape, device=parameter.device)
    if parameter.ndim == 1:
        drawn.normal_(0.0, 0.05, generator=generator)
        if "norm" in name and name.endswith("weight"):
            drawn.add_(1.0)
    else:
        drawn.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    parameter.data.copy_(drawn)

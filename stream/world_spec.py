"""Which world a command or the service opens, resolved from what was asked for.

Owns the checks of preset, picture size, weights and first picture, all before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import (
    PRESET_NAMES,
    SPARSE_STEPS,
    EngineConfig,
    Geometry,
    PromptOptions,
    preset,
)
from engine.errors import ConfigError
from stream.images import SeedImage, load_seed_image


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSpec:
    """Which world, on which device. Worlds of equal specs share their weights."""

    source: str
    """"model" or "renderer"."""
    preset: str
    geometry: Geometry
    weights: str
    """"shipped", "random", or a folder."""
    engine: EngineConfig
    decoder: str = "auto"
    """Mode of the decoder, which also chooses among several; "auto": the best that is there."""
    world_count: int = 1
    """Worlds at a time, each with weights of its own."""
    rank_count: int = 1
    """Processes that share a world; on CUDA each has a GPU of its own."""
    seat: int = 0
    """Which of the worlds this one is."""

    @property
    def decoder_mode(self) -> str | None:
        """The mode, None for the best."""
        return None if self.decoder == "auto" else self.decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """First picture: a file, or a named scene seen from its start."""

    image: SeedImage | None
    image_path: str | None
    scene: str | None


def world_spec(
    preset_name: str,
    *,
    size: str | None,
    weights: str,
    renderer: bool,
    device: str,
    dtype: str,
    prompts: PromptOptions | None = None,
    decoder: str = "auto",
    linear: str = "auto",
    attention: str = "auto",
    sparse_tau: float = 1.0,
    sparse_block: int = 64,
    sparse_steps: int = SPARSE_STEPS,
    kernels: str = "auto",
    compiling: str = "auto",
    is_long_lived: bool = False,
    world_count: int = 1,
    rank_count: int = 1,
    lora: str | None = None,
    lora_mode: str = "auto",
    qkv_layout: str = "auto",
) -> WorldSpec:
    """Resolve a preset at one of its sizes."""
    if preset_name not in PRESET_NAMES:
        raise ConfigError(f"preset: {preset_name!r}; allowed: {', '.join(PRESET_NAMES)}")
    found = preset(preset_name)
    geometry = found.model.geometry
    if size is not None:
        by_name = {f"{each.width_px}x{each.height_px}": each for each in found.geometries}
        if size not in by_name:
            raise ConfigError(f"size: {size!r}; allowed for {preset_name}: {', '.join(by_name)}")
        geometry = by_name[size]
    if renderer and preset_name != "mini":
        raise ConfigError(f"renderer: preset is {preset_name!r}; allowed with it: mini")
    if not renderer and weights == "shipped" and found.weights is None:
        raise ConfigError(
            f"weights: no weights ship with {preset_name}; allowed: random, or a folder"
        )
    if weights not in ("shipped", "random") and not Path(weights).is_dir():
        raise ConfigError(f"weights: {weights!r} is no folder; allowed: shipped, random, a folder")
    if lora is not None and not Path(lora).exists():
        raise ConfigError(f"lora: {lora!r} is not there; allowed: a file, or a folder of training")
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"dtype: {dtype!r}; allowed: auto, float32, bfloat16")
    if rank_count > 1:
        check_ranks(rank_count, found.model.num_attention_heads, renderer=renderer, device=device)
    return WorldSpec(
        source="renderer" if renderer else "model",
        preset=preset_name,
        geometry=geometry,
        weights=weights,
        engine=EngineConfig(
            device=device,
            dtype=dtype,  # type: ignore[arg-type]  # checked above
            prompts=prompts or PromptOptions(),
            linear=linear,
            attention=attention,  # type: ignore[arg-type]  # checked there
            sparse_tau=sparse_tau,
            sparse_block=sparse_block,
            sparse_steps=sparse_steps,
            kernels=kernels,  # type: ignore[arg-type]  # checked there
            compile=compiling,  # type: ignore[arg-type]  # checked there
            is_long_lived=is_long_lived,
            lora=lora,
            lora_mode=lora_mode,  # type: ignore[arg-type]  # checked there
            qkv_layout=qkv_layout,  # type: ignore[arg-type]  # checked there
        ),
        decoder=decoder,
        world_count=world_count,
        rank_count=rank_count,
    )


def check_ranks(ranks: int, heads: int, *, device: str, renderer: bool = False) -> None:
    """Refuse ranks that cannot share a world.

    Raises:
        ConfigError: names the option, its value and what is allowed.
    """
    if renderer:
        raise ConfigError(f"ranks: {ranks} with renderer; allowed: 1, as there is nothing to share")
    if heads % ranks:
        allowed = ", ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
        raise ConfigError(f"ranks: {ranks} for a model of {heads} heads; allowed: {allowed}")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: {device!r} with ranks {ranks}; allowed: auto, cpu, cuda")


def prompt_options(
    *,
    encoder: str | None,
    residency: str = "auto",
    cache: str | None = None,
    cache_mib: int | None = None,
    refinement: bool = False,
) -> PromptOptions:
    """Options of the prompt encoder; what is None stays as it is by default.

    Raises:
        ConfigError: names the option, its value and what is allowed.
    """
    if encoder is not None and not Path(encoder).is_dir():
        raise ConfigError(
            f"prompt_encoder: {encoder!r} is no folder; allowed: one with text_encoder, tokenizer "
            "and processor"
        )
    given = {"cache": cache, "cache_mib": cache_mib}
    return PromptOptions(
        encoder=encoder,
        residency=residency,  # type: ignore[arg-type]  # checked there
        refinement=refinement,
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )


def read_start(world: WorldSpec, *, image: str | None, scene: str | None) -> Start:
    """Read the first picture; exactly one of image and scene is given."""
    if (image is None) == (scene is None):
        given = "neither" if image is None else "both"
        raise ConfigError(f"image, scene: {given} given; allowed: exactly one of them")
    if world.source == "renderer" and scene is None:
        raise ConfigError("renderer: an image was given; allowed: a scene")
    geometry = world.geometry
    seed_image = None
    if image is not None:
        seed_image = load_seed_image(
            image, width_px=geometry.width_px, height_px=geometry.height_px
        )
    return Start(image=seed_image, image_path=image, scene=scene)

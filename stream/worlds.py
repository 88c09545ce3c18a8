"""Loading of worlds: weights, encoder, decoder, first picture.

Owns the choice of files. A `ModelCache` keeps the models that were loaded last, so that the jobs of
a batch with equal settings share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from engine.config import preset
from engine.errors import CheckpointError
from stream.renderer import RendererWorld, scene_prompt
from stream.session import ModelWorld, World
from stream.world_spec import Start, WorldSpec

if TYPE_CHECKING:
    from engine.engine import Engine
    from vae_stream.decoder import StreamingDecoder
    from vae_stream.encoder import ImageEncoder
    from vae_stream.taehv import TinyVae

VAE_FOLDER = "vae"


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """What is loaded for one `WorldSpec`."""

    engine: Engine
    encoder: ImageEncoder
    decoder: StreamingDecoder | None

    def close(self) -> None:
        """Free the engine and what the decoder keeps."""
        if self.decoder is not None:
            self.decoder.close()
        self.engine.close()


class ModelCache:
    """Keeps the models of one spec."""

    def __init__(self) -> None:
        self._spec: WorldSpec | None = None
        self._models: Models | None = None

    def world(self, spec: WorldSpec, start: Start, *, with_frames: bool = True) -> World:
        """Open a world at its first picture.

        Args:
            spec: which world.
            start: its first picture.
            with_frames: False leaves the decoder out: latents only.

        Raises:
            ConfigError: unknown scene.
            CheckpointError: weights are missing or damaged.
            DeviceError: the device or its memory does not suffice.
        """
        if start.scene is not None:
            scene = RendererWorld(start.scene, spec.geometry)
            if spec.source == "renderer":
                return scene
            rgb_HWC = scene.first_picture()
        else:
            assert start.image is not None
            rgb_HWC = torch.from_numpy(start.image.rgb_HWC)
        models = self._load(spec)
        anchor_BCTHW = models.encoder.encode_image(rgb_HWC).float()
        return ModelWorld(
            models.engine,
            models.decoder if with_frames else None,
            anchor_BCTHW=anchor_BCTHW,
            picture_HWC=rgb_HWC,
        )

    def _load(self, spec: WorldSpec) -> Models:
        if self._models is not None and spec == self._spec:
            return self._models
        self.close()
        self._models, self._spec = load_models(spec), spec
        return self._models

    def close(self) -> None:
        """Free what is loaded."""
        if self._models is not None:
            self._models.close()
        self._models = self._spec = None


def load_models(spec: WorldSpec) -> Models:
    """Load engine, encoder and decoder.

    With random weights the codec is random too. `h3_33b` has no decoder yet: it makes latents only.

    Raises:
        CheckpointError: weights are missing, damaged or made for another picture size.
        DeviceError: the device or its memory does not suffice.
    """
    from engine.engine import Engine
    from vae_stream.encoder import ImageEncoder

    found = preset(spec.preset, spec.geometry)
    if spec.weights == "random":
        engine = Engine.from_random(found.model, spec.engine, geometries=found.geometries)
        folder = None
    else:
        folder = found.weights if spec.weights == "shipped" else Path(spec.weights)
        if folder is None:
            raise CheckpointError(f"weights: none ship with {spec.preset}; allowed: a folder")
        engine = Engine.from_pretrained(folder, spec.engine, model_config=found.model)
        if engine.model_config.geometry != spec.geometry:
            made_for = engine.model_config.geometry
            raise CheckpointError(
                f"weights: {folder} is made for {made_for.width_px}x{made_for.height_px}; "
                f"asked for: {spec.geometry.width_px}x{spec.geometry.height_px}"
            )
    # The picture is encoded once, so it may as well be exact; frames follow the engine's dtype.
    encoder = ImageEncoder(_vae(folder, torch.float32, engine.device))
    decoder = None if spec.preset == "h3_33b" else _decoder(folder, spec, engine)
    return Models(engine=engine, encoder=encoder, decoder=decoder)


def _decoder(folder: Path | None, spec: WorldSpec, engine: Engine) -> StreamingDecoder:
    """Decoder of a folder of weights, or one of the random codec."""
    from vae_stream.opening import open_decoder
    from vae_stream.tiny_decoder import TinyDecoder

    size = spec.geometry
    if folder is None:
        vae = _vae(None, engine.dtype, engine.device)
        return TinyDecoder(vae, height_px=size.height_px, width_px=size.width_px)
    try:
        return open_decoder(
            folder / VAE_FOLDER, device=engine.device, dtype=engine.dtype,
            height_px=size.height_px, width_px=size.width_px,
        )  # fmt: skip
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"weights: {folder / VAE_FOLDER}: {error}") from error


def _vae(folder: Path | None, dtype: torch.dtype, device: torch.device) -> TinyVae:
    """Codec of a folder of weights, or a random one, the same each time."""
    from vae_stream.taehv import TinyVae, TinyVaeConfig

    if folder is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            vae = TinyVae(TinyVaeConfig())
        return vae.cast(dtype).to(device).eval().requires_grad_(False)
    try:
        return TinyVae.from_pretrained(folder / VAE_FOLDER, dtype=dtype, device=device)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"weights: {folder / VAE_FOLDER}: {error}") from error


def default_prompt(start: Start) -> str:
    """Prompt of a job that names none: the scene's own, or none for an image."""
    return "" if start.scene is None else scene_prompt(start.scene)

"""Loading of worlds: weights, encoder, decoder, first picture.

Owns the choice of files. A `ModelCache` keeps the models that were loaded last, so that the jobs of
a batch with equal settings share them.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.config import preset
from engine.device import gpu_count, present_memory, resolve_device
from engine.errors import CheckpointError, StateError
from engine.ranks import Ranks
from stream.decode_lane import DecodeLane
from stream.load_news import LoadNews
from stream.plan_world import plan_world
from stream.renderer import RendererWorld, scene_prompt
from stream.session import ModelWorld, World
from stream.weight_checks import check_codec
from stream.weight_folder import Role, WeightFolder, look_through
from stream.weight_sources import sources_of
from stream.world_place import neighbour_count
from stream.world_spec import Start, WorldSpec

if TYPE_CHECKING:
    from torch import Tensor

    from engine.config import Geometry
    from engine.engine import Engine
    from engine.memory import MemoryPlan, Present
    from stream.followers import Followers
    from vae_stream.decoder import StreamingDecoder
    from vae_stream.encoder import ImageEncoder


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """What is loaded for one `WorldSpec`."""

    engine: Engine
    encoder: ImageEncoder
    decoder: StreamingDecoder | None
    lane: DecodeLane
    """Of the decoder: a world takes over memory in which the one before may still be decoded."""
    plan: MemoryPlan

    def close(self) -> None:
        """Free the engine and what the decoder keeps."""
        self.lane.join()
        if self.decoder is not None:
            self.decoder.close()
        self.engine.close()


class ModelCache:
    """Keeps the models of one spec.

    Args:
        news: hears of the loading.
        is_played: worlds are for play: without a decoder, or with one whose pictures wait for the
            next chunk, nothing is loaded.
        ranks: who shares the rollouts; by default this process has them to itself.
        followers: the other ranks, where this process leads them; they load once.
    """

    def __init__(
        self,
        news: LoadNews | None = None,
        ranks: Ranks | None = None,
        *,
        followers: Followers | None = None,
        is_played: bool = False,
    ) -> None:
        self._news = news or LoadNews()
        self._followers = followers
        self._is_played = is_played
        self.ranks = ranks or Ranks()
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
        if spec.source == "renderer":
            assert start.scene is not None
            return RendererWorld(start.scene, spec.geometry)
        with self._news.stage("scene"):
            rgb_HWC = first_picture(start, spec.geometry)
        models = self._load(spec)
        with self._news.stage("first picture"):
            anchor_BCTHW = models.encoder.encode_image(rgb_HWC).float()
        return ModelWorld(
            models.engine,
            models.decoder if with_frames else None,
            anchor_BCTHW=anchor_BCTHW,
            picture_HWC=rgb_HWC,
            lane=models.lane,
        )

    @property
    def plan(self) -> MemoryPlan:
        """Memory plan of what is loaded.

        Raises:
            StateError: nothing is.
        """
        if self._models is None:
            raise StateError("plan: nothing is loaded; expected world() first")
        return self._models.plan

    def _load(self, spec: WorldSpec) -> Models:
        if self._models is not None and spec == self._spec:
            return self._models
        self.close()
        self._models = load_models(
            spec, self._news, self.ranks, followers=self._followers, is_played=self._is_played
        )
        self._spec = spec
        return self._models

    def close(self) -> None:
        """Free what is loaded."""
        if self._models is not None:
            self._models.close()
        self._models = self._spec = None


def load_models(
    spec: WorldSpec,
    news: LoadNews | None = None,
    ranks: Ranks | None = None,
    *,
    followers: Followers | None = None,
    is_played: bool = False,
) -> Models:
    """Load engine, picture encoder and decoder, once their files are whole and memory suffices.

    With random weights the codec is random too, of the preset's kind. Without a decoder among the
    weights there are latents only.

    Args:
        spec: which world; its device is that of the rank.
        news: hears of the loading.
        ranks: who shares the rollouts; each has all weights.
        followers: the other ranks, where they do not come here by themselves.
        is_played: see `ModelCache`.

    Raises:
        ConfigError: the heads do not divide among the ranks.
        CheckpointError: weights are missing, damaged or made for another picture size.
        UnsupportedError: nobody can play with the decoder, as `is_played` asks for.
        DeviceError: the device or its memory does not suffice.
    """
    from engine.engine import Engine
    from engine.following import LeadingEngine
    from engine.loading import EngineSource

    news = news or LoadNews()
    found = preset(spec.preset, spec.geometry)
    folder = None
    if spec.weights != "random":
        path = found.weights if spec.weights == "shipped" else Path(spec.weights)
        if path is None:
            raise CheckpointError(f"weights: none ship with {spec.preset}; allowed: a folder")
        folder = look_through(path)
        folder.need(Role.TRANSFORMER)
        check_codec(folder, spec.decoder_mode, is_played=is_played)
    ranks = ranks or Ranks()
    ranks.require_alike(spec.engine.dtype)
    device = resolve_device(ranks.device(spec.engine.device))
    present = _present(spec, device, ranks.count)
    if followers is None:
        # Ranks whose plans differ would hold other linears; followers get the plan of their leader.
        present = dataclasses.replace(
            present,
            device_gib=ranks.least(present.device_gib),
            host_gib=ranks.least(present.host_gib),
        )
    asked_for = dataclasses.replace(spec.engine, device=str(device))
    spec = dataclasses.replace(spec, engine=asked_for)
    planned = plan_world(spec, folder, present, world_size=ranks.count)
    exchange = ranks.exchange(planned.model.num_attention_heads)
    if planned.model.geometry != spec.geometry:
        made_for, asked = planned.model.geometry, spec.geometry
        raise CheckpointError(
            f"weights: {spec.weights} is made for {made_for.width_px}x{made_for.height_px}; "
            f"asked for: {asked.width_px}x{asked.height_px}"
        )
    if folder is not None and planned.engine.lora is None:
        for source in sources_of(spec.preset):
            if source.role == Role.ADAPTER:
                _log.warning("adapter_missing weights=%s: %s", folder.path, source.without)
    news.planned(planned.plan, present)
    engine_source = EngineSource(
        weights=None if folder is None else folder.need(Role.TRANSFORMER),
        model=planned.model,
        config=planned.engine,
        geometries=found.geometries,
    )
    if followers is not None:
        followers.load(engine_source)
    with news.stage("transformer"):
        parts = engine_source.parts(world_size=ranks.count, on_progress=news.read)
        engine = (
            Engine(parts, exchange=exchange)
            if followers is None
            else LeadingEngine(parts, exchange=exchange, followers=followers)
        )
    try:
        with news.stage("decoder"):
            decoder = _decoder(folder, spec, engine)
        with news.stage("picture encoder"):
            encoder = _encoder(folder, spec, engine)
        if followers is not None:
            with news.stage("other ranks"):
                followers.wait_loaded()
    except BaseException:
        engine.close()
        raise
    return Models(
        engine=engine,
        encoder=encoder,
        decoder=decoder,
        lane=DecodeLane(engine.device),
        plan=planned.plan,
    )


def _present(spec: WorldSpec, device: torch.device, rank_count: int) -> Present:
    """Memory that is free for one rank, where those of all worlds will want as much."""
    everywhere = spec.world_count * rank_count
    if device.type == "cpu":
        return present_memory(device, shared_by=everywhere)
    return present_memory(
        device,
        shared_by=1 + neighbour_count(spec, str(device), gpu_count()),
        machine_shared_by=everywhere,
    )


def _decoder(
    folder: WeightFolder | None, spec: WorldSpec, engine: Engine
) -> StreamingDecoder | None:
    """Decoder of a folder of weights, a random one, or None where the folder has none.

    Its products have the dtype of the engine.
    """
    from vae_stream.opening import open_decoder
    from vae_stream.random_codec import random_decoder

    size, mode = spec.geometry, spec.decoder_mode
    place = None if folder is None else folder.decoder(mode)
    try:
        if folder is None:
            return random_decoder(
                preset(spec.preset).codec, device=engine.device, dtype=engine.dtype,
                height_px=size.height_px, width_px=size.width_px, mode=mode,
            )  # fmt: skip
        if place is None:
            return None
        return open_decoder(
            place, device=engine.device, dtype=engine.dtype, height_px=size.height_px,
            width_px=size.width_px, mode=mode,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise CheckpointError(f"decoder: {error}") from error


def _encoder(folder: WeightFolder | None, spec: WorldSpec, engine: Engine) -> ImageEncoder:
    """Picture encoder of a folder of weights, or a random one; in fp32: a picture is encoded once.

    Raises:
        CheckpointError: its files are damaged.
    """
    from vae_stream.encoder import open_encoder
    from vae_stream.random_codec import random_encoder

    if folder is None:
        return random_encoder(preset(spec.preset).codec, device=engine.device)
    place = folder.picture_encoder()
    assert place is not None, "checked before anything was loaded"
    try:
        return open_encoder(place, device=engine.device)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"picture encoder: {error}") from error


def first_picture(start: Start, size: Geometry) -> Tensor:
    """Picture that a world begins with, uint8 RGB [H, W, 3].

    Raises:
        ConfigError: unknown scene.
    """
    if start.scene is not None:
        return RendererWorld(start.scene, size).first_picture()
    assert start.image is not None
    return torch.from_numpy(start.image.rgb_HWC)


def default_prompt(start: Start) -> str:
    """Prompt of a job that names none: the scene's own, or none for an image."""
    return "" if start.scene is None else scene_prompt(start.scene)

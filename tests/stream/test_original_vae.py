"""Worlds whose codec is the original H3 autoencoder: first picture in, windows of latents out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from PIL import Image

from engine.checkpoint.folder import save_model
from engine.config import preset
from engine.text import WordEncoder
from engine.types import Action
from stream.session import Session
from stream.world_spec import WorldSpec, read_start, world_spec
from stream.worlds import ModelCache
from tests.tiny import tiny_model
from tests.vae_stream.h3_tiny import random_vit, randomise, tensors_in, write_folder
from vae_stream.h3_encoder import H3Encoder, H3EncoderConfig
from vae_stream.vit_weights import VitLayout

pytestmark = pytest.mark.cpu

CHUNKS = 3


@pytest.fixture
def spec(tmp_path: Path) -> WorldSpec:
    """A tiny model beside a small autoencoder in the layout of the original release."""
    model = preset("tiny").model
    weights = tmp_path / "weights"
    save_model(weights, tiny_model(model), model, text_encoder=WordEncoder.of(model))
    encoder = H3Encoder(
        H3EncoderConfig(widths=(8, 8, 16, 16, 16, 16), block_count=1, norm_groups=4)
    )
    randomise(encoder)
    tensors = tensors_in(random_vit(), VitLayout.ORIGINAL) | encoder.state_dict()
    write_folder(weights / "video_vae", tensors, {"norm_num_groups": 4})
    return world_spec(
        "tiny", size=None, weights=str(weights), renderer=False, device="cpu", dtype="float32"
    )


@pytest.mark.parametrize(
    ("mode", "counts", "owed"),
    [
        ("auto", [0, 17, 17], 17),
        ("prefix_chunk", [17, 17, 17], 0),
        ("prefix_latent", [17, 17, 17], 0),
    ],
)
def test_pictures_come_chunk_by_chunk_and_none_is_lost(
    spec: WorldSpec, tmp_path: Path, mode: str, counts: list[int], owed: int
) -> None:
    image = tmp_path / "seed.png"
    Image.new("RGB", (96, 64), (90, 120, 60)).save(image)
    cache = ModelCache()
    world = cache.world(
        dataclasses.replace(spec, decoder=mode), read_start(spec, image=str(image), scene=None)
    )
    session = Session(world, prompt="a lake", seed=0)

    chunks = [list(session.step(Action.still())) for _ in range(CHUNKS)]
    last = list(session.finish())

    assert [sum(len(each.frames_THWC) for each in chunk) for chunk in chunks] == counts
    assert sum(len(each.frames_THWC) for each in last) == owed
    made = [each for chunk in (*chunks, last) for each in chunk]
    assert [each.latent_index for each in made] == list(range(5 * CHUNKS))
    assert all(each.frames_THWC.shape[1:] == (64, 96, 3) for each in made)
    assert torch.cat([each.frames_THWC for each in made]).float().std() > 1
    cache.close()

"""Sizes of decoders before they are loaded, against those that are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.allocator import LiveBytes
from tests.vae_stream.h3_tiny import CONFIG, random_vit, tensors_in, write_folder
from vae_stream import TinyDecoder, TinyVae, TinyVaeConfig
from vae_stream.memory import causal_memory, decoder_memory, module_bytes, tiny_memory
from vae_stream.opening import open_decoder
from vae_stream.random_codec import (
    CAUSAL_LAYERS,
    random_decoder,
    random_decoder_memory,
    random_encoder,
    random_encoder_memory,
)
from vae_stream.taeh3 import Taeh3, Taeh3Config
from vae_stream.vit import VitConfig
from vae_stream.vit_weights import VitLayout

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
SIZE = {"height_px": 64, "width_px": 96}


@pytest.mark.parametrize("layout", list(VitLayout))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_of_a_folder_have_the_size_that_is_loaded(
    layout: VitLayout, dtype: torch.dtype, tmp_path: Path
) -> None:
    vit = random_vit()
    folder = write_folder(tmp_path, tensors_in(vit, layout))
    found = decoder_memory(folder, dtype=dtype, **SIZE)
    assert found.weights == module_bytes(vit.cast_blocks(dtype))


def test_the_ring_has_the_size_of_a_state(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tensors_in(random_vit(), VitLayout.CAUSAL))
    decoder = open_decoder(folder, device=CPU, dtype=torch.bfloat16, **SIZE)
    assert decoder_memory(folder, dtype=torch.bfloat16, **SIZE).state == decoder.state_bytes()


def test_distilled_weights_under_the_names_of_the_original_have_a_ring(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tensors_in(random_vit(), VitLayout.ORIGINAL))
    asked = {"dtype": torch.bfloat16, "mode": "single_a5", **SIZE}
    decoder = open_decoder(folder, device=CPU, **asked)
    assert decoder_memory(folder, **asked).state == decoder.state_bytes()


@pytest.mark.parametrize(
    ("height_px", "width_px", "gib"), [(768, 1344, 4.43), (480, 832, 1.71)], ids=["768p", "480p"]
)
def test_the_released_ring_is_as_published(height_px: int, width_px: int, gib: float) -> None:
    config = VitConfig(layer_count=CAUSAL_LAYERS)
    found = causal_memory(config, dtype=torch.bfloat16, height_px=height_px, width_px=width_px)
    assert found.state / 2**30 == pytest.approx(gib, abs=0.01)
    # 1.62 billion parameters, all but 7 million of them in products.
    assert found.weights == pytest.approx(3.24e9, rel=0.01)


def test_random_codecs_are_the_same_each_time_and_no_black() -> None:
    latent = torch.randn(1, 24, 4, 6)
    made = []
    for _ in range(2):
        decoder = random_decoder("tiny", device=CPU, dtype=torch.float32, **SIZE)
        made.append(decoder.push(decoder.new_state(), latent)[0].frames_THWC)
    assert torch.equal(*made)
    assert made[0].float().std() > 1.0


def test_a_mode_of_another_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="'pair'; allowed for the tiny VAE: single"):
        random_decoder("tiny", device=CPU, dtype=torch.float32, mode="pair", **SIZE)


def test_a_random_tiny_codec_has_the_size_that_is_planned() -> None:
    decoder = random_decoder("tiny", device=CPU, dtype=torch.float32, **SIZE)
    planned = random_decoder_memory("tiny", dtype=torch.float32, **SIZE)
    assert planned.weights == module_bytes(decoder._network.decoder)
    encoder = random_encoder("tiny", device=CPU)
    assert random_encoder_memory("tiny", **SIZE).weights == module_bytes(encoder._network.encoder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["tiny", "taeh3"])
def test_memories_of_tiny_decoders_and_two_calls_fit_into_the_plan(
    kind: str, dtype: torch.dtype
) -> None:
    network = TinyVae(TinyVaeConfig()) if kind == "tiny" else Taeh3(Taeh3Config())
    decoder = TinyDecoder(network.to(dtype).eval().requires_grad_(False), **SIZE)
    planned = tiny_memory(1, dtype=dtype, **SIZE)
    with LiveBytes() as live:
        decoder.push(decoder.new_state(1), torch.randn(1, 24, 4, 6))
    assert decoder.state_bytes() <= planned.state
    # One call that runs anew, and the memory of the recorded ones.
    assert 2 * live.peak_bytes <= planned.working


def test_windows_take_more_than_a_ring(tmp_path: Path) -> None:
    released = VitConfig()
    assert released.layer_count > CONFIG.layer_count
    folder = write_folder(tmp_path, tensors_in(random_vit(), VitLayout.ORIGINAL))
    found = decoder_memory(folder, dtype=torch.bfloat16, height_px=768, width_px=1344)
    assert found.state > 0
    assert found.working > found.state

"""An hour of a stream, 25,412 latents at 24 pictures a second: memory stays, a still scene too."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from tests.vae_stream.h3_tiny import random_vit
from vae_stream import StreamingDecoder, TinyDecoder, TinyVae, TinyVaeConfig
from vae_stream.causal_vit import CausalConfig, CausalVitDecoder, Mode
from vae_stream.vit import VitConfig

pytestmark = pytest.mark.manual

HOUR = 25_412
SETTLED = 100
"""Latents after which every memory is full."""
DRIFT = 0.01
"""Grey levels: what the tables' rounding moves."""


def _causal(mode: Mode) -> StreamingDecoder:
    vit = random_vit(VitConfig(layer_count=2, head_count=1, ffn_width=32))
    return CausalVitDecoder(
        vit, height_px=16, width_px=16, mode=mode, causal=CausalConfig(window=4)
    )


def _tiny() -> StreamingDecoder:
    torch.manual_seed(4)
    config = TinyVaeConfig(decoder_widths=(16, 12, 8), head_width=4, encoder_widths=(8, 8, 16))
    return TinyDecoder(TinyVae(config).eval(), height_px=16, width_px=16)


def _tensor_count() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


OPEN: dict[str, Callable[[], StreamingDecoder]] = {
    "pair": lambda: _causal(Mode.PAIR),
    "hybrid_a3": lambda: _causal(Mode.HYBRID_A3),
    "single_a5": lambda: _causal(Mode.SINGLE_A5),
    "tiny": _tiny,
}


@pytest.mark.parametrize("name", OPEN)
def test_an_hour_changes_neither_memory_nor_a_still_scene(name: str) -> None:
    decoder = OPEN[name]()
    state, shown, held = decoder.new_state(), 0, 0
    z_BCHW = torch.randn(1, 24, 1, 1, generator=torch.Generator().manual_seed(1))
    # Ten latents after each other are two blocks and five pairs; then all repeats.
    first: dict[int, torch.Tensor] = {}
    for index in range(HOUR):
        if index == SETTLED:
            held = _tensor_count()
        for chunk in decoder.push(state, z_BCHW):
            shown += 1
            if chunk.latent_index < SETTLED:
                continue
            grey_T = chunk.frames_THWC.float().mean(dim=(1, 2, 3))
            expected_T = first.setdefault(chunk.latent_index % 10, grey_T)
            assert (grey_T - expected_T).abs().max() <= DRIFT, chunk.latent_index
    assert HOUR - shown <= decoder.lookahead_latents
    assert len(first) == 10
    # Besides those that are kept here: what the last push left in variables.
    assert _tensor_count() <= held + len(first) + 4

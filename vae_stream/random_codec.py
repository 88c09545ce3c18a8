"""Codecs with random weights: for tests, and to measure speed and memory of released shapes.

Owns the two kinds and how they are drawn. Invariants: the same weights each time on a kind of
device; activations keep their size, so that pictures are noise and not black.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from vae_stream.causal_vit.decoder import CausalVitDecoder
from vae_stream.causal_vit.modes import Mode
from vae_stream.decoder import StreamingDecoder
from vae_stream.encoder import ImageEncoder
from vae_stream.h3_encoder import H3Encoder, H3EncoderConfig
from vae_stream.memory import (
    CodecMemory,
    causal_memory,
    picture_memory,
    tiny_memory,
)
from vae_stream.recorded import decode_runner
from vae_stream.taehv import TinyVae, TinyVaeConfig
from vae_stream.tiny_decoder import TinyDecoder
from vae_stream.vit import Vit, VitConfig

CodecKind = Literal["tiny", "h3"]
"""The small world's own codec; or H3's picture encoder with the causal decoder, as released."""
CAUSAL_LAYERS = 24
"""Of the released causal decoder."""
_SEED = 0
_SCALE = 0.5
_BIAS = 0.1


def random_decoder(
    kind: CodecKind,
    *,
    device: torch.device,
    dtype: torch.dtype,
    height_px: int,
    width_px: int,
    mode: str | None = None,
) -> StreamingDecoder:
    """Make a decoder; arguments and errors are those of `open_decoder`."""
    if kind == "tiny":
        if mode not in (None, "single"):
            raise ValueError(f"mode: {mode!r}; allowed for the tiny VAE: single")
        return TinyDecoder(
            _tiny(dtype, device),
            height_px=height_px,
            width_px=width_px,
            runner=decode_runner(device),
        )
    with torch.device("meta"):
        vit = Vit(VitConfig(layer_count=CAUSAL_LAYERS)).cast_blocks(dtype)
    vit = vit.to_empty(device=device)
    vit.reset_statistics()
    fill(vit)
    return CausalVitDecoder(
        vit.eval().requires_grad_(False),
        height_px=height_px,
        width_px=width_px,
        mode=Mode(mode or Mode.HYBRID_A3),
    )


def random_encoder(kind: CodecKind, *, device: torch.device) -> ImageEncoder:
    """Make a picture encoder in fp32."""
    if kind == "tiny":
        return ImageEncoder(_tiny(torch.float32, device))
    with torch.device("meta"):
        network = H3Encoder(H3EncoderConfig())
    network = network.to_empty(device=device)
    network.reset_statistics()
    fill(network)
    return ImageEncoder(network.eval().requires_grad_(False))


def random_decoder_memory(
    kind: CodecKind, *, dtype: torch.dtype, height_px: int, width_px: int
) -> CodecMemory:
    """Size of what `random_decoder` makes."""
    if kind == "h3":
        config = VitConfig(layer_count=CAUSAL_LAYERS)
        return causal_memory(config, dtype=dtype, height_px=height_px, width_px=width_px)
    count = _counts(kind)[0]
    return tiny_memory(count, dtype=dtype, height_px=height_px, width_px=width_px)


def random_encoder_memory(kind: CodecKind, *, height_px: int, width_px: int) -> CodecMemory:
    """Size of what `random_encoder` makes."""
    return picture_memory(_counts(kind)[1], height_px=height_px, width_px=width_px)


def _tiny(dtype: torch.dtype, device: torch.device) -> TinyVae:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        vae = TinyVae(TinyVaeConfig())
    return vae.cast(dtype).to(device).eval().requires_grad_(False)


def fill(network: nn.Module) -> None:
    """Draw the parameters of a network, in place."""
    generator: torch.Generator | None = None
    for name, parameter in network.named_parameters():
        if generator is None:
            generator = torch.Generator(parameter.device).manual_seed(_SEED)
        _draw(name, parameter.data, generator)


def _draw(name: str, values: Tensor, generator: torch.Generator) -> None:
    """Norms 1, scales of branches below 1, products of unit size."""
    if values.ndim > 1:
        values.normal_(0.0, math.prod(values.shape[1:]) ** -0.5, generator=generator)
    elif "norm" in name and name.endswith("weight"):
        values.fill_(1.0)
    elif "scale" in name:
        values.fill_(_SCALE)
    else:
        values.normal_(0.0, _BIAS, generator=generator)


@cache
def _counts(kind: CodecKind) -> tuple[int, int]:
    """Parameters of decoder (of a tiny codec) and picture encoder."""
    with torch.device("meta"):
        vae = TinyVae(TinyVaeConfig())
        encoder: nn.Module = H3Encoder(H3EncoderConfig()) if kind == "h3" else vae.encoder
    parts = (vae.decoder, encoder)
    decoder_count, encoder_count = (sum(p.numel() for p in part.parameters()) for part in parts)
    return decoder_count, encoder_count

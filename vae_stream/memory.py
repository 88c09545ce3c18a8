"""Memory of decoders and picture encoders, before they are loaded.

Owns sizes from the heads of files, or from the shape of a network that is to be random. Invariant:
no tensor is read and none is allocated; what is small beside a gigabyte is estimated from above.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from vae_stream.causal_vit.modes import Mode
from vae_stream.causal_vit.state import ring_shape
from vae_stream.geometry import RAW_FRAMES, SPATIAL_RATIO
from vae_stream.opening import CUDA_TILE_BATCH
from vae_stream.tiling import Tiling, plan_tiles
from vae_stream.vit import Vit, VitConfig
from vae_stream.vit_weights import ENCODER_PARTS, VitLayout, read_vit_config, vit_layout
from vae_stream.weight_files import WeightFiles
from vae_stream.windows import WINDOW_LATENTS

_FLOAT_BYTES = 4
_PAIR = 2
"""Latents that are decoded together at most."""
_CONV_CHANNELS = 128
"""Widest rows of a convolution at the size of the picture, and so many copies of them."""
_CONV_COPIES = 6
_MEMORY_NUMBERS = 24
"""Of a tiny decoder, for each pixel: TAEH3 remembers 21, and a latent waits beside them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecMemory:
    """Bytes on the device."""

    weights: int
    state: int
    """Of one stream; 0 for an encoder."""
    working: int
    """Widest moment of a call."""


def decoder_memory(
    source: Path, *, dtype: torch.dtype, height_px: int, width_px: int, mode: str | None = None
) -> CodecMemory:
    """Size of the decoder whose weights lie in a folder or file; arguments as of `open_decoder`.

    Raises:
        ValueError: what `open_decoder` raises for the heads of files.
        FileNotFoundError: there is no safetensors file.
    """
    files = WeightFiles(source)
    layout = vit_layout(files.shapes)
    if layout is None:
        count = _numbers(files, lambda name: not name.startswith(ENCODER_PARTS))
        return tiny_memory(count, dtype=dtype, height_px=height_px, width_px=width_px)
    config = read_vit_config(files, layout)
    if layout == VitLayout.CAUSAL or mode in tuple(Mode):
        return causal_memory(config, dtype=dtype, height_px=height_px, width_px=width_px)
    return windowed_memory(config, dtype=dtype, height_px=height_px, width_px=width_px)


def encoder_memory(source: Path, *, height_px: int, width_px: int) -> CodecMemory:
    """Size of the picture encoder whose weights lie in a folder or file; it computes in fp32."""
    count = _numbers(WeightFiles(source), lambda name: name.startswith(ENCODER_PARTS))
    return picture_memory(count, height_px=height_px, width_px=width_px)


def tiny_memory(
    parameter_count: int, *, dtype: torch.dtype, height_px: int, width_px: int
) -> CodecMemory:
    """Size of a tiny decoder: memories are as large as a few pictures.

    A call that runs anew takes up to 142 numbers a pixel (TAEH3), and what is recorded, whose two
    calls share their memory, as many again.
    """
    pixels = height_px * width_px
    return CodecMemory(
        weights=parameter_count * dtype.itemsize,
        state=_MEMORY_NUMBERS * pixels * dtype.itemsize,
        working=_CONV_COPIES * RAW_FRAMES * _CONV_CHANNELS // 4 * pixels * dtype.itemsize,
    )


def causal_memory(
    config: VitConfig, *, dtype: torch.dtype, height_px: int, width_px: int
) -> CodecMemory:
    """Size of the causal H3 decoder: a ring of keys and values, two latents at a time."""
    height, width = height_px // SPATIAL_RATIO, width_px // SPATIAL_RATIO
    frames = _PAIR * RAW_FRAMES * 3 * height_px * width_px * _FLOAT_BYTES
    return CodecMemory(
        weights=_vit_bytes(config, dtype),
        state=ring_shape(config, dtype, height=height, width=width).size_bytes,
        working=_PAIR * height * width * vit_row_bytes(config, dtype) + 2 * frames,
    )


def windowed_memory(
    config: VitConfig, *, dtype: torch.dtype, height_px: int, width_px: int
) -> CodecMemory:
    """Size of the original H3 decoder: tiles in batches, frames of two windows in fp32."""
    plan = plan_tiles(height_px, width_px, Tiling())
    window = WINDOW_LATENTS * RAW_FRAMES * 3 * _FLOAT_BYTES
    frames = window * height_px * width_px
    tile = window * plan.rows.size * plan.columns.size
    batch = min(CUDA_TILE_BATCH, plan.tile_count)
    rows = batch * WINDOW_LATENTS * (plan.rows.size * plan.columns.size) // SPATIAL_RATIO**2
    # Frames of a batch as they are laid out anew, and of all tiles of two windows till they are
    # joined.
    tiles = (batch + 2 * plan.tile_count) * tile
    return CodecMemory(
        weights=_vit_bytes(config, dtype),
        state=frames,
        working=max(rows * vit_row_bytes(config, dtype) + tiles, tiles + 3 * frames),
    )


def picture_memory(parameter_count: int, *, height_px: int, width_px: int) -> CodecMemory:
    """Size of a picture encoder in fp32, one tile of the picture at a time."""
    plan = plan_tiles(height_px, width_px, Tiling())
    tile = plan.rows.size * plan.columns.size
    return CodecMemory(
        weights=parameter_count * _FLOAT_BYTES,
        state=0,
        working=_CONV_COPIES * 3 * _CONV_CHANNELS * tile * _FLOAT_BYTES,
    )


def vit_row_bytes(config: VitConfig, dtype: torch.dtype) -> int:
    """Widest moment of one token: the fp32 residual and its copies, q, k and v placed and not,
    both halves of the feed-forward part and their product.
    """
    halves = 6 * config.width + 4 * config.ffn_width
    return 3 * _FLOAT_BYTES * config.width + halves * dtype.itemsize


def module_bytes(module: nn.Module) -> int:
    """Size of the parameters of a network, which may be on the meta device."""
    return sum(each.nbytes for each in module.parameters())


@cache
def _vit_bytes(config: VitConfig, dtype: torch.dtype) -> int:
    with torch.device("meta"):
        return module_bytes(Vit(config).cast_blocks(dtype))


def _numbers(files: WeightFiles, is_counted: Callable[[str], bool]) -> int:
    return sum(math.prod(shape) for name, shape in files.shapes.items() if is_counted(name))

"""Where the time of a call of the causal ViT decoder goes, and the tiles of its attention.

    python -m benchmarks.decoder_parts --geometry 832x480 [--latents 2] [--no-tiles]

Owns the command and its record. A part is what a recorded call is made of, at the released shape
with random weights, timed alone inside a graph; its share is that of all layers. Tiles are other
shapes of a program of attention, which differ in speed alone. On CUDA.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoders import RELEASED, call_flops
from benchmarks.kernels import device_us
from benchmarks.options import command_parser
from benchmarks.record import append_record, describe_machine, parse_geometry, size_name
from benchmarks.windowed import random_vit
from engine.config import Geometry
from engine.device import resolve_device
from engine.errors import ConfigError, WorldStreamError
from graphs.compile import CompileMode
from vae_stream.causal_vit.fused import FusedCalls
from vae_stream.causal_vit.modes import PAIR, SECOND
from vae_stream.causal_vit.places import RING_SLOTS, CausalConfig
from vae_stream.vit import VitConfig

EXIT_OK, EXIT_USAGE = 0, 2
_LAYERS = 2
"""Of the network that is measured; a part of a layer counts as often as the released one has it."""


TILES = (
    (128, 64, 8, 3), (128, 128, 4, 2), (128, 128, 8, 3), (128, 32, 4, 4), (64, 64, 4, 3),
    (64, 128, 4, 3),
)  # fmt: skip
"""Queries, keys, warps, stages; beside the tile in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a call."""

    name: str
    us: float
    count: int
    """In a call; 0 for what it does not have."""

    @property
    def line(self) -> str:
        """One line for a terminal."""
        return f"{self.name:34}{self.us:10.1f}{self.count:6}{self.us * self.count / 1e3:10.2f}"


def measure(size: Geometry, latents: int, device: torch.device, *, tiles: bool) -> Iterator[Part]:
    """Time the parts of a call."""
    from vae_stream.causal_vit import window_attention_triton as kernels

    layers = RELEASED.layer_count
    config = VitConfig(layer_count=_LAYERS)
    vit = random_vit(config, device).cast_blocks(torch.bfloat16)
    height, width = size.latent_height, size.latent_width
    calls = FusedCalls(
        vit, CausalConfig(), height=height, width=width, compile_mode=CompileMode.BLOCKS,
        runner=None,
    )  # fmt: skip
    kind, tokens = (PAIR if latents == 2 else SECOND), height * width
    rows = latents * tokens + config.suffix_count
    x_RD = torch.randn(rows, config.width, device=device)
    o_RD = x_RD.bfloat16()
    shape = (RING_SLOTS, tokens, config.width)
    key_SRD = torch.randn(shape, device=device, dtype=torch.bfloat16)
    ring = key_SRD, torch.randn_like(key_SRD)
    z_CFHW = torch.randn(latents, config.latent_channels, height, width, device=device)
    clock_2 = torch.tensor([1000, 0], device=device)

    def timed(name: str, count: int, call: Callable[[], Any]) -> Part:
        return Part(name=name, us=round(device_us(call, {}), 2), count=count)

    now = calls.moment(clock_2, kind)
    yield timed("clock and tables", 1, lambda: calls.moment(clock_2, kind))
    yield timed("enter", 1, lambda: calls.enter(z_CFHW))
    _, qkv_RF = calls.enter(z_CFHW)
    placed = calls.place(0, qkv_RF, ring, now)
    yield timed("place", layers, lambda: calls.place(0, qkv_RF, ring, now))
    for layer, name in enumerate(("attend", "attend, windows moved")):
        yield timed(name, layers // 2, partial(calls.attend, layer, placed, ring, now))
        plan = calls.plans[layer]
        for queries, keys, warps, stages in TILES if tiles else ():
            tile = kernels.Tile(queries=queries, keys=keys, warps=warps, stages=stages)
            label = f"  {queries}x{keys}, {warps} warps, {stages} stages"
            q_RD, *last = placed
            run = partial(
                kernels.attend, q_RD, *ring, last[0], last[1], now.slots_S, now.count_1,
                plan.token_WJ, plan.begin_W, plan.size_W, config.head_count, tile,
            )  # fmt: skip
            yield timed(label, 0, run)
    yield timed("between", layers - 1, lambda: calls.between(0, x_RD, o_RD))
    yield timed("leave, head, paint", 1, lambda: calls.leave(x_RD, o_RD))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says and return the exit code."""
    parser = command_parser("benchmarks.decoder_parts", __doc__)
    parser.add_argument("--geometry", default="832x480", help="picture size")
    parser.add_argument("--latents", type=int, choices=(1, 2), default=1)
    parser.add_argument("--no-tiles", action="store_true", help="the tile in use alone")
    parser.add_argument("--device", default="auto", help="cuda or cuda:N")
    parser.add_argument("--record", type=Path, help="file to append the JSON line to")
    parser.add_argument("--commit", help="of the files, where they are no checkout")
    options = parser.parse_args(arguments)
    try:
        size, device = parse_geometry(options.geometry), resolve_device(options.device)
        if device.type != "cuda":
            raise ConfigError(f"device: {device}; allowed: cuda, whose kernels are measured")
    except WorldStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    print(f"{'part':34}{'us':>10}{'count':>6}{'ms':>10}", file=sys.stderr)
    parts = []
    with torch.no_grad():
        for part in measure(size, options.latents, device, tiles=not options.no_tiles):
            print(part.line, file=sys.stderr, flush=True)
            parts.append(part)
    tokens = size.latent_height * size.latent_width
    line = {
        "name": "causal_decoder_parts",
        "geometry": size_name(size),
        "latents": options.latents,
        "call_gflop": round(
            call_flops(RELEASED, tokens, latents=options.latents, seen=RING_SLOTS, window=16) / 1e9
        ),
        "parts": [asdict(part) for part in parts],
        **asdict(describe_machine(device, commit=options.commit)),
    }
    if options.record is not None:
        append_record(options.record, line)
    print(json.dumps(line))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())

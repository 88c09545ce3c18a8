"""The original windowed decoder: what compiling it and batching its tiles give.

    python -m benchmarks.windowed --geometry 1344x768 --record benchmarks/windowed.jsonl
    python -m benchmarks.windowed --tiny --device cpu            # shows that the command works

Owns the command and the record of a row. A row is the time of one block of 17 pictures, from its
latents to uint8, through the decoder that a world uses: a window of 7 latents, all its tiles, the
stitching. Random weights of the released shape, which take as long as any. The first row is how the
released weights are commonly run: fp32 weights under autocast, tile by tile. All others have the
blocks' weights in bf16. A row is held against the first one, and against the eager row of the same
weights and as many tiles at once. Errors are those of the frames against fp32.
Needs torch, numpy, einops, safetensors and pillow alone. Rows go to stderr as they are done, the
last line of stdout is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import command_parser, count
from benchmarks.record import Spread, append_record, describe_machine, parse_geometry, size_name
from engine.clock import new_clock
from engine.config import Geometry
from engine.device import resolve_device
from engine.errors import WorldStreamError
from graphs.compile import CompileMode
from vae_stream.geometry import BLOCK_FRAMES, BLOCK_LATENTS
from vae_stream.random_codec import fill
from vae_stream.tiling import Tiling, plan_tiles
from vae_stream.vit import Vit, VitConfig
from vae_stream.windowed import WindowedDecoder
from vae_stream.windows import WINDOW_LATENTS

EXIT_OK, EXIT_USAGE = 0, 2
_TINY = VitConfig(layer_count=2, head_count=2, ffn_width=96)
_DTYPE = torch.bfloat16
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A way to run the decoder."""

    name: str
    tile_batch: int
    mode: CompileMode
    is_autocast: bool = False
    """Weights in fp32, products in bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Outcome of a row."""

    row: Row
    block: Spread
    """Of the time of 17 pictures."""
    first_s: float
    """First block: compilation and warm-up."""
    error_max: float
    """Largest distance of the frames from fp32, where white is 1 and black 0."""
    psnr_db: float
    peak_gib: float | None
    is_exact: bool
    """Whether the frames have the bits of the first row."""

    def line(self, autocast: Measured, eager: Measured) -> str:
        """One line for a terminal."""
        return (
            f"{self.row.name:26}{self.block.p50:10.1f}{self.block.p80:10.1f}"
            f"{self.gain(autocast):11.2f}{self.gain(eager):9.2f}"
            f"{BLOCK_FRAMES / self.block.p50 * 1e3:8.2f}"
            f"{self.first_s:9.1f}{self.error_max:10.5f}{self.psnr_db:8.1f}"
            f"{'-' if self.peak_gib is None else f'{self.peak_gib:.2f}':>9}"
        )

    def gain(self, control: Measured) -> float:
        """How many times as fast as another row."""
        return control.block.p50 / self.block.p50


HEAD = (
    f"{'row':26}{'p50 ms':>10}{'p80 ms':>10}{'x autocast':>11}{'x eager':>9}{'fps':>8}"
    f"{'first s':>9}{'max err':>10}{'psnr':>8}{'GiB':>9}"
)
AUTOCAST = Row(
    name="autocast, tile by tile", tile_batch=1, mode=CompileMode.EAGER, is_autocast=True
)


def rows_in_bf16(batch: int, *, with_all: bool) -> list[Row]:
    """Return what is measured with the blocks in bf16, eager rows first."""
    rows = [
        Row(name="eager, tile by tile", tile_batch=1, mode=CompileMode.EAGER),
        Row(name=f"eager, {batch} tiles", tile_batch=batch, mode=CompileMode.EAGER),
        Row(name=f"compiled, {batch} tiles", tile_batch=batch, mode=CompileMode.BLOCKS),
        Row(name="compiled, tile by tile", tile_batch=1, mode=CompileMode.BLOCKS),
    ]
    if with_all:
        rows.append(Row(name=f"tuned, {batch} tiles", tile_batch=batch, mode=CompileMode.TUNED))
    return rows


def random_vit(config: VitConfig, device: torch.device) -> Vit:
    """Make a decoder in fp32 whose activations keep their size."""
    with torch.device("meta"):
        vit = Vit(config)
    vit = vit.to_empty(device=device)
    vit.reset_statistics()
    fill(vit)
    return vit.eval().requires_grad_(False)


class Bench:
    """Decoders over one network at one picture size."""

    def __init__(self, vit: Vit, size: Geometry, *, blocks: int, dropped: int) -> None:
        self._vit, self._size = vit, size
        self._blocks, self._dropped = blocks, dropped
        self._device = vit.register_tokens.device
        generator = torch.Generator(self._device).manual_seed(1)
        shape = (1, vit.config.latent_channels, size.latent_height, size.latent_width)
        self._latents = [
            torch.randn(shape, device=self._device, generator=generator)
            for _ in range(WINDOW_LATENTS + BLOCK_LATENTS * (blocks + dropped))
        ]
        self._clip_BCTHW = torch.stack(self._latents[:WINDOW_LATENTS], dim=2)
        self._exact = self._frames(self._decoder(1, CompileMode.EAGER))
        self._control: Tensor | None = None

    def _decoder(self, tile_batch: int, mode: CompileMode) -> WindowedDecoder:
        return WindowedDecoder(
            self._vit,
            height_px=self._size.height_px,
            width_px=self._size.width_px,
            tile_batch=tile_batch,
            compile_mode=mode,
        )

    def _frames(self, decoder: WindowedDecoder) -> Tensor:
        """Frames of one window."""
        return decoder.clip_frames(self._clip_BCTHW)

    def run(self, row: Row) -> Measured:
        """Measure a row; the first one without autocast is the control of the others."""
        is_cuda = self._device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        decoder = self._decoder(row.tile_batch, row.mode)
        with torch.autocast(self._device.type, _DTYPE, enabled=row.is_autocast):
            return self._run(row, decoder)

    def _run(self, row: Row, decoder: WindowedDecoder) -> Measured:
        is_cuda = self._device.type == "cuda"
        start_s = time.perf_counter()
        frames = self._frames(decoder)
        self._wait()
        first_s = time.perf_counter() - start_s
        state, spans_ms = decoder.new_state(), list[float]()
        clock = new_clock(self._device)
        for latent in self._latents[:2]:
            decoder.push(state, latent)
        for block in range(1 + self._blocks + self._dropped):
            start = 2 + BLOCK_LATENTS * block
            clock.mark("begin")
            for latent in self._latents[start : start + BLOCK_LATENTS]:
                decoder.push(state, latent)
            clock.mark("end")
            spans_ms.append(clock.between_ms("begin", "end"))
        if self._control is None and not row.is_autocast:
            self._control = frames
        # The spread of colours in ImageNet's normalisation is about 0.226 of white.
        apart = (frames - self._exact) * 0.226
        return Measured(
            row=row,
            block=Spread.of(spans_ms[1 + self._dropped :], unit="ms", dropped_count=self._dropped),
            first_s=round(first_s, 2),
            error_max=float(apart.abs().max()),
            psnr_db=round(float(-10 * apart.square().mean().clamp_min(1e-20).log10()), 2),
            peak_gib=torch.cuda.max_memory_allocated(self._device) / _GIB if is_cuda else None,
            is_exact=self._control is not None and torch.equal(frames, self._control),
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says and return the exit code."""
    parser = command_parser("benchmarks.windowed", __doc__)
    parser.add_argument("--geometry", default="1344x768", help="picture size")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--tile-batch", type=count, default=14, help="most tiles at once")
    parser.add_argument("--blocks", type=count, default=4, help="that count, of each row")
    parser.add_argument("--tuned", action="store_true", help="with autotuning too: minutes")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers, small tiles")
    parser.add_argument("--record", type=Path, help="file to append to: benchmarks/windowed.jsonl")
    parser.add_argument("--commit", help="of the files, where they are no checkout")
    options = parser.parse_args(arguments)
    try:
        size, device = parse_geometry(options.geometry), resolve_device(options.device)
    except WorldStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    machine = describe_machine(device, commit=options.commit)
    vit = random_vit(_TINY if options.tiny else VitConfig(), device)
    bench = Bench(vit, size, blocks=options.blocks, dropped=1)
    tiles = plan_tiles(size.height_px, size.width_px, Tiling()).tile_count
    print(
        f"{size_name(size)}, {tiles} tiles, {machine.gpu or machine.cpu}\n{HEAD}", file=sys.stderr
    )
    records: list[dict[str, Any]] = []

    def tell(measured: Measured, eager: Measured) -> None:
        print(measured.line(autocast, eager), file=sys.stderr, flush=True)
        row = measured.row
        records.append(
            {
                "name": "windowed_decoder",
                "row": row.name,
                "class": "X" if measured.is_exact else "F",
                "preset": "tiny" if options.tiny else "h3_33b",
                "weights": "random",
                "geometry": size_name(size),
                "gpu_count": int(device.type == "cuda"),
                "dtype": "autocast" if row.is_autocast else str(_DTYPE).removeprefix("torch."),
                "tile_count": tiles,
                "tile_batch": row.tile_batch,
                "compile": str(row.mode),
                "gain_over_autocast": round(measured.gain(autocast), 3),
                "gain_over_eager": round(measured.gain(eager), 3),
                **{
                    key: value
                    for key, value in dataclasses.asdict(measured).items()
                    if key not in ("row", "is_exact")
                },
                **dataclasses.asdict(machine),
            }
        )
        if options.record is not None:
            append_record(options.record, records[-1])

    autocast = bench.run(AUTOCAST)
    tell(autocast, autocast)
    vit.cast_blocks(_DTYPE)
    eager: dict[int, Measured] = {}
    for row in rows_in_bf16(min(options.tile_batch, tiles), with_all=options.tuned):
        measured = bench.run(row)
        tell(measured, eager.setdefault(row.tile_batch, measured))
    print(json.dumps({"rows": records}))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())

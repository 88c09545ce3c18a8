"""The causal ViT decoder of H3: time of a latent, of a pair, memory of a stream, error.

    python -m benchmarks.decoders --record benchmarks/decoders.jsonl
    python -m benchmarks.decoders --tiny --device cpu --geometry 96x64   # shows that it works

Owns the command and the record of a row. A row is a form (plain, compiled, recorded) of a mode
(latents one by one, or in pairs) at a picture size; its time is that of a call, from latents on the
device to uint8 pictures on the device, in a stream that is long under way: back to back, which runs
a device into the limit of its power, and, in the form that a session has on the device, paced: a
few times as fast as pictures are shown, with rests between. Random weights of the released shape,
which take as long as any. Errors are in grey levels, against the plain form with fp32 blocks. What
is wanted most comes first; a row that would begin after the limit is left out, and named. Needs
torch, triton, numpy, einops, safetensors and pillow alone. Rows go to stderr as they are done, the
last line of stdout is JSON.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.options import command_parser, count
from benchmarks.record import (
    Machine,
    Spread,
    append_record,
    describe_machine,
    parse_geometry,
    size_name,
)
from benchmarks.windowed import random_vit
from engine.clock import new_clock
from engine.config import Geometry
from engine.device import resolve_device
from engine.errors import ConfigError, WorldStreamError
from vae_stream.causal_vit import CausalVitDecoder, Form, Mode
from vae_stream.geometry import BLOCK_FRAMES, BLOCK_LATENTS
from vae_stream.vit import Vit, VitConfig

EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2
GEOMETRIES = "832x480,1344x768"
RELEASED = VitConfig(layer_count=24)
_TINY = VitConfig(layer_count=2, head_count=2, ffn_width=96)
_COMPARED = 8
"""Latents whose pictures are compared: the ring fills, and wraps once."""
_SHARES = {Form.RECORDED: 1, Form.COMPILED: 4, Form.PLAIN: 12}
"""One of so many calls; a target is claimed of recorded ones alone."""
PACE = 2.4
"""Of paced calls, in streams of 24 pictures a second."""
_LATENT_S = BLOCK_FRAMES / BLOCK_LATENTS / 24.0 / PACE
_PACED_SHARE, _PACED_DROPPED = 4, 3
"""One of so many calls is paced; the first of these are left out."""
_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A way to run the decoder."""

    mode: Mode
    form: Form

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.form}, {'pair' if self.mode == Mode.PAIR else 'one latent'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Outcome of a row."""

    row: Row
    size: Geometry
    call: Spread
    """Back to back."""
    call_p95: float
    paced: Spread | None
    """Of the form that a session has."""
    paced_p95: float | None
    first_s: float
    """The first latents: compilation, plain calls, recording."""
    error_max: float
    """Grey levels."""
    psnr_db: float
    tflops: float
    """Of products and attention, at the median."""
    state_mib: float
    """Computed."""
    state_measured_mib: float | None
    peak_gib: float | None
    """Weights, one stream, recordings and the widest moment."""
    graph_count: int

    @property
    def line(self) -> str:
        """One line for a terminal."""
        measured = "-" if self.state_measured_mib is None else f"{self.state_measured_mib:.1f}"
        peak = "-" if self.peak_gib is None else f"{self.peak_gib:.2f}"
        paced = (
            f"{'-':>9}{'-':>9}"
            if self.paced is None
            else f"{self.paced.p50:9.2f}{self.paced_p95:9.2f}"
        )
        return (
            f"{size_name(self.size):10}{self.row.name:24}{self.call.p50:9.2f}{self.call_p95:9.2f}"
            f"{paced}{self.tflops:9.1f}{self.first_s:9.1f}{self.error_max:8.0f}{self.psnr_db:8.1f}"
            f"{self.state_mib:10.1f}{measured:>10}{peak:>8}{self.graph_count:7}"
        )


HEAD = (
    f"{'size':10}{'row':24}{'p50 ms':>9}{'p95 ms':>9}{'paced 50':>9}{'95':>9}{'TFLOP/s':>9}"
    f"{'first s':>9}{'max err':>8}{'psnr':>8}{'state MiB':>10}{'measured':>10}{'GiB':>8}"
    f"{'graphs':>7}"
)


def call_flops(config: VitConfig, tokens: int, *, latents: int, seen: int, window: int) -> float:
    """Return the products of a call: linears of all rows, and whole windows of attention.

    Args:
        config: of the network.
        tokens: of a latent.
        latents: of the call.
        seen: latents that attention reads, the call's own included.
        window: tokens along a side.
    """
    rows = latents * tokens
    block = 4 * config.width**2 + 3 * config.width * config.ffn_width
    linears = rows * (config.layer_count * block + config.width * config.patch_width)
    keys = min(window**2, tokens) * seen + config.suffix_count
    return 2.0 * linears + 4.0 * rows * keys * config.width * config.layer_count


class Bench:
    """Decoders over one network at one picture size."""

    def __init__(self, vit: Vit, size: Geometry, *, calls: int, dropped: int) -> None:
        self._vit, self.size = vit, size
        self._calls, self._dropped = calls, dropped
        self._device = vit.register_tokens.device
        generator = torch.Generator(self._device).manual_seed(1)
        channels = vit.config.latent_channels
        shape = (_COMPARED, 1, channels, size.latent_height, size.latent_width)
        self._latents = torch.randn(shape, device=self._device, generator=generator)
        self._exact: dict[Mode, Tensor] = {}

    def keep_exact(self, modes: Sequence[Mode]) -> None:
        """Decode with the weights as they are now, for the errors of the rows."""
        for mode in modes:
            decoder = self._decoder(Row(mode=mode, form=Form.PLAIN))
            self._exact[mode] = self._pictures(decoder)
            decoder.close()

    def run(self, row: Row, size: int) -> Measured:
        """Measure a row; `size` is that of a window."""
        is_cuda = self._device.type == "cuda"
        self._forget()
        decoder = self._decoder(row)
        start_s, before = time.perf_counter(), self._allocated()
        state = decoder.new_state()
        state_mib = (self._allocated() - before) / _MIB if is_cuda else None
        del state
        frames = self._pictures(decoder)
        self._wait()
        first_s = time.perf_counter() - start_s
        calls = -(-self._calls // _SHARES[row.form])
        spans_ms = self._spans_ms(decoder, calls, dropped=self._dropped)
        paced_ms = None
        if row.form == (Form.RECORDED if is_cuda else Form.PLAIN):
            paced_ms = self._spans_ms(
                decoder, -(-calls // _PACED_SHARE), dropped=_PACED_DROPPED, latent_s=_LATENT_S
            )
        apart = (frames.float() - self._exact[row.mode].float()).cpu()
        latents = 2 if row.mode == Mode.PAIR else 1
        flops = call_flops(
            self._vit.config, self.size.latent_height * self.size.latent_width,
            latents=latents, seen=6, window=size,
        )  # fmt: skip
        call = Spread.of(spans_ms, unit="ms", dropped_count=self._dropped)
        measured = Measured(
            row=row,
            size=self.size,
            call=call,
            call_p95=_p95(spans_ms),
            paced=None
            if paced_ms is None
            else Spread.of(paced_ms, unit="ms", dropped_count=_PACED_DROPPED),
            paced_p95=None if paced_ms is None else _p95(paced_ms),
            first_s=round(first_s, 2),
            error_max=float(apart.abs().max()),
            psnr_db=round(_psnr_db(apart), 2),
            tflops=round(flops / call.p50 / 1e9, 2),
            state_mib=round(decoder.state_bytes() / _MIB, 2),
            state_measured_mib=None if state_mib is None else round(state_mib, 2),
            peak_gib=round(torch.cuda.max_memory_allocated(self._device) / _GIB, 3)
            if is_cuda
            else None,
            graph_count=0 if decoder.runner is None else decoder.runner.entry_count,
        )
        decoder.close()
        return measured

    def _decoder(self, row: Row) -> CausalVitDecoder:
        return CausalVitDecoder(
            self._vit, height_px=self.size.height_px, width_px=self.size.width_px,
            mode=row.mode, form=row.form,
        )  # fmt: skip

    def _pictures(self, decoder: CausalVitDecoder) -> Tensor:
        """Decode a stream twice, so that the second one finds its calls recorded; return it."""
        frames: list[Tensor] = []
        for _ in range(1 if decoder.form == Form.PLAIN else 2):
            state = decoder.new_state()
            frames = [
                chunk.frames_THWC
                for latent in self._latents
                for chunk in decoder.push(state, latent)
            ]
            del state  # its memory goes to the next stream
        return torch.cat(frames)

    def _spans_ms(
        self, decoder: CausalVitDecoder, calls: int, *, dropped: int, latent_s: float = 0.0
    ) -> list[float]:
        """Times of calls; read at the end, so that nothing waits between.

        Args:
            decoder: in a new stream.
            calls: to time.
            dropped: calls before these.
            latent_s: from a latent to the next, of which a call takes all at once; 0 for one call
                after another.
        """
        state, clocks = decoder.new_state(), []
        latents = 1 + decoder.lookahead_latents
        begin_s = time.perf_counter()
        for index in range((calls + dropped) * latents):
            if index % latents == 0:
                time.sleep(max(0.0, begin_s + index * latent_s - time.perf_counter()))
            clock = new_clock(self._device)
            clock.mark("begin")
            shown = decoder.push(state, self._latents[index % _COMPARED])
            clock.mark("end")
            if shown:
                clocks.append(clock)
        return [clock.between_ms("begin", "end") for clock in clocks[dropped:]]

    def _forget(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _p95(spans_ms: list[float]) -> float:
    return round(float(np.percentile(spans_ms, 95)), 3)


def _psnr_db(apart: Tensor) -> float:
    """Against white; pictures that are equal count as one grey level in a million pixels."""
    return float(20 * np.log10(255) - 10 * apart.square().mean().clamp_min(1e-6).log10())


def as_record(measured: Measured, machine: Machine, *, preset: str, dtype: str) -> dict[str, Any]:
    """Return the record of a row, json-ready."""
    row = measured.row
    figures = {
        key: value
        for key, value in dataclasses.asdict(measured).items()
        if key not in ("row", "size")
    }
    return {
        "name": "causal_decoder",
        "row": row.name,
        "class": "F",
        "preset": preset,
        "weights": "random",
        "geometry": size_name(measured.size),
        "gpu_count": int(machine.gpu is not None),
        "dtype": dtype,
        "mode": str(row.mode),
        "form": str(row.form),
        **figures,
        "pace": PACE,
        **dataclasses.asdict(machine),
    }


def _rows(device: torch.device, names: str) -> list[Row]:
    """Rows of the forms that were named. Raises: ConfigError for one that the device has not."""
    forms = list(_SHARES) if device.type == "cuda" else [Form.PLAIN]
    chosen = list(map(str, forms)) if names == "all" else names.split(",")
    for name in chosen:
        if name not in forms:
            raise ConfigError(f"forms: {name!r}; allowed on {device}: all, {', '.join(forms)}")
    modes = (Mode.SINGLE_A1, Mode.PAIR)
    return [Row(mode=mode, form=form) for form in forms if form in chosen for mode in modes]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says and return the exit code."""
    parser = command_parser("benchmarks.decoders", __doc__)
    parser.add_argument("--geometry", default=GEOMETRIES, help="picture sizes with commas")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--forms", default="all", help="all, or names with commas")
    parser.add_argument("--calls", type=count, default=120, help="that count, of a recorded row")
    parser.add_argument("--limit-s", type=float, default=90.0, help="no row begins later")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers")
    parser.add_argument("--record", type=Path, help="file to append to: benchmarks/decoders.jsonl")
    parser.add_argument("--commit", help="of the files, where they are no checkout")
    options = parser.parse_args(arguments)
    try:
        sizes = [parse_geometry(text) for text in options.geometry.split(",")]
        device = resolve_device(options.device)
        rows = _rows(device, options.forms)
    except WorldStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    start_s = time.perf_counter()
    machine = describe_machine(device, commit=options.commit)
    vit = random_vit(_TINY if options.tiny else RELEASED, device)
    benches = [Bench(vit, size, calls=options.calls, dropped=5) for size in sizes]
    for bench in benches:  # with fp32 blocks
        bench.keep_exact(sorted({row.mode for row in rows}))
    vit.cast_blocks(torch.bfloat16)
    records = []
    print(f"{machine.gpu or machine.cpu}\n{HEAD}", file=sys.stderr)
    for row, bench in itertools.product(rows, benches):
        spent_s = time.perf_counter() - start_s
        if spent_s > options.limit_s:
            name = f"{size_name(bench.size)} {row.name}"
            print(f"{name}: left out, {spent_s:.0f} s have gone", file=sys.stderr)
            continue
        measured = bench.run(row, size=16)
        print(measured.line, file=sys.stderr, flush=True)
        preset = "tiny" if options.tiny else "h3_33b"
        records.append(as_record(measured, machine, preset=preset, dtype="bfloat16"))
        if options.record is not None:
            append_record(options.record, records[-1])
    print(json.dumps({"rows": records}))
    if not records:
        message = f"error: nothing was measured: limit_s is {options.limit_s:g}; allowed: more"
        print(message, file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())

"""What a new prompt or a new start costs while somebody walks: the prefix, then the next chunks.

    python -m benchmarks.switches --preset h3_33b --geometry 832x480
    python -m benchmarks.switches --preset h3_33b --geometry 832x480 --free-adaln on
    python -m benchmarks.switches --preset tiny --device cpu --chunks 2   # shows that it works

Owns the command and its record. A walk in its steady window gets another prefix three times: one
with as many rows, for which recorded passes serve on; one with fewer, whose first chunk runs before
anything of its shape is recorded; and one with as many as before, which is known again. Then it
begins anew, a few times each: with another seed, for which an engine without modulation weights
has to fetch some; with the same seed, for which it has what it made of them; with another picture.
The engine is as a session would have it, what it gives up for the decoder beside it included.
Random weights of the released shape, which take as long as any. Needs torch, triton, numpy, einops,
safetensors and pillow alone. Lines for people go to stderr, the last line of stdout is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.options import command_parser, count
from benchmarks.record import (
    Spread,
    append_record,
    describe_machine,
    parse_geometry,
    size_name,
)
from benchmarks.session_report import SWITCH_RATIO
from engine.config import PRESET_NAMES, EngineConfig, Geometry, preset
from engine.device import present_memory, resolve_device
from engine.engine import Engine
from engine.errors import ConfigError, WorldStreamError
from engine.prefix import anchor_shape, make_prefix
from engine.rollout import Rollout
from engine.types import FRAMES_PER_CHUNK, Action, Control
from stream.plan_world import plan_world
from stream.world_spec import WorldSpec

EXIT_OK, EXIT_USAGE, EXIT_ENVIRONMENT = 0, 2, 3
SEED = 0
RESTARTS = 3
"""Of each kind."""
FREE_ADALN: dict[str, Literal["auto", True, False]] = {"auto": "auto", "on": True, "off": False}
_EXTRA_DROPPED = 3
_PROMPT = "a meadow by day"
_ACTION = Action.from_keys([{Control.FORWARD}] * FRAMES_PER_CHUNK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """One new prefix."""

    text_rows: int
    prefix_ms: float
    """Keys and values of the new prefix, and the history placed by it."""
    chunk_ms: tuple[float, ...]
    """The chunks after it, in order."""
    capture_count: int
    """Passes recorded in them."""


@dataclass(kw_only=True, slots=True)
class Restarts:
    """Rollouts that began anew in the same way, in order."""

    prefix_ms: list[float] = field(default_factory=list)
    """Keys and values of the prefix, and the modulation of its audio rows."""
    chunk_ms: list[float] = field(default_factory=list)
    """From there to the latents of the first chunk."""
    capture_count: int = 0
    """Passes recorded in them."""


class Walk:
    """A rollout in its steady window.

    Args:
        engine: with whatever prompt encoder; its rows are cut here.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, config = engine, engine.model_config
        self._anchor_BCTHW = _anchor(engine, 0)
        self._rollout: Rollout = engine.new_rollout(
            _PROMPT, anchor_BCTHW=self._anchor_BCTHW, seed=SEED
        )
        self.dropped_count = config.window_chunks + _EXTRA_DROPPED
        self.chunk_ms(self.dropped_count)

    def chunk_ms(self, count: int) -> list[float]:
        """Times of the next chunks, each waited for."""
        found = []
        for _ in range(count):
            begin_s = _now_s(self._engine)
            self._engine.step(self._rollout, _ACTION)
            self._engine.settle(self._rollout)
            found.append((_now_s(self._engine) - begin_s) * 1e3)
        return found

    def switch(self, prompt: str, text_rows: int, chunk_count: int) -> Switch:
        """Change the prefix to the first rows of a prompt and go on."""
        core, config, rollout = self._engine.core, self._engine.model_config, self._rollout
        encoding = self._engine.prompts.encode(prompt)
        rows_BRE: Tensor = encoding.rows_BRE[:, :text_rows].to(self._engine.device)
        before = _captures(self._engine)
        begin_s = _now_s(self._engine)
        inputs = make_prefix(
            config, rows_BRE, encoding.tags_R[:text_rows], self._anchor_BCTHW, rollout.prefix_draws
        )
        core.switch_prefix(rollout.core, inputs)
        prefix_ms = (_now_s(self._engine) - begin_s) * 1e3
        chunk_ms = tuple(self.chunk_ms(chunk_count))
        return Switch(
            text_rows=text_rows, prefix_ms=prefix_ms, chunk_ms=chunk_ms,
            capture_count=_captures(self._engine) - before,
        )  # fmt: skip


def restart(engine: Engine, seed: int, picture: int, found: Restarts) -> None:
    """Begin a rollout, make its first latents, and let go of it, as a session does first of all."""
    anchor_BCTHW, before = _anchor(engine, picture), _captures(engine)
    begin_s = _now_s(engine)
    rollout = engine.new_rollout(_PROMPT, anchor_BCTHW=anchor_BCTHW, seed=seed)
    middle_s = _now_s(engine)
    engine.denoise(rollout, _ACTION)
    found.prefix_ms.append((middle_s - begin_s) * 1e3)
    found.chunk_ms.append((_now_s(engine) - middle_s) * 1e3)
    found.capture_count += _captures(engine) - before


def _anchor(engine: Engine, picture: int) -> Tensor:
    generator = torch.Generator().manual_seed(picture)
    return torch.randn(anchor_shape(engine.model_config), generator=generator)


def _captures(engine: Engine) -> int:
    runner = engine.core.runner
    return 0 if runner is None else runner.counts.captures


def _now_s(engine: Engine) -> float:
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return time.perf_counter()


def load(preset_name: str, geometry: Geometry | None, config: EngineConfig) -> Engine:
    """Make an engine as a session would have it beside its decoder.

    Raises: ConfigError, DeviceError.
    """
    found = preset(preset_name, geometry)
    spec = WorldSpec(
        source="model", preset=preset_name, geometry=found.model.geometry, weights="random",
        engine=config,
    )  # fmt: skip
    planned = plan_world(spec, None, present_memory(resolve_device(config.device)))
    return Engine.from_random(planned.model, planned.engine, geometries=found.geometries)


def measure(engine: Engine, chunk_count: int) -> dict[str, Any]:
    """Walk, switch, walk, begin anew; return the record without the machine."""
    walk = Walk(engine)
    steady = Spread.of(walk.chunk_ms(chunk_count), unit="ms", dropped_count=walk.dropped_count)
    rows = engine.prompts.encode("").rows_BRE.shape[1]
    # Fewer rows by a half: any other length would do, and lengths are even in the released model.
    fewer = max(2, rows // 4 * 2)
    same, shorter, known = (
        walk.switch("snow at night", text_rows, 2) for text_rows in (rows, fewer, rows)
    )
    del walk  # the next rollout takes over its memory
    new_seed, same_seed, picture = Restarts(), Restarts(), Restarts()
    for seed in range(SEED + 1, SEED + 1 + RESTARTS):
        restart(engine, seed, 0, new_seed)
        restart(engine, seed, 0, same_seed)
        restart(engine, seed, seed, picture)
    new_ms, same_ms = (statistics.median(each.prefix_ms) for each in (new_seed, same_seed))
    return {
        "name": "switches",
        "steady": dataclasses.asdict(steady),
        "same_length": dataclasses.asdict(same),
        "new_length": dataclasses.asdict(shorter),
        "known_length": dataclasses.asdict(known),
        "first_chunk_ratio": round(shorter.chunk_ms[0] / steady.p50, 3),
        "new_seed": dataclasses.asdict(new_seed),
        "same_seed": dataclasses.asdict(same_seed),
        "another_picture": dataclasses.asdict(picture),
        "new_seed_extra_ms": round(new_ms - same_ms, 3),
    }


def line(record: dict[str, Any]) -> str:
    """Return what a record says, for people."""
    parts = [f"steady chunk {record['steady']['p50']:.1f} ms"]
    for name, words in (
        ("same_length", "as many rows"), ("new_length", "another length"),
        ("known_length", "as many as before"),
    ):  # fmt: skip
        switch = record[name]
        chunks = ", ".join(f"{ms:.1f}" for ms in switch["chunk_ms"])
        parts.append(
            f"{words} ({switch['text_rows']}): prefix {switch['prefix_ms']:.1f}, "
            f"chunks {chunks} ms, {switch['capture_count']} recorded"
        )
    parts.append(f"first chunk {record['first_chunk_ratio']:.2f} x steady (<= {SWITCH_RATIO:g})")
    for name, words in (
        ("new_seed", "anew, another seed"), ("same_seed", "same seed"),
        ("another_picture", "another picture"),
    ):  # fmt: skip
        restarts = record[name]
        prefixes, chunks = (
            ", ".join(f"{ms:.1f}" for ms in restarts[key]) for key in ("prefix_ms", "chunk_ms")
        )
        parts.append(
            f"{words}: prefix {prefixes}, first chunk {chunks} ms, "
            f"{restarts['capture_count']} recorded"
        )
    parts.append(f"a new seed's prefix takes {record['new_seed_extra_ms']:.1f} ms longer")
    return "; ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says and return the exit code."""
    parser = command_parser("benchmarks.switches", __doc__)
    parser.add_argument("--preset", choices=PRESET_NAMES, default="h3_33b")
    parser.add_argument("--geometry", help="picture size, such as 832x480")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--chunks", type=count, default=4, help="steady ones that count")
    parser.add_argument(
        "--free-adaln", choices=tuple(FREE_ADALN), default="auto",
        help="give the modulation weights up; auto: where a session would have to",
    )  # fmt: skip
    parser.add_argument("--record", type=Path, help="file to append to: benchmarks/switches.jsonl")
    parser.add_argument("--commit", help="of the files, where they are no checkout")
    options = parser.parse_args(arguments)
    try:
        geometry = None if options.geometry is None else parse_geometry(options.geometry)
        config = EngineConfig(device=options.device, free_adaln=FREE_ADALN[options.free_adaln])
        engine = load(options.preset, geometry, config)
        try:
            record = measure(engine, options.chunks)
        finally:
            engine.close()
        record |= {
            "class": "X",
            "preset": options.preset,
            "weights": "random",
            "gpu_count": int(engine.device.type == "cuda"),
            "geometry": size_name(engine.model_config.geometry),
            # None as in older records, which kept them.
            "free_adaln": engine.config.free_adaln or None,
            "linear": engine.config.linear,
            "kernels": engine.config.kernels,
            **dataclasses.asdict(describe_machine(engine.device, commit=options.commit)),
        }
    except WorldStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ENVIRONMENT
    print(line(record), file=sys.stderr, flush=True)
    if options.record is not None:
        append_record(options.record, record)
    print(json.dumps(record), flush=True)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())

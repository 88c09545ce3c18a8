"""What a new prompt costs while somebody walks: the new prefix, then the first chunks after it.

    python -m benchmarks.switches --preset h3_33b --geometry 832x480
    python -m benchmarks.switches --preset tiny --device cpu --chunks 2   # shows that it works

Owns the command and its record. A walk in its steady window gets another prefix three times: one
with as many rows, for which recorded passes serve on; one with fewer, whose first chunk runs before
anything of its shape is recorded; and one with as many as before, which is known again. Random
weights of the released shape, which take as long as any. Needs torch, triton, numpy, einops and
safetensors alone. Lines for people go to stderr, the last line of stdout is JSON.
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

from benchmarks.climb import LadderScenario
from benchmarks.options import command_parser
from benchmarks.record import (
    Spread,
    append_record,
    describe_machine,
    parse_geometry,
    size_name,
)
from benchmarks.session_report import SWITCH_RATIO
from engine.config import PRESET_NAMES, EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, WorldStreamError
from engine.parallel import Alone
from engine.prefix import anchor_shape, make_prefix
from engine.rollout import Rollout
from engine.types import FRAMES_PER_CHUNK, Action, Control

EXIT_OK, EXIT_USAGE, EXIT_ENVIRONMENT = 0, 2, 3
SEED = 0
_EXTRA_DROPPED = 3
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


class Walk:
    """A rollout in its steady window.

    Args:
        engine: with whatever prompt encoder; its rows are cut here.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, config = engine, engine.model_config
        generator = torch.Generator().manual_seed(SEED)
        self._anchor_BCTHW = torch.randn(anchor_shape(config), generator=generator)
        self._rollout: Rollout = engine.new_rollout(
            "a meadow by day", anchor_BCTHW=self._anchor_BCTHW, seed=SEED
        )
        self.dropped_count = config.window_chunks + _EXTRA_DROPPED
        self.chunk_ms(self.dropped_count)

    def chunk_ms(self, count: int) -> list[float]:
        """Times of the next chunks, each waited for."""
        found = []
        for _ in range(count):
            begin_s = self._now_s()
            self._engine.step(self._rollout, _ACTION)
            self._engine.settle(self._rollout)
            found.append((self._now_s() - begin_s) * 1e3)
        return found

    def switch(self, prompt: str, text_rows: int, chunk_count: int) -> Switch:
        """Change the prefix to the first rows of a prompt and go on."""
        core, config, rollout = self._engine.core, self._engine.model_config, self._rollout
        encoding = self._engine.prompts.encode(prompt)
        rows_BRE: Tensor = encoding.rows_BRE[:, :text_rows].to(self._engine.device)
        before = 0 if core.runner is None else core.runner.counts.captures
        begin_s = self._now_s()
        inputs = make_prefix(
            config, rows_BRE, encoding.tags_R[:text_rows], self._anchor_BCTHW, rollout.prefix_draws
        )
        core.switch_prefix(rollout.core, inputs)
        prefix_ms = (self._now_s() - begin_s) * 1e3
        chunk_ms = tuple(self.chunk_ms(chunk_count))
        after = 0 if core.runner is None else core.runner.counts.captures
        return Switch(
            text_rows=text_rows, prefix_ms=prefix_ms, chunk_ms=chunk_ms,
            capture_count=after - before,
        )  # fmt: skip

    def _now_s(self) -> float:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        return time.perf_counter()


def measure(engine: Engine, count: int) -> dict[str, Any]:
    """Walk, switch, walk; return the record without the machine."""
    walk = Walk(engine)
    steady = Spread.of(walk.chunk_ms(count), unit="ms", dropped_count=walk.dropped_count)
    rows = engine.prompts.encode("").rows_BRE.shape[1]
    # Fewer rows by a half: any other length would do, and lengths are even in the released model.
    fewer = max(2, rows // 4 * 2)
    same, shorter, known = (
        walk.switch("snow at night", text_rows, 2) for text_rows in (rows, fewer, rows)
    )
    return {
        "name": "switches",
        "steady": dataclasses.asdict(steady),
        "same_length": dataclasses.asdict(same),
        "new_length": dataclasses.asdict(shorter),
        "known_length": dataclasses.asdict(known),
        "first_chunk_ratio": round(shorter.chunk_ms[0] / steady.p50, 3),
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
    return "; ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says and return the exit code."""
    parser = command_parser("benchmarks.switches", __doc__)
    parser.add_argument("--preset", choices=PRESET_NAMES, default="h3_33b")
    parser.add_argument("--geometry", help="picture size, such as 832x480")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--chunks", type=int, default=4, help="steady ones that count")
    parser.add_argument("--record", type=Path, help="file to append to: benchmarks/switches.jsonl")
    parser.add_argument("--commit", help="of the files, where they are no checkout")
    options = parser.parse_args(arguments)
    try:
        scenario = LadderScenario(
            preset=options.preset,
            weights="random",
            geometry=None if options.geometry is None else parse_geometry(options.geometry),
            device=options.device,
            chunk_count=options.chunks,
        )
        engine = scenario.load(EngineConfig(device=options.device), Alone())
        try:
            record = measure(engine, options.chunks)
        finally:
            engine.close()
        record |= {
            "class": "X",
            "preset": options.preset,
            "weights": "random",
            "gpu_count": int(engine.device.type == "cuda"),
            "geometry": size_name(scenario.model.geometry),
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

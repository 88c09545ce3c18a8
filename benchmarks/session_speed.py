"""A session from its start to the steady window: start-up, frames a second, time to a first frame.

    python -m benchmarks.session_speed --preset h3_33b --geometry 832x480
    python -m benchmarks.session_speed --preset tiny --device cpu --chunks 3

`worldstream bench session` is the same. Owns the order of the measurement; everything goes through
the `Session` that `serve` runs. Needs torch, triton, numpy, einops, safetensors and pillow alone.
Rows: "exact" has the dtype of the weights; the others are approximations. "A" puts the linears into
eight bits, "mixed" all but the output of attention, "block" all with factors of blocks; "sparse" is
"mixed" and reads a part of the window in summary in its first steps. Lines for people go to stderr,
the last line of stdout is JSON.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.options import add_options, command_parser, take_options
from engine.config import (
    FRAMES_PER_LATENT,
    PRESET_NAMES,
    EngineConfig,
    KernelChoice,
    preset,
)
from engine.errors import ConfigError, WorldStreamError
from stream.load_news import LoadNews

if TYPE_CHECKING:
    import torch

    from engine.memory import MemoryPlan
    from engine.types import Action, StepTimings
    from stream.session import ModelWorld, Session
    from stream.world_spec import WorldSpec

EXIT_OK, EXIT_USAGE, EXIT_ENVIRONMENT = 0, 2, 3
ROWS: dict[str, dict[str, Any]] = {
    "exact": {"linear": "bf16"},
    "A": {"linear": "fp8_rowwise"},
    "mixed": {"linear": "fp8_mixed"},
    "block": {"linear": "fp8_block"},
    "sparse": {"linear": "fp8_mixed", "attention": "sparse"},
}
"""Fields of `EngineConfig` by the name of a row."""
SCENE = "meadow-lake"
SEED = 0
CHUNK_LIMIT = 10_000
_GIB = 2**30
_EXTRA_DROPPED = 3
_LAST = len(FRAMES_PER_LATENT) - 1
_FRAMES = sum(FRAMES_PER_LATENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionScenario:
    """What is measured, as the command line says it."""

    preset: Literal["mini", "h3_33b", "tiny"] = "h3_33b"
    """Which model."""
    weights: str = "auto"
    """shipped, random, or a folder; auto: shipped where they are, else random."""
    geometry: str = "auto"
    """Picture size, such as 832x480; auto: the preset's own."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the transformer blocks and the decoder."""
    kernels: KernelChoice = "auto"
    """Fused kernels and where they round."""
    decoder: str = "auto"
    """Mode of the decoder."""
    rows: str = "exact"
    """exact, A (eight bits), mixed (the same but for attention's output), block (factors of blocks
    in all linears), sparse (mixed and sparse attention), or several with commas."""
    chunks: int = 20
    """Chunks to measure once the window is full, of each kind of measurement."""

    def check(self) -> None:
        """Raises: ConfigError for what cannot be measured."""
        if self.preset not in PRESET_NAMES:
            raise ConfigError(f"preset: {self.preset!r}; allowed: {', '.join(PRESET_NAMES)}")
        if not 1 <= self.chunks <= CHUNK_LIMIT:
            raise ConfigError(f"chunks: {self.chunks}; allowed: 1 to {CHUNK_LIMIT}")
        for row in self.row_names:
            if row not in ROWS:
                raise ConfigError(f"rows: {row!r}; allowed: {', '.join(ROWS)}")

    @property
    def row_names(self) -> tuple[str, ...]:
        """What is measured, in this order."""
        return tuple(self.rows.split(","))

    def spec(self, row: str) -> WorldSpec:
        """The world of a row."""
        from benchmarks.record import parse_geometry
        from stream.world_spec import WorldSpec

        geometry = None if self.geometry == "auto" else parse_geometry(self.geometry)
        found = preset(self.preset, geometry)
        ships = found.weights is not None and geometry in (None, *found.geometries)
        weights = self.weights
        if weights == "auto":
            weights = "shipped" if ships else "random"
        return WorldSpec(
            source="model",
            preset=self.preset,
            geometry=found.model.geometry,
            weights="random" if self.preset == "tiny" else weights,
            engine=EngineConfig(
                device=self.device, dtype=self.dtype, kernels=self.kernels, **ROWS[row]
            ),
            decoder=self.decoder,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRow:
    """Outcome of one row."""

    name: str
    device: torch.device
    dtype: str
    decoder: str
    stages_s: dict[str, float]
    """From the start of the process to the first frame, one after the other."""
    warm_up_s: float
    """From there to the first chunk that counts."""
    chunk_ms: list[float]
    """Back to back: from one chunk's last frame in host memory to the next one's."""
    steps: list[dict[str, float]]
    """Spans of the same chunks on the device, in ms from the begin of their step."""
    first_ms: list[float]
    """Action accepted to first frame in host memory, the refresh before it done, as in service."""
    first_parts: list[dict[str, float]]
    density: float | None
    """Share of the blocks of keys that sparse attention read where it served."""
    plan: MemoryPlan
    allocated_gib: float
    reserved_gib: float
    used_gib: float
    """Of the whole device at the end."""

    @property
    def denoise_count(self) -> int:
        """Denoise steps of a chunk."""
        return sum(name.startswith("denoise_") for name in self.first_parts[0])

    @property
    def frames_per_second(self) -> float:
        """Transformer, refresh and decoder, at the mean chunk."""
        return _FRAMES * len(self.chunk_ms) / sum(self.chunk_ms) * 1e3


class Stages(LoadNews):
    """Times what happens before the first frame."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one stage."""
        begin_s = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - begin_s)

    def add(self, name: str, seconds: float) -> None:
        """Count time to a stage and say so."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        _say(f"  {name}: {seconds:.2f} s")


def run_sessions(
    scenario: SessionScenario,
    *,
    record: Path | None,
    commit: str | None = None,
    stages: Stages | None = None,
) -> str:
    """Measure each row, tell it, keep it; return the JSON line of all.

    Args:
        scenario: what is measured.
        record: file to append one JSON line a row to.
        commit: see `describe_machine`.
        stages: of the start so far.

    Raises: CheckpointError, ConfigError, DeviceError.
    """
    scenario.check()
    stages = stages or Stages()
    import torch

    from benchmarks.record import append_record, describe_machine
    from engine.device import resolve_device

    device = resolve_device(scenario.device)
    lines = []
    for row in scenario.row_names:
        _say(f"row {row}")
        measured = measure_row(scenario, row, stages)
        machine = dataclasses.asdict(describe_machine(device, commit=commit))
        line = {**as_record(scenario, measured), **machine}
        lines.append(line)
        _say(summary(measured))
        if record is not None:
            append_record(record, line)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch.compiler.reset()
        stages = Stages()
    return json.dumps({"name": "session", "rows": lines})


def measure_row(scenario: SessionScenario, row: str, stages: Stages) -> SessionRow:
    """Load, play, measure."""
    import torch

    from engine.attention.sparse import check_density
    from engine.device import resolve_device
    from stream.session import ModelWorld, Session
    from stream.world_spec import Start
    from stream.worlds import ModelCache, default_prompt

    device = resolve_device(scenario.device)
    if device.type == "cuda":
        with stages.stage("device"):
            torch.zeros(1, device=device)
            torch.cuda.reset_peak_memory_stats(device)
    spec, start = scenario.spec(row), Start(image=None, image_path=None, scene=SCENE)
    models = ModelCache(stages)
    try:
        world = models.world(spec, start)
        assert isinstance(world, ModelWorld)
        _wait(device)
        with stages.stage("prompt and prefix"):
            session = Session(world, prompt=default_prompt(start), seed=SEED)
            _wait(device)
        begin_s = time.perf_counter()
        _play(session, world, on_first=lambda: stages.add("first frame", _since(begin_s)))
        dropped_count = preset(scenario.preset).model.window_chunks + _EXTRA_DROPPED
        for _ in range(dropped_count):
            _play(session, world)
        _wait(device)
        warm_up_s = _since(begin_s)
        world.take_density()
        chunk_ms, timings = _back_to_back(session, world, scenario.chunks)
        density = world.take_density()
        if density is not None:
            check_density(density)
        steps = [_spans(each) for each in timings]
        first_ms, first_parts = _one_by_one(session, world, device, scenario.chunks)
        is_cuda = device.type == "cuda"
        free, total = torch.cuda.mem_get_info(device) if is_cuda else (0, 0)
        return SessionRow(
            name=row,
            device=device,
            dtype=world.dtype,
            decoder=world.decoder_name,
            stages_s=dict(stages.seconds),
            warm_up_s=warm_up_s,
            chunk_ms=chunk_ms,
            steps=steps,
            first_ms=first_ms,
            first_parts=first_parts,
            density=density,
            plan=models.plan,
            allocated_gib=torch.cuda.max_memory_allocated(device) / _GIB if is_cuda else 0.0,
            reserved_gib=torch.cuda.max_memory_reserved(device) / _GIB if is_cuda else 0.0,
            used_gib=(total - free) / _GIB,
        )
    finally:
        models.close()


def _back_to_back(
    session: Session, world: ModelWorld, count: int
) -> tuple[list[float], list[StepTimings]]:
    """Chunks without a pause; nothing is read of their clocks before the last one is done."""
    chunk_ms, timings = [], []
    last_s = time.perf_counter()
    for _ in range(count):
        _play(session, world)
        assert world.timings is not None
        timings.append(world.timings)
        now_s = time.perf_counter()
        chunk_ms.append((now_s - last_s) * 1e3)
        last_s = now_s
    return chunk_ms, timings


def _one_by_one(
    session: Session, world: ModelWorld, device: torch.device, count: int
) -> tuple[list[float], list[dict[str, float]]]:
    """Chunks whose action is taken when the device has nothing else to do."""
    first_ms, parts = [], []
    for _ in range(count):
        _wait(device)
        begin_s = time.perf_counter()
        firsts: list[float] = []
        _play(session, world, on_first=lambda: firsts.append(_since(begin_s) * 1e3))  # noqa: B023
        assert world.timings is not None
        clock, steps = world.timings.clock, world.timings.steps
        found = {f"denoise_{index}": ms for index, ms in enumerate(world.timings.denoise_ms)}
        found["camera_and_draws"] = clock.between_ms("begin", "step_0")
        found["decode_first_frames"] = clock.between_ms(f"step_{steps}", "first_frames")
        # What is left: the way of the launches to the device, the wait of the host.
        found["host"] = firsts[0] - sum(found.values())
        first_ms.append(firsts[0])
        parts.append(found)
    return first_ms, parts


def _spans(timings: StepTimings) -> dict[str, float]:
    """When parts of a chunk began and ended on the device, in ms from the begin of its step."""
    clock = timings.clock
    latents = f"step_{timings.steps}"
    names = (latents, "decode", "first_frames", f"decoded_{_LAST}", "refresh", "end")
    return {name: clock.between_ms("begin", name) for name in names}


def overlap_ms(spans: dict[str, float]) -> float:
    """For how long a chunk was decoded and made history at the same time."""
    end = min(spans[f"decoded_{_LAST}"], spans["end"])
    return max(0.0, end - max(spans["decode"], spans["refresh"]))


def _play(session: Session, world: ModelWorld, on_first: Callable[[], None] = lambda: None) -> None:
    """Make a chunk and take its frames to host memory, as the service does."""
    is_first = True
    for frames in session.step(_action(session.chunk_index)):
        frames.frames_THWC.cpu()
        if is_first:
            on_first()
            is_first = False


def _action(index: int) -> Action:
    from engine.types import Action, Control

    turns = (Control.LOOK_RIGHT, Control.FORWARD, Control.LOOK_LEFT, Control.RIGHT)
    return Action.from_keys([{Control.FORWARD, turns[index % len(turns)]}] * _FRAMES)


def as_record(scenario: SessionScenario, row: SessionRow) -> dict[str, Any]:
    """Return the record of a row, json-ready, the machine left out."""
    from benchmarks.record import Spread, size_name

    dropped = preset(scenario.preset).model.window_chunks + _EXTRA_DROPPED + 1

    def spread(values: Sequence[float]) -> dict[str, Any]:
        found = Spread.of(values, unit="ms", dropped_count=dropped)
        return {**dataclasses.asdict(found), "p95": round(_percentile(values, 95), 3)}

    spec, plan = scenario.spec(row.name), row.plan
    peak_gib = row.reserved_gib
    spans = {name: spread([step[name] for step in row.steps]) for name in row.steps[0]}
    parts = {name: spread([each[name] for each in row.first_parts]) for name in row.first_parts[0]}
    return {
        "name": "session",
        "row": row.name,
        "class": "F" if row.name == "exact" else "A",
        "preset": scenario.preset,
        "weights": spec.weights if spec.weights in ("random", "shipped") else "folder",
        "geometry": size_name(spec.geometry),
        "gpu_count": 1 if row.device.type == "cuda" else 0,
        "dtype": row.dtype,
        "linear": spec.engine.linear,
        "attention": spec.engine.attention,
        "sparse_tau": None if row.density is None else spec.engine.sparse_tau,
        "sparse_block": None if row.density is None else spec.engine.sparse_block,
        "sparse_steps": None if row.density is None else spec.engine.sparse_steps,
        "density": None if row.density is None else round(row.density, 4),
        "kernels": spec.engine.kernels,
        "decoder": row.decoder,
        "frames_per_second": round(row.frames_per_second, 3),
        "chunk": spread(row.chunk_ms),
        "spans": spans,
        "overlap": spread([overlap_ms(step) for step in row.steps]),
        "first_frame": spread(row.first_ms),
        "first_frame_parts": parts,
        "start_up_s": {name: round(seconds, 2) for name, seconds in row.stages_s.items()},
        "first_frame_after_s": round(sum(row.stages_s.values()), 2),
        "warm_up_s": round(row.warm_up_s, 2),
        "memory": {
            "planned_gib": round(plan.peak_gib, 3),
            "planned_loading_gib": round(plan.loading_gib, 3),
            "planned_playing_gib": round(plan.playing_gib, 3),
            "free_adaln": plan.free_adaln,
            "parts_gib": {part.name: round(part.playing / _GIB, 3) for part in plan.parts},
            "allocated_peak_gib": round(row.allocated_gib, 3),
            "reserved_peak_gib": round(peak_gib, 3),
            "used_gib": round(row.used_gib, 3),
            "off_by": round(peak_gib / plan.peak_gib - 1.0, 4) if peak_gib else None,
        },
    }


def summary(row: SessionRow) -> str:
    """Return what a row came to, for people."""
    step = row.steps[len(row.steps) // 2]
    parts = ", ".join(
        f"{name} {_percentile([each[name] for each in row.first_parts], 50):.1f}"
        for name in row.first_parts[0]
    )
    chunk_ms, chunk_p95_ms = (_percentile(row.chunk_ms, share) for share in (50, 95))
    lines = [
        f"{row.name}: {row.frames_per_second:.2f} frames/s, {chunk_ms:.1f} ms a chunk "
        f"(p95 {chunk_p95_ms:.1f}): {row.denoise_count} denoise steps, refresh, decoder",
        f"  action to first frame {_percentile(row.first_ms, 50):.1f} ms "
        f"(p95 {_percentile(row.first_ms, 95):.1f}): {parts}",
        f"  on the device: latents at {step[f'step_{row.denoise_count}']:.1f}, "
        f"decoded {step['decode']:.1f} to {step[f'decoded_{_LAST}']:.1f}, refresh "
        f"{step['refresh']:.1f} to {step['end']:.1f} ms; together for {overlap_ms(step):.1f} ms",
        f"  first frame {sum(row.stages_s.values()):.1f} s after the start, steady "
        f"{row.warm_up_s:.1f} s later",
        f"  memory: planned {row.plan.peak_gib:.2f} GiB, peak allocated {row.allocated_gib:.2f}, "
        f"reserved {row.reserved_gib:.2f}, device in use {row.used_gib:.2f}",
    ]
    if row.density is not None:
        lines.append(f"  sparse attention read {row.density:.3f} of the blocks")
    return "\n".join(lines)


def _percentile(values: Sequence[float], share: float) -> float:
    import numpy as np

    return float(np.percentile(np.asarray(values), share))


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _since(begin_s: float) -> float:
    return time.perf_counter() - begin_s


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says and return the exit code."""
    parser = command_parser("benchmarks.session_speed", __doc__)
    add_options(parser, SessionScenario)
    parser.add_argument("--record", type=Path, help="file to append to: benchmarks/session.jsonl")
    parser.add_argument("--commit", help="of the files, where they are no checkout")
    options = parser.parse_args(arguments)
    stages = Stages()
    with stages.stage("imports"):
        import_module("stream.worlds")
    try:
        scenario = take_options(options, SessionScenario)
        line = run_sessions(scenario, record=options.record, commit=options.commit, stages=stages)
        print(line, flush=True)
    except WorldStreamError as error:
        _say(f"error: {error}")
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ENVIRONMENT
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())

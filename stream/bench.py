"""`worldstream bench engine`: how fast a preset makes frames, where the time goes, what it holds.

Owns the scenario, the timing of its parts, the table and the record. Everything is measured through
the `Session` that every command uses, in one process; the steady window begins when the window of
chunks is full and has slid once, and nothing before it counts.
Classes: X the same bits as the plain path in float32, F the same operations with other rounding.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import (
    Machine,
    Spread,
    append_record,
    describe_machine,
    peak_resident_mib,
    resident_mib,
)
from engine.config import PRESET_NAMES, EngineConfig, Geometry, preset
from engine.device import DtypeName, resolve_device
from engine.errors import ConfigError
from engine.types import FRAMES_PER_CHUNK, Action, Control
from stream.jobs import Start, WorldSpec
from stream.session import ModelWorld, Session
from stream.worlds import ModelCache, default_prompt

CHUNK_LIMIT = 100_000
SCENE = "meadow-lake"
SEED = 0
MEMORY_SAMPLES = 20
ABLATIONS = ("prefix_cache", "adaln_tables", "packed_history", "compile", "dtype")
"""What can be changed, one at a time: shortcuts left out, eager or compiled, the other dtype."""
_MIB = 2**20
_KEYS: tuple[tuple[Control, ...], ...] = (
    (Control.FORWARD,),
    (Control.FORWARD, Control.LOOK_RIGHT),
    (Control.LOOK_RIGHT,),
    (Control.RIGHT, Control.LOOK_LEFT),
)
"""Held over one chunk each, in turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What is measured. Raises ConfigError for what cannot be."""

    preset: str = "mini"
    weights: str = "shipped"
    geometry: Geometry | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    chunk_count: int = 20
    """Chunks that count, after the warm-up."""

    def __post_init__(self) -> None:
        if self.preset not in PRESET_NAMES:
            raise ConfigError(f"preset: {self.preset!r}; allowed: {', '.join(PRESET_NAMES)}")
        if not 1 <= self.chunk_count <= CHUNK_LIMIT:
            raise ConfigError(f"chunks: {self.chunk_count}; allowed: 1 to {CHUNK_LIMIT}")
        found = preset(self.preset)
        if self.weights == "shipped":
            if found.weights is None and self.preset != "tiny":
                raise ConfigError(
                    f"weights: no weights ship with {self.preset}; allowed: random, or a folder"
                )
            if self.size != found.model.geometry:
                made_for = found.model.geometry
                raise ConfigError(
                    f"geometry: {size_name(self.size)}; the weights that ship are made for "
                    f"{size_name(made_for)}; allowed with --weights random"
                )

    @property
    def size(self) -> Geometry:
        """Picture size."""
        return self.geometry or preset(self.preset).model.geometry

    @property
    def spec(self) -> WorldSpec:
        """The world to load."""
        weights = "random" if self.preset == "tiny" else self.weights
        return WorldSpec(
            source="model",
            preset=self.preset,
            geometry=self.size,
            weights=weights,
            engine=self.engine,
        )

    def config_hash(self) -> str:
        """Hash of everything above and of the model's configuration."""
        model = preset(self.preset, self.size).model
        text = json.dumps(dataclasses.asdict(self), sort_keys=True) + model.to_json()
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory of the process and, on CUDA, of its tensors there."""

    peak_mib: float
    start_mib: float
    """When the steady window began."""
    end_mib: float
    samples_mib: tuple[float, ...]
    """In between, evenly."""
    device_peak_mib: float | None
    device_drift_mib: float | None

    @property
    def drift_mib(self) -> float:
        """Growth over the steady window."""
        return self.end_mib - self.start_mib


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Outcome of one scenario."""

    scenario: Scenario
    device: torch.device
    dtype: str
    dtype_note: str
    has_frames: bool
    load_s: float
    first_frame_s: float
    """From the end of loading to the first frame (the first latents where there is no decoder)."""
    warm_up_s: float
    parts: dict[str, Spread]
    chunk: Spread
    cpu: Spread
    """Processor time of all threads: says more than wall time on a busy machine."""
    memory: Memory
    digest: str
    """Of all that was made."""

    @property
    def frames_per_second(self) -> float:
        """Frames a second at the median chunk."""
        return FRAMES_PER_CHUNK / self.chunk.p50 * 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """The scenario with one thing changed."""

    name: str
    row_class: str
    """X where it made the control's bits, else F: found by comparing digests."""
    measured: Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """Times of one chunk, in milliseconds."""

    parts: dict[str, float]
    chunk_ms: float
    cpu_ms: float
    first_ms: float


def parse_geometry(text: str) -> Geometry:
    """Read WIDTHxHEIGHT.

    Raises: ConfigError.
    """
    match = re.fullmatch(r"(\d{2,4})x(\d{2,4})", text)
    if match is None:
        raise ConfigError(f"geometry: {text!r}; allowed: WIDTHxHEIGHT, multiples of 32")
    return Geometry(width_px=int(match[1]), height_px=int(match[2]))


def parse_ablations(text: str) -> tuple[str, ...]:
    """Read "all" or names with commas between them.

    Raises: ConfigError.
    """
    names = ABLATIONS if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in ABLATIONS:
            raise ConfigError(f"ablations: {name!r}; allowed: all, {', '.join(ABLATIONS)}")
    return names


def size_name(size: Geometry) -> str:
    """WIDTHxHEIGHT."""
    return f"{size.width_px}x{size.height_px}"


def measure(scenario: Scenario) -> Measured:
    """Load, warm up, run the steady window.

    Raises: CheckpointError, ConfigError, DeviceError.
    """
    device = resolve_device(scenario.engine.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = Start(image=None, image_path=None, scene=SCENE)
    models = ModelCache()
    begin_s = time.perf_counter()
    world = models.world(scenario.spec, start)
    load_s = time.perf_counter() - begin_s
    assert isinstance(world, ModelWorld)
    try:
        begin_s = time.perf_counter()
        session = Session(world, prompt=default_prompt(start), seed=SEED)
        begin_ms = (time.perf_counter() - begin_s) * 1e3
        warm_up_count = preset(scenario.preset).model.window_chunks + 1
        first = _chunk(session, world, device)
        for _ in range(warm_up_count - 1):
            _chunk(session, world, device)
        warm_up_s = time.perf_counter() - begin_s
        samples, memory = _steady(session, world, device, scenario.chunk_count)
    finally:
        models.close()

    def spread(values: Sequence[float]) -> Spread:
        return Spread.of(values, unit="ms", dropped_count=warm_up_count)

    return Measured(
        scenario=scenario,
        device=device,
        dtype=world.dtype,
        dtype_note=world.note,
        has_frames=world.has_frames,
        load_s=load_s,
        first_frame_s=(begin_ms + first.first_ms) / 1e3,
        warm_up_s=warm_up_s,
        parts={
            name: spread([sample.parts[name] for sample in samples]) for name in samples[0].parts
        },
        chunk=spread([sample.chunk_ms for sample in samples]),
        cpu=spread([sample.cpu_ms for sample in samples]),
        memory=memory,
        digest=session.digest.hex(),
    )


def _steady(
    session: Session, world: ModelWorld, device: torch.device, chunk_count: int
) -> tuple[list[_Sample], Memory]:
    samples, resident = [], [resident_mib()]
    device_start = _allocated_mib(device)
    every = max(1, chunk_count // MEMORY_SAMPLES)
    for index in range(chunk_count):
        samples.append(_chunk(session, world, device))
        if (index + 1) % every == 0 or index + 1 == chunk_count:
            resident.append(resident_mib())
    is_cuda = device.type == "cuda"
    memory = Memory(
        peak_mib=round(peak_resident_mib(), 1),
        start_mib=round(resident[0], 1),
        end_mib=round(resident[-1], 1),
        samples_mib=tuple(round(each, 1) for each in resident[1:-1]),
        device_peak_mib=torch.cuda.max_memory_allocated(device) / _MIB if is_cuda else None,
        device_drift_mib=_allocated_mib(device) - device_start if is_cuda else None,
    )
    return samples, memory


def _allocated_mib(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / _MIB if device.type == "cuda" else 0.0


def _chunk(session: Session, world: ModelWorld, device: torch.device) -> _Sample:
    """One chunk to its last frame in host memory."""
    action = Action.from_keys([_KEYS[session.chunk_index % len(_KEYS)]] * FRAMES_PER_CHUNK)
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    marks_s = []
    for frames in session.step(action):
        frames.frames_THWC.cpu()
        marks_s.append(time.perf_counter())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    end_s = time.perf_counter()
    timings = world.timings
    assert timings is not None
    parts = {f"denoise_{step}": ms for step, ms in enumerate(timings.denoise_ms)}
    parts["refresh"] = timings.refresh_ms
    parts["step_other"] = timings.total_ms - sum(timings.denoise_ms) - timings.refresh_ms
    before_s = begin_s + timings.total_ms / 1e3
    for index, mark_s in enumerate(marks_s):
        parts[f"decode_{index}"] = (mark_s - before_s) * 1e3
        before_s = mark_s
    if marks_s:
        parts["decode"] = (marks_s[-1] - begin_s) * 1e3 - timings.total_ms
    return _Sample(
        parts=parts,
        chunk_ms=(end_s - begin_s) * 1e3,
        cpu_ms=(time.process_time() - cpu_s) * 1e3,
        first_ms=((marks_s[0] if marks_s else end_s) - begin_s) * 1e3,
    )


def ablate(control: Measured, names: Sequence[str]) -> list[Ablation]:
    """Measure the scenario with one thing changed at a time, then unchanged again."""
    base = control.scenario
    chosen: DtypeName = "bfloat16" if control.dtype == "bfloat16" else "float32"
    other: DtypeName = "float32" if chosen == "bfloat16" else "bfloat16"
    engine = dataclasses.replace(base.engine, dtype=chosen)
    rows = []
    for name in (*names, "control"):
        label, changed = f"{name} off", engine
        if name == "control":
            label = "control, rerun"
        elif name == "compile":
            label = "eager blocks" if engine.compile_blocks else "compiled blocks"
            changed = dataclasses.replace(engine, compile_blocks=not engine.compile_blocks)
        elif name == "dtype":
            label, changed = other, dataclasses.replace(engine, dtype=other)
        elif name == "prefix_cache":
            changed = dataclasses.replace(engine, prefix_cache=False)
        elif name == "adaln_tables":
            changed = dataclasses.replace(engine, adaln_tables=False)
        else:
            changed = dataclasses.replace(engine, packed_history=False)
        measured = measure(dataclasses.replace(base, engine=changed))
        row_class = "X" if measured.digest == control.digest else "F"
        rows.append(Ablation(name=label, row_class=row_class, measured=measured))
    return rows


def bench_engine(scenario: Scenario, *, ablations: Sequence[str], record: Path | None) -> str:
    """Measure, draw the table on stderr, append the record if asked; return the JSON line."""
    measured = measure(scenario)
    rows = ablate(measured, ablations) if ablations else []
    machine = describe_machine(measured.device)
    console = Console(stderr=True)
    console.print(_table(measured, machine))
    if rows:
        console.print(_ablation_table(measured, rows))
    line = as_record(measured, rows, machine)
    if record is not None:
        append_record(record, line)
    return json.dumps(line)


def as_record(
    measured: Measured, ablations: Sequence[Ablation], machine: Machine
) -> dict[str, Any]:
    """Return the record of one run, json-ready."""
    scenario, memory = measured.scenario, measured.memory
    line: dict[str, Any] = {
        "name": "engine",
        "frames_per_second": round(measured.frames_per_second, 2),
        "preset": scenario.preset,
        "weights": scenario.spec.weights,
        "geometry": size_name(scenario.size),
        "class": _resolved_class(measured),
        "device": str(measured.device),
        "dtype": measured.dtype,
        "dtype_note": measured.dtype_note,
        "compile_blocks": scenario.engine.compile_blocks,
        "has_frames": measured.has_frames,
        "config_hash": scenario.config_hash(),
        "chunk": dataclasses.asdict(measured.chunk),
        "cpu_time": dataclasses.asdict(measured.cpu),
        "parts": {name: dataclasses.asdict(part) for name, part in measured.parts.items()},
        "load_s": round(measured.load_s, 3),
        "first_frame_s": round(measured.first_frame_s, 3),
        "warm_up_s": round(measured.warm_up_s, 3),
        "memory": {**dataclasses.asdict(memory), "drift_mib": round(memory.drift_mib, 1)},
        **dataclasses.asdict(machine),
    }
    if ablations:
        line["ablations"] = [
            {
                "name": each.name,
                "class": each.row_class,
                "frames_per_second": round(each.measured.frames_per_second, 2),
                "chunk": dataclasses.asdict(each.measured.chunk),
                "cpu_time": dataclasses.asdict(each.measured.cpu),
            }
            for each in ablations
        ]
        line["control_spread"] = round(_control_spread(measured, ablations), 4)
    return line


def _resolved_class(measured: Measured) -> str:
    is_plain = measured.dtype == "float32" and not measured.scenario.engine.compile_blocks
    return "X" if is_plain else "F"


def _control_spread(measured: Measured, ablations: Sequence[Ablation]) -> float:
    """Relative difference of the control to its rerun; smaller gains than that are no gains."""
    rerun = ablations[-1].measured.chunk.p50
    return abs(rerun - measured.chunk.p50) / measured.chunk.p50


def _table(measured: Measured, machine: Machine) -> Table:
    scenario, memory = measured.scenario, measured.memory
    where = machine.gpu or f"{machine.cpu}, {machine.threads} threads"
    compiled = ", compiled blocks" if scenario.engine.compile_blocks else ""
    table = Table(
        title=f"{scenario.preset} {size_name(scenario.size)} {measured.dtype}{compiled} on {where}",
        caption=(
            f"{measured.frames_per_second:.1f} frames/s; load {measured.load_s:.1f} s, first frame "
            f"{measured.first_frame_s:.2f} s later, warm-up {measured.warm_up_s:.1f} s "
            f"({measured.chunk.dropped_count} chunks, dropped); peak {memory.peak_mib:.0f} MiB, "
            f"drift {memory.drift_mib:+.1f} MiB"
        ),
    )
    for title in ("part", "n", "p20 ms", "p50 ms", "p80 ms"):
        table.add_column(title, justify="left" if title == "part" else "right")
    rows = {**measured.parts, "chunk": measured.chunk, "processor time": measured.cpu}
    for name, part in rows.items():
        figures = (f"{value:.1f}" for value in (part.p20, part.p50, part.p80))
        table.add_row(name, str(part.n), *figures, end_section=name == "decode")
    return table


def _ablation_table(measured: Measured, ablations: Sequence[Ablation]) -> Table:
    spread = _control_spread(measured, ablations)
    table = Table(title="One change at a time", caption=f"spread of the control {spread:.1%}")
    for title in ("change", "class", "p50 ms", "processor ms", "frames/s", "against control"):
        table.add_column(title, justify="left" if title == "change" else "right")
    control = Ablation(name="control", row_class=_resolved_class(measured), measured=measured)
    for each in (control, *ablations):
        chunk = each.measured.chunk
        table.add_row(
            each.name,
            each.row_class,
            f"{chunk.p50:.1f}",
            f"{each.measured.cpu.p50:.1f}",
            f"{each.measured.frames_per_second:.1f}",
            f"{chunk.p50 / measured.chunk.p50:.2f}x",
        )
    return table

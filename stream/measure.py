"""Measurement of a preset: speed of each part of a chunk, and memory.

Owns the scenario and its timing. Everything goes through the `Session` that every command uses; the
steady window begins when the window of chunks is full and has slid once, and nothing before counts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.peak import denoise_flops, product_rate
from benchmarks.record import Spread, peak_resident_mib, resident_mib, size_name
from engine.config import PRESET_NAMES, EngineConfig, Geometry, preset
from engine.device import resolve_device
from engine.errors import ConfigError
from engine.types import FRAMES_PER_CHUNK, Action, Control
from stream.session import ModelWorld, Session
from stream.world_spec import Start, WorldSpec
from stream.worlds import ModelCache, default_prompt

CHUNK_LIMIT = 100_000
SCENE = "meadow-lake"
SEED = 0
MEMORY_SAMPLES = 20
_MIB = 2**20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
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
    denoise_gflop: float
    product_gflops: float
    """Rate of plain matrix products in this dtype, measured right after."""
    digest: str
    """Of all that was made."""

    @property
    def frames_per_second(self) -> float:
        """Frames a second at the median chunk."""
        return FRAMES_PER_CHUNK / self.chunk.p50 * 1e3

    @property
    def dit_fps(self) -> float:
        """Frames a second of the transformer alone, refresh included, at median times."""
        passes = [part for name, part in self.parts.items() if name.startswith("denoise_")]
        transformer_ms = sum(part.p50 for part in passes) + self.parts["refresh"].p50
        return FRAMES_PER_CHUNK / transformer_ms * 1e3

    @property
    def share_of_peak(self) -> float:
        """Rate of the median denoise step against that of plain products."""
        return self.denoise_gflop / (self.parts["denoise_1"].p50 / 1e3) / self.product_gflops


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """Times of one chunk, in milliseconds."""

    parts: dict[str, float]
    chunk_ms: float
    cpu_ms: float
    first_ms: float


class _Times:
    """Times of all chunks, eight bytes each: a bench that watches memory must not fill it."""

    def __init__(self) -> None:
        self.parts: dict[str, array[float]] = {}
        self.chunk_ms = array("d")
        self.cpu_ms = array("d")

    def add(self, sample: _Sample) -> None:
        """Keep the numbers of a chunk."""
        self.chunk_ms.append(sample.chunk_ms)
        self.cpu_ms.append(sample.cpu_ms)
        for name, ms in sample.parts.items():
            self.parts.setdefault(name, array("d")).append(ms)


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
        times, memory = _steady(session, world, device, scenario.chunk_count)
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
        # Chunks differ in their parts where frames wait for the next one.
        parts={name: spread(values) for name, values in times.parts.items()},
        chunk=spread(times.chunk_ms),
        cpu=spread(times.cpu_ms),
        memory=memory,
        denoise_gflop=denoise_flops(preset(scenario.preset, scenario.size).model) / 1e9,
        product_gflops=product_rate(device, _DTYPES[world.dtype]) / 1e9,
        digest=session.digest.hex(),
    )


def _steady(
    session: Session, world: ModelWorld, device: torch.device, chunk_count: int
) -> tuple[_Times, Memory]:
    times, resident = _Times(), [resident_mib()]
    device_start = _allocated_mib(device)
    every = max(1, chunk_count // MEMORY_SAMPLES)
    for index in range(chunk_count):
        times.add(_chunk(session, world, device))
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
    return times, memory


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
    parts["step_other"] = timings.latents_ms - sum(timings.denoise_ms)
    before_s = begin_s + timings.latents_ms / 1e3
    for index, mark_s in enumerate(marks_s):
        parts[f"decode_{index}"] = (mark_s - before_s) * 1e3
        before_s = mark_s
    if marks_s:
        parts["decode"] = (marks_s[-1] - begin_s) * 1e3 - timings.latents_ms
    return _Sample(
        parts=parts,
        chunk_ms=(end_s - begin_s) * 1e3,
        cpu_ms=(time.process_time() - cpu_s) * 1e3,
        first_ms=((marks_s[0] if marks_s else end_s) - begin_s) * 1e3,
    )

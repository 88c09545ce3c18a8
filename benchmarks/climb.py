"""The ladder of the engine, climbed: row after row on the same weights, in one process.

Owns how a row is run, and its error against the first or another. Invariants: every row makes the
weights anew from one seed, so that no row sees what another did to them and one copy is there at a
time; same noise, same controls; a row counts once its window is full and has slid; the refresh is
part of a chunk. Where ranks share a rollout, each row is first run by every rank for itself: what
ranks together make and take is compared with what one makes and takes.
Classes: X the bits of that row, F other rounding, A approximate. X and F are found by comparing
latents.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.floor import Floor, measure_floor
from benchmarks.ladder_rows import ROWS, SEED, LadderScenario, Row, plain_config
from benchmarks.peak import fp8_product_rate, product_rate
from benchmarks.record import Machine, Spread, describe_machine, peak_resident_mib
from engine.attention.sparse import check_density
from engine.clock import new_clock
from engine.config import EngineConfig
from engine.device import choose_dtype, resolve_device, torch_dtype
from engine.engine import Engine
from engine.errors import ConfigError, UnsupportedError
from engine.memory import DtypeName
from engine.parallel import Alone, Exchange
from engine.prefix import anchor_shape
from engine.rollout import Rollout
from engine.types import FRAMES_PER_CHUNK, Action, Control, LatentChunk

PROMPT = "a meadow by day"
ERROR_CHUNKS = (1, 6)
"""Chunks after which the error against the first row is taken."""
_EXTRA_DROPPED = 3
_GIB = 2**30
_KEYS: tuple[tuple[Control, ...], ...] = (
    (Control.FORWARD,),
    (Control.FORWARD, Control.LOOK_RIGHT),
    (Control.LOOK_RIGHT,),
    (Control.RIGHT, Control.LOOK_LEFT),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """What one chunk makes the device do."""

    kernels: int
    """That ran, those inside graphs included."""
    calls: int
    """Launches by the host: of kernels and of graphs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Climbed:
    """Outcome of one row."""

    row: Row
    config: EngineConfig
    row_class: str
    chunk: Spread
    denoise: Spread
    refresh: Spread
    errors: dict[int, float]
    """rel-L2 of the latents against the reference, by chunks made."""
    peak_gib: float
    launches: Launches | None
    attention: dict[str, str]
    """Backend of each group of rows."""
    density: float | None
    """Share of the blocks of keys that sparse attention read where it served."""
    replay_count: int
    """Passes that were replayed from graphs."""
    load_s: float
    warm_up_s: float
    """From the weights to the first chunk that counts: compilation, capture, a full window."""
    one_rank: Spread | None = None
    """A chunk of the same row by one rank alone, where ranks share a rollout."""

    @property
    def speed_up(self) -> float | None:
        """How many times as fast as one rank these are together, at the median chunk."""
        return None if self.one_rank is None else self.one_rank.p50 / self.chunk.p50

    @property
    def dit_fps(self) -> float:
        """Frames a second of transformer alone, refresh included, at the median chunk."""
        return FRAMES_PER_CHUNK / self.chunk.p50 * 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A row that cannot be run here."""

    row: Row
    reason: str


Step = Climbed | Refused


@dataclass(frozen=True, kw_only=True, slots=True)
class Grounds:
    """What all rows stand on."""

    machine: Machine
    dtype: DtypeName
    world_size: int
    product_flops: float
    """Operations a second of large products in the dtype of the blocks, one device."""
    fp8_product_flops: float | None
    floor: Floor

    @property
    def gpu_count(self) -> int:
        """Devices that share a rollout."""
        return self.world_size if self.machine.gpu else 0


def measure_grounds(
    scenario: LadderScenario, exchange: Exchange, *, commit: str | None = None
) -> Grounds:
    """Measure what this machine reaches at best. Every rank calls this.

    Raises: ConfigError, DeviceError; UnsupportedError for rows that cannot run here.
    """
    device = resolve_device(scenario.device)
    scenario.require_device(device)
    dtype = scenario.dtype
    if dtype == "auto":
        dtype = choose_dtype(scenario.model, device).dtype
    blocks = torch_dtype(dtype)
    return Grounds(
        machine=describe_machine(device, commit=commit),
        dtype=dtype,
        world_size=exchange.world_size,
        product_flops=product_rate(device, blocks),
        fp8_product_flops=fp8_product_rate(device),
        floor=measure_floor(scenario.model, device, blocks, world_size=exchange.world_size),
    )


def climb(scenario: LadderScenario, grounds: Grounds, exchange: Exchange) -> Iterator[Step]:
    """Run row after row. Every rank runs all of them.

    Raises: CheckpointError, ConfigError, DeviceError from the first row; later ones are refused
        with their reason instead, and what they change is left out of those after them. Among
        several ranks whatever may have happened to one of them alone is raised: the others wait
        for it in an exchange.
    """
    device = resolve_device(scenario.device)
    base = plain_config(device, grounds.dtype)
    reference: dict[int, Tensor] = {}
    last: Climbed | None = None
    refusable = (ConfigError, UnsupportedError) if exchange.world_size > 1 else (Exception,)
    for row in filter(scenario.takes, ROWS):
        is_reference = row.name == scenario.reference
        if not scenario.measures(row):
            base = dataclasses.replace(base, **row.changes)
            continue
        _release(device)
        try:
            config = dataclasses.replace(base, **row.changes)
            one_rank = None
            if exchange.world_size > 1:
                one_rank = _climb_row(scenario, row, config, Alone(), reference).chunk
                _release(device)
            step = dataclasses.replace(
                _climb_row(scenario, row, config, exchange, reference), one_rank=one_rank
            )
        # A row may fail in a compiler, a driver or for want of memory; the others still count.
        except refusable as error:
            if is_reference:
                raise
            yield Refused(row=row, reason=" ".join(f"{error}".split())[:300])
        else:
            if row.is_approximate and last is not None and step.errors == last.errors:
                yield Refused(row=row, reason="made what the row before made: it was not in use")
                continue
            base, last = config, step
            yield step


def _climb_row(
    scenario: LadderScenario,
    row: Row,
    config: EngineConfig,
    exchange: Exchange,
    reference: dict[int, Tensor],
) -> Climbed:
    """Run one row; the first one fills ``reference``."""
    begin_s = time.perf_counter()
    engine = scenario.load(config, exchange)
    device = engine.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    load_s = time.perf_counter() - begin_s
    try:
        chunks = _chunks(engine)
        made = {}
        dropped_count = scenario.model.window_chunks + _EXTRA_DROPPED
        for index in range(1, dropped_count + 1):
            latents_BCTHW = next(chunks).latents_BCTHW
            if index in ERROR_CHUNKS:
                made[index] = latents_BCTHW.cpu()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        warm_up_s = time.perf_counter() - begin_s - load_s
        sparse = engine.core.attention.sparse
        if sparse is not None:
            sparse.take_density()
        clock = new_clock(device)
        timings = []
        clock.mark("0")
        for index in range(1, scenario.chunk_count + 1):
            timings.append(next(chunks).timings)
            clock.mark(f"{index}")
        chunk_ms = [
            clock.between_ms(f"{index}", f"{index + 1}") for index in range(scenario.chunk_count)
        ]
        density = None if sparse is None else sparse.take_density()
        if density is not None:
            check_density(density)
        launches = _launches(lambda: next(chunks)) if device.type == "cuda" else None
        peak_gib = peak_resident_mib() * 2**20 / _GIB
        if device.type == "cuda":
            peak_gib = torch.cuda.max_memory_allocated(device) / _GIB
        resolved, runner, plan = engine.config, engine.core.runner, engine.core.attention
        replay_count = 0 if runner is None else runner.counts.replays
        if resolved.records_passes and replay_count == 0:
            raise RuntimeError(f"no pass was replayed from a graph: {engine.graphs}")
    finally:
        engine.close()
    if not reference:
        reference.update(made)

    def spread(values: list[float]) -> Spread:
        return Spread.of(values, unit="ms", dropped_count=dropped_count)

    errors = {count: relative_error(made[count], reference[count]) for count in ERROR_CHUNKS}
    is_exact = not any(errors.values())
    return Climbed(
        row=row,
        config=resolved,
        row_class="X" if is_exact else "A" if row.is_approximate else "F",
        chunk=spread(chunk_ms),
        denoise=spread([sum(each.denoise_ms) for each in timings]),
        refresh=spread([each.refresh_ms for each in timings]),
        errors=errors,
        peak_gib=peak_gib,
        launches=launches,
        attention=plan.names,
        density=density,
        replay_count=replay_count,
        load_s=load_s,
        warm_up_s=warm_up_s,
    )


def relative_error(found: Tensor, expected: Tensor) -> float:
    """rel-L2: |found - expected| / |expected|; 0 for equal bits alone, infinite where not finite.

    The difference is taken in float64, so that a single differing bit does not vanish.
    """
    if torch.equal(found, expected):
        return 0.0
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    return error if error == error else float("inf")


def _chunks(engine: Engine) -> Iterator[LatentChunk]:
    """Walk for ever from a picture of noise, in the order of calls of a session."""
    generator = torch.Generator().manual_seed(SEED)
    anchor_BCTHW = torch.randn(anchor_shape(engine.model_config), generator=generator)
    rollout: Rollout = engine.new_rollout(PROMPT, anchor_BCTHW=anchor_BCTHW, seed=SEED)
    while True:
        keys = _KEYS[rollout.chunk_index % len(_KEYS)]
        chunk = engine.step(rollout, Action.from_keys([keys] * FRAMES_PER_CHUNK))
        engine.settle(rollout)
        yield chunk


def _launches(step: Callable[[], object]) -> Launches:
    """Count what one chunk launches, by torch's profiler.

    Operators of the host are left out, and its records are counted as they are: sorted into a
    tree, a hundred thousand take a minute.
    """
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    found = profiler.profiler.kineto_results
    events = [(each.device_type(), each.name()) for each in found.events()]
    calls = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
    return Launches(
        kernels=sum(
            kind == DeviceType.CUDA and not name.startswith(("Mem", "## ")) for kind, name in events
        ),
        calls=sum(name.startswith(calls) for _, name in events),
    )


def _release(device: torch.device) -> None:
    """Give memory and compiled code of the row before back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.compiler.reset()

"""Which attention backend serves each group of rows: measured once, then remembered.

Owns the measurement and its record on disk. Invariant: a machine that has measured a shape makes
the same choice ever after, so the same trace gives the same bits.
Shape suffixes: B batch, R query rows, S key rows, N heads, K head width.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.base import (
    AttentionBackend,
    AttentionNeed,
    AttentionPlan,
    backends,
    select_backend,
)
from engine.config import BackendName, ModelConfig

_log = logging.getLogger(__name__)

CANDIDATES: tuple[BackendName, ...] = (
    "sdpa", "cudnn", "cudnn_split", "flash", "fa3", "fa4",
)  # fmt: skip
"""FlexAttention takes a minute to compile and was never near the fastest: by name only."""
_WARM_UPS, _REPEATS = 3, 9
_MARGIN, _OWN_MARGIN = 0.98, 0.95
"""What is ahead by less than this is no faster: of any backend, of torch's own choice."""

Measure = Callable[[AttentionBackend, "AttentionShape"], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """One group of rows and what it sees."""

    group: str
    rows: int
    keys: int
    heads: int
    need: AttentionNeed

    def __str__(self) -> str:
        dtype = str(self.need.dtype).removeprefix("torch.")
        return f"{self.group} {self.rows}x{self.keys}x{self.heads}x{self.need.head_dim} {dtype}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """Outcome for one group."""

    shape: AttentionShape
    name: BackendName
    times_ms: dict[str, float]
    refused: dict[str, str]

    @property
    def reason(self) -> str:
        """One phrase for a log or a terminal."""
        times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in sorted(self.times_ms.items()))
        refused = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
        return f"{self.shape}: {self.name} ({times or 'not measured'}; refused {refused or 'none'})"


def group_shapes(model: ModelConfig, heads: int, need: AttentionNeed) -> tuple[AttentionShape, ...]:
    """Groups of a steady window: conditioning, audio, video.

    Args:
        model: with its picture size.
        heads: of this rank.
        need: of the model on its device.
    """
    conditioning = model.text_rows + model.rows_per_latent
    prefix = conditioning + model.audio_rows
    window = prefix + model.window_chunks * model.rows_per_chunk
    sizes = {
        "conditioning": (conditioning, conditioning),
        "audio": (model.audio_rows, prefix),
        "video": (model.rows_per_chunk, window),
    }
    return tuple(
        AttentionShape(group=group, rows=rows, keys=keys, heads=heads, need=need)
        for group, (rows, keys) in sizes.items()
    )


def choose(shape: AttentionShape, measure: Measure) -> AttentionChoice:
    """Measure every candidate that serves the shape; torch's own choice wins near ties."""
    times_ms: dict[str, float] = {}
    refused: dict[str, str] = {}
    known = backends()
    for name in CANDIDATES:
        reason = known[name].refusal(shape.need)
        if reason is None:
            try:
                times_ms[name] = measure(known[name], shape)
            except (RuntimeError, ImportError) as error:  # the kernel is there and cannot serve
                reason = str(error).partition("\n")[0]
        if reason is not None:
            refused[name] = reason
    best: BackendName = "sdpa"
    for name in CANDIDATES:
        margin = _OWN_MARGIN if best == "sdpa" else _MARGIN
        if times_ms.get(name, float("inf")) < margin * times_ms.get(best, float("inf")):
            best = name
    return AttentionChoice(shape=shape, name=best, times_ms=times_ms, refused=refused)


def plan_attention(
    shapes: tuple[AttentionShape, ...],
    prefer: BackendName,
    *,
    machine: str,
    record: Path,
    measure: Measure,
) -> AttentionPlan:
    """Backend of each group: that of the given name, or what is fastest here.

    Args:
        shapes: conditioning, audio, video.
        prefer: "auto", or one for all groups.
        machine: what the record is kept by: device and versions.
        record: file of earlier choices; one that cannot be read or written is done without.
        measure: milliseconds of one call.

    Raises: UnsupportedError when the backend of that name refuses.
    """
    need = shapes[0].need
    if prefer != "auto" or need.device_type != "cuda":
        return AttentionPlan.of(select_backend(need, prefer))
    known, chosen = _read(record), {}
    for shape in shapes:
        key = f"{machine}, {shape}"
        name = known.get(key)
        if name in CANDIDATES and backends()[name].refusal(need) is None:
            _log.info("attention_selected %s: %s, as measured before", shape, name)
        else:
            choice = choose(shape, measure)
            name = known[key] = choice.name
            _log.info("attention_selected %s", choice.reason)
        chosen[shape.group] = select_backend(need, name)
    _write(record, known)
    return AttentionPlan(**chosen)


def _read(record: Path) -> dict[str, BackendName]:
    try:
        known = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(record: Path, known: dict[str, BackendName]) -> None:
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(known, indent=1, sort_keys=True))
    except OSError as error:
        _log.warning("attention_not_remembered path=%s: %s", record, error)


def measure_on(device: torch.device) -> Measure:
    """Median time of a call on a CUDA device, in milliseconds, over heads-outermost keys."""

    def measure(backend: AttentionBackend, shape: AttentionShape) -> float:
        def part(rows: int) -> torch.Tensor:
            size = (1, shape.heads, rows, shape.need.head_dim)
            return torch.randn(size, device=device, dtype=shape.need.dtype).transpose(1, 2)

        q_BRNK, k_BSNK, v_BSNK = part(shape.rows).contiguous(), part(shape.keys), part(shape.keys)
        times_ms = []
        for repeat in range(_WARM_UPS + _REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            backend(q_BRNK, k_BSNK, v_BSNK)
            end.record()
            end.synchronize()
            if repeat >= _WARM_UPS:
                times_ms.append(begin.elapsed_time(end))
        return statistics.median(times_ms)

    return measure

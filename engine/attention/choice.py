"""Which attention backend serves each group of rows: measured once, then remembered.

Owns the choice and its record on disk; `timing` measures. Invariant: a machine that has measured a
shape makes the same choice as long as candidates, libraries and kernels of our own are the same, so
the same trace gives the same bits.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine.attention.base import (
    AttentionBackend,
    AttentionNeed,
    AttentionPlan,
    AttentionShape,
    backends,
    select_backend,
)
from engine.attention.timing import Measure
from engine.config import BackendName, ModelConfig

_log = logging.getLogger(__name__)

CANDIDATES: tuple[BackendName, ...] = (
    "sdpa", "cudnn", "cudnn_split", "flash", "fa3", "fa4", "gluon",
)  # fmt: skip
"""FlexAttention takes a minute to compile and was never near the fastest: by name only."""
_MARGIN, _OWN_MARGIN = 0.98, 0.95
"""What is ahead by less than this is no faster: of any backend, of torch's own choice."""
_OWN_SOURCES = tuple(Path(__file__).parents[1] / name for name in ("attention", "kernels"))
"""Folders of what is measured and how: kernels of our own, what calls them, the timing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """Outcome for one group."""

    shape: AttentionShape
    name: BackendName
    times_ms: dict[BackendName, float]
    refused: dict[BackendName, str] = field(default_factory=dict)

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
    known = backends()
    reasons = {name: known[name].refusal(shape.need) for name in CANDIDATES}
    candidates = {name: known[name] for name, reason in reasons.items() if reason is None}
    made = measure(candidates, shape)
    times_ms = made.times_ms
    refused = {name: reason for name, reason in reasons.items() if reason} | made.refused
    best: BackendName = "sdpa"
    for name in CANDIDATES:
        margin = _OWN_MARGIN if best == "sdpa" else _MARGIN
        if times_ms.get(name, float("inf")) < margin * times_ms.get(best, float("inf")):
            best = name
    return AttentionChoice(shape=shape, name=best, times_ms=times_ms, refused=refused)


def measured_by(device_name: str) -> str:
    """Return what times depend on: the device, the libraries and kernels that are called there."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    own = hashlib.sha256()
    for path in sorted(each for folder in _OWN_SOURCES for each in folder.glob("*.py")):
        own.update(path.read_bytes())
    return (
        f"{device_name}, torch {torch.__version__}, cudnn {torch.backends.cudnn.version()}, "
        f"triton {triton}, own {own.hexdigest()[:12]}"
    )


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
        machine: what the record is kept by: see `measured_by`.
        record: file of earlier choices; one that cannot be read or written is done without.
        measure: of all candidates for one shape.

    Raises: UnsupportedError when the backend of that name refuses.
    """
    need = shapes[0].need
    if prefer != "auto" or need.device_type != "cuda":
        return AttentionPlan.of(select_backend(need, prefer))
    known, made = _read(record), dict[str, AttentionChoice]()
    choices = dict[str, AttentionChoice]()
    for shape in shapes:
        key = f"{machine}, {shape}"
        choice = _remembered(known.get(key), shape)
        if choice is None:
            choice = made[key] = choose(shape, measure)
        choices[key] = choice
    if made:
        choices |= _keep(record, made)
    chosen = dict[str, AttentionBackend]()
    for key, choice in choices.items():
        when = "" if choice is made.get(key) else ", as measured before"
        _log.info("attention_selected %s%s", choice.reason, when)
        chosen[choice.shape.group] = select_backend(need, choice.name)
    return AttentionPlan(
        conditioning=chosen["conditioning"], audio=chosen["audio"], video=chosen["video"]
    )


def _remembered(kept: Any, shape: AttentionShape) -> AttentionChoice | None:
    """Earlier choice, unless it is damaged, among others or its backend has gone."""
    match kept:
        case {"name": str(name), "times_ms": dict(times_ms), "candidates": list(among)} if (
            name in CANDIDATES
            and tuple(among) == CANDIDATES
            and all(isinstance(ms, float) for ms in times_ms.values())
        ):
            is_there = backends()[name].refusal(shape.need) is None
            return AttentionChoice(shape=shape, name=name, times_ms=times_ms) if is_there else None
    return None


def _read(record: Path) -> dict[str, Any]:
    try:
        known = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _keep(record: Path, made: dict[str, AttentionChoice]) -> dict[str, AttentionChoice]:
    """Write new choices; return them, but those that another process was first to write as it did.

    Two that begin together would measure otherwise at a near tie, and the next one follows one.
    """
    kept = dict(made)
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with record.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = _read(record)
            for key, choice in made.items():
                earlier = _remembered(known.get(key), choice.shape)
                if earlier is not None:
                    kept[key] = earlier
                    continue
                known[key] = {
                    "name": choice.name, "times_ms": choice.times_ms,
                    "candidates": list(CANDIDATES),
                }  # fmt: skip
            part = record.with_suffix(".part")
            part.write_text(json.dumps(known, indent=1, sort_keys=True))
            # In one step: a reader never meets half a file.
            part.replace(record)
    except OSError as error:
        _log.warning("attention_not_remembered path=%s: %s", record, error)
    return kept

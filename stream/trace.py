"""Traces: what makes a rollout again, one JSON line each, and the digest that proves it.

Owns the format, its writer and its reader.

    header   version, source, preset, weights and their hash, engine settings, prompt, seed, image
    chunk    index, held controls over its 17 frames, prompt where it changed, digest so far
    end      chunks and frames made, digest, whether it was interrupted

Invariants: every line is on the disk before the next chunk begins, so that a crash costs at most
the line being written; the reader drops a torn last line and refuses any other fault. Controls are
stored as axes with all their digits: a replay sees the very same numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from engine.config import FRAMES_PER_LATENT
from engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from engine.types import Action

TRACE_VERSION = 8
"""Rises where an older trace would be read, but not made again bit for bit."""
TRACE_SUFFIX = ".trace.jsonl"
FILE_LIMIT_BYTES = 256 * 1024 * 1024
FRAMES_PER_CHUNK = sum(FRAMES_PER_LATENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceHeader:
    """Everything but the controls that the latents depend on."""

    version: int
    source: str
    """"model", or "renderer" for the true frames of a named scene."""
    preset: str
    weights: str
    model_hash: str
    prompt: str
    seed: int
    chunk_count: int
    """Chunks that were asked for; 0 where a person played until it ended."""
    width_px: int
    height_px: int
    device: str
    dtype: str
    linear: str
    """Scheme of the products."""
    attention: str
    sparse_tau: float
    sparse_block: int
    sparse_steps: int
    kernels: str
    compile: str
    torch_version: str
    thread_count: int
    rank_count: int
    """Processes that shared it, each with some of the rows."""
    scene: str | None
    image: str | None
    image_sha256: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceChunk:
    """Input of one chunk, and the digest of everything up to and including it."""

    chunk_index: int
    held: tuple[tuple[int, dict[str, float]], ...]
    """(frame in the chunk, axes that are not zero) at each change; begins at frame 0."""
    prompt: str | None
    """New prompt from this chunk on, or None."""
    digest: str

    def action(self) -> Action:
        """Return the action as it was, to the last bit.

        Raises:
            ConfigError: an axis or a value that no action has.
        """
        import numpy as np

        from engine.types import AXES, Action

        axes_FA = np.zeros((FRAMES_PER_CHUNK, len(AXES)))
        for frame, axes in self.held:
            if not axes.keys() <= set(AXES):
                raise ConfigError(
                    f"trace, chunk {self.chunk_index}: axes {', '.join(axes)}; "
                    f"allowed: {', '.join(AXES)}"
                )
            axes_FA[frame:] = [axes.get(name, 0.0) for name in AXES]
        try:
            return Action(axes_FA)
        except ConfigError as error:
            raise ConfigError(f"trace, chunk {self.chunk_index}: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEnd:
    """How it ended."""

    chunk_count: int
    frame_count: int
    digest: str
    interrupted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A trace as read."""

    header: TraceHeader
    chunks: tuple[TraceChunk, ...]
    end: TraceEnd | None
    """None where the recording broke off."""
    is_torn: bool
    """Whether the last line was cut and dropped."""


class Digest:
    """Digest of what a source made: fp32 latents, or a renderer's uint8 frames.

    A chain: each value is the sha256 of the value before and the new bytes; zeros at first. So it
    can go on from its last value alone.
    """

    def __init__(self) -> None:
        self._value = bytes(hashlib.sha256().digest_size)

    def update(self, values: Tensor) -> None:
        """Add the bytes of a tensor in row-major order."""
        data = values.detach().cpu().contiguous().numpy().tobytes()
        self._value = hashlib.sha256(self._value + data).digest()

    def resume(self, value: str) -> None:
        """Go on from a value that `hex` returned."""
        self._value = bytes.fromhex(value)

    def hex(self) -> str:
        """Return the digest so far."""
        return self._value.hex()


class TraceWriter:
    """Appends lines, each flushed to the disk.

    Raises:
        OSError: from any method, when the file cannot be written.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.path = path
        self._file = path.open("w", encoding="utf-8", newline="\n")
        self._line("header", asdict(header))

    def chunk(self, index: int, action: Action, *, digest: str, prompt: str | None = None) -> None:
        """Record a finished chunk."""
        data: dict[str, Any] = {"chunk_index": index, "held": held_axes(action)}
        if prompt is not None:
            data["prompt"] = prompt
        self._line("chunk", {**data, "digest": digest})

    def copy(self, chunk: TraceChunk) -> None:
        """Record a chunk of another trace as it is there."""
        data: dict[str, Any] = {"chunk_index": chunk.chunk_index, "held": chunk.held}
        if chunk.prompt is not None:
            data["prompt"] = chunk.prompt
        self._line("chunk", {**data, "digest": chunk.digest})

    def end(self, end: TraceEnd) -> None:
        """Record how it ended."""
        self._line("end", asdict(end))

    def close(self) -> None:
        """Close the file; what was written stays."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _line(self, kind: str, data: dict[str, Any]) -> None:
        self._file.write(json.dumps({"type": kind, **data}, ensure_ascii=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def held_axes(action: Action) -> list[tuple[int, dict[str, float]]]:
    """Axes that are not zero, at frame 0 and at each frame where they change."""
    from engine.types import AXES

    held: list[tuple[int, dict[str, float]]] = []
    for frame, row in enumerate(action.axes_FA.tolist()):
        axes = {name: value for name, value in zip(AXES, row, strict=True) if value}
        if not held or held[-1][1] != axes:
            held.append((frame, axes))
    return held


def trace_path(video: Path) -> Path:
    """`NAME.trace.jsonl` beside `NAME.mp4`."""
    return video.with_name(video.stem + TRACE_SUFFIX)


def read_trace(path: str | Path) -> Trace:
    """Read a trace.

    Raises:
        ConfigError: no such file, or a line (other than a torn last one) that is not as written.
    """
    lines, is_torn = _lines(Path(path))
    where = f"trace {str(path)!r}"
    if not lines:
        raise ConfigError(f"{where} has no header line")
    header = _header(lines[0], where)
    chunks: list[TraceChunk] = []
    end = None
    for number, data in enumerate(lines[1:], start=2):
        kind = data.get("type")
        if end is not None or kind not in ("chunk", "end"):
            raise ConfigError(f"{where}, line {number}: unexpected {kind!r}")
        try:
            if kind == "end":
                end = TraceEnd(**{key: value for key, value in data.items() if key != "type"})
            else:
                chunks.append(_chunk(data, len(chunks)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}, line {number}: {error}") from error
    return Trace(header=header, chunks=tuple(chunks), end=end, is_torn=is_torn)


def _lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"trace: cannot read {str(path)!r}: {error.strerror}") from error
    if len(data) > FILE_LIMIT_BYTES:
        raise ConfigError(f"trace {str(path)!r} is larger than {FILE_LIMIT_BYTES} bytes")
    *complete, rest = data.split(b"\n")
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(complete, start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"trace {str(path)!r}, line {number} is not JSON") from error
        if not isinstance(value, dict):
            raise ConfigError(f"trace {str(path)!r}, line {number} is not an object")
        lines.append(value)
    return lines, bool(rest.strip())


def _header(data: dict[str, Any], where: str) -> TraceHeader:
    if data.get("type") != "header" or not isinstance(data.get("version"), int):
        raise ConfigError(f"{where} does not begin with a header line")
    if data["version"] != TRACE_VERSION:
        raise ConfigError(f"{where} has version {data['version']}; allowed: {TRACE_VERSION}")
    values = {key: value for key, value in data.items() if key != "type"}
    kinds = {field.name: field.type for field in fields(TraceHeader)}
    if set(values) != set(kinds):
        wrong = ", ".join(sorted(set(values) ^ set(kinds)))
        raise ConfigError(f"{where}: header keys missing or unknown: {wrong}")
    allowed: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (float,),
        "str": (str,),
        "str | None": (str, type(None)),
    }
    for name, kind in kinds.items():
        if isinstance(values[name], bool) or not isinstance(values[name], allowed[str(kind)]):
            raise ConfigError(f"{where}: header {name} is {values[name]!r}; allowed: {kind}")
    return TraceHeader(**values)


def _chunk(data: dict[str, Any], expected_index: int) -> TraceChunk:
    if data["chunk_index"] != expected_index:
        raise ValueError(f"chunk_index is {data['chunk_index']}; expected {expected_index}")
    held = tuple(
        (int(frame), {str(name): float(value) for name, value in axes.items()})
        for frame, axes in data["held"]
    )
    frames = [frame for frame, _ in held]
    if not frames or frames[0] != 0 or frames != sorted(set(frames)) or frames[-1] > 16:
        raise ValueError(f"held begins at frames {frames}; allowed: 0, then rising to 16 at most")
    prompt = data.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"prompt is {prompt!r}; allowed: text")
    return TraceChunk(
        chunk_index=expected_index, held=held, prompt=prompt, digest=str(data["digest"])
    )

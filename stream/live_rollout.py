"""A rollout that a person plays: the session, its trace as it goes, the check of what it shows.

Owns the order chunk, trace line; the restoring of a rollout from its trace; the detection of
output that is not numbers, black or frozen. Lives in the worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, WorldStreamError
from stream.generate import trace_header
from stream.jobs import check_prompt
from stream.session import Session, World
from stream.snapshots import (
    SNAPSHOT_CHUNKS,
    SNAPSHOT_LIMIT_BYTES,
    Snapshot,
    snapshot_file,
    write_snapshot,
)
from stream.trace import TRACE_SUFFIX, Trace, TraceEnd, TraceWriter
from stream.worker_messages import FailureCode
from stream.world_spec import Start, WorldSpec

if TYPE_CHECKING:
    from engine.types import Action

BLACK_LEVEL = 4
"""Pictures without a value above this are black; night scenes have values above 100."""


class OutputError(WorldStreamError):
    """The model made something that must not be shown."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class LiveRollout:
    """One epoch of a live session.

    Args:
        spec: which world, for the trace.
        world: opened at `start`; used by this rollout only, until another one begins on it.
        start: first picture.
        prompt: what the world looks like.
        seed: of the rollout.
        trace_path: trace to write; one that exists is replaced.

    Raises:
        ConfigError: the prompt is refused.
        OSError: the trace cannot be written.
    """

    def __init__(
        self,
        spec: WorldSpec,
        world: World,
        start: Start,
        *,
        prompt: str,
        seed: int,
        trace_path: Path,
    ) -> None:
        self.prompt = check_prompt(prompt)
        self.seed = seed
        self.trace_path = trace_path
        self.frame_count = 0
        self.last_frame_HWC: NDArray[np.uint8] | None = None
        self._line_count = 0
        self._kept_index = 0
        self._session = Session(world, prompt=prompt, seed=seed)
        self._next_prompt: str | None = None
        # The trace is given to visitors: it names the picture, not where the server keeps it.
        path = None if start.image_path is None else Path(start.image_path).name
        shown = replace(start, image_path=path)
        header = trace_header(
            spec, shown, world, prompt=prompt, seed=seed, chunk_count=0, rank_count=spec.rank_count
        )
        self._trace: TraceWriter | None = TraceWriter(trace_path, header)

    @property
    def world(self) -> World:
        """What makes the frames."""
        return self._session.world

    @property
    def chunk_index(self) -> int:
        """Index of the next chunk."""
        return self._session.chunk_index

    @property
    def newest_prompt(self) -> str:
        """That of the next chunk."""
        return self.prompt if self._next_prompt is None else self._next_prompt

    def switch_prompt(self, prompt: str) -> None:
        """Change the prompt from the next chunk on.

        Raises:
            ConfigError: the prompt is refused.
        """
        self._next_prompt = check_prompt(prompt)

    def prepare(self) -> None:
        """Do what the next chunk needs but its action: before the latch, so that it is late."""
        if self._next_prompt is not None and self._next_prompt != self.prompt:
            self._session.switch_prompt(self._next_prompt)

    def step(self, action: Action) -> Generator[NDArray[np.uint8], None, None]:
        """Make one chunk and yield its frames [T, H, W, 3], latent by latent.

        The line of the trace is written after the last frame, or when the caller stops early:
        the chunk is part of the rollout from its first frame on. `prepare` comes first.

        Raises:
            OutputError: the chunk holds no numbers, is black or frozen. Nothing that is not a
                number or black is yielded.
        """
        prompt = self._next_prompt if self._next_prompt != self.prompt else None
        index = self._session.chunk_index
        frames = self._session.step(action)
        portions: list[NDArray[np.uint8]] = []
        try:
            for portion in frames:
                frames_THWC = portion.frames_THWC.cpu().numpy()
                self._check_portion(frames_THWC, index)
                portions.append(frames_THWC)
                self.frame_count += len(frames_THWC)
                self.last_frame_HWC = frames_THWC[-1]
                yield frames_THWC
        except ValueError as error:  # decoders refuse what is no number, some before any frame
            if self.world.is_finite:
                raise
            raise _no_numbers(index) from error
        finally:
            if self._trace is not None and (portions or not self.world.is_finite):
                digest = self._session.digest.hex()
                self._trace.chunk(index, action, digest=digest, prompt=prompt)
                self._line_count += 1
            self.prompt = self.prompt if prompt is None else prompt
            self._next_prompt = None
        self._check_frozen(portions, index)

    def keep(self, *, at_once: bool = False) -> None:
        """Write a snapshot where one is due. Call it between two chunks.

        A world that is too large for it comes back chunk by chunk, from its trace.

        Args:
            at_once: write it although none is due.

        Raises:
            OSError: it cannot be written.
        """
        index = self.chunk_index
        is_due = at_once or index % SNAPSHOT_CHUNKS == 0
        if not is_due or index == self._kept_index or self.last_frame_HWC is None:
            return
        if self.world.state_bytes > SNAPSHOT_LIMIT_BYTES:
            return
        from torch import from_numpy

        self._kept_index = index
        snapshot = Snapshot(
            chunk_index=index,
            frame_count=self.frame_count,
            digest=self._session.digest.hex(),
            prompt=self.prompt,
            state=self.world.state(),
            last_frame_HWC=from_numpy(self.last_frame_HWC),
        )
        write_snapshot(snapshot_file(self.trace_path), snapshot)

    def restore(
        self, trace: Trace, should_stop: Callable[[], bool], snapshot: Snapshot | None = None
    ) -> Iterator[bool]:
        """Make the chunks of a trace again and yield, for each, whether it is the same.

        Those before a snapshot that belongs to the trace are taken over instead.

        Raises:
            ConfigError: the trace belongs to other weights.
        """
        if trace.header.model_hash != self.world.model_hash:
            raise ConfigError("trace: it was made with other weights; allowed: those loaded")
        if snapshot is not None and _belongs(snapshot, trace):
            self._take_over(trace, snapshot)
        for chunk in trace.chunks[self.chunk_index :]:
            if should_stop():
                return
            if chunk.prompt is not None:
                self.switch_prompt(chunk.prompt)
            self.prepare()
            deque(self.step(chunk.action()), maxlen=0)
            yield self._session.digest.hex() == chunk.digest

    def end(self) -> None:
        """Complete the trace. Calling it again does nothing."""
        if self._trace is None:
            return
        self._trace.end(
            TraceEnd(
                chunk_count=self._line_count,
                frame_count=self.frame_count,
                digest=self._session.digest.hex(),
                interrupted=False,
            )
        )
        self._trace.close()
        self._trace = None
        snapshot_file(self.trace_path).unlink(missing_ok=True)

    def _take_over(self, trace: Trace, snapshot: Snapshot) -> None:
        """Stand where the snapshot was taken."""
        assert self._trace is not None
        if snapshot.prompt != self.prompt:
            self._session.switch_prompt(snapshot.prompt)
        self._session.resume(
            snapshot.state, chunk_index=snapshot.chunk_index, digest=snapshot.digest
        )
        for chunk in trace.chunks[: snapshot.chunk_index]:
            self._trace.copy(chunk)
        self._line_count = snapshot.chunk_index
        self.prompt = snapshot.prompt
        self.frame_count = snapshot.frame_count
        self.last_frame_HWC = snapshot.last_frame_HWC.numpy()

    def _check_portion(self, frames_THWC: NDArray[np.uint8], index: int) -> None:
        if not self.world.is_finite:
            raise _no_numbers(index)
        if frames_THWC.max() <= BLACK_LEVEL:
            raise OutputError(FailureCode.OUTPUT_BLACK, f"chunk {index}: frames are black")

    def _check_frozen(self, portions: list[NDArray[np.uint8]], index: int) -> None:
        """A model draws noise for each latent: equal frames throughout mean that it is broken.

        Rendered frames may be equal: nobody walks, or somebody walks against a wall.
        """
        if self.world.digest_of != "latents" or not portions:
            return
        first_HWC = portions[0][0]
        if all(np.array_equal(frame, first_HWC) for portion in portions for frame in portion):
            raise OutputError(FailureCode.OUTPUT_FROZEN, f"chunk {index}: all frames are equal")


def _no_numbers(index: int) -> OutputError:
    return OutputError(FailureCode.OUTPUT_NAN, f"chunk {index}: latents are not finite")


def _belongs(snapshot: Snapshot, trace: Trace) -> bool:
    """Whether the snapshot was taken right after one of the chunks of the trace."""
    index = snapshot.chunk_index
    return 0 < index <= len(trace.chunks) and trace.chunks[index - 1].digest == snapshot.digest


def trace_file(folder: Path, session_id: str, epoch: int) -> Path:
    """Trace of one epoch of a session."""
    return folder / f"{session_id}-e{epoch}{TRACE_SUFFIX}"

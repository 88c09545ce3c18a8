"""Rollouts to files: run a job, record its frames and its trace.

Invariants: the trace has a line for every chunk whose latents were made; a stop wish ends after the
chunk in hand with complete files; a failed writer leaves no partial file and keeps the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stream.interrupt import StopWish
from stream.jobs import Job, Outputs
from stream.progress import Progress
from stream.record import FrameWriter, GifWriter, Mp4Writer, PngWriter, Recorder
from stream.trace import TRACE_VERSION, TraceEnd, TraceHeader, TraceWriter, trace_path
from stream.world_spec import Start, WorldSpec

if TYPE_CHECKING:
    from engine.ranks import Ranks
    from engine.types import Action
    from stream.session import Session, World
    from stream.worlds import ModelCache


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkInput:
    """What one chunk is made from."""

    action: Action
    prompt: str | None
    """New prompt from this chunk on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What a rollout left."""

    chunk_count: int
    frame_count: int
    digest: str
    digest_of: str
    device: str
    """Device and dtype, and how they were chosen."""
    is_interrupted: bool
    frames_per_second: float
    paths: tuple[Path, ...]


def generate(job: Job, models: ModelCache) -> Made:
    """Run one job; among several ranks, the first one writes its files.

    Raises:
        WorldStreamError: the world cannot be opened.
        OSError: a file cannot be written; partial files are gone, the trace stays.
    """
    from stream.session import Session
    from stream.worlds import default_prompt

    ranks = models.ranks
    prompt = default_prompt(job.start) if job.prompt is None else job.prompt
    world = models.world(job.world, job.start, with_frames=ranks.is_first)
    session = Session(world, prompt=prompt, seed=job.seed)
    if not ranks.is_first:
        return roll_out(
            session, _inputs(job), job.chunk_count, ranks, recorder=Recorder([]), note=_note_nothing
        )
    header = trace_header(
        job.world, job.start, world, prompt=prompt, seed=job.seed, chunk_count=job.chunk_count,
        rank_count=ranks.count,
    )  # fmt: skip
    with TraceWriter(trace_path(job.outputs.video), header) as trace:

        def note(index: int, chunk: ChunkInput, digest: str) -> None:
            trace.chunk(index, chunk.action, digest=digest, prompt=chunk.prompt)

        recorder = open_recorder(job.outputs, world)
        made = roll_out(session, _inputs(job), job.chunk_count, ranks, recorder=recorder, note=note)
        trace.end(
            TraceEnd(
                chunk_count=made.chunk_count,
                frame_count=made.frame_count,
                digest=made.digest,
                interrupted=made.is_interrupted,
            )
        )
        return made


def roll_out(
    session: Session,
    inputs: Iterable[ChunkInput],
    chunk_count: int,
    ranks: Ranks,
    *,
    recorder: Recorder,
    note: Callable[[int, ChunkInput, str], None],
    label: str = "generate",
) -> Made:
    """Step a session through its inputs and complete the files.

    The first Ctrl-C or SIGTERM ends it after the chunk in hand, with complete files.

    Args:
        session: at its first chunk.
        inputs: one for each chunk.
        chunk_count: how many of them.
        ranks: who makes the same; they end after the same chunk, and the first one tells.
        recorder: takes the frames.
        note: called after each chunk with its index, its input and the digest so far.
        label: of the progress.
    """
    frame_count = 0
    world = session.world
    try:
        with (
            StopWish() as stop,
            Progress(label, chunk_count, is_shown=ranks.is_first) as progress,
        ):
            for chunk in inputs:
                if chunk.prompt is not None:
                    session.switch_prompt(chunk.prompt)
                before = frame_count
                for frames in session.step(chunk.action):
                    recorder.write(frames.frames_THWC.cpu().numpy())
                    frame_count += len(frames.frames_THWC)
                note(session.chunk_index - 1, chunk, session.digest.hex())
                progress.chunk_done(frame_count - before)
                if ranks.any(stop.is_set):
                    break
            for frames in session.finish():
                recorder.write(frames.frames_THWC.cpu().numpy())
                frame_count += len(frames.frames_THWC)
            recorder.finish()
    except BaseException:
        recorder.abort()
        raise
    return Made(
        chunk_count=session.chunk_index,
        frame_count=frame_count,
        digest=session.digest.hex(),
        digest_of=world.digest_of,
        device=f"{world.device} {world.dtype}" + (f" ({world.note})" if world.note else ""),
        is_interrupted=session.chunk_index < chunk_count,
        frames_per_second=progress.frames_per_second,
        paths=tuple(recorder.paths),
    )


def open_recorder(outputs: Outputs | None, world: World) -> Recorder:
    """Open the writers; a world without frames has none."""
    if outputs is None or not world.has_frames:
        return Recorder([])
    size = world.geometry
    video = Mp4Writer(outputs.video, width_px=size.width_px, height_px=size.height_px)
    writers: list[FrameWriter] = [video]
    if outputs.png is not None:
        writers.append(PngWriter(outputs.png))
    if outputs.gif is not None:
        writers.append(GifWriter(outputs.gif))
    return Recorder(writers)


def _inputs(job: Job) -> Iterator[ChunkInput]:
    for index, action in enumerate(job.script.actions(job.chunk_count)):
        yield ChunkInput(action=action, prompt=job.script.prompt_for(index))


def _note_nothing(index: int, chunk: ChunkInput, digest: str) -> None:
    """Leave the trace to the first rank."""


def trace_header(
    spec: WorldSpec,
    start: Start,
    world: World,
    *,
    prompt: str,
    seed: int,
    chunk_count: int,
    rank_count: int = 1,
) -> TraceHeader:
    """Return what a replay needs to know of a rollout that begins."""
    import torch

    return TraceHeader(
        version=TRACE_VERSION,
        source=spec.source,
        preset=spec.preset,
        weights=spec.weights,
        model_hash=world.model_hash,
        prompt=prompt,
        seed=seed,
        chunk_count=chunk_count,
        width_px=world.geometry.width_px,
        height_px=world.geometry.height_px,
        device=world.device,
        dtype=world.dtype,
        linear=world.speed.linear,
        attention=world.speed.attention,
        sparse_tau=world.speed.sparse_tau,
        sparse_block=world.speed.sparse_block,
        sparse_steps=world.speed.sparse_steps,
        kernels=world.speed.kernels,
        compile=world.speed.compile,
        torch_version=torch.__version__,
        thread_count=torch.get_num_threads(),
        rank_count=rank_count,
        scene=start.scene,
        image=start.image_path,
        image_sha256=None if start.image is None else start.image.sha256,
    )

"""A world played through a real worker process, and its trace made again by the command line."""

import asyncio
import json
from pathlib import Path

import pytest

from stream.actions import ActionSnapshot, Edge, wall_ms
from stream.cli import main
from stream.supervisor import WorkerHandle
from stream.trace import read_trace
from stream.worker_messages import (
    ChunkDone,
    ChunkStarted,
    EndSession,
    FrameReady,
    SessionEnded,
    SessionStarted,
    SetPrompt,
    StartFrom,
    StartSession,
    WorkerConfig,
)
from stream.world_spec import world_spec

pytestmark = pytest.mark.cpu

CHUNKS = 4


async def _play(folder: Path, compiling: str) -> Path:
    """Press and tap keys, look round, change the prompt; return the trace."""
    spec = world_spec(
        "tiny", size=None, weights="random", renderer=False, device="cpu", dtype="float32",
        compiling=compiling,
    )  # fmt: skip
    # On a machine that is busy a chunk may take long; what is held counts all the same.
    config = WorkerConfig(
        world=spec, trace_folder=folder, fps=400.0, thread_count=1, stale_ms=60_000.0
    )
    handle = WorkerHandle(config)
    await handle.start()
    handle.send(StartSession(session_id="s", start=StartFrom(scene="snow-ruins"), seed=11))
    trace = Path()
    try:
        async with asyncio.timeout(120.0):
            async for report in handle.messages():
                match report:
                    case SessionStarted():
                        trace = report.trace
                    case FrameReady():
                        handle.ring.release(report.slot)
                    case ChunkStarted():
                        _act(handle, report.chunk)
                    case ChunkDone() if report.chunk == CHUNKS - 1:
                        handle.send(EndSession())
                    case SessionEnded():
                        break
    finally:
        await handle.close()
    return trace


def _act(handle: WorkerHandle, chunk: int) -> None:
    tap = Edge(id=2 * chunk + 1, code="KeyA", is_down=True, ct_ms=0.0)
    handle.mailbox.post(
        ActionSnapshot(
            seq=chunk + 1,
            held=frozenset({"KeyW", "ShiftLeft"}),
            look=(37.0 * chunk, -11.0 * chunk),
            edges=(tap,),
            received_ms=wall_ms(),
        )
    )
    if chunk == 1:
        handle.send(SetPrompt(id=1, prompt="a lake at night"))


@pytest.mark.parametrize("compiling", ["off", "blocks"])
def test_a_live_trace_replays_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compiling: str
) -> None:
    path = asyncio.run(_play(tmp_path, compiling))
    trace = read_trace(path)
    assert trace.header.compile == compiling
    assert len(trace.chunks) >= CHUNKS
    held = json.dumps([chunk.held for chunk in trace.chunks])
    assert all(name in held for name in ("forward", "right", "yaw", "pitch", "boost"))
    assert any(chunk.prompt == "a lake at night" for chunk in trace.chunks)
    assert main(["replay", str(path)]) == 0
    assert f"same as recorded: {len(trace.chunks)} of {len(trace.chunks)}" in (
        capsys.readouterr().out
    )

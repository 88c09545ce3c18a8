"""The handle with real processes; their world paints numbers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TypeVar

import pytest

from stream.frames import NO_CHUNK
from stream.processes import runs
from stream.supervisor import WatchdogLimits, WorkerHandle
from stream.trace import read_trace
from stream.worker_messages import (
    Applied,
    ChunkDone,
    ChunkStarted,
    EndSession,
    Failed,
    FailureCode,
    FrameReady,
    Heartbeat,
    Loading,
    Ready,
    Report,
    Reset,
    SessionEnded,
    SessionStarted,
    SetPrompt,
    StartFrom,
    StartSession,
    WorkerConfig,
)
from tests.stream.painted_worlds import SPEC, DeadlyWorlds, NoWorlds, PaintedWorlds

pytestmark = pytest.mark.cpu

PATIENCE_S = 60.0
QUICK = WatchdogLimits(backoff_first_s=0.05, chunk_s=1.0)
R = TypeVar("R", bound=Report)


class Client:
    """Reads reports and frees the slots of frames at once."""

    def __init__(self, handle: WorkerHandle) -> None:
        self.handle = handle
        self.frames: list[FrameReady] = []
        self._reports = handle.messages()

    def start(self, prompt: str = "slow 0.01") -> None:
        start = StartFrom(scene="meadow-forest")
        self.handle.send(StartSession(session_id="s", start=start, prompt=prompt))

    async def wait(self, kind: type[R], that: Callable[[R], bool] = lambda report: True) -> R:
        async with asyncio.timeout(PATIENCE_S):
            async for report in self._reports:
                if isinstance(report, FrameReady):
                    self.frames.append(report)
                    self.handle.ring.release(report.slot)
                if isinstance(report, kind) and that(report):
                    return report
        raise AssertionError(f"the reports ended without {kind.__name__}")

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.handle.pid is not None
        os.kill(self.handle.pid, number)


@contextlib.asynccontextmanager
async def _client(folder: Path, limits: WatchdogLimits = QUICK) -> AsyncIterator[Client]:
    faults: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context))
    config = WorkerConfig(world=SPEC, trace_folder=folder, fps=200.0, jit_margin_ms=0.0)
    handle = WorkerHandle(config, open_source=PaintedWorlds, limits=limits)
    try:
        await handle.start()
        yield Client(handle)
    finally:
        await handle.close()
    assert not faults


def test_a_session_goes_on_when_its_worker_dies(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _client(tmp_path) as client:
            client.start()
            done = await client.wait(ChunkDone, lambda done: done.chunk == 3)
            client.handle.send(SetPrompt(id=1, prompt="slow 0.02"))
            client.kill()
            failed = await client.wait(Failed)
            assert (failed.code, failed.is_fatal) == (FailureCode.WORKER_DIED, False)
            assert not client.handle.is_ready
            last_id = client.frames[-1].meta.frame_id
            started = await client.wait(SessionStarted)
            assert started.restored_chunk_count >= done.chunk
            assert started.is_same_world
            assert started.epoch == done.epoch + 1
            resumed = await client.wait(FrameReady)
            assert (resumed.meta.chunk, resumed.meta.frame_id) == (NO_CHUNK, last_id + 1)
            # A chunk may begin before the new worker has read the wish that came with the session.
            applied = await client.wait(Applied, lambda applied: applied.id == 1)
            await client.wait(ChunkDone, lambda done: done.chunk >= applied.chunk)
            chunks = read_trace(started.trace).chunks
            assert [chunk.prompt for chunk in chunks if chunk.prompt] == ["slow 0.02"]
            assert client.handle.restart_count == 1

    asyncio.run(scenario())


def test_a_worker_starts_when_the_followers_of_the_one_before_are_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _client(tmp_path) as client:
            await client.wait(Ready)
            with subprocess.Popen(["sleep", "1.5"]) as follower:
                beat = Heartbeat(
                    busy_ms=0.0, device_bytes=0, graphs=(), follower_pids=(follower.pid,)
                )
                client.handle._note(beat)
                client.handle.recycle("memory")
                await client.wait(Loading)
                assert not runs(follower.pid)

    asyncio.run(scenario())


def test_a_session_that_ends_while_there_is_no_worker_is_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _client(tmp_path) as client:
            client.start()
            client.handle.send(EndSession())
            assert (await client.wait(SessionEnded)).session_id == "s"
            client.start("hang 1")
            await client.wait(ChunkStarted, lambda started: started.chunk == 1)
            client.handle.send(EndSession())
            client.kill()
            assert (await client.wait(SessionEnded)).session_id == "s"
            client.start()
            started = await client.wait(SessionStarted)
            assert (started.epoch, started.restored_chunk_count) == (0, 0)

    asyncio.run(scenario())


def test_a_hanging_chunk_is_found_and_its_session_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _client(tmp_path) as client:
            client.start("hang 2")
            failed = await client.wait(Failed)
            assert (failed.session_id, failed.code) == ("s", FailureCode.GEN_TIMEOUT)
            assert (await client.wait(SessionEnded)).session_id == "s"
            await client.wait(Ready)
            client.start()
            await client.wait(ChunkDone)

    asyncio.run(scenario())


def test_a_session_that_kills_each_of_its_workers_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = WatchdogLimits(backoff_first_s=0.05, deaths_of_a_session=1)
        async with _client(tmp_path, limits) as client:
            client.start()
            await client.wait(ChunkDone)
            client.kill()
            assert (await client.wait(SessionEnded)).session_id == "s"

    asyncio.run(scenario())


def test_a_worker_that_dies_while_it_loads_is_given_up_at_last(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = WatchdogLimits(backoff_first_s=0.01, deaths_while_loading=2)
        config = WorkerConfig(world=SPEC, trace_folder=tmp_path)
        handle = WorkerHandle(config, open_source=DeadlyWorlds, limits=limits)
        await handle.start()
        reports = [report async for report in handle.messages()]
        fatal = [each for each in reports if isinstance(each, Failed) and each.is_fatal]
        assert [each.code for each in fatal] == [FailureCode.LOAD_FAILED]
        assert (handle.pid, handle.restart_count) == (None, 1)
        await handle.close()

    asyncio.run(scenario())


def test_a_worker_is_not_blamed_when_nobody_had_time_to_listen(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _client(tmp_path, WatchdogLimits(heartbeat_s=1.5)) as client:
            await client.wait(Ready)
            time.sleep(3.0)
            await asyncio.sleep(1.5)
            assert client.handle.restart_count == 0
            assert client.handle.is_ready

    asyncio.run(scenario())


def test_close_while_the_worker_starts_leaves_no_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        handle = WorkerHandle(WorkerConfig(world=SPEC, trace_folder=tmp_path), limits=QUICK)
        starting = asyncio.create_task(handle.start())
        await asyncio.sleep(0.01)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        pid = handle.pid
        await handle.close()
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(scenario())


def test_a_terminated_worker_completes_its_trace(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _client(tmp_path) as client:
            client.start()
            started = await client.wait(SessionStarted)
            await client.wait(ChunkDone)
            client.kill(signal.SIGTERM)
            await client.wait(Failed)
            assert read_trace(started.trace).end is not None

    asyncio.run(scenario())


def test_commands_wait_for_the_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _client(tmp_path) as client:
            client.start()
            client.handle.send(Reset(id=1, seed=7))
            assert (await client.wait(SessionStarted)).seed == 0
            assert (await client.wait(SessionStarted)).seed == 7

    asyncio.run(scenario())


def test_close_ends_the_process_and_the_memory_within_five_seconds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _client(tmp_path) as client:
            client.start("slow 0.3")
            started = await client.wait(SessionStarted)
            handle, pid = client.handle, client.handle.pid
            begin_s = time.monotonic()
            await handle.close()
            assert time.monotonic() - begin_s < 5.0
            assert pid is not None
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
            for name in (handle.mailbox.name, handle.ring.handle.name):
                with pytest.raises(FileNotFoundError):
                    SharedMemory(name)
            assert read_trace(started.trace).end is not None
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_a_worker_that_cannot_load_is_not_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = WorkerConfig(world=SPEC, trace_folder=tmp_path)
        handle = WorkerHandle(config, open_source=NoWorlds, limits=QUICK)
        await handle.start()
        reports = [report async for report in handle.messages()]
        assert isinstance(reports[-1], Failed)
        assert reports[-1].code is FailureCode.LOAD_FAILED
        assert handle.pid is None
        await handle.close()

    asyncio.run(scenario())


def test_a_supervisor_that_fails_gives_the_worker_up_aloud(tmp_path: Path) -> None:
    async def no_process() -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        handle = WorkerHandle(WorkerConfig(world=SPEC, trace_folder=tmp_path), limits=QUICK)
        handle._spawn = no_process  # type: ignore[method-assign]
        handle._spawn_task(handle._restart())
        report = await anext(handle.messages())
        assert isinstance(report, Failed)
        assert report.is_fatal
        await handle.close()

    asyncio.run(scenario())


def test_the_side_of_the_service_loads_no_torch() -> None:
    code = "import sys, stream.supervisor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

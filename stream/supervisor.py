"""The worker as the API process sees it: one handle that outlives worker processes.

Owns the process, its pipe, the mailbox and the ring; the watchdogs; the restart after a death, with
the session brought back from its trace. Invariants: everything here runs on one event loop; the
pipe is read when it has something (`add_reader`); mailbox and ring stay the same over restarts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from engine.errors import StateError
from stream.actions import ActionMailbox
from stream.frames import FrameRing
from stream.processes import wait_until_gone
from stream.worker import run_worker
from stream.worker_messages import (
    Applied,
    ChunkDone,
    Command,
    EndSession,
    Failed,
    FailureCode,
    FrameReady,
    GraphUse,
    Heartbeat,
    Loading,
    Pause,
    Planned,
    Ready,
    Refused,
    Report,
    Reset,
    Resume,
    SessionEnded,
    SessionStarted,
    SetPrompt,
    Shutdown,
    StartSession,
    StepOnce,
    WorkerConfig,
)
from stream.world_source import LoadedWorlds, OpenSource

FOLLOWERS_S = 3.0
"""From the end of a worker to that of its followers, at most."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchdogLimits:
    """How long a worker may be silent, and how it comes back."""

    heartbeat_s: float = 10.0
    loading_heartbeat_s: float = 60.0
    chunk_s: float = 30.0
    shutdown_s: float = 4.0
    """From `close` to the kill."""
    backoff_first_s: float = 1.0
    backoff_last_s: float = 30.0
    deaths_of_a_session: int = 3
    """Without a chunk in between; then the session is given up."""
    deaths_while_loading: int = 5
    """In a row; then the worker is given up."""


@dataclass(kw_only=True, slots=True)
class _SessionMemory:
    """What is needed to go on with a session in another process."""

    command: StartSession
    """As it would be sent now."""
    trace: Path | None = None
    """None until the session began."""
    death_count: int = 0
    next_prompt: tuple[int, SetPrompt] | None = None
    """A prompt that counts from this chunk on, until that chunk is in the trace."""


class WorkerHandle:
    """A worker that is there again after it died.

    Args:
        config: what it serves.
        open_source: makes the worlds, in the worker; picklable by name.
        limits: of the watchdogs.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        open_source: OpenSource = LoadedWorlds,
        limits: WatchdogLimits | None = None,
    ) -> None:
        self.config = config
        self.mailbox = ActionMailbox.create()
        size = config.world.geometry
        self.ring = FrameRing.create(width_px=size.width_px, height_px=size.height_px)
        self.loading: Loading | None = None
        """Newest progress, also of a session that is being restored."""
        self.plan_text = ""
        """Memory plan of the worker, as a table."""
        self.info: Ready | None = None
        """Set while the worker is ready."""
        self.restart_count = 0
        self.device_bytes = 0
        """Memory on its GPUs, as the worker told last."""
        self.graphs: tuple[GraphUse, ...] = ()
        """What recording made of the worker's passes, as it told last."""
        self._follower_pids: tuple[int, ...] = ()
        self._open_source = open_source
        self._limits = limits or WatchdogLimits()
        self._reports: asyncio.Queue[Report | None] = asyncio.Queue()
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._heard_s = 0.0
        self._session: _SessionMemory | None = None
        self._ending_id: str | None = None
        """Session that the worker was told to end and has not ended yet."""
        self._waiting: list[Command] = []
        """Commands that no worker has answered yet; pauses are part of the session's own."""
        self._backoff_s = self._limits.backoff_first_s
        self._loading_death_count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._is_lost = False

    @property
    def is_ready(self) -> bool:
        """Whether the worker is loaded, warmed up and was heard of within 2 s."""
        return self.info is not None and self.heartbeat_age_s < 2.0

    @property
    def heartbeat_age_s(self) -> float:
        """Time since anything came from the worker."""
        return time.monotonic() - self._heard_s

    @property
    def pid(self) -> int | None:
        """Process id, while there is a process."""
        return None if self._process is None else self._process.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the worker and of its followers, as it told last."""
        return () if self.pid is None else (self.pid, *self._follower_pids)

    async def start(self) -> None:
        """Start the process and return; progress comes as reports."""
        if self._is_closed or self._process is not None:
            raise StateError("worker: already started or closed; expected one start() before that")
        await self._spawn()
        self._spawn_task(self._watch())

    async def messages(self) -> AsyncIterator[Report]:
        """Yield reports until the handle is closed or the worker is gone for good."""
        while (report := await self._reports.get()) is not None:
            yield report

    def send(self, command: Command) -> None:
        """Give a command to the worker; while there is none it is kept for the next one."""
        if self._is_closed or self._is_lost:
            return
        if isinstance(command, EndSession):
            self._end_session(command)
            return
        if isinstance(command, StartSession):
            self._waiting.clear()
            self._session = _SessionMemory(command=command)
            if self.info is not None:
                self._write(command)
            return
        self._note_pause(command)
        if isinstance(command, SetPrompt | Reset | StepOnce):
            self._waiting.append(command)
        if self.info is not None:
            self._write(command)

    def _end_session(self, command: EndSession) -> None:
        session, self._session = self._session, None
        self._waiting.clear()
        if session is None:
            return
        self._ending_id = session.command.session_id
        if self.info is not None:
            self._write(command)
        else:
            self._report_ended()

    def _report_ended(self) -> None:
        """Answer for a worker that is not there: it holds no session."""
        if self._ending_id is not None:
            self._reports.put_nowait(SessionEnded(session_id=self._ending_id))
            self._ending_id = None

    def recycle(self, reason: str) -> None:
        """Part from a worker that holds memory but no session; another one takes over."""
        if self.info is not None and self._session is None and self._ending_id is None:
            self._lose(FailureCode.WORKER_DIED, reason)

    async def close(self) -> None:
        """End the worker and free everything, within 5 s. Calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None:
            self._write(Shutdown())
            await asyncio.to_thread(self._process.join, self._limits.shutdown_s)
            await self._reap()
        self.mailbox.close()
        self.ring.close()
        self._reports.put_nowait(None)

    async def _spawn(self) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=run_worker,
            args=(self.config, theirs, self.mailbox.name, self.ring.handle, self._open_source),
            name="worldstream-worker",
            daemon=True,
        )
        starting = asyncio.ensure_future(asyncio.to_thread(process.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread goes on: whoever closes must find the process that it starts.
            await starting
            self._process = process
            ours.close()
            raise
        finally:
            theirs.close()
        self._process, self._connection = process, ours
        self._heard_s = time.monotonic()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)

    def _receive(self) -> None:
        """Take what the pipe holds; a report may part us from the worker."""
        try:
            while self._connection is not None and self._connection.poll():
                self._note(self._connection.recv())
        except (EOFError, OSError):
            self._lose(FailureCode.WORKER_DIED, "the worker process ended")

    def _note(self, report: Report) -> None:
        """Remember what a restart needs, and pass the report on."""
        self._heard_s = time.monotonic()
        if isinstance(report, Heartbeat):
            self.device_bytes = report.device_bytes
            self._follower_pids = report.follower_pids
            # Between two worlds the parts are still there, and go on counting.
            self.graphs = report.graphs or self.graphs
        elif isinstance(report, FrameReady):
            self.ring.claim(report.slot)
        session = self._session
        match report:
            case Loading():
                self.loading = report
            case Planned():
                self.plan_text = report.text
            case Ready():
                self.info, self.loading = report, None
                self._loading_death_count = 0
                self._go_on()
            case SessionStarted() if session is not None:
                session.trace, self.loading = report.trace, None
                session.next_prompt = None
                session.command = replace(
                    session.command,
                    epoch=report.epoch,
                    start=report.start,
                    prompt=report.prompt,
                    seed=report.seed,
                )
            case FrameReady() if session is not None:
                next_id = report.meta.frame_id + 1
                session.command = replace(session.command, first_frame_id=next_id)
            case Applied():
                self._note_applied(report)
            case Refused():
                self._note_answered(report.id)
            case ChunkDone() if session is not None:
                session.death_count = 0
                if session.next_prompt is not None and report.chunk >= session.next_prompt[0]:
                    session.next_prompt = None
                self._backoff_s = self._limits.backoff_first_s
            case Heartbeat():
                if report.busy_ms > self._limits.chunk_s * 1000.0:
                    self._lose(FailureCode.GEN_TIMEOUT, f"a chunk takes {report.busy_ms:.0f} ms")
            case SessionEnded():
                self._note_ended(report)
            case Failed(is_fatal=True):
                self._is_lost = True
            case _:
                pass
        self._reports.put_nowait(report)

    def _note_ended(self, report: SessionEnded) -> None:
        if self._ending_id == report.session_id:
            self._ending_id = None
        elif self._session and self._session.command.session_id == report.session_id:
            self._session = None
            self._waiting.clear()

    def _note_applied(self, report: Applied) -> None:
        for command in self._waiting:
            if isinstance(command, SetPrompt) and command.id == report.id and self._session:
                self._session.next_prompt = (report.chunk, command)
        self._note_answered(report.id)

    def _note_answered(self, number: int) -> None:
        self._waiting = [c for c in self._waiting if getattr(c, "id", None) != number]

    def _note_pause(self, command: Command) -> None:
        session = self._session
        if session is not None and isinstance(command, Pause | Resume | StepOnce):
            is_paused = not isinstance(command, Resume)
            session.command = replace(session.command, is_paused=is_paused)

    def _go_on(self) -> None:
        """Give a new worker the session of the one before it, and what that left undone."""
        session = self._session
        if session is None:
            return
        command = session.command
        if session.trace is not None:
            command = replace(command, epoch=command.epoch + 1, resume_trace=session.trace)
        self._write(command)
        if session.next_prompt is not None:
            self._write(session.next_prompt[1])
        for waiting in self._waiting:
            self._write(waiting)

    def _lose(self, code: FailureCode, detail: str) -> None:
        """Part from a worker that is dead or stuck; another one takes over."""
        if self._connection is None:
            return
        self._disconnect()
        was_loading, self.info = self.info is None, None
        self.device_bytes, self.graphs = 0, ()
        if self._is_closed:
            return
        self._report_ended()
        self._loading_death_count += was_loading
        if self._loading_death_count >= self._limits.deaths_while_loading and not self._is_lost:
            self._is_lost = True
            count = self._loading_death_count
            detail = f"{count} deaths before it was ready, the last: {detail}"
            self._reports.put_nowait(
                Failed(session_id=None, code=FailureCode.LOAD_FAILED, is_fatal=True, detail=detail)
            )
        if self._is_lost:
            self._spawn_task(self._end_lost())
            return
        _log.error("worker_lost code=%s detail=%s", code, detail)
        session = self._session
        session_id = None if session is None else session.command.session_id
        self._reports.put_nowait(
            Failed(session_id=session_id, code=code, is_fatal=False, detail=detail)
        )
        if session is not None:
            session.death_count += 1
            # A chunk that never ends would not end the next time: the same input makes it again.
            is_hopeless = code is FailureCode.GEN_TIMEOUT
            if is_hopeless or session.death_count >= self._limits.deaths_of_a_session:
                self._session = None
                self._waiting.clear()
                self._reports.put_nowait(SessionEnded(session_id=session.command.session_id))
        self._spawn_task(self._restart())

    async def _restart(self) -> None:
        await self._reap()
        self.ring.recover()
        while self._connection is None:
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(2.0 * self._backoff_s, self._limits.backoff_last_s)
            self.restart_count += 1
            try:
                await self._spawn()
            except OSError as error:  # no memory or no process left: perhaps later
                _log.error("worker_not_started detail=%s", error)

    async def _end_lost(self) -> None:
        await self._reap()
        self._reports.put_nowait(None)

    async def _reap(self) -> None:
        """Make sure that the process is gone, and its followers with it, and forget them."""
        process, self._process = self._process, None
        followers, self._follower_pids = self._follower_pids, ()
        self._disconnect()
        if process is None:
            return
        if process.is_alive():
            process.kill()
        await asyncio.to_thread(process.join, 1.0)
        if not process.is_alive():
            process.close()
        # The next one could not have the GPUs that they still hold.
        await asyncio.to_thread(wait_until_gone, followers, FOLLOWERS_S)

    def _disconnect(self) -> None:
        if self._connection is not None:
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._connection.close()
            self._connection = None

    async def _watch(self) -> None:
        """Look after the heartbeat once a second."""
        while True:
            await asyncio.sleep(1.0)
            # Its heartbeats may be lying in the pipe while this process had no time to read them.
            self._receive()
            is_loading = self.info is None or self.loading is not None
            limit_s = self._limits.heartbeat_s
            if is_loading:
                limit_s = max(limit_s, self._limits.loading_heartbeat_s)
            if self._connection is not None and self.heartbeat_age_s > limit_s:
                age_s = self.heartbeat_age_s
                self._lose(FailureCode.WORKER_DIED, f"no heartbeat for {age_s:.0f} s")

    def _write(self, command: Command) -> None:
        if self._connection is None:
            return
        try:
            self._connection.send(command)
        except OSError:
            self._receive()  # what it said last counts
            self._lose(FailureCode.WORKER_DIED, "the pipe to the worker is closed")

    def _spawn_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        """Without its watch or restart a worker would be missed by nobody: give it up aloud."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("supervisor_failed", exc_info=error)
        self._is_lost = True
        detail = f"{type(error).__name__} in the supervisor; see the log"
        self._reports.put_nowait(
            Failed(session_id=None, code=FailureCode.LOAD_FAILED, is_fatal=True, detail=detail)
        )

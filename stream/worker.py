"""The worker process: owns the model, obeys commands, lets chunks be made, reports.

Owns the loop of a session and the moment at which a chunk starts. Does not own how one is made
(`chunk_maker`). Invariants: commands act between chunks (those that end what is under way also
between frames); a chunk starts as late as its cost allows without a gap in playback. Importing this
module loads no torch; `run_worker` does.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from engine.config import preset
from engine.errors import ConfigError, UnsupportedError, WorldStreamError
from stream.actions import ActionMailbox
from stream.chunk_maker import ChunkMaker
from stream.chunk_schedule import ChunkSchedule
from stream.command_inbox import CommandInbox, merge_resets
from stream.frames import FrameRing, RingCancelledError, RingHandle
from stream.live_rollout import LiveRollout, OutputError, trace_file
from stream.load_news import WorkerNews
from stream.prompt_ahead import PromptAhead
from stream.session import Session
from stream.snapshots import read_snapshot, snapshot_file
from stream.trace import read_trace
from stream.worker_messages import (
    Applied,
    Command,
    EndSession,
    Failed,
    FailureCode,
    Loading,
    Pause,
    PromptReady,
    Ready,
    Refused,
    Reset,
    Resume,
    SessionEnded,
    SessionStarted,
    SetPrompt,
    Shutdown,
    StartFrom,
    StartSession,
    StepOnce,
    WorkerConfig,
)
from stream.worker_pulse import Pulse
from stream.world_source import LoadedWorlds, OpenSource, Worlds

_log = logging.getLogger(__name__)


def run_worker(
    config: WorkerConfig,
    connection: Connection,
    mailbox_name: str,
    ring_handle: RingHandle,
    open_source: OpenSource = LoadedWorlds,
) -> None:
    """Serve until `Shutdown` or the end of the pipe. The target of the process.

    Args:
        config: what it serves.
        connection: the worker's end of the pipe.
        mailbox_name: of the actions.
        ring_handle: of the frames.
        open_source: makes the worlds; picklable by name.
    """
    # Ctrl-C reaches the whole group: the parent decides, and says Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    camera = preset(config.world.preset).model.camera
    mailbox = ActionMailbox.attach(mailbox_name, camera, stale_ms=config.stale_ms)
    ring = FrameRing.attach(ring_handle)
    try:
        worker = Worker(config, connection, mailbox, ring, open_source)
        signal.signal(signal.SIGTERM, lambda number, frame: worker.stop())
        worker.run()
    finally:
        mailbox.close()
        ring.close()
    if config.world.rank_count > 1:
        from engine.ranks import end_without_interpreter

        end_without_interpreter()


@dataclass(kw_only=True, slots=True)
class _Live:
    """The session in hand."""

    session_id: str
    epoch: int
    start: StartFrom
    prompt: str | None
    seed: int
    is_paused: bool
    is_single_step: bool = False
    rollout: LiveRollout | None = None


class Worker:
    """One model, one session at a time."""

    def __init__(
        self,
        config: WorkerConfig,
        connection: Connection,
        mailbox: ActionMailbox,
        ring: FrameRing,
        open_source: OpenSource,
    ) -> None:
        self._config = config
        self._ring = ring
        self._inbox = CommandInbox(connection, ring)
        self._news = WorkerNews(lambda report: self._report(report))
        self._worlds = Worlds(config.world, open_source, self._news)
        self._pulse = Pulse(connection, self._worlds)
        self._report = self._pulse.report
        self._is_done = threading.Event()
        self._live: _Live | None = None
        self._prompts = PromptAhead(lambda: self._inbox.put(PromptReady()))
        self._schedule = ChunkSchedule(config.fps, config.jit_margin_ms / 1000.0)
        self._maker = ChunkMaker(mailbox, ring, self._schedule, self._pulse)

    def stop(self) -> None:
        """Ask for the end, after the frame in hand; from any thread or a signal handler."""
        self._inbox.put(Shutdown())

    def run(self) -> None:
        """Load, then serve."""
        self._inbox.start()
        self._pulse.start()
        try:
            if self._load():
                while not self._is_done.is_set():
                    self._turn()
        finally:
            self._is_done.set()
            self._pulse.stop()
            self._end_session()
            self._prompts.close()
            self._worlds.close()

    def _load(self) -> bool:
        try:
            self._warm_up()
        # Libraries and drivers raise what they like; the operator has to hear of it.
        except Exception as error:
            if not isinstance(error, WorldStreamError | OSError | MemoryError):
                _log.exception("load_failed")
            self._news.failed(error)
            return False
        return True

    def _warm_up(self) -> None:
        """Load, and fill a window once, so that the first visitor waits for neither."""
        ranks = self._config.world.rank_count
        self._news.tell(f"loading the model{f', {ranks} ranks' if ranks > 1 else ''}", 0.0)
        if self._config.thread_count is not None:
            import torch

            torch.set_num_threads(self._config.thread_count)
        from engine.types import Action

        spec = self._config.world
        start = StartFrom(scene=self._config.warm_up_scene)
        world = self._worlds.open(start).world
        if not world.has_frames:
            raise UnsupportedError(f"preset {spec.preset} has no decoder: it makes latents only")
        if world.lookahead_latents:
            raise UnsupportedError(
                f"decoder: frames wait for {world.lookahead_latents} latents of the next chunk, "
                "which nobody has steered yet; needed for play: a mode without lookahead"
            )
        # As long as that of the first session, so that its passes are recorded already.
        session = Session(world, prompt=self._worlds.prepare(start, None), seed=0)
        is_model = spec.source == "model"
        # On CUDA the steady window comes twice more: its passes are recorded, then timed.
        more = 2 if world.device.startswith("cuda") else 1
        count = preset(spec.preset).model.window_chunks + more if is_model else 1
        for done in range(count):
            if self._inbox.has_shutdown:
                self._is_done.set()
                return
            self._news.warming_up(done / count)
            chunk_begin_s, first_s = time.monotonic(), 0.0
            for _ in session.step(Action.still()):
                first_s = first_s or time.monotonic() - chunk_begin_s
            chunk_s = time.monotonic() - chunk_begin_s
        self._schedule.chunk_made(first_s)
        self._news.over()
        self._report(
            Ready(
                device=world.device,
                dtype=world.dtype,
                model_hash=world.model_hash,
                width_px=world.geometry.width_px,
                height_px=world.geometry.height_px,
                fps=self._config.fps,
                chunk_ms=chunk_s * 1000.0,
                linear=world.speed.linear if is_model else "",
                attention=", ".join(
                    f"{group} {name}" for group, name in world.attention_names.items()
                ),
                rank_count=spec.rank_count,
            )
        )

    def _turn(self) -> None:
        """Commands, then a chunk if it is time for one."""
        for command, ids in merge_resets(self._inbox.take(self._wait_s())):
            # To start a session may mean to load a world, which has a limit of its own.
            with nullcontext() if isinstance(command, StartSession) else self._pulse.busy():
                self._guarded(partial(self._apply, command, ids))
        if self._is_done.is_set() or self._wait_s() != 0.0:
            return
        with self._pulse.busy():
            self._guarded(self._make_chunk)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run work for the session; what it raises ends the session, not the worker."""
        try:
            work()
        except RingCancelledError:
            pass
        except OutputError as error:
            self._fail(error.code, error)
        except ConfigError as error:
            self._fail(FailureCode.BAD_START, error)
        # A step may raise anything that torch, the driver or the disk raise; the worker must live
        # on to say so.
        except Exception as error:
            _log.exception("session_failed")
            self._fail(FailureCode.GEN_FAILED, error)

    def _fail(self, code: FailureCode, error: Exception) -> None:
        session_id = None if self._live is None else self._live.session_id
        detail = f"{type(error).__name__}: {error}"
        self._report(Failed(session_id=session_id, code=code, is_fatal=False, detail=detail))
        self._worlds.forget()
        self._end_session()

    def _wait_s(self) -> float | None:
        """How long nothing has to be made; None while there is nothing to make."""
        live = self._live
        if live is None or live.rollout is None or live.is_paused:
            return None
        if live.is_single_step:
            return 0.0
        if live.rollout.chunk_index == 0:  # frames in the ring are those of another world
            return 0.0
        ring = self._ring
        return self._schedule.wait_s(ring.taken_count, ring.released_s, time.monotonic())

    def _apply(self, command: Command, ids: tuple[int, ...]) -> None:
        live = self._live
        match command:
            case StartSession():
                self._start_session(command)
            case Shutdown():
                self._is_done.set()
            case EndSession():
                self._end_session()
            case _ if live is None:
                return
            case Reset():
                self._reset(live, command, ids)
            case SetPrompt() | PromptReady():
                assert live.rollout is not None
                if isinstance(command, SetPrompt):
                    self._prompts.add(live.rollout, command)
                self._prompts.apply(live.rollout, live.epoch, self._report)
            case Pause():
                live.is_paused = True
            case Resume():
                live.is_paused = live.is_single_step = False
            case StepOnce():
                assert live.rollout is not None
                live.is_paused, live.is_single_step = False, True
                chunk = live.rollout.chunk_index
                self._report(Applied(id=command.id, epoch=live.epoch, chunk=chunk))

    def _start_session(self, command: StartSession) -> None:
        self._end_session()
        self._maker.begin(command.first_frame_id)
        self._live = _Live(
            session_id=command.session_id,
            epoch=command.epoch,
            start=command.start,
            prompt=command.prompt,
            seed=command.seed,
            is_paused=command.is_paused,
        )
        if command.resume_trace is None:
            self._begin_rollout(self._live)
        else:
            self._restore(self._live, command)

    def _reset(self, live: _Live, command: Reset, ids: tuple[int, ...]) -> None:
        """Begin anew; with the prompt of before where the encoder refuses another one."""
        assert live.rollout is not None
        before = self._prompts.newest(live.rollout)
        ids = (*(each.id for each in self._prompts.drop()), *ids)
        prompt, start = command.prompt, command.start or live.start
        prompt = before if prompt is None and command.start is None else prompt
        self._worlds.open(start)
        try:
            with self._pulse.waiting():
                prompt = self._worlds.prepare(start, prompt)
        except WorldStreamError as error:
            for number in ids:
                self._report(Refused(id=number, detail=str(error)))
            ids, start, prompt = (), live.start, live.rollout.prompt
        live.start, live.prompt, live.epoch = start, prompt, live.epoch + 1
        live.seed = live.seed if command.seed is None else command.seed
        self._begin_rollout(live, ids)

    def _begin_rollout(self, live: _Live, ids: tuple[int, ...] = ()) -> None:
        """Answer the commands that ask for a new epoch, and show its first picture."""
        rollout = self._new_rollout(live)
        self._report_start(live, rollout)
        # Before the picture, which the next reset may cut off.
        for number in ids:
            self._report(Applied(id=number, epoch=live.epoch, chunk=0))
        self._maker.show(live.epoch, self._worlds.first_picture(live.start))

    def _restore(self, live: _Live, command: StartSession) -> None:
        """Bring a rollout back from its trace and show where it was left."""
        assert command.resume_trace is not None
        trace = read_trace(command.resume_trace)
        live.prompt, live.seed = trace.header.prompt, trace.header.seed
        rollout = self._new_rollout(live)
        begin_s = time.monotonic()
        is_same = True
        snapshot = read_snapshot(snapshot_file(command.resume_trace))
        for same in rollout.restore(trace, lambda: self._inbox.is_interrupted, snapshot):
            is_same = is_same and same
            percent = 100.0 * rollout.chunk_index / len(trace.chunks)
            seconds = time.monotonic() - begin_s
            self._report(Loading(stage="restoring the world", percent=percent, seconds=seconds))
        if not self._inbox.is_interrupted:
            self._keep(rollout, at_once=True)
            snapshot_file(command.resume_trace).unlink(missing_ok=True)
        live.prompt = rollout.prompt
        self._report_start(live, rollout, rollout.chunk_index, is_same=is_same)
        frame_HWC = rollout.last_frame_HWC
        if frame_HWC is None:
            frame_HWC = self._worlds.first_picture(live.start)
        self._maker.show(live.epoch, frame_HWC)

    def _new_rollout(self, live: _Live) -> LiveRollout:
        if live.rollout is not None:
            live.rollout.end()
        with self._pulse.waiting():
            live.prompt = self._worlds.prepare(live.start, live.prompt)
        opened = self._worlds.open(live.start)
        live.rollout = LiveRollout(
            self._config.world,
            opened.world,
            opened.start,
            prompt=live.prompt,
            seed=live.seed,
            trace_path=trace_file(self._config.trace_folder, live.session_id, live.epoch),
        )
        return live.rollout

    def _report_start(
        self, live: _Live, rollout: LiveRollout, restored_count: int = 0, *, is_same: bool = True
    ) -> None:
        self._report(
            SessionStarted(
                session_id=live.session_id,
                epoch=live.epoch,
                start=live.start,
                prompt=rollout.prompt,
                seed=live.seed,
                trace=rollout.trace_path,
                restored_chunk_count=restored_count,
                is_same_world=is_same,
            )
        )

    def _make_chunk(self) -> None:
        live = self._live
        assert live is not None
        assert live.rollout is not None
        rollout = live.rollout
        live.is_paused = live.is_paused or live.is_single_step
        live.is_single_step = False
        self._maker.make(rollout, live.epoch)
        self._keep(rollout)

    @staticmethod
    def _keep(rollout: LiveRollout, *, at_once: bool = False) -> None:
        try:
            rollout.keep(at_once=at_once)
        except OSError as error:  # a full disk: a worker that dies costs more then
            _log.warning("snapshot_not_kept detail=%s", error)

    def _end_session(self) -> None:
        live, self._live = self._live, None
        self._prompts.drop()
        if live is None:
            return
        if live.rollout is not None:
            try:
                live.rollout.end()
            except OSError as error:  # a full disk: the session ends all the same
                _log.error("trace_not_completed detail=%s", error)
        self._report(SessionEnded(session_id=live.session_id))

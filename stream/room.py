"""A session as the API process sees it: its viewers, their messages, its media, its seat.

Owns who hears what. Does not own states (`sessions`), commands (`world_commands`), figures
(`session_meter`), the way of frames (`transports`), the world (`worker`). Invariants: only the
player's messages change the world; whatever a viewer had is freed when it leaves; frames and
messages of one session never reach another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import structlog

from stream import client_messages as client
from stream import protocol as p
from stream import server_messages as server
from stream.actions import FRAMES_PER_CHUNK, wall_ms
from stream.error_codes import ERROR_TEXT, ErrorCode, ProtocolError
from stream.info import CHUNK, latch_ms
from stream.inputs import SessionInput
from stream.protocol import SessionState
from stream.session_meter import SessionMeter
from stream.session_states import LIVE, PLAYABLE, TRANSITIONS, Event, Session
from stream.sessions import Change
from stream.transports import Transports
from stream.viewer import Surroundings, Viewer
from stream.worker_messages import (
    Applied,
    ChunkDone,
    ChunkStarted,
    Failed,
    FailureCode,
    FrameReady,
    Heartbeat,
    Loading,
    Pause,
    Refused,
    Report,
    Resume,
    SessionStarted,
    StartSession,
)
from stream.world_commands import WorldCommands

if TYPE_CHECKING:
    from stream.seat import Seat

log = structlog.get_logger(__name__)

_ERROR_OF_FAILURE: dict[FailureCode, ErrorCode] = {
    FailureCode.LOAD_FAILED: ErrorCode.WORKER_DIED,
    FailureCode.BAD_START: ErrorCode.BAD_IMAGE,
    FailureCode.OUTPUT_NAN: ErrorCode.GEN_INVALID,
    FailureCode.OUTPUT_BLACK: ErrorCode.GEN_INVALID,
    FailureCode.OUTPUT_FROZEN: ErrorCode.GEN_INVALID,
    FailureCode.GEN_FAILED: ErrorCode.INTERNAL,
    FailureCode.GEN_TIMEOUT: ErrorCode.GEN_TIMEOUT,
    FailureCode.WORKER_DIED: ErrorCode.WORKER_DIED,
}


class Room:
    """One session, from its creation to its end."""

    def __init__(self, session: Session, around: Surroundings) -> None:
        self.session = session
        self.viewers: dict[str, Viewer] = {}
        self._meter = SessionMeter(around.metrics)
        self.transports = Transports(
            self.viewers, around, self._meter.presented, on_act=self.handle, on_failed=self.fail
        )
        self.seat: Seat | None = None
        self._around = around
        self._input = SessionInput()
        self._commands = WorldCommands(session, around, self._meter)
        self._warming_since_s = 0.0
        self._queue_told: server.Queue | None = None
        self.trace: SessionStarted | None = None
        """Newest start, which names the trace."""

    # ---- coming, going

    def join(self, viewer: Viewer) -> None:
        """A socket said hello. A second one of the player replaces the first."""
        now_s = time.monotonic()
        if self.session.state is SessionState.CLOSED:
            # It ended between the ticket and the hello.
            viewer.socket.close(self.session.last_error or ErrorCode.NO_SESSION)
            return
        if viewer.is_player:
            for other in self._players():
                self.leave(other, replaced=True)
                other.socket.close(ErrorCode.CONFLICT)
            if self.seat is not None:
                self.seat.mailbox.clear()
            self._input.begin_socket(wall_ms())
            self._meter.forget_presses()
        self.viewers[viewer.id] = viewer
        if not viewer.is_player:
            self.session.viewer_ids.add(viewer.id)
        viewer.socket.send(self._welcome(viewer))
        if viewer.is_player:
            if self.session.state is SessionState.GRACE:
                self._around.metrics.reconnects.inc()
            self._around.registry.connected(self.session, now_s)
        viewer.socket.send(self._state())
        if self.seat is not None and (loading := self.seat.loading) is not None:
            viewer.socket.send(loading)
        self.transports.welcome(viewer)
        self._queue_told = None

    def leave(self, viewer: Viewer, *, replaced: bool = False, said_bye: bool = False) -> None:
        """A socket is gone, or said bye; calling it again does nothing."""
        if viewer.has_left or viewer.id not in self.viewers:
            return
        viewer.has_left = True
        self.viewers.pop(viewer.id, None)
        self.session.viewer_ids.discard(viewer.id)
        self.transports.leave(viewer)
        if viewer.is_player and not replaced:
            if self.seat is not None:
                self.seat.mailbox.clear()
            self._around.registry.lost(self.session, time.monotonic(), said_bye=said_bye)

    def take_seat(self, seat: Seat) -> None:
        """The session got a worker: open the world."""
        settings, world = self._around.settings, self.session.world
        self.seat = seat
        self.transports.start(self._around.files.growing(self.session.id))
        seat.mailbox.begin()
        try:
            start = self._around.start_from(world.scene, world.image_id)
        except ProtocolError:
            # The picture expired while the visitor waited.
            start = self._around.start_from(settings.scene, None)
        seat.send(
            StartSession(
                session_id=self.session.id,
                start=start,
                prompt=world.prompt or None,
                seed=world.seed,
                is_paused=True,
            )
        )
        self._around.metrics.queue_wait_s.observe(time.monotonic() - self.session.created_s)

    async def close(self, code: ErrorCode) -> None:
        """End every socket and the media. The seat is given back by the caller."""
        for viewer in tuple(self.viewers.values()):
            viewer.socket.close(code)
            viewer.has_left = True
            self.transports.leave(viewer)
        self.viewers.clear()
        await self.transports.close()

    # ---- messages of browsers

    def handle(self, viewer: Viewer, message: client.ClientMessage) -> None:
        """Act on a message.

        Raises:
            ProtocolError: it is refused.
        """
        match message:
            case client.Ping():
                now_ms = wall_ms()
                viewer.clock.heard(message.ct, now_ms)
                viewer.socket.send(server.Pong(id=message.id, ct=message.ct, st=now_ms))
            case client.Hello():
                raise ProtocolError(ErrorCode.BAD_MESSAGE, "second hello")
            case client.RtcOffer():
                self.transports.offer(viewer, message)
            case client.RtcCandidate():
                self.transports.candidate(viewer, message)
            case client.RtcState():
                log.info("rtc_state", gen=message.gen, state=message.state)
            case client.Media():
                self.transports.choose(viewer, message)
            case client.Ack():
                self.transports.acknowledge(viewer, message.frame)
            case client.Kf():
                self.transports.want_keyframe(viewer)
            case client.Shown():
                self._meter.shown(viewer, message.frames, self.transports.due_times)
            case client.ClientBye():
                self.leave(viewer, said_bye=True)
            case _ if not viewer.is_player:
                if not (isinstance(message, client.Act) and viewer.was_told_not_controller):
                    viewer.was_told_not_controller = True
                    raise ProtocolError(ErrorCode.NOT_CONTROLLER)
            case client.Act():
                if viewer.acts.take(time.monotonic()):
                    self._act(message)
                else:  # the next one makes up for it: each holds the whole state
                    self._around.metrics.drops.labels(where="act_rate").inc()
            case (
                client.Prompt() | client.Reset() | client.Pause() | client.Resume() | client.Step()
            ):
                if not viewer.commands.take(time.monotonic()):
                    raise ProtocolError(ErrorCode.RATE_LIMIT, "commands", retry_ms=1_000)
                self._commands.take(message, self.seat)
            case _:
                assert_never(message)

    def _act(self, act: client.Act) -> None:
        if self.seat is None or self.session.state not in PLAYABLE:
            return
        now_ms = wall_ms()
        taken = self._input.take(act, now_ms)
        if taken is None or not self.seat.mailbox.post(taken.snapshot):
            self._around.metrics.drops.labels(where="old_act").inc()
            return
        self._meter.acted(act.seq, taken, now_ms)
        if taken.has_content:
            is_paused = self.session.state is SessionState.PAUSED
            if taken.is_press or not is_paused:
                self._around.registry.input(self.session, time.monotonic())

    # ---- reports of the worker

    def on_report(self, report: Report, release: Callable[[int], None]) -> None:
        """Act on a report that belongs to this session.

        Args:
            report: of the worker.
            release: frees a slot of the ring.
        """
        match report:
            case FrameReady():
                self._frame(report, release)
            case SessionStarted():
                self._started(report)
            case ChunkStarted():
                self._meter.chunk_started(report)
            case ChunkDone():
                made_ms = self._meter.chunk_done(report)
                if self.transports.media is not None:
                    self.transports.media.note_chunk(made_ms, FRAMES_PER_CHUNK)
            case Applied():
                if self._commands.applied(report):
                    self.broadcast(server.World(world=self.session.world))
                self.broadcast(server.Applied(id=report.id, chunk=report.chunk, epoch=report.epoch))
            case Refused():
                self._commands.refused(report.id)
                self.broadcast(server.Warn(code="REFUSED", msg="This prompt cannot be used."))
                self.broadcast(server.World(world=self.session.world))
            case Loading():
                self.broadcast(
                    server.Loading(
                        stage=report.stage, percent=report.percent, seconds=report.seconds
                    )
                )
            case Heartbeat():
                if self._meter.is_slow(report.busy_ms):
                    log.warning("chunk_slow", busy_ms=report.busy_ms)
                    self.broadcast(server.Warn(code="SLOW", msg="The next chunk takes long."))
            case Failed():
                self._failed(report)
            case _:
                pass

    def _failed(self, report: Failed) -> None:
        log.error("session_failed", code=str(report.code), detail=report.detail)
        code, session = _ERROR_OF_FAILURE[report.code], self.session
        if report.is_fatal or report.code is not FailureCode.WORKER_DIED:
            self.fail(code)
            return
        self._around.metrics.worker_restarts.inc()
        if session.state not in (*LIVE, SessionState.GRACE):
            return  # it ends already
        # The worker starts again and brings the world back from its trace.
        self.broadcast(server.Warn(code=str(code), msg=ERROR_TEXT[code] + " It starts again."))
        self._around.registry.transition(session, Event.RESTART, str(code), time.monotonic())

    def fail(self, code: ErrorCode) -> None:
        """End the session with an error; one that ends already ends as it is."""
        if (self.session.state, Event.FAIL) in TRANSITIONS:
            self._around.registry.transition(
                self.session, Event.FAIL, str(code), time.monotonic(), code
            )

    def _frame(self, report: FrameReady, release: Callable[[int], None]) -> None:
        metrics, meta, seat = self._around.metrics, report.meta, self.seat
        media = self.transports.media
        if media is None or seat is None or meta.epoch < self.session.world.epoch:
            metrics.frames_stale.inc()
            release(report.slot)
            return
        metrics.frames_made.inc()
        self._meter.frame_made(meta.frame_id, meta.act_seq)
        media.publish(seat.read(report.slot), meta, lambda: release(report.slot))
        if self.session.state in (SessionState.WARMING, SessionState.GRACE):
            self._first_frame()

    def _first_frame(self) -> None:
        session, now_s = self.session, time.monotonic()
        if session.state is SessionState.GRACE and (
            session.before_grace is not SessionState.WARMING
        ):
            return
        reason = "first picture" if session.before_restart is None else "worker is back"
        self._around.registry.transition(session, Event.FIRST_FRAME, reason, now_s)

    def _started(self, report: SessionStarted) -> None:
        self.trace = report
        picture = report.start.image_path
        self._around.files.keep_picture(report)
        self.session.world = p.WorldInfo(
            scene=report.start.scene,
            image_id=None if picture is None else Path(picture).stem,
            prompt=report.prompt,
            seed=report.seed,
            epoch=report.epoch,
        )
        self.broadcast(server.World(world=self.session.world))
        if self.transports.media is not None:
            self.transports.media.set_epoch(report.epoch)
        if report.epoch:
            self._around.metrics.epochs.inc()
        if not report.is_same_world:
            self.broadcast(server.Warn(code="OTHER_WORLD", msg="The world came back changed."))
        log.info("session_started", epoch=report.epoch, restored=report.restored_chunk_count)

    # ---- what viewers are told

    def on_change(self, change: Change) -> None:
        """The session's state changed: tell the worker and everybody."""
        now_s = time.monotonic()
        if change.new is SessionState.WARMING:
            self._warming_since_s = now_s
        elif change.old is SessionState.WARMING and change.new in PLAYABLE:
            self._around.metrics.warm_up_s.observe(now_s - self._warming_since_s)
        self.broadcast(self._state())
        if self.seat is None:
            return
        if change.new is SessionState.RUNNING:
            if change.old is SessionState.PAUSED:
                self.seat.mailbox.forget_motion()
            self.seat.send(Resume())
        # Whatever it was before: a world that comes back from its trace goes on by itself.
        elif change.new in (SessionState.PAUSED, SessionState.GRACE, SessionState.DRAINING):
            self.seat.mailbox.clear()
            self.seat.send(Pause())

    def broadcast(self, message: server.ServerMessage) -> None:
        """Send to everybody in the room."""
        for viewer in self.viewers.values():
            viewer.socket.send(message)

    def tell_queue(self, position: int, length: int, eta_s: float) -> None:
        """Tell the place in the queue where it changed."""
        told = self._queue_told
        if told is None or (told.pos, told.len) != (position, length):
            self._queue_told = server.Queue(pos=position, len=length, eta_s=round(eta_s))
            self.broadcast(self._queue_told)

    def tell_stats(self) -> None:
        """Send the figures of the last second."""
        stats = self.transports.stats()
        if stats is None:
            return
        for viewer in self.viewers.values():
            viewer.socket.send(
                server.Stats(
                    gen_ms=self._meter.chunk_ms,
                    queue_frames=stats.queue_frames,
                    fps_out=stats.fps_out,
                    encode_ms=stats.encode_ms,
                    kbps=stats.kbps,
                    act_lag_ms=self._meter.latch_age_ms,
                    dropped=stats.overflow_count + self.transports.dropped_count(viewer),
                    viewers=len(self.viewers),
                )
            )

    def _welcome(self, viewer: Viewer) -> server.Welcome:
        around, settings = self._around, self._around.settings
        return server.Welcome(
            session=self.session.id,
            role=viewer.role,
            resume_token=self.session.resume_token if viewer.is_player else None,
            video=around.video,
            chunk=CHUNK,
            latch_ms=latch_ms(around.video),
            ice=settings.ice_servers,
            limits=around.limits,
            world=self.session.world,
            last_seq=self._input.last_seq,
            hb_ms=settings.hb_ms,
            st=wall_ms(),
        )

    def _state(self) -> server.State:
        held_s = time.monotonic() - self.session.since_s
        return server.State(
            state=self.session.state, reason=self.session.reason, since=wall_ms() - held_s * 1e3
        )

    def _players(self) -> list[Viewer]:
        return [viewer for viewer in self.viewers.values() if viewer.is_player]

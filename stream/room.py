"""A session as the API process sees it: its viewers, their messages, its media, its seat.

Owns who hears what. Does not own states (`sessions`), frames and pacing (`media`), the world
(`worker`). Invariants: only the player's messages change the world; whatever a viewer had is freed
when it leaves; frames and messages of one session never reach another.
"""

from __future__ import annotations

import asyncio
import time
import unicodedata
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import structlog
from pydantic import BaseModel

from stream import protocol as p
from stream.chunk_notice import ChunkNotice
from stream.inputs import PhotonMeter, SessionInput
from stream.limits import TokenBucket
from stream.media import Media
from stream.media_events import MediaEvents, MediaSettings
from stream.metrics import Metrics
from stream.peer import OfferError
from stream.protocol import ErrorCode, ProtocolError, SessionState
from stream.sessions import Change, Event, Registry, Role, Session
from stream.settings import ServerSettings
from stream.sockets import Socket
from stream.video_encoder import Codec
from stream.worker_messages import (
    Applied,
    ChunkDone,
    ChunkStarted,
    Failed,
    FailureCode,
    FrameReady,
    Loading,
    Pause,
    Report,
    Reset,
    Resume,
    SessionStarted,
    SetPrompt,
    StartFrom,
    StartSession,
    StepOnce,
)

if TYPE_CHECKING:
    from stream.seat import Seat

FRAMES_PER_CHUNK = 17
OFFER_EVERY_S = 2.0

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


@dataclass(kw_only=True, eq=False, slots=True)
class Viewer:
    """One socket of a session: the player, or somebody who watches."""

    id: str
    role: Role
    socket: Socket
    ws_codec: Codec | None = None
    """Chosen WebSocket video, to begin as soon as there is media."""
    transport: str = "none"
    negotiation: asyncio.Task[None] | None = None
    offers: TokenBucket = field(
        default_factory=lambda: TokenBucket(per_s=1.0 / OFFER_EVERY_S, burst=3.0)
    )
    keyframes: TokenBucket = field(default_factory=lambda: TokenBucket(per_s=2.0, burst=2.0))
    was_told_not_controller: bool = False
    has_left: bool = False

    @property
    def is_player(self) -> bool:
        """Whether this one plays."""
        return self.role == "controller"


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What rooms share."""

    settings: ServerSettings
    registry: Registry
    metrics: Metrics
    media: MediaSettings
    video: p.VideoInfo
    limits: p.Limits
    recordings: Path
    start_from: Callable[[str | None, str | None], StartFrom]
    """(scene, image_id) -> first picture; raises ProtocolError for one that is unknown."""


class Room(MediaEvents):
    """One session, from its creation to its end."""

    def __init__(self, session: Session, around: Surroundings) -> None:
        self.session = session
        self.viewers: dict[str, Viewer] = {}
        self.media: Media | None = None
        self.seat: Seat | None = None
        self._around = around
        self._input = SessionInput()
        self._photons = PhotonMeter()
        self._prompts: dict[int, str] = {}
        self._plays_after_restart = False
        self._last_act_ms = 0.0
        self._act_lag_ms: float | None = None
        self._gen_ms: float | None = None
        self._queue_told: p.Queue | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._overflow_seen = 0
        self.trace: SessionStarted | None = None
        """Newest start, which names the trace."""

    @property
    def recording(self) -> Path:
        """Growing file of what is shown."""
        return self._around.recordings / f"{self.session.id}.ts"

    # ---- coming, going

    def join(self, viewer: Viewer, *, loading: p.Loading | None) -> None:
        """A socket said hello. A second one of the player replaces the first."""
        now_s = time.monotonic()
        if viewer.is_player:
            for other in self._players():
                self.leave(other, replaced=True)
                other.socket.close(ErrorCode.CONFLICT)
            self._input.begin_socket(wall_ms())
            self._photons.clear()
        self.viewers[viewer.id] = viewer
        if not viewer.is_player:
            self.session.viewer_ids.add(viewer.id)
        viewer.socket.send(self._welcome(viewer))
        if viewer.is_player:
            if self.session.state is SessionState.GRACE:
                self._around.metrics.reconnects.inc()
            self._around.registry.connected(self.session, now_s)
        viewer.socket.send(self._state())
        if loading is not None:
            viewer.socket.send(loading)
        if self.media is not None and self.media.notice is not None:
            viewer.socket.send(self._chunk(self.media.notice, viewer))
        self._queue_told = None

    def leave(self, viewer: Viewer, *, replaced: bool = False) -> None:
        """A socket is gone, or said bye; calling it again does nothing."""
        if viewer.has_left:
            return
        viewer.has_left = True
        self.viewers.pop(viewer.id, None)
        self.session.viewer_ids.discard(viewer.id)
        if viewer.negotiation is not None:
            viewer.negotiation.cancel()
        if self.media is not None:
            self.media.remove(viewer.id)
        if viewer.is_player and not replaced:
            if self.seat is not None:
                self.seat.mailbox.clear()
            self._around.registry.lost(self.session, time.monotonic())

    def take_seat(self, seat: Seat) -> None:
        """The session got a worker: open the world."""
        settings, world = self._around.settings, self.session.world
        self.seat = seat
        self.media = Media(
            self._around.video.w,
            self._around.video.h,
            self._around.video.fps,
            self._around.media,
            events=self,
        )
        self.media.record(self.recording)
        self.media.start()
        for viewer in self.viewers.values():
            if viewer.ws_codec is not None:
                self._add_ws(viewer, viewer.ws_codec)
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
            if viewer.negotiation is not None:
                viewer.negotiation.cancel()
        self.viewers.clear()
        for task in tuple(self._tasks):
            task.cancel()
        if self.media is not None:
            await self.media.close()

    # ---- messages of browsers

    def handle(self, viewer: Viewer, message: p.ClientMessage) -> None:
        """Act on a message.

        Raises:
            ProtocolError: it is refused.
        """
        match message:
            case p.Ping():
                viewer.socket.send(p.Pong(id=message.id, ct=message.ct, st=wall_ms()))
            case p.Hello():
                raise ProtocolError(ErrorCode.BAD_MESSAGE, "second hello")
            case p.RtcOffer():
                self._offer(viewer, message)
            case p.RtcCandidate():
                self._candidate(viewer, message)
            case p.RtcState():
                log.info("rtc_state", gen=message.gen, state=message.state)
            case p.Media():
                self._choose_media(viewer, message)
            case p.Ack():
                if self.media is not None:
                    self.media.acknowledge(viewer.id, message.frame)
            case p.Kf():
                if self.media is not None and viewer.keyframes.take(time.monotonic()):
                    self._around.metrics.keyframes.labels(cause="client").inc()
                    self.media.request_keyframe(viewer.id)
            case p.Shown():
                self._shown(viewer, message)
            case p.ClientBye():
                viewer.socket.close(ErrorCode.GONE)
            case _ if not viewer.is_player:
                if not (isinstance(message, p.Act) and viewer.was_told_not_controller):
                    viewer.was_told_not_controller = True
                    raise ProtocolError(ErrorCode.NOT_CONTROLLER)
            case p.Act():
                self._act(message)
            case p.Prompt() | p.Reset() | p.Pause() | p.Resume() | p.Step():
                self._command(message)
            case _:
                assert_never(message)

    def _act(self, act: p.Act) -> None:
        if self.seat is None or self.session.state not in _PLAYABLE:
            return
        now_ms = wall_ms()
        taken = self._input.take(act, now_ms)
        if taken is None:
            self._around.metrics.drops.labels(where="old_act").inc()
            return
        self.session.last_seq = self._input.last_seq
        self.seat.mailbox.post(taken.snapshot)
        self._photons.pressed(act.seq, taken.new_edges)
        if taken.has_content:
            self._last_act_ms = now_ms
            is_paused = self.session.state is SessionState.PAUSED
            if taken.is_press or not is_paused:
                self._around.registry.input(self.session, time.monotonic())

    def _command(self, message: p.Prompt | p.Reset | p.Pause | p.Resume | p.Step) -> None:
        registry, session, now_s = self._around.registry, self.session, time.monotonic()
        session.last_input_s = now_s
        if self.seat is None or session.state not in (*_PLAYABLE, SessionState.WARMING):
            raise ProtocolError(ErrorCode.NOT_READY, str(session.state), retry_ms=1_000)
        match message:
            case p.Prompt():
                prompt = clean_prompt(message.text)
                self._prompts[message.id] = prompt
                self.seat.send(SetPrompt(id=message.id, prompt=prompt))
            case p.Reset():
                start = None
                if message.scene is not None or message.image_id is not None:
                    start = self._around.start_from(message.scene, message.image_id)
                prompt_or_none = None if message.prompt is None else clean_prompt(message.prompt)
                self.seat.mailbox.clear()
                self._photons.clear()
                self.seat.send(
                    Reset(id=message.id, start=start, prompt=prompt_or_none, seed=message.seed)
                )
            case p.Pause():
                if session.state is not SessionState.PAUSED:
                    registry.transition(session, Event.PAUSE, message.reason or "user", now_s)
            case p.Resume():
                if session.state is not SessionState.RUNNING:
                    registry.transition(session, Event.PLAY, message.reason or "user", now_s)
            case p.Step():
                if session.state is not SessionState.PAUSED:
                    registry.transition(session, Event.PAUSE, "step", now_s)
                self.seat.send(StepOnce(id=message.id))

    def _shown(self, viewer: Viewer, message: p.Shown) -> None:
        metrics = self._around.metrics
        metrics.frames_shown.inc(len(message.frames))
        if viewer.is_player:
            for latency_ms in self._photons.shown(message.frames):
                metrics.photon_s.labels(transport=viewer.transport).observe(latency_ms / 1e3)

    # ---- media

    def _offer(self, viewer: Viewer, offer: p.RtcOffer) -> None:
        if not self._around.settings.webrtc:
            raise ProtocolError(ErrorCode.RTC_FAILED, "switched off")
        if self.media is None:
            raise ProtocolError(ErrorCode.NOT_READY, "no media yet", retry_ms=1_000)
        if viewer.negotiation is not None and not viewer.negotiation.done():
            raise ProtocolError(ErrorCode.RATE_LIMIT, "offer under way", retry_ms=1_000)
        if not viewer.offers.take(time.monotonic()):
            raise ProtocolError(ErrorCode.RATE_LIMIT, "offers", retry_ms=2_000)
        viewer.negotiation = self._spawn(self._answer(self.media, viewer, offer), "rtc answer")

    async def _answer(self, media: Media, viewer: Viewer, offer: p.RtcOffer) -> None:
        try:
            answer = await media.add_webrtc(viewer.id, offer.gen, offer.sdp)
        except OfferError as error:
            log.info("offer_refused", code=error.code, detail=error.detail)
            viewer.socket.refuse(ProtocolError(ErrorCode(error.code), error.detail))
            return
        viewer.socket.send(p.RtcAnswer(gen=offer.gen, sdp=answer.sdp, codec=str(answer.codec)))

    def _candidate(self, viewer: Viewer, message: p.RtcCandidate) -> None:
        if self.media is not None:
            self._spawn(self._add_candidate(self.media, viewer, message), "rtc candidate")

    async def _add_candidate(self, media: Media, viewer: Viewer, message: p.RtcCandidate) -> None:
        # The offer that it belongs to may still be in hand.
        if viewer.negotiation is not None:
            await asyncio.wait((viewer.negotiation,))
        try:
            await media.add_candidate(
                viewer.id, message.gen, message.candidate, message.mid, message.mline
            )
        except OfferError as error:
            viewer.socket.refuse(ProtocolError(ErrorCode(error.code), error.detail))

    def _choose_media(self, viewer: Viewer, message: p.Media) -> None:
        if message.transport == "webrtc":
            viewer.ws_codec = None
            return  # an offer follows; what the viewer has now goes on until it stands
        viewer.ws_codec = Codec(message.codec or "jpeg")
        if self.media is not None:
            self._add_ws(viewer, viewer.ws_codec)

    def _add_ws(self, viewer: Viewer, codec: Codec) -> None:
        assert self.media is not None
        drops = self._around.metrics.drops.labels(where="socket")

        def send(frame: bytes) -> None:
            if not viewer.socket.send_video(frame):
                drops.inc()

        self._chose(viewer, f"ws-{codec}")
        self.media.add_ws(viewer.id, codec, send)

    def _chose(self, viewer: Viewer, transport: str) -> None:
        viewer.transport = transport
        self._around.metrics.fallbacks.labels(transport=transport).inc()

    def on_chunk(self, notice: ChunkNotice) -> None:
        """Tell every viewer when the frames of a chunk are due."""
        for viewer in self.viewers.values():
            viewer.socket.send(self._chunk(notice, viewer))

    def on_origin(self, viewer_id: str, gen: int, origin: int) -> None:
        """Tell a viewer how its RTP timestamps count."""
        viewer = self.viewers.get(viewer_id)
        if viewer is not None:
            viewer.socket.send(p.RtcOrigin(gen=gen, origin=origin))

    def on_peer_state(self, viewer_id: str, gen: int, state: str) -> None:
        """Note which transport a viewer has."""
        viewer = self.viewers.get(viewer_id)
        if viewer is None:
            return
        if state == "connected":
            self._chose(viewer, "webrtc")
        elif state == "failed":
            viewer.socket.send(p.err(ErrorCode.RTC_FAILED))

    def on_encoded(self, codec: Codec, encode_ms: float, size_bytes: int) -> None:
        """Count the cost of a picture."""
        self._around.metrics.encode_s.observe(encode_ms / 1e3)

    # ---- reports of the worker

    def on_report(self, report: Report, release: Callable[[int], None]) -> None:
        """Act on a report that belongs to this session.

        Args:
            report: of the worker.
            release: frees a slot of the ring.
        """
        metrics = self._around.metrics
        match report:
            case FrameReady():
                self._frame(report, release)
            case SessionStarted():
                self._started(report)
            case ChunkStarted():
                if self._last_act_ms:
                    self._act_lag_ms = max(0.0, report.latch_ms - self._last_act_ms)
                    metrics.latch_age_s.observe(self._act_lag_ms / 1e3)
            case ChunkDone():
                made_ms = report.total_ms - report.ring_wait_ms
                self._gen_ms = made_ms
                metrics.chunk_s.observe(made_ms / 1e3)
                metrics.denoise_s.observe(sum(report.denoise_ms) / 1e3)
                metrics.refresh_s.observe(report.refresh_ms / 1e3)
                metrics.decode_s.observe(report.decode_ms / 1e3)
                metrics.ring_wait_s.observe(report.ring_wait_ms / 1e3)
                if self.media is not None:
                    self.media.note_chunk(made_ms, FRAMES_PER_CHUNK)
            case Applied():
                self._applied(report)
            case Loading():
                self.broadcast(
                    p.Loading(stage=report.stage, percent=report.percent, seconds=report.seconds)
                )
            case Failed():
                self._failed(report)
            case _:
                pass

    def _failed(self, report: Failed) -> None:
        log.error("session_failed", code=str(report.code), detail=report.detail)
        code = _ERROR_OF_FAILURE[report.code]
        session = self.session
        is_worker = report.code in (FailureCode.WORKER_DIED, FailureCode.GEN_TIMEOUT)
        if report.is_fatal or not is_worker:
            self.fail(code)
            return
        # The worker starts again and brings the world back from its trace.
        self._around.metrics.worker_restarts.inc()
        self.broadcast(p.Warn(code=str(code), msg=p.ERROR_TEXT[code] + " It starts again."))
        self._plays_after_restart = session.state is SessionState.RUNNING
        self._around.registry.transition(session, Event.RESTART, str(code), time.monotonic())

    def fail(self, code: ErrorCode) -> None:
        """End the session with an error."""
        self._around.registry.transition(
            self.session, Event.FAIL, str(code), time.monotonic(), code
        )

    def _frame(self, report: FrameReady, release: Callable[[int], None]) -> None:
        metrics, meta, seat = self._around.metrics, report.meta, self.seat
        if self.media is None or seat is None or meta.epoch < self.session.world.epoch:
            metrics.frames_stale.inc()
            release(report.slot)
            return
        metrics.frames_made.inc()
        self._photons.made(meta.frame_id, meta.act_seq)
        self.media.publish(seat.read(report.slot), meta, lambda: release(report.slot))
        if self.session.state in (SessionState.WARMING, SessionState.GRACE):
            self._first_frame()

    def _first_frame(self) -> None:
        session, now_s = self.session, time.monotonic()
        if session.state is SessionState.GRACE and (
            session.before_grace is not SessionState.WARMING
        ):
            return
        self._around.registry.transition(session, Event.FIRST_FRAME, "first picture", now_s)
        if self._plays_after_restart and session.state is SessionState.READY:
            self._plays_after_restart = False
            self._around.registry.transition(session, Event.PLAY, "worker is back", now_s)

    def _started(self, report: SessionStarted) -> None:
        self.trace = report
        image_id = None
        if report.start.image_path is not None:
            image_id = report.start.image_path.rsplit("/", 1)[-1].partition(".")[0]
        self.session.world = p.WorldInfo(
            scene=report.start.scene,
            image_id=image_id,
            prompt=report.prompt,
            seed=report.seed,
            epoch=report.epoch,
        )
        if self.media is not None:
            self.media.set_epoch(report.epoch)
        if report.epoch:
            self._around.metrics.epochs.inc()
        if not report.is_same_world:
            self.broadcast(p.Warn(code="OTHER_WORLD", msg="The world came back changed."))
        log.info("session_started", epoch=report.epoch, restored=report.restored_chunk_count)

    def _applied(self, report: Applied) -> None:
        prompt = self._prompts.pop(report.id, None)
        if prompt is not None:
            self.session.world = self.session.world.model_copy(update={"prompt": prompt})
        self.broadcast(p.Applied(id=report.id, chunk=report.chunk, epoch=report.epoch))

    # ---- what viewers are told

    def on_change(self, change: Change) -> None:
        """The session's state changed: tell the worker and everybody."""
        self.broadcast(self._state())
        if self.seat is None:
            return
        if change.new is SessionState.RUNNING:
            self.seat.send(Resume())
        elif change.old is SessionState.RUNNING and change.new in (
            SessionState.PAUSED,
            SessionState.GRACE,
        ):
            self.seat.mailbox.clear()
            self.seat.send(Pause())

    def broadcast(self, message: BaseModel) -> None:
        """Send to everybody in the room."""
        for viewer in self.viewers.values():
            viewer.socket.send(message)

    def tell_queue(self, position: int, length: int, eta_s: float) -> None:
        """Tell the place in the queue where it changed."""
        told = self._queue_told
        if told is None or (told.pos, told.len) != (position, length):
            self._queue_told = p.Queue(pos=position, len=length, eta_s=round(eta_s))
            self.broadcast(self._queue_told)

    def tell_stats(self) -> None:
        """Send the figures of the last second."""
        if self.media is None:
            return
        stats = self.media.stats()
        drops = self._around.metrics.drops.labels(where="media_queue")
        drops.inc(stats.overflow_count - self._overflow_seen)
        self._overflow_seen = stats.overflow_count
        for viewer in self.viewers.values():
            viewer.socket.send(
                p.Stats(
                    gen_ms=self._gen_ms,
                    queue_frames=stats.queue_frames,
                    fps_out=stats.fps_out,
                    encode_ms=stats.encode_ms,
                    kbps=stats.kbps,
                    act_lag_ms=self._act_lag_ms,
                    dropped=stats.overflow_count + self.media.dropped_count(viewer.id),
                    viewers=len(self.viewers),
                )
            )

    def _welcome(self, viewer: Viewer) -> p.Welcome:
        around, settings = self._around, self._around.settings
        return p.Welcome(
            session=self.session.id,
            role=viewer.role,
            resume_token=self.session.resume_token if viewer.is_player else None,
            video=around.video,
            chunk=p.ChunkInfo(first=FRAMES_PER_CHUNK, next=FRAMES_PER_CHUNK),
            latch_ms=FRAMES_PER_CHUNK / around.video.fps * 1e3,
            ice=settings.ice_servers,
            limits=around.limits,
            world=self.session.world,
            last_seq=self._input.last_seq,
            hb_ms=settings.hb_ms,
            st=wall_ms(),
        )

    def _state(self) -> p.State:
        held_s = time.monotonic() - self.session.since_s
        return p.State(
            state=self.session.state, reason=self.session.reason, since=wall_ms() - held_s * 1e3
        )

    def _chunk(self, notice: ChunkNotice, viewer: Viewer) -> p.Chunk:
        return p.Chunk(
            k=notice.k,
            epoch=notice.epoch,
            first=notice.first,
            n=notice.n,
            pts0=notice.pts0,
            dpts=notice.dpts,
            pts=notice.pts,
            act=notice.act if viewer.is_player else None,
            times=p.ChunkTimes(
                latch=notice.latch,
                gen0=notice.gen0_ms,
                gen1=notice.gen1_ms,
                enq=notice.enq_ms,
            ),
        )

    def _players(self) -> list[Viewer]:
        return [viewer for viewer in self.viewers.values() if viewer.is_player]

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


_PLAYABLE = (SessionState.READY, SessionState.RUNNING, SessionState.PAUSED)


def clean_prompt(text: str) -> str:
    """Prompt in normal form without control characters, as `check_prompt` wants it."""
    normal = unicodedata.normalize("NFC", text)
    kept = (" " if each in "\n\t\r" else each for each in normal)
    printable = "".join(each for each in kept if unicodedata.category(each) not in ("Cc", "Cs"))
    return " ".join(printable.split())[: p.PROMPT_LIMIT]


def wall_ms() -> float:
    """Wall clock in ms, the `st` of the protocol."""
    return time.time() * 1e3

"""The live service: workers, sessions, sockets, pictures, joined.

Owns the composition and its clockwork; the routes of `app` call nothing else. Invariants: no torch
in this process; a session gets a seat in the order of the queue; closing tells everybody, then ends
everything within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import structlog
from starlette.datastructures import Headers

from stream import http_bodies as bodies
from stream import protocol as p
from stream import server_messages as server
from stream.actions import FRAMES_PER_CHUNK, wall_ms
from stream.error_codes import ERROR_TEXT, ErrorCode, ProtocolError
from stream.gate import has_token
from stream.gauges import bring_up_to_date
from stream.info import limits, service_info
from stream.limits import BucketTable
from stream.loop_probe import LoopProbe
from stream.media_events import MediaSettings
from stream.memory import MemoryWatch, Pressure
from stream.metrics import Metrics
from stream.peer import IceServerSettings, IceSettings
from stream.protocol import SessionState
from stream.room import Room
from stream.scenes import Scene, draw_scenes
from stream.session_files import SessionFiles
from stream.session_states import Event, Session
from stream.sessions import Admission, Change, Registry
from stream.settings import ServerSettings
from stream.supervisor import WatchdogLimits, WorkerHandle
from stream.uploads import ImageStore
from stream.video_encoder import default_bitrate_bps
from stream.viewer import Surroundings
from stream.worker_messages import StartFrom
from stream.workers import FPS, Workers, spec_of
from stream.world_source import LoadedWorlds, OpenSource

TICK_S = 0.25
SCENES_LIMIT_S = 15.0
RECYCLE_EVERY_S = 60.0
ROOM_END = "room end"
VITAL = "vital"
"""Name of tasks that the service cannot do without."""
ROOM_END_LIMIT_S = 3.0

log = structlog.get_logger(__name__)


class Live:
    """The service.

    Args:
        settings: what the operator chose.
        open_source: makes the worlds, in the worker.
        on_lost: called once when a worker cannot run at all.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        open_source: OpenSource = LoadedWorlds,
        on_lost: Callable[[str], None] | None = None,
        watchdog: WatchdogLimits | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.registry = Registry(settings, self._on_change)
        self.scenes: dict[str, Scene] = {}
        self._is_lost = False
        spec = spec_of(settings)
        self.workers = Workers(settings, spec, open_source=open_source, limits=watchdog)
        self._on_lost = on_lost
        self._geometry = spec.geometry
        self._video = p.VideoInfo(w=self._geometry.width_px, h=self._geometry.height_px, fps=FPS)
        self._rooms: dict[str, Room] = {}
        self._creations = BucketTable(
            per_s=settings.sessions_per_min / 60, burst=settings.sessions_per_min
        )
        self._memory = MemoryWatch(settings.memory_limit_mib, settings.gpu_limit_mib)
        self._recycled_s = -RECYCLE_EVERY_S
        self._tasks: set[asyncio.Task[None]] = set()
        self._scenes_drawn = asyncio.Event()
        self._is_closing = False
        self._files: SessionFiles | None = None
        self.images: ImageStore | None = None

    # ---- life

    async def start(self) -> None:
        """Start workers and clockwork; returns before anything is loaded. `close` ends it all.

        Raises:
            OSError: a folder cannot be made, a process not be started.
        """
        self._files = SessionFiles(self.settings.record)
        width_px, height_px = self._geometry.width_px, self._geometry.height_px
        self.images = ImageStore(self._files.pictures, width_px=width_px, height_px=height_px)
        await self.workers.start(
            self._files.records, on_ready=self._ready, on_free=self._assign, on_lost=self._lose
        )
        for seat in self.workers.seats:
            self._spawn(seat.run(), VITAL)
        self._spawn(self._draw_scenes(), "scenes")
        self._spawn(self._tick_forever(), VITAL)
        probe = LoopProbe(self.metrics.loop_lag_s.observe, self.metrics.loop_stuck.inc)
        self._spawn(probe.run(), "loop probe")

    async def close(self) -> None:
        """Tell everybody, end everything. Calling it again does nothing."""
        if self._is_closing:
            return
        self._is_closing = self.registry.is_draining = True
        now_s = time.monotonic()
        for session in self.registry:
            if session.state is not SessionState.CLOSED:
                self.registry.transition(
                    session, Event.CLOSE, "server closing", now_s, ErrorCode.SERVER_SHUTDOWN
                )
        ends = [task for task in self._tasks if task.get_name() == ROOM_END]
        # Rooms leave their seats first, as their tasks were made first.
        await asyncio.gather(
            asyncio.wait(ends, timeout=ROOM_END_LIMIT_S) if ends else asyncio.sleep(0.0),
            self.workers.close(),
        )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._files is not None:
            await self._files.close()

    # ---- what the routes ask

    @property
    def is_ready(self) -> bool:
        """Whether visitors can play."""
        is_fine = self._memory.pressure is Pressure.FINE
        return not self._is_closing and is_fine and self.workers.is_ready

    async def info(self) -> bodies.ServiceInfo:
        """Everything a page needs before it opens a session."""
        await self._wait_for_scenes()
        return service_info(
            self.settings,
            self._video,
            self.scenes.values(),
            is_ready=self.is_ready,
            loading=self.workers.loading,
        )

    async def create(
        self, request: bodies.CreateSession, *, address: str, idempotency_key: str | None
    ) -> bodies.SessionCreated:
        """Admit somebody.

        Raises:
            ProtocolError: no place, no such session or picture, too often.
        """
        if self._files is None:
            raise ProtocolError(ErrorCode.NOT_READY)
        now_s = time.monotonic()
        bucket = self._creations.bucket(address)
        if not bucket.take(now_s):
            raise ProtocolError(ErrorCode.RATE_LIMIT, "sessions", retry_ms=bucket.wait_ms(now_s))
        is_new = request.resume is None and request.role == "controller"
        if is_new and self._memory.pressure is not Pressure.FINE:
            raise ProtocolError(ErrorCode.NOT_READY, "memory", retry_ms=10_000)
        if request.scene is not None:
            await self._wait_for_scenes()
        if request.scene is not None or request.image_id is not None:
            self._start_from(request.scene, request.image_id)
        if idempotency_key is not None:
            # A key means the same only to who sent it, with the same request.
            idempotency_key = f"{address} {idempotency_key} {request.model_dump_json()}"
        now_s = time.monotonic()  # scenes may have been waited for
        admission = self.registry.create(request, now_s=now_s, idempotency_key=idempotency_key)
        session = admission.session
        if session.id not in self._rooms:
            self._rooms[session.id] = Room(session, self._surroundings(self._files))
        self._assign()
        return self._created(admission)

    async def upload(self, data: bytes, *, address: str) -> str:
        """Take a seed image and return its id.

        Raises:
            ProtocolError: BAD_IMAGE, NOT_READY, too often.
        """
        if self.images is None or self._is_closing:
            raise ProtocolError(ErrorCode.NOT_READY)
        try:
            image_id = await self.images.add(data, client=address)
        except ProtocolError:
            self.metrics.uploads.labels(result="refused").inc()
            raise
        self.metrics.uploads.labels(result="taken").inc()
        return image_id

    def status(self, session_id: str) -> bodies.SessionStatus:
        """State of a session.

        Raises:
            ProtocolError: NO_SESSION.
        """
        session = self.registry.get(session_id)
        return bodies.SessionStatus(
            session_id=session.id,
            state=session.state,
            reason=session.reason,
            queue_pos=self.registry.queue_position(session),
            viewers=len(session.viewer_ids),
            last_error=session.last_error,
            world=session.world,
        )

    def end(self, session_id: str, headers: Headers) -> None:
        """End a session for its player or the operator.

        Raises:
            ProtocolError: NO_SESSION, NOT_CONTROLLER.
        """
        session = self._owned(session_id, headers)
        if session.state is SessionState.CLOSED:
            raise ProtocolError(ErrorCode.NO_SESSION, "ended")
        self.registry.transition(
            session, Event.CLOSE, "ended by the player", time.monotonic(), ErrorCode.GONE
        )

    def trace(self, session_id: str, headers: Headers) -> Path:
        """File of the trace of the newest epoch.

        Raises:
            ProtocolError: NO_SESSION, NOT_CONTROLLER.
        """
        session = self._owned(session_id, headers)
        room = self._rooms.get(session.id)
        if room is None or room.trace is None:
            raise ProtocolError(ErrorCode.NO_SESSION, "no trace yet")
        return room.trace.trace

    def picture(self, session_id: str, headers: Headers) -> Path:
        """Uploaded picture that the newest epoch started from; its trace needs it to replay.

        Raises:
            ProtocolError: NO_SESSION, NOT_CONTROLLER.
        """
        session = self._owned(session_id, headers)
        started = self.room(session.id).trace
        path = self._files.picture(started) if self._files and started else None
        if path is None or not path.is_file():
            raise ProtocolError(ErrorCode.NO_SESSION, "started from a scene")
        return path

    async def recording(self, session_id: str, headers: Headers) -> Path:
        """MP4 of what the session showed so far; the caller removes it after it was sent.

        Raises:
            ProtocolError: NO_SESSION, NOT_CONTROLLER.
        """
        session = self._owned(session_id, headers)
        if self._files is None:
            raise ProtocolError(ErrorCode.NO_SESSION, "no recording")
        return await self._files.download(session.id)

    def room(self, session_id: str) -> Room:
        """Room of a session.

        Raises:
            ProtocolError: NO_SESSION.
        """
        room = self._rooms.get(session_id)
        if room is None:
            raise ProtocolError(ErrorCode.NO_SESSION)
        return room

    def metrics_text(self) -> bytes:
        """All metrics, gauges brought up to date."""
        bring_up_to_date(
            self.metrics,
            registry=self.registry,
            rooms=self._rooms.values(),
            workers=self.workers,
        )
        return self.metrics.text()

    # ---- inside

    def _created(self, admission: Admission) -> bodies.SessionCreated:
        session = admission.session
        left_s = admission.expires_s - time.monotonic()
        return bodies.SessionCreated(
            session_id=session.id,
            role=admission.role,
            ticket=admission.ticket,
            resume_token=admission.resume_token,
            ws_url="/v1/ws",
            state=session.state,
            queue_pos=self.registry.queue_position(session),
            expires_at=wall_ms() + left_s * 1e3,
        )

    def _owned(self, session_id: str, headers: Headers) -> Session:
        session = self.registry.get(session_id)
        kind, _, given = headers.get("authorization", "").partition(" ")
        is_own = kind.lower() == "bearer" and self.registry.is_player(session, given)
        if not (is_own or has_token(self.settings, headers)):
            raise ProtocolError(ErrorCode.NOT_CONTROLLER)
        return session

    def _start_from(self, scene: str | None, image_id: str | None) -> StartFrom:
        if image_id is not None:
            if self.settings.renderer or self.images is None:
                raise ProtocolError(ErrorCode.BAD_IMAGE, "the renderer takes no pictures")
            return StartFrom(image_path=str(self.images.path(image_id)))
        name = scene or self.settings.scene
        if not self._scenes_drawn.is_set() and name != self.settings.scene:
            raise ProtocolError(ErrorCode.NOT_READY, "scenes", retry_ms=2_000)
        if self.scenes and name not in self.scenes:
            raise ProtocolError(ErrorCode.BAD_MESSAGE, "unknown scene")
        return StartFrom(scene=name)

    def _surroundings(self, files: SessionFiles) -> Surroundings:
        settings = self.settings
        servers = tuple(
            IceServerSettings(urls=each.urls, username=each.username, credential=each.credential)
            for each in settings.ice_servers
        )
        return Surroundings(
            settings=settings,
            registry=self.registry,
            metrics=self.metrics,
            media=MediaSettings(
                frames_per_chunk=FRAMES_PER_CHUNK,
                bitrate_bps=settings.bit_rate_kbps * 1_000
                if settings.bit_rate_kbps is not None
                else default_bitrate_bps(self._video.w, self._video.h),
                keyframe_min_s=settings.kf_min_ms / 1e3,
                ice=IceSettings(
                    servers=servers,
                    hosts=settings.ice_hosts,
                    udp_ports=settings.udp_ports,
                ),
            ),
            video=self._video,
            limits=limits(self.settings),
            files=files,
            start_from=self._start_from,
        )

    def _assign(self) -> None:
        """Give free seats to those who wait."""
        if self._is_closing or self._memory.pressure is not Pressure.FINE:
            return
        free = self.workers.free_seats
        chosen = self.registry.assign(len(free), time.monotonic())
        for seat, session in zip(free, chosen, strict=False):
            room = self._rooms[session.id]
            seat.give_to(room)
            room.take_seat(seat)

    def _on_change(self, change: Change) -> None:
        session, room = change.session, self._rooms.get(change.session.id)
        log.info(
            "session_state",
            session_id=session.id,
            old=str(change.old),
            new=str(change.new),
            reason=session.reason,
        )
        if room is None:
            return
        room.on_change(change)
        if change.new is SessionState.FAILED:
            code = session.last_error or ErrorCode.INTERNAL
            self.metrics.errors.labels(code=str(code)).inc()
            room.broadcast(server.err(code, fatal=True))
            self.registry.transition(session, Event.CLOSE, str(code), time.monotonic(), code)
        elif change.new is SessionState.CLOSED:
            code = session.last_error or ErrorCode.GONE
            self.metrics.sessions_ended.labels(reason=str(code)).inc()
            self._spawn(self._end_room(room, code), ROOM_END)

    async def _end_room(self, room: Room, code: ErrorCode) -> None:
        seat, room.seat = room.seat, None
        if seat is not None:
            seat.leave()
        await room.close(code)
        self._assign()
        if self._files is not None:
            await self._files.complete(room.session.id)

    def _ready(self, worker: WorkerHandle) -> None:
        info = worker.info
        if info is not None:
            log.info(
                "worker_ready", device=info.device, ranks=info.rank_count, dtype=info.dtype,
                linear=info.linear, attention=info.attention, chunk_ms=info.chunk_ms,
            )  # fmt: skip
        now_s = time.monotonic()
        for session in self.registry:
            self.registry.warm_up_begins(session, now_s)
        self._assign()

    def _lose(self, reason: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            log.error("worker_lost", reason=reason)
            if self._on_lost is not None:
                self._on_lost(reason)

    async def _wait_for_scenes(self) -> None:
        """Wait until it is known which scenes there are; not for ever."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._scenes_drawn.wait(), SCENES_LIMIT_S)

    async def _draw_scenes(self) -> None:
        try:
            self.scenes = await draw_scenes(
                width_px=self._geometry.width_px, height_px=self._geometry.height_px
            )
        except (RuntimeError, TimeoutError, OSError) as error:
            log.error("scenes_not_drawn", detail=str(error))
        finally:
            self._scenes_drawn.set()

    async def _tick_forever(self) -> None:
        last_stats_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self.registry.tick(now_s, is_loaded=self.workers.is_loaded)
            self._assign()
            self._forget_rooms()
            if now_s - last_stats_s >= 1.0:
                last_stats_s = now_s
                self._judge_memory(now_s)
                self._tell(now_s)

    def _judge_memory(self, now_s: float) -> None:
        """With too little memory nobody is admitted; if that does not help, sessions end."""
        before, use = self._memory.pressure, self.workers.memory
        pressure = self._memory.judge(use, now_s)
        if pressure is not before:
            log.warning("memory", pressure=str(pressure), mib=round(use.resident_mib))
        if pressure is not Pressure.DRAIN:
            return
        self.registry.drain(ErrorCode.NOT_READY, "memory", now_s)
        if now_s - self._recycled_s >= RECYCLE_EVERY_S and self.workers.free_seats:
            self._recycled_s = now_s
            self.workers.recycle_free("memory")

    def _tell(self, now_s: float) -> None:
        """Once a second: places in the queue, figures, the end of a lease."""
        waiting = self.registry.queue()
        for position, session in enumerate(waiting, start=1):
            eta_s = self.registry.eta_s(position, now_s)
            self._rooms[session.id].tell_queue(position, len(waiting), eta_s)
        for room in self._rooms.values():
            room.tell_stats()
            if self.registry.end_warning(room.session, now_s):
                text = ERROR_TEXT[ErrorCode.MAX_DURATION]
                room.broadcast(server.Warn(code="MAX_DURATION", msg=f"In a minute: {text}"))

    def _forget_rooms(self) -> None:
        known = {session.id for session in self.registry}
        for session_id in [each for each in self._rooms if each not in known]:
            del self._rooms[session_id]
            if self._files is not None:
                self._files.forget(session_id)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task_failed", task=task.get_name(), exc_info=error)
            if task.get_name() == VITAL:
                # Without it nothing ends or begins any more: better to end and be started again.
                self._lose(f"{type(error).__name__} in the service; see the log")

"""Transports of one session: its media, and the way to each of its viewers.

Owns the media, offers under way, the choice between WebRTC and WebSocket video, actions that come
over a data channel. Invariant: whatever a viewer had is freed when it leaves or the session ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path

import structlog

from stream import client_messages as client
from stream import server_messages as server
from stream.chunk_notice import ChunkNotice, DueTimes
from stream.error_codes import ErrorCode, ProtocolError
from stream.media import Media
from stream.media_events import MediaEvents, MediaStats
from stream.peer import OfferError
from stream.rate_control import Role
from stream.video_encoder import Codec, KeyCause
from stream.viewer import RTC_CODECS, Surroundings, Viewer

ACT_LIMIT = 4 * 1024
"""Characters of a message over the data channel."""
RENEGOTIATE = "RENEGOTIATE"
"""Code of the warning that asks a page for a new offer."""

log = structlog.get_logger(__name__)


class Transports(MediaEvents):
    """The ways of one session's frames.

    Args:
        viewers: of the session, by id; changed by its owner.
        around: what sessions share.
        on_presented: playback of a chunk begins; with the newest action that it shows.
        on_act: a viewer's action came over its data channel; may raise ProtocolError.
        on_failed: no frame can be sent any more.
    """

    def __init__(
        self,
        viewers: Mapping[str, Viewer],
        around: Surroundings,
        on_presented: Callable[[int], None],
        *,
        on_act: Callable[[Viewer, client.Act], None],
        on_failed: Callable[[ErrorCode], None],
    ) -> None:
        self.media: Media | None = None
        self.due_times = DueTimes()
        self._viewers = viewers
        self._around = around
        self._on_presented = on_presented
        self._on_act = on_act
        self._on_failed = on_failed
        self._tasks: set[asyncio.Task[None]] = set()
        self._overflow_seen = 0

    def start(self, recording: Path) -> None:
        """Make the media, and record what it shows; where that fails, play goes on without."""
        video = self._around.video
        self.media = Media(video.w, video.h, video.fps, self._around.media, events=self)
        try:
            self.media.record(recording)
        except OSError as error:
            log.error("recording_failed", reason=str(error))
        self.media.start()
        for viewer in self._viewers.values():
            if viewer.ws_codec is not None:
                self._add_ws(viewer, viewer.ws_codec)

    def welcome(self, viewer: Viewer) -> None:
        """Tell a viewer who joins about the chunk that is being shown."""
        if self.media is not None and self.media.notice is not None:
            viewer.socket.send(_chunk(self.media.notice, viewer))

    def leave(self, viewer: Viewer) -> None:
        """Free what a viewer had."""
        if viewer.negotiation is not None:
            viewer.negotiation.cancel()
        if self.media is not None:
            self.media.audience.remove(viewer.id)

    async def close(self) -> None:
        """Free everything; what the session had of media is forgotten, figures included."""
        media, self.media = self.media, None
        for task in tuple(self._tasks):
            task.cancel()
        # Connections that were half made close with the media.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if media is not None:
            await media.close()

    def acknowledge(self, viewer: Viewer, frame_id: int) -> None:
        """A frame was drawn or dropped."""
        if self.media is not None:
            self.media.audience.acknowledge(viewer.id, frame_id)

    def want_keyframe(self, viewer: Viewer) -> None:
        """Let a viewer have a keyframe soon."""
        if self.media is not None and viewer.keyframes.take(time.monotonic()):
            self.media.audience.request_keyframe(viewer.id)

    def stats(self) -> MediaStats | None:
        """Figures of now; what was dropped since the last call is counted."""
        if self.media is None:
            return None
        stats = self.media.stats()
        drops = self._around.metrics.drops.labels(where="media_queue")
        drops.inc(stats.overflow_count - self._overflow_seen)
        self._overflow_seen = stats.overflow_count
        return stats

    def dropped_count(self, viewer: Viewer) -> int:
        """Frames that this viewer did not get."""
        return 0 if self.media is None else self.media.audience.dropped_count(viewer.id)

    def offer(self, viewer: Viewer, offer: client.RtcOffer) -> None:
        """Answer an offer in the background.

        Raises:
            ProtocolError: RTC_FAILED, NOT_READY, RATE_LIMIT.
        """
        if not self._around.settings.webrtc:
            raise ProtocolError(ErrorCode.RTC_FAILED, "switched off")
        if self.media is None:
            raise ProtocolError(ErrorCode.NOT_READY, "no media yet", retry_ms=1_000)
        if viewer.negotiation is not None and not viewer.negotiation.done():
            raise ProtocolError(ErrorCode.RATE_LIMIT, "offer under way", retry_ms=1_000)
        if not viewer.offers.take(time.monotonic()):
            raise ProtocolError(ErrorCode.RATE_LIMIT, "offers", retry_ms=2_000)
        viewer.negotiation = self._spawn(self._answer(self.media, viewer, offer), "rtc answer")

    async def _answer(self, media: Media, viewer: Viewer, offer: client.RtcOffer) -> None:
        try:
            answer = await media.audience.add_webrtc(
                viewer.id,
                offer.gen,
                offer.sdp,
                codecs=viewer.rtc_codecs,
                role=_role(viewer),
            )
        except OfferError as error:
            self._refuse(viewer, error)
            return
        viewer.socket.send(server.RtcAnswer(gen=offer.gen, sdp=answer.sdp, codec=str(answer.codec)))

    def candidate(self, viewer: Viewer, message: client.RtcCandidate) -> None:
        """Take one more ICE candidate in the background."""
        if self.media is not None:
            self._spawn(self._add_candidate(self.media, viewer, message), "rtc candidate")

    async def _add_candidate(
        self, media: Media, viewer: Viewer, message: client.RtcCandidate
    ) -> None:
        # The offer that it belongs to may still be in hand.
        if viewer.negotiation is not None:
            await asyncio.wait((viewer.negotiation,))
        try:
            await media.audience.add_candidate(
                viewer.id, message.gen, message.candidate, message.mid, message.mline
            )
        except OfferError as error:
            self._refuse(viewer, error)

    def _refuse(self, viewer: Viewer, error: OfferError) -> None:
        log.info("offer_refused", code=error.code, detail=error.detail)
        self._around.metrics.errors.labels(code=error.code).inc()
        viewer.socket.refuse(ProtocolError(ErrorCode(error.code), error.detail))

    def choose(self, viewer: Viewer, message: client.Media) -> None:
        """Change a viewer's transport.

        Raises:
            ProtocolError: RTC_CODEC, RATE_LIMIT.
        """
        if not viewer.choices.take(time.monotonic()):
            raise ProtocolError(ErrorCode.RATE_LIMIT, "transports", retry_ms=2_000)
        if message.transport == "webrtc":
            viewer.ws_codec = None
            if message.codec == "jpeg":
                raise ProtocolError(ErrorCode.RTC_CODEC, "jpeg")
            viewer.rtc_codecs = (Codec(message.codec),) if message.codec else RTC_CODECS
            return  # an offer follows; what the viewer has now goes on until it stands
        viewer.ws_codec = Codec(message.codec or "jpeg")
        if self.media is not None:
            self._add_ws(viewer, viewer.ws_codec)

    def _add_ws(self, viewer: Viewer, codec: Codec) -> None:
        assert self.media is not None
        drops = self._around.metrics.drops.labels(where="socket")

        def send(frame: bytes) -> bool:
            is_sent = viewer.socket.send_video(frame)
            drops.inc(not is_sent)
            return is_sent

        if viewer.negotiation is not None:
            viewer.negotiation.cancel()  # its connection would take the frames over
        self._chose(viewer, f"ws-{codec}")
        self.media.audience.add_ws(
            viewer.id, codec, send, viewer.socket.take_back_video, role=_role(viewer)
        )

    def _chose(self, viewer: Viewer, transport: str) -> None:
        viewer.transport = transport
        self._around.metrics.fallbacks.labels(transport=transport).inc()

    def on_chunk(self, notice: ChunkNotice) -> None:
        """Tell every viewer when the frames of a chunk are due."""
        self.due_times.told(notice)
        for viewer in self._viewers.values():
            viewer.socket.send(_chunk(notice, viewer))
        if notice.act:
            self._on_presented(notice.act[-1][1])

    def on_origin(self, viewer_id: str, gen: int, origin: int) -> None:
        """Tell a viewer how its RTP timestamps count."""
        viewer = self._viewers.get(viewer_id)
        if viewer is not None:
            viewer.socket.send(server.RtcOrigin(gen=gen, origin=origin))

    def on_peer_state(self, viewer_id: str, gen: int, state: str) -> None:
        """Note which transport a viewer has."""
        viewer = self._viewers.get(viewer_id)
        if viewer is None:
            return
        if state == "connected":
            self._chose(viewer, "webrtc")
        elif state == "failed":
            viewer.socket.send(server.err(ErrorCode.RTC_FAILED))

    def on_act(self, viewer_id: str, text: str | bytes) -> None:
        """Take an action like one that comes over the socket."""
        viewer = self._viewers.get(viewer_id)
        if viewer is None:
            return
        try:
            message = viewer.socket.judge(text, limit=ACT_LIMIT)
        except ProtocolError as error:  # the socket told the client
            self._around.metrics.messages_bad.labels(why=str(error.code)).inc()
            return
        try:
            if not isinstance(message, client.Act):
                raise ProtocolError(ErrorCode.BAD_MESSAGE, "no action on the data channel")
            self._around.metrics.messages_in.labels(type="act.channel").inc()
            self._on_act(viewer, message)
        except ProtocolError as error:
            log.info("act_refused", code=str(error.code), detail=error.detail)
            self._around.metrics.errors.labels(code=str(error.code)).inc()
            viewer.socket.refuse(error)

    def on_stalled(self, viewer_id: str, gen: int) -> None:
        """Ask the page for a new connection."""
        viewer = self._viewers.get(viewer_id)
        if viewer is not None:
            text = "No picture could be sent; a new connection is needed."
            viewer.socket.send(server.Warn(code=RENEGOTIATE, msg=text))

    def on_encoded(
        self, codec: Codec, encode_ms: float, size_bytes: int, key_cause: KeyCause | None
    ) -> None:
        """Count the cost of a picture."""
        metrics = self._around.metrics
        video = self._around.video
        size = f"{video.w}x{video.h}"
        metrics.encode_s.labels(codec=str(codec), size=size).observe(encode_ms / 1e3)
        metrics.frames_encoded.labels(codec=str(codec)).inc()
        if key_cause is not None:
            metrics.keyframes.labels(cause=str(key_cause)).inc()

    def on_delivered(self, transport: str, is_sent: bool) -> None:
        """Count a frame for one viewer."""
        metrics = self._around.metrics
        counter = metrics.frames_sent if is_sent else metrics.frames_dropped
        counter.labels(transport=transport).inc()

    def on_sent(self, send_ms: float) -> None:
        """Count how long a picture took to its last packet."""
        self._around.metrics.send_s.observe(send_ms / 1e3)

    def on_failed(self) -> None:
        """End the session: frames would pile up unseen."""
        self._on_failed(ErrorCode.INTERNAL)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task_failed", task=task.get_name(), exc_info=error)


def _role(viewer: Viewer) -> Role:
    return "player" if viewer.is_player else "spectator"


def _chunk(notice: ChunkNotice, viewer: Viewer) -> server.Chunk:
    return server.Chunk(
        k=notice.k,
        epoch=notice.epoch,
        first=notice.first,
        n=notice.n,
        pts0=notice.pts0,
        dpts=notice.dpts,
        pts=notice.pts,
        act=notice.act if viewer.is_player else None,
        times=server.ChunkTimes(
            latch=notice.latch,
            gen0=notice.gen0_ms,
            gen1=notice.gen1_ms,
            enq=notice.enq_ms,
            due=notice.due_ms,
        ),
    )

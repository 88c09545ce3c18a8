"""Media of one session: frames in, evenly paced and encoded once for all viewers.

Owns the queue of frames that wait for their time, the pacing task, the viewers. Does not own
sockets, sessions or the ring: what happens is told to a `MediaEvents`.

    publish -> queue -> (due time) -> encoder of each codec in use -> WebRTC tracks, WebSockets

Invariants: everything runs on one event loop, encoding on one thread; the queue holds two chunks,
and drops its oldest frame beyond; after `set_epoch` no frame of an older epoch leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stream import pacing
from stream.chunk_notice import Announcer, ChunkNotice
from stream.media_events import MediaEvents, MediaSettings, MediaStats
from stream.peer import Answer, OfferError, Peer
from stream.recording import Recording
from stream.shared_encoders import SharedEncoders, Viewer
from stream.video_encoder import Codec, EncodedFrame
from stream.ws_video import WsVideo

if TYPE_CHECKING:
    from stream.frames import FrameMeta

STATS_FRAMES = 240
"""Frames over which times and sizes are taken."""
STATS_S = 2.0
"""Time over which rates are taken."""


@dataclass(slots=True)
class _Waiting:
    frame_HWC: NDArray[np.uint8]
    meta: FrameMeta
    release: Callable[[], None] | None
    queued_s: float
    """By the clock of the media; the next one is wall clock."""
    queued_ms: float

    def let_go(self) -> None:
        if self.release is not None:
            self.release()
            self.release = None


@dataclass(slots=True)
class _Counts:
    published: int = 0
    shown: int = 0
    repeated: int = 0
    overflow: int = 0
    stale: int = 0
    missed: int = 0
    keyframes: int = 0
    late: int = 0


class Media:
    """The way of one session's frames to its viewers.

    Args:
        width_px: of every frame, like `height_px`.
        height_px: even.
        fps: nominal rate; slower where the generator does not keep up, never faster.
        settings: what the operator chose.
        events: is told what happens; nobody by default.
        clock_s: monotonic, for tests.

    Made and used on one running event loop; nothing leaves before `start`.
    """

    def __init__(
        self,
        width_px: int,
        height_px: int,
        fps: float,
        settings: MediaSettings,
        *,
        events: MediaEvents | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size_px = (width_px, height_px)
        self._fps = fps
        self._settings = settings
        self._events = events or MediaEvents()
        self._clock_s = clock_s
        self._timeline = pacing.new_timeline(fps)
        self._queue: deque[_Waiting] = deque()
        self._queue_limit = settings.queue_chunks * settings.frames_per_chunk
        self._wake = asyncio.Event()
        self._epoch = 0
        self._shown_epoch: int | None = None
        self._last: _Waiting | None = None
        self._last_s = 0.0
        self._announcer = Announcer(settings.frames_per_chunk)
        self._encoders = SharedEncoders(width_px, height_px, fps, settings, clock_s=clock_s)
        self._peers: dict[tuple[str, int], Peer] = {}
        self._newest_gen: dict[str, int] = {}
        self._ws: dict[str, WsVideo] = {}
        self._recording: Recording | None = None
        self._counts = _Counts()
        self._sent_at_s: deque[float] = deque(maxlen=STATS_FRAMES)
        self._encode_ms: deque[float] = deque(maxlen=STATS_FRAMES)
        self._sizes: deque[int] = deque(maxlen=STATS_FRAMES)
        self._task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def start(self) -> None:
        """Begin pacing."""
        if self._task is None and not self._is_closed:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="pacer")

    @property
    def notice(self) -> ChunkNotice | None:
        """Of the newest chunk that was announced; for viewers who join."""
        return self._announcer.newest

    # ---- frames in

    def publish(
        self,
        frame_HWC: NDArray[np.uint8],
        meta: FrameMeta,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Take one uint8 RGB frame [height, width, 3], to be shown at its time.

        `frame_HWC` has to stay as it is until `release` is called, which happens once: when the
        frame leaves or is dropped. Frames come in order.
        """
        waiting = _Waiting(frame_HWC, meta, release, self._clock_s(), _wall_ms())
        self._counts.published += 1
        if self._is_closed or meta.epoch < self._epoch:
            self._counts.stale += 1
            waiting.let_go()
            return
        if len(self._queue) >= self._queue_limit:
            self._counts.overflow += 1
            self._queue.popleft().let_go()
        self._queue.append(waiting)
        self._wake.set()

    def note_chunk(self, total_ms: float, frame_count: int) -> None:
        """Learn what a chunk cost, waiting for room in the ring not included; sets the pace."""
        self._timeline = pacing.with_chunk_cost(self._timeline, total_ms / 1e3, frame_count)

    def set_epoch(self, epoch: int) -> None:
        """Drop all frames of older epochs; none of them leaves after this call."""
        if epoch <= self._epoch:
            return
        self._epoch = epoch
        kept: deque[_Waiting] = deque()
        for waiting in self._queue:
            if waiting.meta.epoch < epoch:
                self._counts.stale += 1
                waiting.let_go()
            else:
                kept.append(waiting)
        self._queue = kept
        self._last = None
        self._announcer.forget()
        for peer in self._peers.values():
            peer.track.discard_before(epoch)
        for viewer in self._viewers():
            self._encoders.want_keyframe(viewer.codec)
        self._wake.set()

    # ---- viewers

    async def add_webrtc(
        self,
        viewer_id: str,
        gen: int,
        offer_sdp: str,
        *,
        codecs: Sequence[Codec] = (Codec.H264, Codec.VP8),
    ) -> Answer:
        """Answer an offer. What the viewer has now goes on until the new connection stands.

        Raises:
            OfferError: if the offer cannot be used, or another overtook it.
        """
        if self._is_closed or gen <= self._newest_gen.get(viewer_id, -1):
            raise OfferError("BAD_MESSAGE", f"gen {gen} is not newer")
        self._newest_gen[viewer_id] = gen
        peer = Peer(
            self._settings.ice,
            on_started=self._wake_for_viewer,
            on_keyframe=lambda: self._want_key(peer.track),
            on_origin=lambda origin: self._events.on_origin(viewer_id, gen, origin),
            on_state=lambda state: self._handle_peer(viewer_id, gen, state),
        )
        try:
            answer = await peer.answer(offer_sdp, codecs)
            if self._newest_gen.get(viewer_id) != gen:
                raise OfferError("RTC_FAILED", "the viewer left or sent a newer offer")
        except BaseException:  # cancellation too: a half-made connection must not stay
            self._close_later(peer)
            raise
        self._peers[viewer_id, gen] = peer
        return answer

    async def add_candidate(
        self, viewer_id: str, gen: int, candidate: str, mid: str | None, mline: int | None
    ) -> None:
        """Take one more ICE candidate; those of connections that are gone are passed over.

        Raises:
            OfferError: if it is malformed, or one too many.
        """
        peer = self._peers.get((viewer_id, gen))
        if peer is not None:
            await peer.add_candidate(candidate, mid, mline)

    def add_ws(self, viewer_id: str, codec: Codec, send: Callable[[bytes], None]) -> None:
        """Send video over a WebSocket from now on; the viewer's WebRTC connections end.

        `send` takes one binary message and returns at once.
        """
        self._drop_peers(viewer_id, before_gen=None)
        self._newest_gen.setdefault(viewer_id, -1)
        period_s = 1.0 / self._fps
        self._ws[viewer_id] = WsVideo(codec, send, period_s=period_s, clock_s=self._clock_s)
        self._wake_for_viewer()

    def acknowledge(self, viewer_id: str, frame_id: int) -> None:
        """A WebSocket viewer has shown or dropped a frame."""
        viewer = self._ws.get(viewer_id)
        if viewer is not None:
            viewer.acknowledge(frame_id)

    def request_keyframe(self, viewer_id: str) -> None:
        """Let this viewer's codec have a keyframe soon."""
        for (owner, _), peer in self._peers.items():
            if owner == viewer_id:
                self._want_key(peer.track)
        if (viewer := self._ws.get(viewer_id)) is not None:
            self._want_key(viewer)

    def remove(self, viewer_id: str) -> None:
        """Forget a viewer; its connections close in the background."""
        self._newest_gen.pop(viewer_id, None)
        self._ws.pop(viewer_id, None)
        self._drop_peers(viewer_id, before_gen=None)

    def dropped_count(self, viewer_id: str) -> int:
        """Frames that this viewer did not get since its first, over its present connections."""
        mine: list[Viewer] = [
            peer.track for (owner, _), peer in self._peers.items() if owner == viewer_id
        ]
        if viewer_id in self._ws:
            mine.append(self._ws[viewer_id])
        return sum(viewer.dropped_count for viewer in mine)

    def set_bitrate(self, bitrate_bps: int) -> None:
        """Change the bit rate of all encoders from the next frame on."""
        self._encoders.bitrate_bps = bitrate_bps

    def record(self, path: Path) -> None:
        """Record from now on what is shown, into a growing `.ts` file (see `stream.recording`).

        Raises:
            OSError: if the file cannot be made.
        """
        self.stop_recording()
        width_px, height_px = self._size_px
        self._recording = Recording(path, width_px=width_px, height_px=height_px, fps=self._fps)

    def stop_recording(self) -> None:
        """Complete the recording, if there is one."""
        if self._recording is not None:
            self._recording.finish()
            self._recording = None

    def stats(self) -> MediaStats:
        """Figures of now."""
        counts, now_s = self._counts, self._clock_s()
        recent = [each for each in self._sent_at_s if each > now_s - STATS_S]
        span_s = now_s - recent[0] if recent else 0.0
        fps_out = (len(recent) - 1) / span_s if len(recent) > 1 and span_s > 0 else 0.0
        mean_bytes = sum(self._sizes) / len(self._sizes) if self._sizes else 0.0
        period_s = self._timeline.period_s
        return MediaStats(
            queue_frames=len(self._queue),
            playout_left_s=len(self._queue) * period_s,
            period_s=period_s,
            fps_out=fps_out,
            encode_ms=sum(self._encode_ms) / len(self._encode_ms) if self._encode_ms else 0.0,
            kbps=mean_bytes * 8e-3 * fps_out,
            published_count=counts.published,
            shown_count=counts.shown,
            repeated_count=counts.repeated,
            overflow_count=counts.overflow,
            stale_count=counts.stale,
            skipped_count=self._encoders.skipped_count,
            missed_count=counts.missed,
            keyframe_count=counts.keyframes,
            late_count=counts.late,
            webrtc_viewers=sum(peer.state == "connected" for peer in self._peers.values()),
            ws_viewers=len(self._ws),
        )

    async def close(self) -> None:
        """Stop pacing, release what waits, end all connections; may be called twice."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        while self._queue:
            self._queue.popleft().let_go()
        self._last = None
        self._ws.clear()
        self._newest_gen.clear()
        for peer in self._peers.values():
            self._close_later(peer)
        self._peers.clear()
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
        self.stop_recording()
        self._encoders.close()

    # ---- pacing

    async def _run(self) -> None:
        while True:
            waiting = await self._next()
            try:
                if waiting is None:
                    await self._send_last()
                else:
                    await self._send_new(waiting)
            finally:
                if waiting is not None:
                    waiting.let_go()

    async def _next(self) -> _Waiting | None:
        """Next frame; None when the last has to be sent again."""
        while not self._queue:
            wait_s = None
            if self._last is not None:
                wait_s = self._last_s + self._settings.repeat_s - self._clock_s()
                if wait_s <= 0 or self._encoders.has_newcomer(self._viewers()):
                    return None
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
        return self._queue.popleft()

    async def _send_new(self, waiting: _Waiting) -> None:
        decision = pacing.decide(self._timeline, self._clock_s())
        if waiting.meta.offset == 0:
            lead_s = decision.due_s - waiting.queued_s
            chunk_frames = self._settings.frames_per_chunk
            self._timeline = pacing.with_chunk_begin(self._timeline, lead_s, chunk_frames)
        told = self._announcer.announce(
            waiting.meta,
            self._timeline,
            decision,
            queued_ms=waiting.queued_ms,
            now_ms=_wall_ms(),
        )
        if told is not None:
            self._events.on_chunk(told)
        if decision.wait_s > 0:
            await asyncio.sleep(decision.due_s - self._clock_s())
        if waiting.meta.epoch < self._epoch:
            self._counts.stale += 1
            return
        self._counts.late += decision.is_late
        self._counts.shown += 1
        frame_HWC = waiting.frame_HWC.copy()
        waiting.let_go()
        self._last = replace(waiting, frame_HWC=frame_HWC, release=None)
        await self._send(self._last, decision, is_repeated=False)

    async def _send_last(self) -> None:
        if self._last is not None:
            self._counts.repeated += 1
            decision = pacing.decide(self._timeline, self._clock_s())
            if decision.wait_s > 0:
                await asyncio.sleep(decision.wait_s)
            if self._last is not None:  # a new epoch may have begun
                await self._send(self._last, decision, is_repeated=True)

    async def _send(
        self, waiting: _Waiting, decision: pacing.PacingDecision, *, is_repeated: bool
    ) -> None:
        self._last_s = self._clock_s()
        self._timeline = pacing.with_sent(self._timeline, decision, self._last_s)
        self._sent_at_s.append(self._last_s)
        wants = self._encoders.choose(self._viewers())
        created_ms = _wall_ms()
        pictures = {}
        if wants:
            pictures = await self._encoders.encode(waiting.frame_HWC, decision.pts90, wants)
            self._sizes.append(sum(len(timed.picture.data) for timed in pictures.values()))
            self._encode_ms.append(sum(timed.encode_ms for timed in pictures.values()))
        for codec, timed in pictures.items():
            size_bytes = len(timed.picture.data)
            self._events.on_encoded(codec, timed.encode_ms, size_bytes)
            self._counts.keyframes += timed.picture.is_key and codec is not Codec.JPEG
        meta = waiting.meta
        is_stale = meta.epoch < self._epoch
        self._counts.stale += is_stale
        for viewer in self._viewers():
            want, made = wants.get(viewer.codec), pictures.get(viewer.codec)
            if want is None or is_stale or made is None or viewer not in want.viewers:
                self._leave_out(viewer, is_encoded=want is not None, is_repeated=is_repeated)
                continue
            viewer.deliver(
                EncodedFrame(
                    codec=viewer.codec,
                    data=made.picture.data,
                    is_key=made.picture.is_key,
                    frame_id=meta.frame_id,
                    act_seq=meta.act_seq,
                    pts90=decision.pts90,
                    epoch=meta.epoch,
                    created_ms=created_ms,
                    width_px=self._size_px[0],
                    height_px=self._size_px[1],
                    is_repeated=is_repeated,
                    is_discontinuity=meta.epoch != self._shown_epoch,
                )
            )
        if not is_stale:
            self._shown_epoch = meta.epoch

    # ---- viewers, inside

    def _leave_out(self, viewer: Viewer, *, is_encoded: bool, is_repeated: bool) -> None:
        """Count a picture that a viewer does not get; what was encoded without it leaves a gap."""
        if is_encoded:
            self._counts.missed += not viewer.gate.is_waiting
            viewer.gate.miss()
        if not is_repeated and viewer.sent_count:
            viewer.dropped_count += 1

    def _viewers(self) -> list[Viewer]:
        viewers: list[Viewer] = [peer.track for peer in self._peers.values()]
        viewers += self._ws.values()
        return viewers if self._recording is None else [*viewers, self._recording]

    def _wake_for_viewer(self) -> None:
        self._wake.set()

    def _want_key(self, viewer: Viewer) -> None:
        self._encoders.want_keyframe(viewer.codec)

    def _handle_peer(self, viewer_id: str, gen: int, state: str) -> None:
        if state == "connected":
            self._drop_peers(viewer_id, before_gen=gen)
            self._ws.pop(viewer_id, None)
        elif (peer := self._peers.pop((viewer_id, gen), None)) is not None and state == "failed":
            self._close_later(peer)
        self._events.on_peer_state(viewer_id, gen, state)

    def _drop_peers(self, viewer_id: str, *, before_gen: int | None) -> None:
        for owner, gen in list(self._peers):
            if owner == viewer_id and (before_gen is None or gen < before_gen):
                self._close_later(self._peers.pop((owner, gen)))

    def _close_later(self, peer: Peer) -> None:
        task = asyncio.get_running_loop().create_task(peer.close(), name="peer-close")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _wall_ms() -> float:
    return time.time() * 1e3

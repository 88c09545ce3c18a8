"""Media of one session: frames in, evenly paced and encoded once for all viewers.

Owns the queue of frames that wait for their time and the pacing task. Does not own the viewers
(`audience`), sockets, sessions or the ring: what happens is told to a `MediaEvents`.

    publish -> queue -> (due time) -> encoder of each stream in use -> WebRTC tracks, WebSockets

Invariants: everything runs on one event loop, encoding on one thread; the queue holds two chunks,
and drops its oldest frame beyond; after `set_epoch` no frame of an older epoch leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog
from numpy.typing import NDArray

from stream import pacing
from stream.actions import wall_ms
from stream.audience import Audience
from stream.chunk_notice import Announcer, ChunkNotice
from stream.media_events import MediaEvents, MediaSettings, MediaStats
from stream.recording import Recording
from stream.shared_encoders import SharedEncoders, Stream, TimedPicture, Viewer, Want, stream_of
from stream.video_encoder import Codec, EncodedFrame, KeyCause

if TYPE_CHECKING:
    from stream.frames import FrameMeta

log = structlog.get_logger(__name__)

STATS_FRAMES = 240
"""Frames over which times and sizes are taken."""
STATS_S = 2.0
"""Time over which rates are taken."""
RATES_S = 0.5
"""Time between two decisions about bit rates."""


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

    Made and used on one running event loop; nothing leaves before `start`. Viewers come and go by
    its `audience`.
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
        self._last: _Waiting | None = None
        self._last_s = 0.0
        self._announcer = Announcer(settings.frames_per_chunk)
        self._encoders = SharedEncoders(width_px, height_px, fps, settings, clock_s=clock_s)
        self.audience = Audience(
            settings,
            self._events,
            on_joined=self._wake.set,
            on_keyframe=self._want_key,
            period_s=1.0 / fps,
            clock_s=clock_s,
        )
        self._rates_s = float("-inf")
        self._counts = _Counts()
        self._sent_at_s: deque[float] = deque(maxlen=STATS_FRAMES)
        self._encode_ms: deque[float] = deque(maxlen=STATS_FRAMES)
        self._sizes: deque[int] = deque(maxlen=STATS_FRAMES)
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin pacing."""
        if self._task is None and not self._is_closed:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="pacer")
            self._task.add_done_callback(self._pacer_ended)

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
        waiting = _Waiting(frame_HWC, meta, release, self._clock_s(), wall_ms())
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
        self.audience.discard_before(epoch)
        for viewer in self.audience.viewers:
            self._want_key(stream_of(viewer), KeyCause.RESET)

    # ---- what is kept, what is told

    def record(self, path: Path) -> None:
        """Record from now on what is shown, into a growing `.ts` file (see `stream.recording`).

        Raises:
            OSError: if the file cannot be made.
        """
        width_px, height_px = self._size_px
        recording = Recording(path, width_px=width_px, height_px=height_px, fps=self._fps)
        self.audience.record(recording)

    def stats(self) -> MediaStats:
        """Figures of now."""
        counts, now_s = self._counts, self._clock_s()
        recent = [each for each in self._sent_at_s if each > now_s - STATS_S]
        span_s = now_s - recent[0] if recent else 0.0
        fps_out = (len(recent) - 1) / span_s if len(recent) > 1 and span_s > 0 else 0.0
        mean_bytes = sum(self._sizes) / len(self._sizes) if self._sizes else 0.0
        period_s = self._timeline.period_s
        links = [viewer.feed.link for viewer in self.audience.viewers]
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
            webrtc_viewers=self.audience.webrtc_count,
            ws_viewers=self.audience.ws_count,
            bitrate_bps=self._encoders.rates.bitrate_bps,
            remb_bps=min((each.remb_bps for each in links if each.remb_bps), default=None),
            rtt_s=max((each.rtt_s for each in links if each.rtt_s), default=None),
        )

    async def close(self) -> None:
        """Stop pacing, release what waits, end all connections; may be called twice."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None
        while self._queue:
            self._queue.popleft().let_go()
        self._last = None
        await self.audience.close()
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
                key_wait_s = self._encoders.key_wait_s(self.audience.viewers)
                wait_s = wait_s if key_wait_s is None else min(wait_s, key_wait_s)
                if wait_s <= 0:
                    return None
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
        return self._queue.popleft()

    async def _send_new(self, waiting: _Waiting) -> None:
        now_s = self._clock_s()
        decision = pacing.decide(self._timeline, now_s)
        if waiting.meta.offset == 0:
            lead_s = decision.due_s - waiting.queued_s
            chunk_frames = self._settings.frames_per_chunk
            self._timeline = pacing.with_chunk_begin(self._timeline, lead_s, chunk_frames)
        told = self._announcer.announce(
            waiting.meta,
            self._timeline,
            decision,
            queued_ms=waiting.queued_ms,
            now_ms=wall_ms(),
        )
        if told is not None:
            self._events.on_chunk(told)
        if decision.wait_s > 0:
            await asyncio.sleep(now_s + decision.wait_s - self._clock_s())
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
        self.audience.note_frame(self._last_s)
        self._adapt()
        wants = self._encoders.choose(self.audience.viewers)
        created_ms = wall_ms()
        pictures: dict[Stream, TimedPicture] = {}
        if wants:
            pictures = await self._encoders.encode(waiting.frame_HWC, decision.pts90, wants)
            self._note_cost(wants, pictures)
        meta = waiting.meta
        is_stale = meta.epoch < self._epoch
        self._counts.stale += is_stale
        for viewer in self.audience.viewers:
            stream = stream_of(viewer)
            want, made = wants.get(stream), pictures.get(stream)
            is_chosen = want is not None and viewer in want.viewers
            is_sent = False
            if is_chosen and not is_stale and made is not None and made.picture is not None:
                is_sent = viewer.deliver(
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
                        is_discontinuity=meta.epoch != viewer.feed.epoch,
                    )
                )
                if is_sent:
                    viewer.feed.epoch = meta.epoch
            elif want is not None and (made is None or made.picture is not None):
                # What the stream went on with and this viewer lacks is a gap.
                self._counts.missed += not viewer.gate.is_waiting
                viewer.gate.miss()
            self._note_delivery(viewer, made, is_sent=is_sent, is_repeated=is_repeated)

    def _note_cost(self, wants: dict[Stream, Want], pictures: dict[Stream, TimedPicture]) -> None:
        self._encode_ms.append(sum(timed.encode_ms for timed in pictures.values()))
        made = [(stream, timed) for stream, timed in pictures.items() if timed.picture is not None]
        self._sizes.append(sum(len(timed.picture.data) for _, timed in made if timed.picture))
        for stream, timed in made:
            assert timed.picture is not None
            cause = None
            if timed.picture.is_key and stream.codec is not Codec.JPEG:
                cause = wants[stream].key_cause or KeyCause.REBUILD
                self._counts.keyframes += 1
            size_bytes = len(timed.picture.data)
            self._events.on_encoded(stream.codec, timed.encode_ms, size_bytes, cause)

    def _note_delivery(
        self, viewer: Viewer, made: TimedPicture | None, *, is_sent: bool, is_repeated: bool
    ) -> None:
        """Tell a viewer's link and the counts what became of a frame."""
        if is_sent and made is not None and made.picture is not None:
            viewer.feed.link.note_frame(len(made.picture.data), self._last_s)
        elif viewer.sent_count and not viewer.has_room:
            viewer.feed.link.note_frame(None, self._last_s)
        if is_repeated:
            return
        if is_sent:
            self._events.on_delivered(viewer.transport, is_sent=True)
        elif viewer.sent_count:
            viewer.dropped_count += 1
            self._events.on_delivered(viewer.transport, is_sent=False)

    def _adapt(self) -> None:
        """Let bit rates follow what the links carry."""
        if self._last_s - self._rates_s < RATES_S:
            return
        self._rates_s = self._last_s
        viewers = [each for each in self.audience.viewers if each.codec is not Codec.JPEG]
        before = [stream_of(viewer) for viewer in viewers]
        bitrate_bps = self._encoders.rates.bitrate_bps
        feeds = [(viewer.feed, viewer.codec) for viewer in viewers]
        self._encoders.rates.update(feeds, self._last_s)
        for viewer, stream in zip(viewers, before, strict=True):
            if stream_of(viewer) != stream:
                viewer.gate.miss()  # pictures of the other encoder build on none of this one
        if self._encoders.rates.bitrate_bps != bitrate_bps:
            log.info("bit_rate", bps=self._encoders.rates.bitrate_bps, was_bps=bitrate_bps)

    def _want_key(self, stream: Stream, cause: KeyCause) -> None:
        self._encoders.want_keyframe(stream, cause)
        self._wake.set()

    def _pacer_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("pacing_failed", exc_info=error)
            self._events.on_failed()

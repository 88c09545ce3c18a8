"""Video track of one WebRTC viewer: hands encoded pictures to aiortc, which only packs them.

Invariants: at most `QUEUE_FRAMES` wait; on overflow the viewer goes on at the next keyframe; no
picture comes before a keyframe, and none before the connection asks for the first.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from av.packet import Packet

from stream.rate_control import Feed
from stream.video_encoder import TIME_BASE, Codec, EncodedFrame, KeyGate

QUEUE_FRAMES = 2


class VideoTrack(MediaStreamTrack):
    """Track whose `recv` returns packets in place of frames.

    Args:
        codec: what the peers agreed on.
        feed: of the viewer.
        on_started: the connection stands and asks for its first picture.
        on_sent: called after the last RTP packet of a picture was sent, with its `pts90` and the
            milliseconds since it was delivered.
    """

    kind = "video"
    transport = "webrtc"

    def __init__(
        self,
        codec: Codec,
        feed: Feed,
        *,
        on_started: Callable[[], None],
        on_sent: Callable[[int, float], None],
    ) -> None:
        super().__init__()
        self.codec = codec
        self.feed = feed
        self.gate = KeyGate()
        self.sent_count = 0
        self.dropped_count = 0
        self._on_started = on_started
        self._on_sent = on_sent
        self._queue: deque[tuple[EncodedFrame, float]] = deque()
        self._is_filled = asyncio.Event()
        self._is_started = False
        self._handed: tuple[int, float] | None = None

    @property
    def has_room(self) -> bool:
        """Whether the connection takes pictures and is not behind."""
        return self._is_started and len(self._queue) < QUEUE_FRAMES and self.readyState == "live"

    def deliver(self, frame: EncodedFrame) -> bool:
        """Queue a picture that the viewer can decode; says whether it was queued."""
        if not self._is_started or not self.gate.passes(frame):
            return False
        self._queue.append((frame, time.perf_counter()))
        self._is_filled.set()
        self.sent_count += 1
        return True

    def discard_before(self, epoch: int) -> None:
        """Drop what waits from older epochs."""
        kept = [each for each in self._queue if each[0].epoch >= epoch]
        if len(kept) != len(self._queue):
            self._queue = deque(kept)
            self.gate.miss()

    async def recv(self) -> Packet:  # type: ignore[type-arg]  # generic in stubs only
        """Next picture, as aiortc's sender asks for it.

        Raises:
            MediaStreamError: after `stop`.
        """
        if self._handed is not None:
            pts90, delivered_s = self._handed
            self._handed = None
            self._on_sent(pts90, (time.perf_counter() - delivered_s) * 1e3)
        if not self._is_started:
            self._is_started = True
            self._on_started()
        while not self._queue:
            if self.readyState != "live":
                raise MediaStreamError
            self._is_filled.clear()
            await self._is_filled.wait()
        frame, delivered_s = self._queue.popleft()
        packet = Packet(frame.data)
        packet.pts, packet.time_base = frame.pts90, TIME_BASE
        self._handed = (frame.pts90, delivered_s)
        return packet

    def stop(self) -> None:
        """End the track; a waiting `recv` raises."""
        super().stop()
        self._queue.clear()
        self._is_filled.set()

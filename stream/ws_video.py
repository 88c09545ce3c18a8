"""Video over the WebSocket: a header and one encoded picture in each binary message.

Owns the header and the window of frames that a viewer has not acknowledged. Invariant: while the
window is full nothing is sent, so that a slow reader gets few frames late instead of all of them.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict, deque
from collections.abc import Callable

from stream.rate_control import Feed
from stream.video_encoder import Codec, EncodedFrame, KeyGate

HEADER = struct.Struct("<BBBBIIIdHHI")
HEADER_VERSION = 1
CODEC_NUMBERS: dict[Codec, int] = {Codec.H264: 1, Codec.VP8: 2, Codec.JPEG: 3}
FLAG_KEY = 1
FLAG_DISCONTINUITY = 2
FLAG_REPEATED = 4
WINDOW_FRAMES = 2
WINDOW_LIMIT_FRAMES = 8
DELAY_SAMPLES = 50


def pack_frame(frame: EncodedFrame) -> bytes:
    """Header of 32 bytes, little endian, then the picture."""
    flags = (
        FLAG_KEY * frame.is_key
        | FLAG_DISCONTINUITY * frame.is_discontinuity
        | FLAG_REPEATED * frame.is_repeated
    )
    header = HEADER.pack(
        HEADER_VERSION,
        CODEC_NUMBERS[frame.codec],
        flags,
        0,
        frame.frame_id & 0xFFFFFFFF,
        frame.act_seq & 0xFFFFFFFF,
        frame.pts90 & 0xFFFFFFFF,
        frame.created_ms,
        frame.width_px,
        frame.height_px,
        len(frame.data),
    )
    return header + frame.data


class WsVideo:
    """One viewer that gets its video over a WebSocket.

    Args:
        codec: of all its frames.
        feed: of the viewer.
        send: takes one binary message, returns at once, and says whether it will go out.
        take_back: drops those that have not gone out yet, and says how many.
        period_s: time between frames.
        clock_s: monotonic.
    """

    transport = "ws"

    def __init__(
        self,
        codec: Codec,
        feed: Feed,
        send: Callable[[bytes], bool],
        take_back: Callable[[], int],
        *,
        period_s: float,
        clock_s: Callable[[], float],
    ) -> None:
        self.codec = codec
        self.feed = feed
        self.gate = KeyGate()
        self.sent_count = 0
        self.dropped_count = 0
        self._send = send
        self._take_back = take_back
        self._period_s = period_s
        self._clock_s = clock_s
        self._unacknowledged: OrderedDict[int, float] = OrderedDict()
        self._delays_s: deque[float] = deque(maxlen=DELAY_SAMPLES)

    @property
    def window_frames(self) -> int:
        """Frames that may be under way: what fits in the shortest recent round trip, and one more.

        Each frame of the window is one that a reader who stalls gets late.
        """
        if not self._delays_s:
            return WINDOW_FRAMES
        in_flight = math.ceil(min(self._delays_s) / self._period_s)
        return min(max(WINDOW_FRAMES, 1 + in_flight), WINDOW_LIMIT_FRAMES)

    @property
    def has_room(self) -> bool:
        """Whether a frame sent now would not wait behind others."""
        return len(self._unacknowledged) < self.window_frames

    def deliver(self, frame: EncodedFrame) -> bool:
        """Send a frame that the viewer can decode; says whether it was sent."""
        if not self.gate.passes(frame):
            return False
        self._unacknowledged[frame.frame_id] = self._clock_s()
        self._unacknowledged.move_to_end(frame.frame_id)
        if not self._send(pack_frame(frame)):
            self._unacknowledged.pop(frame.frame_id, None)
            self.gate.miss()
            return False
        self.sent_count += 1
        return True

    def discard(self) -> None:
        """Drop what waits: control messages overtake it, so that it would come too late.

        Nobody acknowledges frames that never arrive, so they leave the window as well.
        """
        count = self._take_back()
        for _ in range(min(count, len(self._unacknowledged))):
            self._unacknowledged.popitem()
        if count:
            self.gate.miss()

    def acknowledge(self, frame_id: int) -> None:
        """The viewer has shown or dropped this frame, and with it all that were sent before."""
        sent_s = self._unacknowledged.get(frame_id)
        if sent_s is None:
            return
        self._delays_s.append(self._clock_s() - sent_s)
        while self._unacknowledged:
            oldest_id, _ = self._unacknowledged.popitem(last=False)
            if oldest_id == frame_id:
                return

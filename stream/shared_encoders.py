"""Encoders of one session, shared by its viewers.

Owns which streams a frame is encoded for, keyframes on demand and their least distance, the
encoding thread. A stream is a codec at the whole bit rate or at half of it. Invariants: a frame
that no viewer of a stream could decode is not encoded for it; a viewer that had no room for a
picture goes on at the next keyframe.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from stream.media_events import MediaSettings
from stream.rate_control import RateControl
from stream.recording import Recording
from stream.video_encoder import Codec, JpegEncoder, KeyCause, Picture, VideoEncoder
from stream.video_track import VideoTrack
from stream.ws_video import WsVideo

Viewer = VideoTrack | WsVideo | Recording

RECORDING_KEY_S = 10.0
"""Longest way to a keyframe in a recording, so that players can jump in it."""
SPECTATOR_GAP_S = 1.0
"""Least time between keyframes for spectators who had no room: everybody pays for them."""
IDLE_S = 10.0
"""An encoder that nobody needed for so long is given up."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What one encoder makes."""

    codec: Codec
    is_half: bool = False
    """At half the bit rate."""


@dataclass(frozen=True, slots=True)
class Want:
    """A stream that a frame is to be encoded for."""

    viewers: list[Viewer]
    """Those who can take the picture now."""
    key_cause: KeyCause | None
    """Why it has to be a keyframe, or None."""
    bitrate_bps: int


@dataclass(frozen=True, slots=True)
class TimedPicture:
    """What an encoder made of a frame, and how long it took."""

    picture: Picture | None
    """None where the codec left the frame out: the next builds on the one before."""
    encode_ms: float


class SharedEncoders:
    """One encoder for each stream in use, all on one thread.

    Args:
        width_px: of every frame, like `height_px`.
        height_px: even.
        fps: nominal.
        settings: what the operator chose.
        clock_s: monotonic.
    """

    def __init__(
        self,
        width_px: int,
        height_px: int,
        fps: float,
        settings: MediaSettings,
        *,
        clock_s: Callable[[], float],
    ) -> None:
        self.rates = RateControl(settings.bitrate_bps)
        self.skipped_count = 0
        self._size_px = (width_px, height_px)
        self._fps = fps
        self._settings = settings
        self._clock_s = clock_s
        self._encoders: dict[Stream, VideoEncoder] = {}
        self._used_s: dict[Stream, float] = {}
        self._jpeg = JpegEncoder(quality=settings.jpeg_quality)
        self._wanted: dict[Stream, KeyCause] = {}
        self._key_s: dict[Stream, float] = {}
        self._held_since_s: dict[Stream, float] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="video-encoder")

    def want_keyframe(self, stream: Stream, cause: KeyCause) -> None:
        """Make a keyframe as soon as the last one is old enough."""
        if cause is KeyCause.RESET:
            self._wanted[stream] = cause
        self._wanted.setdefault(stream, cause)

    def key_wait_s(self, viewers: Iterable[Viewer]) -> float | None:
        """How long until a keyframe that somebody waits for may be made; None: nobody waits."""
        waits_s = [
            wait_s
            for stream, users in _by_stream(viewers).items()
            for wait_s, _ in self._key_waits(stream, [each for each in users if each.has_room])
        ]
        return min(waits_s, default=None)

    def choose(self, viewers: Iterable[Viewer]) -> dict[Stream, Want]:
        """What the next frame is encoded for; `encode` has to follow."""
        wants: dict[Stream, Want] = {}
        now_s = self._clock_s()
        for stream, users in _by_stream(viewers).items():
            ready = [viewer for viewer in users if viewer.has_room]
            causes = [cause for wait_s, cause in self._key_waits(stream, ready) if wait_s <= 0.0]
            if stream.codec is not Codec.JPEG and not causes:
                decoding = [viewer for viewer in ready if not viewer.gate.is_waiting]
                ready = ready if decoding else []
            if not ready or self._holds(stream, users, now_s):
                self.skipped_count += 1
                continue
            cause = causes[0] if causes else None
            if cause is not None:
                self._wanted.pop(stream, None)
                self._key_s[stream] = now_s
            self._used_s[stream] = now_s
            bitrate_bps = self.rates.half_bps if stream.is_half else self.rates.bitrate_bps
            wants[stream] = Want(ready, cause, bitrate_bps)
        return wants

    async def encode(
        self, frame_HWC: NDArray[np.uint8], pts90: int, wants: dict[Stream, Want]
    ) -> dict[Stream, TimedPicture]:
        """Encode a uint8 RGB frame [height, width, 3]; a stream that fails is left out."""
        now_s = self._clock_s()
        idle = [each for each, used_s in self._used_s.items() if used_s < now_s - IDLE_S]
        for stream in idle:
            del self._used_s[stream]
            self._encoders.pop(stream, None)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._encode, frame_HWC, pts90, wants)

    def close(self) -> None:
        """End the thread after the frame at hand, and give the encoders up."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._encoders.clear()

    def _key_waits(self, stream: Stream, ready: list[Viewer]) -> list[tuple[float, KeyCause]]:
        """Keyframes that somebody with room waits for: seconds until each may come, and why."""
        if stream.codec is Codec.JPEG or not ready:
            return []
        settings, since_s = self._settings, self._clock_s() - self._key_s.get(stream, float("-inf"))
        waits: list[tuple[float, KeyCause]] = []
        if stream in self._wanted:
            cause = self._wanted[stream]
            is_first = cause is KeyCause.RESET  # of another world
            least_s = settings.join_keyframe_min_s if is_first else settings.keyframe_min_s
            waits.append((least_s - since_s, cause))
        for viewer in ready:
            role = viewer.feed.role
            if viewer.gate.is_waiting:
                if not viewer.sent_count:
                    least_s = settings.join_keyframe_min_s
                    cause = KeyCause.RECORDING if role == "recording" else KeyCause.JOIN
                elif role == "spectator" and not stream.is_half:
                    least_s, cause = SPECTATOR_GAP_S, KeyCause.GAP
                else:
                    least_s, cause = settings.keyframe_min_s, KeyCause.GAP
                waits.append((least_s - since_s, cause))
            elif role == "recording" and since_s >= RECORDING_KEY_S:
                waits.append((0.0, KeyCause.RECORDING))
        return waits

    def _holds(self, stream: Stream, users: list[Viewer], now_s: float) -> bool:
        """Whether to leave a frame out because those who watch have no room for it.

        For a moment the recording can do without as well: nothing builds on the frame then, and the
        viewer goes on without a keyframe.
        """
        watching = [each for each in users if each.feed.role != "recording" and each.sent_count]
        is_full = bool(watching) and all(
            not each.has_room and not each.gate.is_waiting for each in watching
        )
        if not is_full:
            self._held_since_s.pop(stream, None)
            return False
        since_s = self._held_since_s.setdefault(stream, now_s)
        return now_s - since_s < self._settings.keyframe_min_s

    def _encode(
        self, frame_HWC: NDArray[np.uint8], pts90: int, wants: dict[Stream, Want]
    ) -> dict[Stream, TimedPicture]:
        import av

        pictures: dict[Stream, TimedPicture] = {}
        for stream, want in wants.items():
            begin_s = time.perf_counter()
            picture: Picture | None
            if stream.codec is Codec.JPEG:
                picture = self._jpeg.encode(frame_HWC)
            else:
                encoder = self._encoder(stream, want.bitrate_bps)
                is_key = want.key_cause is not None
                try:
                    picture = encoder.encode(frame_HWC, pts90=pts90, is_key=is_key)
                except av.error.FFmpegError as error:
                    log = structlog.get_logger()
                    log.error("encode_failed", codec=str(stream.codec), reason=str(error))
                    encoder.restart()
                    continue
            pictures[stream] = TimedPicture(picture, (time.perf_counter() - begin_s) * 1e3)
        return pictures

    def _encoder(self, stream: Stream, bitrate_bps: int) -> VideoEncoder:
        encoder = self._encoders.get(stream)
        if encoder is None:
            width_px, height_px = self._size_px
            encoder = self._encoders[stream] = VideoEncoder(
                stream.codec,
                width_px=width_px,
                height_px=height_px,
                fps=self._fps,
                bitrate_bps=bitrate_bps,
            )
        encoder.set_bitrate(bitrate_bps)
        return encoder


def stream_of(viewer: Viewer) -> Stream:
    """What this viewer gets."""
    return Stream(viewer.codec, viewer.feed.is_half and viewer.codec is not Codec.JPEG)


def _by_stream(viewers: Iterable[Viewer]) -> dict[Stream, list[Viewer]]:
    found: dict[Stream, list[Viewer]] = {}
    for viewer in viewers:
        found.setdefault(stream_of(viewer), []).append(viewer)
    return found

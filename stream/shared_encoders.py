"""Encoders of one session, shared by its viewers.

Owns which codecs a frame is encoded for, keyframes on demand and their least distance, the encoding
thread. Invariants: a frame that no viewer of a codec could decode is not encoded for it; a viewer
that had no room for a picture goes on at the next keyframe.
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
from stream.recording import Recording
from stream.video_encoder import Codec, JpegEncoder, Picture, VideoEncoder
from stream.video_track import VideoTrack
from stream.ws_video import WsVideo

Viewer = VideoTrack | WsVideo | Recording


RECORDING_KEY_S = 10.0
"""Longest way to a keyframe in a recording, so that players can jump in it."""


@dataclass(frozen=True, slots=True)
class Want:
    """A codec that a frame is to be encoded for."""

    viewers: list[Viewer]
    """Those who can take the picture now."""
    is_key: bool


@dataclass(frozen=True, slots=True)
class TimedPicture:
    """A picture and what it took."""

    picture: Picture
    encode_ms: float


class SharedEncoders:
    """One encoder for each codec in use, all on one thread.

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
        self.bitrate_bps = settings.bitrate_bps
        self.skipped_count = 0
        self._size_px = (width_px, height_px)
        self._fps = fps
        self._settings = settings
        self._clock_s = clock_s
        self._encoders: dict[Codec, VideoEncoder] = {}
        self._jpeg = JpegEncoder(quality=settings.jpeg_quality)
        self._is_key_wanted: set[Codec] = set()
        self._key_s: dict[Codec, float] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="video-encoder")

    def want_keyframe(self, codec: Codec) -> None:
        """Make a keyframe as soon as the last one is old enough."""
        self._is_key_wanted.add(codec)

    def has_newcomer(self, viewers: Iterable[Viewer]) -> bool:
        """Whether a viewer waits for its first picture and could get it now."""
        return any(
            viewer.has_room and viewer.gate.is_waiting and self._may_join(viewer.codec)
            for viewer in viewers
        )

    def choose(self, viewers: Iterable[Viewer]) -> dict[Codec, Want]:
        """What the next frame is encoded for; `encode` has to follow."""
        wants: dict[Codec, Want] = {}
        by_codec: dict[Codec, list[Viewer]] = {}
        for viewer in viewers:
            by_codec.setdefault(viewer.codec, []).append(viewer)
        for codec, users in by_codec.items():
            ready = [viewer for viewer in users if viewer.has_room]
            is_key = self._is_key_due(codec, ready)
            if codec is not Codec.JPEG and not is_key:
                decoding = [viewer for viewer in ready if not viewer.gate.is_waiting]
                ready = ready if decoding else []
            if not ready:
                self.skipped_count += 1
                continue
            if is_key:
                self._is_key_wanted.discard(codec)
                self._key_s[codec] = self._clock_s()
            wants[codec] = Want(ready, is_key)
        return wants

    async def encode(
        self, frame_HWC: NDArray[np.uint8], pts90: int, wants: dict[Codec, Want]
    ) -> dict[Codec, TimedPicture]:
        """Encode a uint8 RGB frame [height, width, 3]; a codec that fails is left out."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._encode, frame_HWC, pts90, wants)

    def close(self) -> None:
        """End the thread after the frame at hand."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _may_join(self, codec: Codec) -> bool:
        return self._since_key_s(codec) >= self._settings.join_keyframe_min_s

    def _since_key_s(self, codec: Codec) -> float:
        return self._clock_s() - self._key_s.get(codec, float("-inf"))

    def _is_key_due(self, codec: Codec, ready: list[Viewer]) -> bool:
        if codec is Codec.JPEG or not ready:
            return False
        if any(viewer.gate.is_waiting for viewer in ready) and self._may_join(codec):
            return True
        since_s = self._since_key_s(codec)
        if since_s >= RECORDING_KEY_S and any(isinstance(each, Recording) for each in ready):
            return True
        return codec in self._is_key_wanted and since_s >= self._settings.keyframe_min_s

    def _encode(
        self, frame_HWC: NDArray[np.uint8], pts90: int, wants: dict[Codec, Want]
    ) -> dict[Codec, TimedPicture]:
        import av

        pictures: dict[Codec, TimedPicture] = {}
        for codec, want in wants.items():
            begin_s = time.perf_counter()
            picture: Picture | None
            if codec is Codec.JPEG:
                picture = self._jpeg.encode(frame_HWC)
            else:
                encoder = self._encoder(codec)
                try:
                    picture = encoder.encode(frame_HWC, pts90=pts90, is_key=want.is_key)
                except av.error.FFmpegError as error:
                    log = structlog.get_logger()
                    log.error("encode_failed", codec=str(codec), reason=str(error))
                    encoder.restart()
                    continue
            if picture is not None:
                pictures[codec] = TimedPicture(picture, (time.perf_counter() - begin_s) * 1e3)
        return pictures

    def _encoder(self, codec: Codec) -> VideoEncoder:
        encoder = self._encoders.get(codec)
        if encoder is None:
            width_px, height_px = self._size_px
            encoder = self._encoders[codec] = VideoEncoder(
                codec,
                width_px=width_px,
                height_px=height_px,
                fps=self._fps,
                bitrate_bps=self.bitrate_bps,
            )
        encoder.set_bitrate(self.bitrate_bps)
        return encoder

"""Video encoders: frames in, one encoded picture out for each, at once.

Owns codecs, their settings, bit rate, keyframes on demand. One encoder serves every viewer of a
session that uses its codec. Invariants: no delay (what goes in comes out before the next frame);
the first picture of an encoder is a keyframe; an H.264 keyframe carries its parameter sets.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from stream.pacing import PTS_HZ

BITRATE_RANGE_BPS = (100_000, 50_000_000)
THREADED_PIXELS = 640 * 400
"""From this size on two threads encode; below, handing over costs more than it gains."""
TIME_BASE = Fraction(1, PTS_HZ)
BITRATE_BPS = 2_000_000
LARGE_BITRATE_BPS = 4_000_000
LARGE_PIXELS = 1280 * 720


def default_bitrate_bps(width_px: int, height_px: int) -> int:
    """Bit rate at which a picture of this size is good, 24 of them a second."""
    return LARGE_BITRATE_BPS if width_px * height_px >= LARGE_PIXELS else BITRATE_BPS


class Codec(StrEnum):
    """Codecs that browsers decode; JPEG is a picture a frame."""

    H264 = "h264"
    VP8 = "vp8"
    JPEG = "jpeg"


class KeyCause(StrEnum):
    """Why a keyframe was made."""

    JOIN = "join"
    PLI = "pli"
    """A WebRTC receiver lost pictures."""
    CLIENT = "client"
    """A page asked."""
    RESET = "reset"
    GAP = "gap"
    """A viewer had no room for a picture before."""
    RECORDING = "recording"
    WATCHDOG = "watchdog"
    REBUILD = "rebuild"
    """The encoder began anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedFrame:
    """One picture, ready to send."""

    codec: Codec
    data: bytes
    """H.264: Annex B; VP8: one frame; JPEG: one file."""
    is_key: bool
    frame_id: int
    act_seq: int
    pts90: int
    epoch: int
    created_ms: float
    """Wall clock of the server when the frame was handed to the encoder."""
    width_px: int
    height_px: int
    is_repeated: bool = False
    """The frame was sent before; nothing newer exists."""
    is_discontinuity: bool = False
    """First frame of its epoch that this viewer gets."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What an encoder made of one frame."""

    data: bytes
    is_key: bool


class VideoEncoder:
    """H.264 (Baseline, as 42e01f) or VP8 through PyAV; for one thread at a time.

    Args:
        codec: H264 or VP8.
        width_px: even, like `height_px`.
        height_px: of every frame.
        fps: nominal; the real times are those of `encode`.
        bitrate_bps: mean and ceiling; within `BITRATE_RANGE_BPS`.

    Raises:
        ConfigError: for a size or bit rate that cannot be encoded.
    """

    def __init__(
        self, codec: Codec, *, width_px: int, height_px: int, fps: float, bitrate_bps: int
    ) -> None:
        if codec is Codec.JPEG:
            raise ConfigError("codec: jpeg; expected h264 or vp8 (jpeg has an encoder of its own)")
        if width_px % 2 or height_px % 2 or min(width_px, height_px) < 16:
            raise ConfigError(
                f"video size: {width_px}x{height_px}; expected even numbers from 16 on"
            )
        self.codec = codec
        self._width_px = width_px
        self._height_px = height_px
        self._fps = fps
        self._context: Any = None
        self._bitrate_bps = 0
        self.set_bitrate(bitrate_bps)

    @property
    def bitrate_bps(self) -> int:
        """Bits a second that the encoder aims at."""
        return self._bitrate_bps

    def set_bitrate(self, bitrate_bps: int) -> None:
        """Change the bit rate; the next picture is a keyframe of a new stream.

        Raises:
            ConfigError: outside `BITRATE_RANGE_BPS`.
        """
        low_bps, high_bps = BITRATE_RANGE_BPS
        if not low_bps <= bitrate_bps <= high_bps:
            raise ConfigError(f"bit rate: {bitrate_bps}; expected {low_bps} to {high_bps} bit/s")
        if bitrate_bps != self._bitrate_bps:
            self._bitrate_bps = bitrate_bps
            self._context = None

    def restart(self) -> None:
        """Forget the stream; the next picture is a keyframe."""
        self._context = None

    def encode(self, frame_HWC: NDArray[np.uint8], *, pts90: int, is_key: bool) -> Picture | None:
        """Encode one uint8 RGB frame [height, width, 3]; None where the codec left it out.

        Raises:
            av.error.FFmpegError: if the codec fails; `restart` before the next frame.
        """
        import av
        from av.video.frame import PictureType
        from av.video.reformatter import ColorRange, Colorspace

        if self._context is None:
            self._context = self._open()
        # VP8 has no field for colours and is taken for BT.601; H.264 says what it is.
        space = Colorspace.ITU709 if self.codec is Codec.H264 else Colorspace.ITU601
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_HWC), format="rgb24")
        frame = frame.reformat(
            format="yuv420p", dst_colorspace=space, dst_color_range=ColorRange.MPEG
        )
        frame.pts, frame.time_base = pts90, TIME_BASE
        frame.pict_type = PictureType.I if is_key else PictureType.NONE
        packets = self._context.encode(frame)
        if not packets:
            return None
        data = b"".join(bytes(packet) for packet in packets)
        return Picture(data, any(packet.is_keyframe for packet in packets))

    def _open(self) -> Any:
        import av

        is_h264 = self.codec is Codec.H264
        context: Any = av.CodecContext.create("libx264" if is_h264 else "libvpx", "w")
        context.width, context.height, context.pix_fmt = self._width_px, self._height_px, "yuv420p"
        context.time_base = TIME_BASE
        context.framerate = Fraction(self._fps).limit_denominator(1001)
        context.bit_rate = self._bitrate_bps
        context.gop_size = 1 << 30
        is_large = self._width_px * self._height_px >= THREADED_PIXELS
        context.thread_count = 2 if is_large else 1
        rate = {"maxrate": str(self._bitrate_bps), "bufsize": str(self._bitrate_bps // 4)}
        if is_h264:
            context.profile = "Baseline"
            # 1 is BT.709 for all three in H.264's own tables (ITU-T H.273).
            context.colorspace, context.color_primaries, context.color_trc = 1, 1, 1
            context.color_range = 1
            context.options = rate | {
                "preset": "superfast",
                "tune": "zerolatency",
                "forced-idr": "1",
                "x264-params": "keyint=infinite:scenecut=0:repeat-headers=1",
            }
        else:
            context.options = rate | {
                "deadline": "realtime",
                "cpu-used": "-6",
                "lag-in-frames": "0",
                "noise-sensitivity": "0",
                "static-thresh": "1",
                "undershoot-pct": "100",
                "overshoot-pct": "15",
            }
        return context


class JpegEncoder:
    """A JPEG file a frame, 4:2:0."""

    codec = Codec.JPEG

    def __init__(self, *, quality: int) -> None:
        if not 1 <= quality <= 95:
            raise ConfigError(f"JPEG quality: {quality}; expected 1 to 95")
        self._quality = quality

    def encode(self, frame_HWC: NDArray[np.uint8]) -> Picture:
        """Encode one uint8 RGB frame [height, width, 3]."""
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(frame_HWC).save(
            buffer, format="JPEG", quality=self._quality, subsampling="4:2:0"
        )
        return Picture(buffer.getvalue(), is_key=True)


class KeyGate:
    """Holds back what a viewer could not decode: all pictures from a gap to the next keyframe."""

    def __init__(self) -> None:
        self.is_waiting = True
        """Nothing passes before a keyframe."""

    def passes(self, frame: EncodedFrame) -> bool:
        """Whether this viewer can decode `frame`; a keyframe ends the wait."""
        if frame.is_key:
            self.is_waiting = False
        return not self.is_waiting

    def miss(self) -> None:
        """A picture will not reach this viewer."""
        self.is_waiting = True

"""Recording of what a session showed, from the pictures that were encoded for its viewers.

Owns the file while it grows (MPEG-TS: playable wherever it ends) and its copy into MP4, which costs
no encoding. Invariants: each frame that was encoded is in it, at the time it was shown; a stall or
pause longer than `PAUSE_S` is shortened to about that; `finish` may be called twice.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import structlog

from stream.pacing import PTS_HZ
from stream.rate_control import Feed
from stream.video_encoder import TIME_BASE, Codec, EncodedFrame, KeyGate

PAUSE_S = 0.25
REPEATED_S = 0.001
"""Of a picture that was sent again: it has to be there, since later ones build on it."""


class Recording:
    """Viewer that writes H.264 to a file; joins `Media` like the viewers who watch.

    Args:
        path: of the growing file, `.ts`.
        width_px: of the video, like `height_px`.
        height_px: even.
        fps: nominal, for players that ask.

    Raises:
        OSError: if the file cannot be made. Later trouble with the disk ends the recording, not the
            session: `error` then says what happened.
    """

    codec = Codec.H264
    transport = "recording"

    def __init__(self, path: Path, *, width_px: int, height_px: int, fps: float) -> None:
        import av

        path.write_bytes(b"")  # PyAV would report trouble with the first picture only
        self.path = path
        self.feed = Feed(role="recording")
        self.gate = KeyGate()
        self.sent_count = 0
        self.dropped_count = 0
        self.error: OSError | None = None
        self._pts = 0
        self._last_pts90: int | None = None
        # Flushed with each picture: what was shown is on the disk, even if the process dies.
        options = {"flush_packets": "1"}
        self._container: Any = av.open(str(path), "w", format="mpegts", options=options)
        self._stream: Any = self._container.add_mux_stream(
            "h264", rate=round(fps), width=width_px, height=height_px
        )

    @property
    def has_room(self) -> bool:
        """Whether the file still grows."""
        return self._container is not None

    def deliver(self, frame: EncodedFrame) -> bool:
        """Write one picture; says whether it was written."""
        if self._container is None or not self.gate.passes(frame):
            return False
        from av.packet import Packet

        if self._last_pts90 is not None:
            longest_s = REPEATED_S if frame.is_repeated else PAUSE_S
            self._pts += min(frame.pts90 - self._last_pts90, round(longest_s * PTS_HZ))
        self._last_pts90 = frame.pts90
        packet: Any = Packet(frame.data)
        packet.pts = packet.dts = self._pts
        packet.time_base, packet.stream = TIME_BASE, self._stream
        packet.is_keyframe = frame.is_key
        try:
            self._container.mux(packet)
        except OSError as error:
            structlog.get_logger().error("recording_failed", reason=str(error))
            self.error = error
            self.finish()
            return False
        self.sent_count += 1
        return True

    def finish(self) -> None:
        """Close the file."""
        if self._container is not None:
            with contextlib.suppress(OSError):
                self._container.close()
            self._container = None


def export_mp4(recording: Path, target: Path) -> int:
    """Copy a recording, finished or growing, into an MP4 with its index in front; frame count.

    Blocks for as long as copying takes. Nothing but a complete file gets the name `target`.

    Raises:
        OSError: if the recording holds no frame yet, or a file cannot be read or written.
    """
    import av

    part = target.with_name(f".{target.name}.part")
    count = 0
    try:
        with (
            av.open(str(recording)) as source,
            av.open(str(part), "w", format="mp4", options={"movflags": "+faststart"}) as made,
        ):
            video: Any = source.streams.video[0]
            copy: Any = made.add_stream_from_template(video)
            for packet in source.demux(video):
                if packet.dts is None:  # the end of the stream
                    continue
                packet.stream = copy
                made.mux(packet)
                count += 1
        part.replace(target)
    except (ValueError, IndexError) as error:  # an empty file is no MPEG-TS
        raise OSError(f"{recording}: no video in it yet") from error
    finally:
        part.unlink(missing_ok=True)
    return count

"""What media is told, and what it tells.

Owns the settings of media, its events and its figures. Plain values: nothing here runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stream.chunk_notice import ChunkNotice
from stream.peer import IceSettings
from stream.video_encoder import Codec


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSettings:
    """What the operator chooses about media."""

    frames_per_chunk: int = 17
    queue_chunks: int = 2
    bitrate_bps: int = 2_000_000
    jpeg_quality: int = 80
    keyframe_min_s: float = 0.5
    """Least time between two keyframes that viewers ask for."""
    join_keyframe_min_s: float = 0.2
    """The same for viewers who wait for their first picture."""
    repeat_s: float = 0.5
    """After this time without a new frame the last is sent again."""
    ice: IceSettings = field(default_factory=IceSettings)


class MediaEvents:
    """What media tells its session; every method is called on the loop and returns at once."""

    def on_chunk(self, schedule: ChunkNotice) -> None:
        """A chunk begins, or its times moved; before the frames concerned are sent."""

    def on_origin(self, viewer_id: str, gen: int, origin: int) -> None:
        """The RTP timestamps of this connection are `origin + pts90` modulo 2**32."""

    def on_peer_state(self, viewer_id: str, gen: int, state: str) -> None:
        """A WebRTC connection became "connected", "failed" or "closed"."""

    def on_encoded(self, codec: Codec, encode_ms: float, size_bytes: int) -> None:
        """One picture was encoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaStats:
    """Figures of one session; counts since its start, rates over the last seconds."""

    queue_frames: int
    playout_left_s: float
    period_s: float
    fps_out: float
    encode_ms: float
    """Mean of all codecs for one frame."""
    kbps: float
    """Of one viewer, all codecs taken together."""
    published_count: int
    shown_count: int
    """Frames that left at their time, repeated ones not counted."""
    repeated_count: int
    overflow_count: int
    """Oldest frames dropped from a full queue."""
    stale_count: int
    """Frames of older epochs dropped."""
    skipped_count: int
    """Pictures that a codec's viewers could not take, and that were not encoded."""
    missed_count: int
    """Pictures that one viewer missed while others got them."""
    keyframe_count: int
    late_count: int
    """Frames that came after their due time."""
    webrtc_viewers: int
    ws_viewers: int

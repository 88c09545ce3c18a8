"""What media is told, and what it tells.

Owns the settings of media, its events and its figures. Plain values: nothing here runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stream.chunk_notice import ChunkNotice
from stream.peer import IceSettings
from stream.video_encoder import Codec, KeyCause


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
    """The same for viewers who wait for their first picture, or the first of a new epoch."""
    player_playout_ms: tuple[int, int] = (0, 0)
    """Shortest and longest time that a player's browser may hold a picture."""
    spectator_playout_ms: tuple[int, int] = (0, 500)
    """The same for those who watch: an even picture is worth more to them than a young one."""
    repeat_s: float = 0.5
    """After this time without a new frame the last is sent again."""
    ice: IceSettings = field(default_factory=IceSettings)


class MediaEvents:
    """What media tells its session; every method is called on the loop and returns at once."""

    def on_chunk(self, notice: ChunkNotice) -> None:
        """A chunk begins, or its times moved; before the frames concerned are sent."""

    def on_origin(self, viewer_id: str, gen: int, origin: int) -> None:
        """The RTP timestamps of this connection are `origin + pts90` modulo 2**32."""

    def on_peer_state(self, viewer_id: str, gen: int, state: str) -> None:
        """A WebRTC connection became "connected", "failed" or "closed"."""

    def on_act(self, viewer_id: str, text: str | bytes) -> None:
        """A message came over the data channel of a WebRTC connection."""

    def on_stalled(self, viewer_id: str, gen: int) -> None:
        """No packet of this connection left for long: the browser should make a new offer."""

    def on_encoded(
        self, codec: Codec, encode_ms: float, size_bytes: int, key_cause: KeyCause | None
    ) -> None:
        """One picture was encoded; with the reason where it is a keyframe."""

    def on_delivered(self, transport: str, is_sent: bool) -> None:
        """A new frame went to a viewer, or not; `transport` is "webrtc", "ws" or "recording"."""

    def on_sent(self, send_ms: float) -> None:
        """The last packet of a picture left, so long after it was encoded."""

    def on_failed(self) -> None:
        """Frames cannot be sent any more: the session has to end."""


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
    """Of all encoders together: what one viewer of each gets."""
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
    bitrate_bps: int
    """What the player's encoder aims at now."""
    remb_bps: int | None
    """Least estimate of the receivers."""
    rtt_s: float | None
    """Longest round trip to a viewer."""

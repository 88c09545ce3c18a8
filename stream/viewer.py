"""Viewer: one socket of a session, and what all sessions share.

Owns nothing that runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from stream import protocol as p
from stream.inputs import BrowserClock
from stream.limits import TokenBucket
from stream.media_events import MediaSettings
from stream.metrics import Metrics
from stream.session_files import SessionFiles
from stream.sessions import Registry, Role
from stream.settings import ServerSettings
from stream.sockets import Socket
from stream.video_encoder import Codec
from stream.worker_messages import StartFrom

OFFER_EVERY_S = 2.0
RTC_CODECS = (Codec.H264, Codec.VP8)
"""The best first."""


@dataclass(kw_only=True, eq=False, slots=True)
class Viewer:
    """One socket of a session: the player, or somebody who watches."""

    id: str
    role: Role
    socket: Socket
    ws_codec: Codec | None = None
    """Chosen WebSocket video, to begin as soon as there is media."""
    rtc_codecs: tuple[Codec, ...] = RTC_CODECS
    """Allowed in the answer to the next offer."""
    transport: str = "none"
    negotiation: asyncio.Task[None] | None = None
    offers: TokenBucket = field(
        default_factory=lambda: TokenBucket(per_s=1.0 / OFFER_EVERY_S, burst=3.0)
    )
    choices: TokenBucket = field(
        default_factory=lambda: TokenBucket(per_s=1.0 / OFFER_EVERY_S, burst=6.0)
    )
    """Of a transport; each costs everybody a keyframe."""
    acts: TokenBucket = field(default_factory=lambda: TokenBucket(per_s=70.0, burst=120.0))
    commands: TokenBucket = field(default_factory=lambda: TokenBucket(per_s=10.0, burst=20.0))
    keyframes: TokenBucket = field(default_factory=lambda: TokenBucket(per_s=2.0, burst=2.0))
    clock: BrowserClock = field(default_factory=BrowserClock)
    was_told_not_controller: bool = False
    has_left: bool = False

    @property
    def is_player(self) -> bool:
        """Whether this one plays."""
        return self.role == "controller"


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What rooms share."""

    settings: ServerSettings
    registry: Registry
    metrics: Metrics
    media: MediaSettings
    video: p.VideoInfo
    limits: p.Limits
    files: SessionFiles
    start_from: Callable[[str | None, str | None], StartFrom]
    """(scene, image_id) -> first picture; raises ProtocolError for one that is unknown."""

"""What a page has to know of the service before and when it opens a session.

Owns the answer to `GET /v1/info` and the limits that every welcome repeats.
"""

from __future__ import annotations

from collections.abc import Iterable

from stream import http_bodies as bodies
from stream import protocol as p
from stream.actions import FRAMES_PER_CHUNK
from stream.scenes import Scene
from stream.server_messages import Loading
from stream.settings import ServerSettings

VERSION = "0.1.0"
CHUNK = p.ChunkInfo(first=FRAMES_PER_CHUNK, next=FRAMES_PER_CHUNK)


def latch_ms(video: p.VideoInfo) -> float:
    """Time between two moments at which actions are taken, in even playback."""
    return FRAMES_PER_CHUNK / video.fps * 1e3


def limits(settings: ServerSettings) -> p.Limits:
    """What the service accepts."""
    return p.Limits(
        image_bytes=settings.image_limit_bytes,
        key_refresh_ms=settings.key_refresh_ms,
        key_stale_ms=settings.key_stale_ms,
        ladder_s=(settings.ladder_direct_s, settings.ladder_relay_s),
    )


def service_info(
    settings: ServerSettings,
    video: p.VideoInfo,
    scenes: Iterable[Scene],
    *,
    is_ready: bool,
    loading: Loading | None,
) -> bodies.ServiceInfo:
    """Return the answer. ICE servers come with the welcome: they may have passwords in them."""
    return bodies.ServiceInfo(
        version=VERSION,
        preset=settings.preset,
        source="renderer" if settings.renderer else "model",
        video=video,
        chunk=CHUNK,
        latch_ms=latch_ms(video),
        transports=("webrtc", "ws") if settings.webrtc else ("ws",),
        codecs=("h264", "vp8", "jpeg"),
        ice=tuple(server for server in settings.ice_servers if server.credential is None),
        limits=limits(settings),
        scenes=tuple(
            bodies.SceneInfo(
                name=scene.name, prompt=scene.prompt, thumbnail=f"/v1/scenes/{scene.name}.png"
            )
            for scene in scenes
        ),
        needs_token=settings.token is not None,
        is_ready=is_ready,
        loading=loading,
    )

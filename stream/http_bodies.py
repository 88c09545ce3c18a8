"""Bodies of the HTTP requests and answers.

Owns every one of them as a model.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stream.error_codes import ErrorCode
from stream.protocol import (
    PROTOCOL,
    ChunkInfo,
    IceServer,
    ImageId,
    Limits,
    Model,
    PromptText,
    SceneName,
    Seed,
    SessionState,
    VideoInfo,
    WorldInfo,
)
from stream.server_messages import Loading


class CreateSession(Model):
    """Body of `POST /v1/sessions`."""

    role: Literal["controller", "viewer"] = "controller"
    join: Annotated[str, Field(max_length=64)] | None = None
    """Session to watch; viewers only. None: the one that plays."""
    scene: SceneName | None = None
    image_id: ImageId | None = None
    prompt: PromptText | None = None
    seed: Seed | None = None
    resume: Annotated[str, Field(max_length=128)] | None = None
    """Token of the session to go on with."""
    client: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{8,64}$")] | None = None
    """Random name of the browser; a new session of the same browser takes the old one's place."""


class SessionCreated(Model):
    """Answer to `POST /v1/sessions`."""

    session_id: str
    role: Literal["controller", "viewer"]
    ticket: str
    resume_token: str | None
    ws_url: str
    """Path on the same host."""
    state: SessionState
    queue_pos: int | None
    expires_at: float
    """Server time when the ticket expires, ms."""


class SessionStatus(Model):
    """Answer to `GET /v1/sessions/{id}`."""

    session_id: str
    state: SessionState
    reason: str
    queue_pos: int | None
    viewers: int
    last_error: ErrorCode | None
    world: WorldInfo


class SceneInfo(Model):
    """A named scene to start from."""

    name: str
    prompt: str
    thumbnail: str
    """Path of a PNG on the same host."""


class ServiceInfo(Model):
    """Answer to `GET /v1/info`."""

    protocols: tuple[str, ...] = (PROTOCOL,)
    version: str
    preset: str
    source: Literal["model", "renderer"]
    video: VideoInfo
    chunk: ChunkInfo
    latch_ms: float
    transports: tuple[str, ...] = ("webrtc", "ws")
    codecs: tuple[str, ...]
    ice: tuple[IceServer, ...]
    limits: Limits
    scenes: tuple[SceneInfo, ...]
    needs_token: bool
    """Whether `POST` needs `Authorization: Bearer`; the page takes it from its URL's #token=."""
    is_ready: bool
    loading: Loading | None
    """Progress while it is not ready."""


class ErrorBody(Model):
    """Body of every HTTP error."""

    code: ErrorCode
    msg: str
    retry_ms: int | None = None
    id: str | None = None
    """Finds the error in the log."""

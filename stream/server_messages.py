"""Messages of the server to the browser.

Owns every one of them as a model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from stream.error_codes import ERROR_TEXT, ErrorCode
from stream.protocol import (
    ChunkInfo,
    IceServer,
    Limits,
    Model,
    SessionState,
    VideoInfo,
    WorldInfo,
)


class Welcome(Model):
    """Answer to `hello`."""

    t: Literal["welcome"] = "welcome"
    session: str
    role: Literal["controller", "viewer"]
    resume_token: str | None
    video: VideoInfo
    chunk: ChunkInfo
    latch_ms: float
    ice: tuple[IceServer, ...]
    limits: Limits
    world: WorldInfo
    last_seq: int
    """Highest `act.seq` that the server has seen; the client goes on above it."""
    hb_ms: int
    st: float


class Queue(Model):
    """Place in the queue, from 1."""

    t: Literal["queue"] = "queue"
    pos: int
    len: int
    eta_s: float | None


class Loading(Model):
    """Progress of the model's loading and warm-up."""

    t: Literal["loading"] = "loading"
    stage: str
    percent: float
    seconds: float


class State(Model):
    """The session's state changed."""

    t: Literal["state"] = "state"
    state: SessionState
    reason: str
    since: float
    """Server time of the change, ms."""


class World(Model):
    """The world of the session is another one than the viewer was told last."""

    t: Literal["world"] = "world"
    world: WorldInfo


class RtcAnswer(Model):
    """SDP answer and the codec that was agreed on."""

    t: Literal["rtc.answer"] = "rtc.answer"
    gen: int
    sdp: str
    codec: str


class RtcOrigin(Model):
    """RTP timestamp = origin + pts90 mod 2^32."""

    t: Literal["rtc.origin"] = "rtc.origin"
    gen: int
    origin: int


class Pong(Model):
    """Answer to `ping`."""

    t: Literal["pong"] = "pong"
    id: int
    ct: float
    st: float


class ChunkTimes(Model):
    """Server times of a chunk, ms; `latch` pairs a frame offset with a time."""

    latch: tuple[tuple[int, float], ...]
    gen0: float
    gen1: float | None = None
    """Absent while the chunk is still being made."""
    enq: float
    due: float
    """When the first frame leaves: everything before it is waiting for its turn."""


class Chunk(Model):
    """Comes before the first frame of a chunk, and again where its due times move."""

    t: Literal["chunk"] = "chunk"
    k: int
    epoch: int
    first: int
    """Frame id of the chunk's first frame."""
    n: int
    pts0: int
    """90 kHz presentation time of the first frame."""
    dpts: int | None = None
    pts: tuple[int, ...] | None = None
    act: tuple[tuple[int, int], ...] | None = None
    """(frame offset, highest act_seq in effect from there on); None for viewers."""
    times: ChunkTimes


class Applied(Model):
    """A wish took effect at this chunk; after a reset frames of earlier epochs never come."""

    t: Literal["applied"] = "applied"
    id: int
    chunk: int
    epoch: int


class Stats(Model):
    """Once a second."""

    t: Literal["stats"] = "stats"
    gen_ms: float | None
    """Cost of the last chunk."""
    queue_frames: int
    fps_out: float
    encode_ms: float | None
    kbps: float
    act_lag_ms: float | None
    """Age of the newest action when it was latched last."""
    dropped: int
    """Frames that this viewer did not get."""
    viewers: int


class Warn(Model):
    """Something the player should know; the session goes on."""

    t: Literal["warn"] = "warn"
    code: str
    msg: str
    retry_ms: int | None = None


class Err(Model):
    """A refused message, or with `fatal` the end of the session."""

    t: Literal["err"] = "err"
    code: ErrorCode
    msg: str
    retry_ms: int | None = None
    fatal: bool = False


class ServerBye(Model):
    """Last message before the server closes the socket."""

    t: Literal["bye"] = "bye"
    code: ErrorCode
    reason: str
    resume: bool


ServerMessage = Annotated[
    Welcome
    | Queue
    | Loading
    | State
    | World
    | RtcAnswer
    | RtcOrigin
    | Pong
    | Chunk
    | Applied
    | Stats
    | Warn
    | Err
    | ServerBye,
    Field(discriminator="t"),
]


SERVER: TypeAdapter[Any] = TypeAdapter(ServerMessage)


def err(code: ErrorCode, *, fatal: bool = False, retry_ms: int | None = None) -> Err:
    """Return the `err` message of a code with its fixed text."""
    return Err(code=code, msg=ERROR_TEXT[code], fatal=fatal, retry_ms=retry_ms)


def bye(code: ErrorCode, *, resume: bool = False) -> ServerBye:
    """Return the `bye` message of a code with its fixed text."""
    return ServerBye(code=code, reason=ERROR_TEXT[code], resume=resume)

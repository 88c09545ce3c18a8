"""Messages of the live service: what browser and server say to each other over the WebSocket.

Owns: the version, every message as a model, error codes with their HTTP status and close codes,
limits. Invariants: messages are frozen; unknown fields are ignored and unknown types are counted,
so that either side may be the newer one; a wrong type never passes. Times are milliseconds: `ct` on
the client's clock (`performance.timeOrigin + performance.now()`), `st` on the server's wall clock.

Raise `VERSION` when a field changes its meaning or a required one is added; a new optional field or
message leaves it.
"""

from __future__ import annotations

import json
import unicodedata
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

VERSION = 1
PROTOCOL = f"wm.v{VERSION}"
TICKET_PREFIX = "ticket."
"""Second subprotocol that the browser offers: this, then the ticket."""

MESSAGE_LIMIT_BYTES = 64 * 1024
SDP_LIMIT = 32 * 1024
PROMPT_LIMIT = 1_000
HELD_LIMIT = 16
EDGE_LIMIT = 64
SHOWN_LIMIT = 60
CANDIDATE_LIMIT = 40
"""ICE candidates for each `gen`."""
JSON_SAFE_INT = 2**53 - 1

KEY_CODES = (
    "KeyW",
    "KeyA",
    "KeyS",
    "KeyD",
    "ArrowUp",
    "ArrowLeft",
    "ArrowDown",
    "ArrowRight",
    "ShiftLeft",
)
"""`KeyboardEvent.code` values that mean something; others in a message are passed over."""


class ErrorCode(StrEnum):
    """What went wrong, in HTTP answers, `err` messages and closed sockets."""

    BAD_MESSAGE = "BAD_MESSAGE"
    UNAUTHORIZED = "UNAUTHORIZED"
    FORBIDDEN_ORIGIN = "FORBIDDEN_ORIGIN"
    NOT_CONTROLLER = "NOT_CONTROLLER"
    NO_SESSION = "NO_SESSION"
    CONFLICT = "CONFLICT"
    TOO_LARGE = "TOO_LARGE"
    BAD_IMAGE = "BAD_IMAGE"
    RATE_LIMIT = "RATE_LIMIT"
    QUEUE_FULL = "QUEUE_FULL"
    INTERNAL = "INTERNAL"
    NOT_READY = "NOT_READY"
    RTC_TIMEOUT = "RTC_TIMEOUT"
    RTC_CODEC = "RTC_CODEC"
    RTC_FAILED = "RTC_FAILED"
    IDLE = "IDLE"
    GONE = "GONE"
    MAX_DURATION = "MAX_DURATION"
    SERVER_SHUTDOWN = "SERVER_SHUTDOWN"
    WARMUP_TIMEOUT = "WARMUP_TIMEOUT"
    GEN_TIMEOUT = "GEN_TIMEOUT"
    GEN_INVALID = "GEN_INVALID"
    """The model made no valid picture: NaN, black or frozen."""
    WORKER_DIED = "WORKER_DIED"


HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.BAD_MESSAGE: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN_ORIGIN: 403,
    ErrorCode.NOT_CONTROLLER: 403,
    ErrorCode.NO_SESSION: 404,
    ErrorCode.CONFLICT: 409,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.BAD_IMAGE: 422,
    ErrorCode.RATE_LIMIT: 429,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_READY: 503,
    ErrorCode.WORKER_DIED: 503,
}

CLOSE_CODE: dict[ErrorCode, int] = {
    ErrorCode.BAD_MESSAGE: 4400,
    ErrorCode.UNAUTHORIZED: 4401,
    ErrorCode.NO_SESSION: 4404,
    ErrorCode.CONFLICT: 4409,
    ErrorCode.TOO_LARGE: 1009,
    ErrorCode.RATE_LIMIT: 4429,
    ErrorCode.QUEUE_FULL: 4429,
    ErrorCode.INTERNAL: 1011,
    ErrorCode.NOT_READY: 1013,
    ErrorCode.IDLE: 4408,
    ErrorCode.GONE: 4410,
    ErrorCode.MAX_DURATION: 4411,
    ErrorCode.SERVER_SHUTDOWN: 1012,
    ErrorCode.WARMUP_TIMEOUT: 4500,
    ErrorCode.GEN_TIMEOUT: 4500,
    ErrorCode.GEN_INVALID: 4500,
    ErrorCode.WORKER_DIED: 4500,
}

ERROR_TEXT: dict[ErrorCode, str] = {
    ErrorCode.BAD_MESSAGE: "The message has a wrong form.",
    ErrorCode.UNAUTHORIZED: "The token or ticket is missing, used or expired.",
    ErrorCode.FORBIDDEN_ORIGIN: "This page may not use this server.",
    ErrorCode.NOT_CONTROLLER: "Only the player may do this.",
    ErrorCode.NO_SESSION: "The session is unknown or has ended.",
    ErrorCode.CONFLICT: "The session went on in another window.",
    ErrorCode.TOO_LARGE: "The message is too large.",
    ErrorCode.BAD_IMAGE: "The picture cannot be used.",
    ErrorCode.RATE_LIMIT: "Too many messages; slow down.",
    ErrorCode.QUEUE_FULL: "The queue is full; try again later.",
    ErrorCode.INTERNAL: "Something went wrong on the server.",
    ErrorCode.NOT_READY: "The server is not ready yet.",
    ErrorCode.RTC_TIMEOUT: "WebRTC did not answer in time.",
    ErrorCode.RTC_CODEC: "No common video codec.",
    ErrorCode.RTC_FAILED: "WebRTC failed.",
    ErrorCode.IDLE: "The session ended because nobody played.",
    ErrorCode.GONE: "The session ended because the connection was gone for too long.",
    ErrorCode.MAX_DURATION: "The session reached its longest duration.",
    ErrorCode.SERVER_SHUTDOWN: "The server is closing.",
    ErrorCode.WARMUP_TIMEOUT: "The world took too long to start.",
    ErrorCode.GEN_TIMEOUT: "The world took too long to make a chunk.",
    ErrorCode.GEN_INVALID: "The model made no valid picture.",
    ErrorCode.WORKER_DIED: "The process that makes the world ended.",
}
"""The only texts that leave the server; details stay in its logs."""


class ProtocolError(Exception):
    """A message or request that is refused, with the code that the client gets."""

    def __init__(self, code: ErrorCode, detail: str = "", *, retry_ms: int | None = None) -> None:
        super().__init__(f"{code}: {detail}" if detail else str(code))
        self.code = code
        self.detail = detail
        """For logs only."""
        self.retry_ms = retry_ms


class SessionState(StrEnum):
    """States of a session; the table is in `stream.sessions`."""

    QUEUED = "QUEUED"
    WARMING = "WARMING"
    READY = "READY"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    GRACE = "GRACE"
    DRAINING = "DRAINING"
    FAILED = "FAILED"
    CLOSED = "CLOSED"


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", strict=True, allow_inf_nan=False, ser_json_inf_nan="null"
    )


UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
Id = Annotated[int, Field(ge=0, le=JSON_SAFE_INT)]
Seed = Annotated[int, Field(ge=0, le=JSON_SAFE_INT)]
TimeMs = Annotated[float, Field(ge=0, le=1e15)]
Code = Annotated[str, Field(max_length=24)]
Reason = Annotated[str, Field(max_length=64)]
ImageId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
SceneName = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
PromptText = Annotated[str, Field(max_length=PROMPT_LIMIT)]
Axis = Annotated[float, Field(ge=-1, le=1)]
Pixels = Annotated[float, Field(ge=-(2**31), le=2**31)]
Transport = Literal["webrtc", "ws"]
Codec = Literal["h264", "vp8", "jpeg"]


# ---- client to server


class Caps(_Model):
    """What the browser can do."""

    webrtc: bool = False
    webcodecs: tuple[Annotated[str, Field(max_length=32)], ...] = Field(default=(), max_length=8)
    jpeg: bool = True
    rvfc: bool = False


class Hello(_Model):
    """First message of a socket, within 5 s."""

    t: Literal["hello"]
    ver: Annotated[int, Field(ge=0, le=2**16)]
    caps: Caps = Caps()
    viewport: tuple[Annotated[int, Field(ge=0, le=2**16)], Annotated[int, Field(ge=0, le=2**16)]]
    ua: Annotated[str, Field(max_length=512)] = ""


class RtcOffer(_Model):
    """SDP offer; `gen` rises with each."""

    t: Literal["rtc.offer"]
    gen: UInt32
    sdp: Annotated[str, Field(min_length=1, max_length=SDP_LIMIT)]


class RtcCandidate(_Model):
    """One more ICE candidate of the client."""

    t: Literal["rtc.candidate"]
    gen: UInt32
    candidate: Annotated[str, Field(max_length=1024)]
    mid: Annotated[str, Field(max_length=64)] | None = None
    mline: Annotated[int, Field(ge=0, le=16)] | None = None


class RtcState(_Model):
    """Change of `RTCPeerConnection.connectionState`."""

    t: Literal["rtc.state"]
    gen: UInt32
    state: Literal["new", "connecting", "connected", "disconnected", "failed", "closed"]


Edge = tuple[Id, Code, Annotated[int, Field(ge=0, le=1)], TimeMs]
"""(rising id, code, 1 down or 0 up, ct)."""


class Act(_Model):
    """State of all controls; a later one makes a lost one harmless."""

    t: Literal["act"]
    seq: UInt32
    ct: TimeMs
    keys: tuple[Code, ...] = Field(default=(), max_length=HELD_LIMIT)
    look: tuple[Pixels, Pixels] = (0.0, 0.0)
    """Mouse motion in CSS pixels, summed since the session began."""
    pad: tuple[Axis, Axis, Axis, Axis] = (0.0, 0.0, 0.0, 0.0)
    """Left stick right and down, right stick right and down."""
    edges: tuple[Edge, ...] = Field(default=(), max_length=EDGE_LIMIT)
    """Transitions of the last 500 ms."""


class Ping(_Model):
    """Question for the server's clock."""

    t: Literal["ping"]
    id: Id
    ct: TimeMs


class Ack(_Model):
    """A WebSocket video frame was drawn or dropped."""

    t: Literal["ack"]
    frame: UInt32
    drawn_ct: TimeMs | None = None


class Kf(_Model):
    """Wish for a keyframe."""

    t: Literal["kf"]
    reason: Reason = ""


class Media(_Model):
    """Choice of the transport. With "webrtc" an offer follows; with "ws" frames follow at once."""

    t: Literal["media"]
    transport: Transport
    codec: Codec | None = None


class Prompt(_Model):
    """New prompt from the next chunk on; answered by `applied`."""

    t: Literal["prompt"]
    text: PromptText
    id: Id


class Reset(_Model):
    """Start the world anew; what is not named stays as it was. Answered by `applied`."""

    t: Literal["reset"]
    id: Id
    scene: SceneName | None = None
    image_id: ImageId | None = None
    seed: Seed | None = None
    prompt: PromptText | None = None


class Pause(_Model):
    """Stop the world until `resume`."""

    t: Literal["pause"]
    reason: Reason = "user"


class Resume(_Model):
    """Go on."""

    t: Literal["resume"]
    reason: Reason = "user"


class Step(_Model):
    """Make one chunk while paused; answered by `applied`."""

    t: Literal["step"]
    id: Id


class Shown(_Model):
    """Frames that were presented, once a second."""

    t: Literal["shown"]
    frames: tuple[tuple[UInt32, TimeMs], ...] = Field(max_length=SHOWN_LIMIT)
    """(frame id, ct)."""


class ClientBye(_Model):
    """Clean leave."""

    t: Literal["bye"]


ClientMessage = Annotated[
    Hello
    | RtcOffer
    | RtcCandidate
    | RtcState
    | Act
    | Ping
    | Ack
    | Kf
    | Media
    | Prompt
    | Reset
    | Pause
    | Resume
    | Step
    | Shown
    | ClientBye,
    Field(discriminator="t"),
]


# ---- server to client


class VideoInfo(_Model):
    """Size and clock of the frames."""

    w: int
    h: int
    fps: float


class ChunkInfo(_Model):
    """Frames in the first and in each later chunk."""

    first: int
    next: int


class IceServer(_Model):
    """As `RTCIceServer`."""

    urls: tuple[str, ...]
    username: str | None = None
    credential: str | None = None


class Limits(_Model):
    """What the server accepts."""

    keys: tuple[str, ...] = KEY_CODES
    prompt_chars: int = PROMPT_LIMIT
    message_bytes: int = MESSAGE_LIMIT_BYTES
    image_bytes: int
    key_refresh_ms: int
    key_stale_ms: int
    ladder_s: tuple[float, float]
    """How long direct WebRTC and WebRTC over a relay may take."""


class WorldInfo(_Model):
    """The world of a session, as a page needs it after it connects again."""

    scene: str | None
    image_id: str | None
    prompt: str
    seed: int
    epoch: int


class Welcome(_Model):
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


class Queue(_Model):
    """Place in the queue, from 1."""

    t: Literal["queue"] = "queue"
    pos: int
    len: int
    eta_s: float | None


class Loading(_Model):
    """Progress of the model's loading and warm-up."""

    t: Literal["loading"] = "loading"
    stage: str
    percent: float
    seconds: float


class State(_Model):
    """The session's state changed."""

    t: Literal["state"] = "state"
    state: SessionState
    reason: str
    since: float
    """Server time of the change, ms."""


class RtcAnswer(_Model):
    """SDP answer and the codec that was agreed on."""

    t: Literal["rtc.answer"] = "rtc.answer"
    gen: int
    sdp: str
    codec: str


class RtcOrigin(_Model):
    """RTP timestamp = origin + pts90 mod 2^32."""

    t: Literal["rtc.origin"] = "rtc.origin"
    gen: int
    origin: int


class Pong(_Model):
    """Answer to `ping`."""

    t: Literal["pong"] = "pong"
    id: int
    ct: float
    st: float


class ChunkTimes(_Model):
    """Server times of a chunk, ms; `latch` pairs a frame offset with a time."""

    latch: tuple[tuple[int, float], ...]
    gen0: float
    gen1: float | None = None
    """Absent while the chunk is still being made."""
    enq: float
    due: float
    """When the first frame leaves: everything before it is waiting for its turn."""


class Chunk(_Model):
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


class Applied(_Model):
    """A wish took effect at this chunk; after a reset frames of earlier epochs never come."""

    t: Literal["applied"] = "applied"
    id: int
    chunk: int
    epoch: int


class Stats(_Model):
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


class Warn(_Model):
    """Something the player should know; the session goes on."""

    t: Literal["warn"] = "warn"
    code: str
    msg: str
    retry_ms: int | None = None


class Err(_Model):
    """A refused message, or with `fatal` the end of the session."""

    t: Literal["err"] = "err"
    code: ErrorCode
    msg: str
    retry_ms: int | None = None
    fatal: bool = False


class ServerBye(_Model):
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

# ---- HTTP bodies


class CreateSession(_Model):
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


class SessionCreated(_Model):
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


class SessionStatus(_Model):
    """Answer to `GET /v1/sessions/{id}`."""

    session_id: str
    state: SessionState
    reason: str
    queue_pos: int | None
    viewers: int
    last_error: ErrorCode | None
    world: WorldInfo


class SceneInfo(_Model):
    """A named scene to start from."""

    name: str
    prompt: str
    thumbnail: str
    """Path of a PNG on the same host."""


class ServiceInfo(_Model):
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


class ErrorBody(_Model):
    """Body of every HTTP error."""

    code: ErrorCode
    msg: str
    retry_ms: int | None = None
    id: str | None = None
    """Finds the error in the log."""


_CLIENT: TypeAdapter[Any] = TypeAdapter(ClientMessage)
_SERVER: TypeAdapter[Any] = TypeAdapter(ServerMessage)


def parse_client(text: str) -> ClientMessage | None:
    """Read one message; None where its type is unknown.

    Raises:
        ProtocolError: TOO_LARGE, or BAD_MESSAGE for anything else that no message is.
    """
    if len(text) > MESSAGE_LIMIT_BYTES:
        raise ProtocolError(ErrorCode.TOO_LARGE, f"{len(text)} characters")
    try:
        message: ClientMessage = _CLIENT.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if first["type"] == "union_tag_invalid" and isinstance(json.loads(text)["t"], str):
            return None
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(ErrorCode.BAD_MESSAGE, f"{where}: {first['type']}") from None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(ErrorCode.BAD_MESSAGE, type(error).__name__) from None
    return message


def parse_server(text: str) -> ServerMessage:
    """Read a message of the server; for clients in Python.

    Raises:
        pydantic.ValidationError: it is none.
    """
    message: ServerMessage = _SERVER.validate_json(text)
    return message


def clean_prompt(text: str) -> str:
    """Prompt in normal form without control characters, as the engine wants it."""
    normal = unicodedata.normalize("NFC", text)
    kept = (" " if each in "\n\t\r" else each for each in normal)
    printable = "".join(each for each in kept if unicodedata.category(each) not in ("Cc", "Cs"))
    return " ".join(printable.split())[:PROMPT_LIMIT]


def encode(message: BaseModel) -> str:
    """Return the message as JSON; fields that are None are left out."""
    return message.model_dump_json(exclude_none=True)


def err(code: ErrorCode, *, fatal: bool = False, retry_ms: int | None = None) -> Err:
    """Return the `err` message of a code with its fixed text."""
    return Err(code=code, msg=ERROR_TEXT[code], fatal=fatal, retry_ms=retry_ms)


def bye(code: ErrorCode, *, resume: bool = False) -> ServerBye:
    """Return the `bye` message of a code with its fixed text."""
    return ServerBye(code=code, reason=ERROR_TEXT[code], resume=resume)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of all messages: `client`, `server` and shared `$defs`."""
    client = _CLIENT.json_schema(ref_template="#/$defs/{model}")
    server = _SERVER.json_schema(ref_template="#/$defs/{model}")
    definitions = {**client.pop("$defs"), **server.pop("$defs")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": PROTOCOL,
        "client": client,
        "server": server,
        "$defs": dict(sorted(definitions.items())),
    }

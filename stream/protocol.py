"""Protocol of the live service: its version, limits, and the values that its messages share.

What browser and server say to each other over the WebSocket is in `client_messages` and
`server_messages`, what goes over HTTP in `http_bodies`, what can go wrong in `error_codes`.
Invariants: messages are frozen; unknown fields are ignored and unknown types are counted, so that
either side may be the newer one; a wrong type never passes. Times are milliseconds: `ct` on the
client's clock (`performance.timeOrigin + performance.now()`), `st` on the server's wall clock.

Raise `VERSION` when a field changes its meaning or a required one is added; a new optional field or
message leaves it.
"""

from __future__ import annotations

import unicodedata
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

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


class SessionState(StrEnum):
    """States of a session; the table is in `stream.session_states`."""

    QUEUED = "QUEUED"
    WARMING = "WARMING"
    READY = "READY"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    GRACE = "GRACE"
    DRAINING = "DRAINING"
    FAILED = "FAILED"
    CLOSED = "CLOSED"


class Model(BaseModel):
    """Base of all messages and bodies."""

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


class VideoInfo(Model):
    """Size and clock of the frames."""

    w: int
    h: int
    fps: float


class ChunkInfo(Model):
    """Frames in the first and in each later chunk."""

    first: int
    next: int


class IceServer(Model):
    """As `RTCIceServer`."""

    urls: tuple[str, ...]
    username: str | None = None
    credential: str | None = None


class Limits(Model):
    """What the server accepts."""

    keys: tuple[str, ...] = KEY_CODES
    prompt_chars: int = PROMPT_LIMIT
    message_bytes: int = MESSAGE_LIMIT_BYTES
    image_bytes: int
    key_refresh_ms: int
    key_stale_ms: int
    ladder_s: tuple[float, float]
    """How long direct WebRTC and WebRTC over a relay may take."""


class WorldInfo(Model):
    """The world of a session, as a page needs it after it connects again."""

    scene: str | None
    image_id: str | None
    prompt: str
    seed: int
    epoch: int


def clean_prompt(text: str) -> str:
    """Prompt in normal form without control characters, as the engine wants it."""
    normal = unicodedata.normalize("NFC", text)
    kept = (" " if each in "\n\t\r" else each for each in normal)
    printable = "".join(each for each in kept if unicodedata.category(each) not in ("Cc", "Cs"))
    return " ".join(printable.split())[:PROMPT_LIMIT]


def encode(message: BaseModel) -> str:
    """Return the message as JSON; fields that are None are left out."""
    return message.model_dump_json(exclude_none=True)

"""Messages of the browser to the server.

Owns every one of them as a model, and the reading of a text that a stranger sent.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from stream.error_codes import ErrorCode, ProtocolError
from stream.protocol import (
    EDGE_LIMIT,
    HELD_LIMIT,
    MESSAGE_LIMIT_BYTES,
    SDP_LIMIT,
    SHOWN_LIMIT,
    Axis,
    Code,
    Codec,
    Id,
    ImageId,
    Model,
    Pixels,
    PromptText,
    Reason,
    SceneName,
    Seed,
    TimeMs,
    Transport,
    UInt32,
)


class Caps(Model):
    """What the browser can do."""

    webrtc: bool = False
    webcodecs: tuple[Annotated[str, Field(max_length=32)], ...] = Field(default=(), max_length=8)
    jpeg: bool = True
    rvfc: bool = False


class Hello(Model):
    """First message of a socket, within 5 s."""

    t: Literal["hello"]
    ver: Annotated[int, Field(ge=0, le=2**16)]
    caps: Caps = Caps()
    viewport: tuple[Annotated[int, Field(ge=0, le=2**16)], Annotated[int, Field(ge=0, le=2**16)]]
    ua: Annotated[str, Field(max_length=512)] = ""


class RtcOffer(Model):
    """SDP offer; `gen` rises with each."""

    t: Literal["rtc.offer"]
    gen: UInt32
    sdp: Annotated[str, Field(min_length=1, max_length=SDP_LIMIT)]


class RtcCandidate(Model):
    """One more ICE candidate of the client."""

    t: Literal["rtc.candidate"]
    gen: UInt32
    candidate: Annotated[str, Field(max_length=1024)]
    mid: Annotated[str, Field(max_length=64)] | None = None
    mline: Annotated[int, Field(ge=0, le=16)] | None = None


class RtcState(Model):
    """Change of `RTCPeerConnection.connectionState`."""

    t: Literal["rtc.state"]
    gen: UInt32
    state: Literal["new", "connecting", "connected", "disconnected", "failed", "closed"]


Edge = tuple[Id, Code, Annotated[int, Field(ge=0, le=1)], TimeMs]
"""(rising id, code, 1 down or 0 up, ct)."""


class Act(Model):
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


class Ping(Model):
    """Question for the server's clock."""

    t: Literal["ping"]
    id: Id
    ct: TimeMs


class Ack(Model):
    """A WebSocket video frame was drawn or dropped."""

    t: Literal["ack"]
    frame: UInt32
    drawn_ct: TimeMs | None = None


class Kf(Model):
    """Wish for a keyframe."""

    t: Literal["kf"]
    reason: Reason = ""


class Media(Model):
    """Choice of the transport. With "webrtc" an offer follows; with "ws" frames follow at once."""

    t: Literal["media"]
    transport: Transport
    codec: Codec | None = None


class Prompt(Model):
    """New prompt from the next chunk on; answered by `applied`."""

    t: Literal["prompt"]
    text: PromptText
    id: Id


class Reset(Model):
    """Start the world anew; what is not named stays as it was. Answered by `applied`."""

    t: Literal["reset"]
    id: Id
    scene: SceneName | None = None
    image_id: ImageId | None = None
    seed: Seed | None = None
    prompt: PromptText | None = None


class Pause(Model):
    """Stop the world until `resume`."""

    t: Literal["pause"]
    reason: Reason = "user"


class Resume(Model):
    """Go on."""

    t: Literal["resume"]
    reason: Reason = "user"


class Step(Model):
    """Make one chunk while paused; answered by `applied`."""

    t: Literal["step"]
    id: Id


class Shown(Model):
    """Frames that were presented, once a second."""

    t: Literal["shown"]
    frames: tuple[tuple[UInt32, TimeMs], ...] = Field(max_length=SHOWN_LIMIT)
    """(frame id, ct)."""


class ClientBye(Model):
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


CLIENT: TypeAdapter[Any] = TypeAdapter(ClientMessage)


def parse_client(text: str) -> ClientMessage | None:
    """Read one message; None where its type is unknown.

    Raises:
        ProtocolError: TOO_LARGE, or BAD_MESSAGE for anything else that no message is.
    """
    if len(text) > MESSAGE_LIMIT_BYTES:
        raise ProtocolError(ErrorCode.TOO_LARGE, f"{len(text)} characters")
    try:
        message: ClientMessage = CLIENT.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if first["type"] == "union_tag_invalid" and isinstance(json.loads(text)["t"], str):
            return None
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(ErrorCode.BAD_MESSAGE, f"{where}: {first['type']}") from None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(ErrorCode.BAD_MESSAGE, type(error).__name__) from None
    return message

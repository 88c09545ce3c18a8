"""A session and the table of its states.

    QUEUED -> WARMING -> READY -> RUNNING <-> PAUSED -> CLOSED
    GRACE holds the place of a player whose socket was lost; DRAINING and FAILED lead to CLOSED

Owns what is allowed; `Registry.transition` in `sessions` is the only one that changes a state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stream.error_codes import ErrorCode
from stream.protocol import SessionState, WorldInfo


class Event(StrEnum):
    """What moves a session from one state to another."""

    ASSIGN = "assign"
    FIRST_FRAME = "first_frame"
    PLAY = "play"
    PAUSE = "pause"
    RESTART = "restart"
    """The worker died; it loads again."""
    LOST = "lost"
    RETURN = "return"
    DRAIN = "drain"
    FAIL = "fail"
    CLOSE = "close"


_S = SessionState
PLAYABLE = (_S.READY, _S.RUNNING, _S.PAUSED)
LIVE = (_S.WARMING, *PLAYABLE)
TRANSITIONS: dict[tuple[SessionState, Event], SessionState] = {
    (_S.QUEUED, Event.ASSIGN): _S.WARMING,
    (_S.WARMING, Event.FIRST_FRAME): _S.READY,
    (_S.READY, Event.PLAY): _S.RUNNING,
    (_S.READY, Event.PAUSE): _S.PAUSED,
    (_S.RUNNING, Event.PAUSE): _S.PAUSED,
    (_S.PAUSED, Event.PLAY): _S.RUNNING,
    **{(state, Event.RESTART): _S.WARMING for state in LIVE},
    **{(state, Event.LOST): _S.GRACE for state in LIVE},
    (_S.GRACE, Event.RETURN): _S.WARMING,  # or where it came from: see `transition`
    **{(state, Event.DRAIN): _S.DRAINING for state in (*LIVE, _S.GRACE, _S.QUEUED)},
    **{(state, Event.FAIL): _S.FAILED for state in (*LIVE, _S.GRACE, _S.QUEUED)},
    **{(state, Event.CLOSE): _S.CLOSED for state in SessionState if state != _S.CLOSED},
}
EVENT_AT_END = {
    ErrorCode.WARMUP_TIMEOUT: Event.FAIL,
    ErrorCode.MAX_DURATION: Event.DRAIN,
}


@dataclass(kw_only=True, slots=True)
class Session:
    """What the service knows of one session; changed by its `Registry` only."""

    id: str
    client: str | None
    world: WorldInfo
    created_s: float
    state: SessionState
    reason: str = "created"
    since_s: float
    resume_token: str
    gone_since_s: float | None
    """When the player's socket was lost; at first when the session was made."""
    started_s: float | None = None
    """When it got its slot."""
    last_input_s: float
    before_grace: SessionState | None = None
    before_restart: SessionState | None = None
    """RUNNING or PAUSED, to go on with once the world is back after its worker died."""
    said_bye: bool = False
    """The page that plays was left, or is loaded anew: it has less time to come back."""
    viewer_ids: set[str] = field(default_factory=set)
    last_error: ErrorCode | None = None
    is_end_warned: bool = False

    @property
    def holds_slot(self) -> bool:
        """Whether it takes a worker's slot."""
        return self.state not in (_S.QUEUED, _S.CLOSED)

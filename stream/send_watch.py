"""Watch over one connection: frames are there for it, and none leaves.

Pure: the monotonic clock is an argument.
"""

from __future__ import annotations

from typing import Literal

KEYFRAME_S = 3.0
RENEGOTIATE_S = 10.0

Remedy = Literal["keyframe", "renegotiate"]


class SendWatch:
    """Time since frames were there for a connection and no packet left."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._tried: Remedy | None = None

    def offered(self, now_s: float) -> None:
        """A frame is there that the connection should send."""
        if self._since_s is None:
            self._since_s = now_s

    def sent(self) -> None:
        """A frame left."""
        self._since_s = self._tried = None

    def remedy(self, now_s: float) -> Remedy | None:
        """What to do now; each is told once, and the last again after as long a time."""
        if self._since_s is None:
            return None
        quiet_s = now_s - self._since_s
        if quiet_s >= RENEGOTIATE_S:
            self._since_s, self._tried = now_s, None
            return "renegotiate"
        if quiet_s >= KEYFRAME_S and self._tried is None:
            self._tried = "keyframe"
            return "keyframe"
        return None

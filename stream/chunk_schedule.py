"""When the next chunk starts: as late as its cost allows without a gap in playback.

Owns what is known of costs. Pure: the monotonic clock is an argument, in seconds.
"""

from __future__ import annotations

from collections import deque

from stream.actions import FRAMES_PER_CHUNK
from stream.pacing import COST_WINDOW, start_wait_s

SHORTEST_WAIT_S = 0.002
"""Less is not worth a sleep."""


class ChunkSchedule:
    """Schedule of one worker.

    Args:
        fps: playback is never faster than this.
        margin_s: reserve on top of what chunks cost.
    """

    def __init__(self, fps: float, margin_s: float) -> None:
        self.period_s = 1.0 / fps
        self._margin_s = margin_s
        self._costs_s: deque[float] = deque(maxlen=COST_WINDOW)

    def chunk_made(self, need_s: float) -> None:
        """Learn from a chunk how long before its first frame was due it had to start.

        More than a chunk's duration is not provided for: a start that early would make every
        later action wait for it.
        """
        self._costs_s.append(min(need_s, FRAMES_PER_CHUNK * self.period_s))

    def wait_s(self, taken_count: int, released_s: float, now_s: float) -> float:
        """How long the next chunk may wait; 0 means: start now.

        Args:
            taken_count: frames that have not left yet.
            released_s: when the last one left; the others follow at the full rate.
            now_s: monotonic clock, as the one before.
        """
        left_s = released_s + (taken_count + 1) * self.period_s - now_s
        wait_s = start_wait_s(left_s, tuple(self._costs_s), self._margin_s)
        return 0.0 if wait_s < SHORTEST_WAIT_S else wait_s

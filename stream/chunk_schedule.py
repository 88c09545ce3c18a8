"""When the next chunk starts: as late as its cost allows without a gap in playback.

Owns what is known of playback and of costs. Pure: the monotonic clock is an argument, in seconds.
"""

from __future__ import annotations

from collections import deque

from stream.actions import FRAMES_PER_CHUNK
from stream.pacing import COST_WINDOW, start_wait_s


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
        self._played_until_s = 0.0

    def chunk_made(self, need_s: float) -> None:
        """Learn from a chunk how long before its first frame was due it had to start.

        More than a chunk's duration is not provided for: a start that early would make every
        later action wait for it.
        """
        self._costs_s.append(min(need_s, FRAMES_PER_CHUNK * self.period_s))

    def frame_made(self, now_s: float) -> None:
        """Count a frame that is to be shown."""
        self._played_until_s = max(self._played_until_s, now_s) + self.period_s

    def restart(self) -> None:
        """Forget what is to be shown; costs stay."""
        self._played_until_s = 0.0

    def wait_s(self, taken_count: int, now_s: float) -> float:
        """How long the next chunk may wait; 0 means: start now.

        Args:
            taken_count: slots of the ring that are not free. Playback at its fastest is counted
                too, in case slots are freed before their frames are shown.
            now_s: monotonic clock.
        """
        left_s = max(0.0, self._played_until_s - now_s)
        in_ring_s = taken_count * self.period_s
        costs_s = tuple(self._costs_s)
        if left_s <= in_ring_s:
            wait_s = start_wait_s(taken_count, self.period_s, costs_s, self._margin_s)
        else:
            wait_s = start_wait_s(1, left_s, costs_s, self._margin_s)
        # Not worth a sleep; where nothing is shown, waits this short would never end either.
        return 0.0 if wait_s < self.period_s / 16.0 else wait_s

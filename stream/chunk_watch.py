"""When a chunk takes so long that viewers should be told. Pure."""

from __future__ import annotations

from collections import deque

from stream.pacing import COST_WINDOW, cost_p95

SLOW_FACTOR = 3.0
SLOW_MS = 5_000.0
"""No chunk is called slow before."""


class ChunkWatch:
    """Watch over the chunks of one session."""

    def __init__(self) -> None:
        self._costs_ms: deque[float] = deque(maxlen=COST_WINDOW)
        self._is_told = False

    def made(self, cost_ms: float) -> None:
        """A chunk is there."""
        self._costs_ms.append(cost_ms)
        self._is_told = False

    def is_slow(self, busy_ms: float) -> bool:
        """Whether the chunk in hand is slow, which is said once.

        Args:
            busy_ms: how long it has been under way; 0 while there is none.
        """
        limit_ms = max(SLOW_FACTOR * cost_p95(tuple(self._costs_ms)), SLOW_MS)
        if self._is_told or busy_ms <= limit_ms:
            return False
        self._is_told = True
        return True

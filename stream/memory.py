"""Memory of the machine, and when the service takes too much of it.

Owns the verdict, which is pure: the clock is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DRAIN_AFTER_S = 10.0
"""For so long memory may stay above its limit while nobody new is admitted."""


class Pressure(StrEnum):
    """What memory allows."""

    FINE = "fine"
    FULL = "full"
    """Nobody new is admitted."""
    DRAIN = "drain"
    """Sessions have to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Memory of all processes of the service."""

    resident_mib: float
    device_bytes: int


class MemoryWatch:
    """Verdicts of one service.

    Args:
        rss_limit_mib: of all processes together; None for no limit.
        gpu_limit_mib: of all workers together; None for no limit.
    """

    def __init__(self, rss_limit_mib: int | None, gpu_limit_mib: int | None) -> None:
        self._rss_limit_mib = rss_limit_mib
        self._gpu_limit_mib = gpu_limit_mib
        self._above_since_s: float | None = None
        self.pressure = Pressure.FINE
        """The newest verdict."""

    def judge(self, use: MemoryUse, now_s: float) -> Pressure:
        """Return what memory allows now."""
        is_above = _exceeds(use.resident_mib, self._rss_limit_mib)
        is_above |= _exceeds(use.device_bytes / 2**20, self._gpu_limit_mib)
        if not is_above:
            self._above_since_s = None
            self.pressure = Pressure.FINE
            return self.pressure
        if self._above_since_s is None:
            self._above_since_s = now_s
        is_long = now_s - self._above_since_s >= DRAIN_AFTER_S
        self.pressure = Pressure.DRAIN if is_long else Pressure.FULL
        return self.pressure


def _exceeds(used_mib: float, limit_mib: int | None) -> bool:
    return limit_mib is not None and used_mib > limit_mib

"""Probe of the event loop: how late it is, and what holds it up.

Owns a task that wakes up every 100 ms and a thread that looks whether it did. The thread writes the
stack of a loop that stands still into the log while it stands still: afterwards nobody knows.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

import structlog

PROBE_S = 0.1
STUCK_S = 0.25
"""A loop that is this late is worth a word."""

log = structlog.get_logger(__name__)


class LoopProbe:
    """Probe of the running loop.

    Args:
        on_lag: is told every 100 ms by how many seconds the loop is late.
        on_stuck: is told, in another thread, each time that the loop stands still for `STUCK_S`.
    """

    def __init__(self, on_lag: Callable[[float], None], on_stuck: Callable[[], None]) -> None:
        self._on_lag = on_lag
        self._on_stuck = on_stuck
        self._due_s = 0.0
        self._loop_thread = 0
        self._is_done = threading.Event()

    async def run(self) -> None:
        """Probe until cancelled."""
        self._loop_thread = threading.get_ident()
        self._due_s = time.monotonic() + PROBE_S
        watcher = threading.Thread(target=self._watch, name="loop watcher", daemon=True)
        watcher.start()
        try:
            while True:
                self._due_s = time.monotonic() + PROBE_S
                await asyncio.sleep(PROBE_S)
                self._on_lag(max(0.0, time.monotonic() - self._due_s))
        finally:
            self._is_done.set()
            watcher.join(2 * PROBE_S)

    def _watch(self) -> None:
        told_due_s = 0.0
        while not self._is_done.wait(PROBE_S):
            due_s = self._due_s
            late_s = time.monotonic() - due_s
            if late_s < STUCK_S or due_s == told_due_s:
                continue
            told_due_s = due_s
            frame = sys._current_frames().get(self._loop_thread)
            stack = "".join(traceback.format_stack(frame)[-8:]) if frame is not None else ""
            self._on_stuck()
            log.warning("loop_stuck", late_ms=round(late_s * 1e3), stack=stack)

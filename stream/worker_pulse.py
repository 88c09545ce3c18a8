"""What the worker tells the API process: reports as they come, and a heartbeat once a second.

Owns the worker's end of the pipe for sending, the thread of the heartbeat, the clock of the work in
hand. Invariant: reports of all threads go out whole, in the order in which they were made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from stream.worker_messages import Heartbeat, Report
from stream.world_source import Worlds

HEARTBEAT_S = 1.0


class Pulse:
    """Reports of one worker.

    Args:
        connection: the worker's end of the pipe.
        worlds: asked each time for the memory that they hold, for what recording made of their
            passes, and for the processes that share them.
    """

    def __init__(self, connection: Connection, worlds: Worlds) -> None:
        self._worlds = worlds
        self._connection = connection
        self._send_lock = threading.Lock()
        self._is_done = threading.Event()
        self._busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """End the heartbeat."""
        self._is_done.set()
        self._thread.join(2 * HEARTBEAT_S)

    def report(self, report: Report) -> None:
        """Send a report."""
        # A parent that is gone reads no reports; the inbox ends the worker then.
        with self._send_lock, suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(report)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Let the heartbeat tell how long this takes."""
        self._busy_since_s = time.monotonic()
        try:
            yield
        finally:
            self._busy_since_s = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within what is busy: wait for somebody else, which is no work; then begin anew."""
        was_busy, self._busy_since_s = self._busy_since_s is not None, None
        try:
            yield
        finally:
            self._busy_since_s = time.monotonic() if was_busy else None

    def _beat(self) -> None:
        while not self._is_done.wait(HEARTBEAT_S):
            since_s = self._busy_since_s
            busy_s = 0.0 if since_s is None else time.monotonic() - since_s
            self.report(
                Heartbeat(
                    busy_ms=busy_s * 1000.0,
                    device_bytes=self._worlds.device_bytes(),
                    graphs=self._worlds.graphs(),
                    follower_pids=self._worlds.follower_pids(),
                )
            )

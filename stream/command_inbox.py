"""Commands as they reach the worker: read by a thread of its own, taken at chunk borders.

Owns the merging of resets and the waking of a writer that waits for the ring. Invariants: order is
kept; a command that ends what is under way cancels the ring until it was taken; the end of the pipe
counts as `Shutdown`, so that no worker outlives its parent.
"""

from __future__ import annotations

import threading
from collections import deque
from multiprocessing.connection import Connection

from stream.frames import FrameRing
from stream.worker_messages import Command, EndSession, Reset, Shutdown, StartSession

_INTERRUPTING = (StartSession, Reset, EndSession, Shutdown)


class CommandInbox:
    """Queue of commands."""

    def __init__(self, connection: Connection, ring: FrameRing) -> None:
        self._connection = connection
        self._ring = ring
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()
        self._thread = threading.Thread(target=self._listen, name="commands", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    @property
    def is_interrupted(self) -> bool:
        """Whether a command waits that ends what is under way."""
        with self._changed:
            return self._has_interrupting()

    @property
    def has_shutdown(self) -> bool:
        """Whether the worker is asked to end."""
        with self._changed:
            return any(isinstance(command, Shutdown) for command in self._commands)

    def take(self, wait_s: float | None) -> list[Command]:
        """Take all commands; waits until there is one.

        Args:
            wait_s: at most this long; None without end.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands), wait_s)
            commands = list(self._commands)
            self._commands.clear()
            self._ring.resume()
            return commands

    def put(self, command: Command) -> None:
        """Add a command; also from a signal handler, as the lock may be entered twice."""
        with self._changed:
            self._commands.append(command)
            if self._has_interrupting():
                self._ring.cancel()
            self._changed.notify()

    def _listen(self) -> None:
        while True:
            try:
                command: Command = self._connection.recv()
            except (EOFError, OSError):
                command = Shutdown()
            self.put(command)
            if isinstance(command, Shutdown):
                return

    def _has_interrupting(self) -> bool:
        return any(isinstance(command, _INTERRUPTING) for command in self._commands)


def merge_resets(commands: list[Command]) -> list[tuple[Command, tuple[int, ...]]]:
    """Join resets that follow each other: what a later one leaves open is taken from the earlier.

    Returns:
        Commands with the ids that they answer; empty for a command without an id.
    """
    merged: list[tuple[Command, tuple[int, ...]]] = []
    for command in commands:
        ids: tuple[int, ...] = (command.id,) if isinstance(command, Reset) else ()
        before = merged[-1][0] if merged else None
        if isinstance(command, Reset) and isinstance(before, Reset):
            ids = merged.pop()[1] + ids
            command = _joined(before, command)
        merged.append((command, ids))
    return merged


def _joined(before: Reset, after: Reset) -> Reset:
    # Another first picture brings its own prompt, so one that was chosen before it is void.
    prompt = before.prompt if after.start is None else None
    return Reset(
        id=after.id,
        start=before.start if after.start is None else after.start,
        prompt=prompt if after.prompt is None else after.prompt,
        seed=before.seed if after.seed is None else after.seed,
    )

"""A worker and the session that sits on it.

Owns which session the worker's reports belong to. Invariants: a seat is free again only after the
worker said that the session before ended, so that nothing of one session reaches the next; a frame
without a session gives its slot back at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from engine.errors import StateError
from stream.actions import ActionMailbox
from stream.error_codes import ErrorCode
from stream.server_messages import Loading
from stream.supervisor import WorkerHandle
from stream.worker_messages import (
    Command,
    EndSession,
    Failed,
    FrameReady,
    Ready,
    Report,
    SessionEnded,
    StartSession,
)

log = structlog.get_logger(__name__)


class Sitter(Protocol):
    """What a seat needs of the session on it."""

    def on_report(self, report: Report, release: Callable[[int], None]) -> None:
        """Act on a report; `release` frees a slot of the ring."""

    def fail(self, code: ErrorCode) -> None:
        """End with an error."""


class Seat:
    """One worker.

    Args:
        worker: started and closed by the caller.
        on_ready: the worker is loaded.
        on_free: the seat may be given away.
        on_lost: the worker cannot run at all; with the reason, for the log.
    """

    def __init__(
        self,
        worker: WorkerHandle,
        *,
        on_ready: Callable[[WorkerHandle], None],
        on_free: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.worker = worker
        self._on_ready = on_ready
        self._on_free = on_free
        self._on_lost = on_lost
        self._sitter: Sitter | None = None
        self._session_id: str | None = None
        """Session that the worker was given and has not ended."""

    @property
    def is_free(self) -> bool:
        """Whether a session may take it."""
        return self._sitter is None and self._session_id is None

    @property
    def loading(self) -> Loading | None:
        """Progress of the worker; None while it is there."""
        if self.worker.info is not None:
            return None
        found = self.worker.loading
        if found is None:
            return Loading(stage="starting", percent=0.0, seconds=0.0)
        return Loading(stage=found.stage, percent=found.percent, seconds=found.seconds)

    @property
    def mailbox(self) -> ActionMailbox:
        """Where actions go."""
        return self.worker.mailbox

    def give_to(self, sitter: Sitter) -> None:
        """Let a session sit down."""
        if not self.is_free:
            raise StateError("seat: taken; expected a free one")
        self._sitter = sitter

    def leave(self) -> None:
        """The session gets up; its world is given up."""
        self._sitter = None
        self.mailbox.begin()
        if self._session_id is not None:
            self.worker.send(EndSession())

    def send(self, command: Command) -> None:
        """Give the worker a command."""
        if isinstance(command, StartSession):
            self._session_id = command.session_id
        self.worker.send(command)

    def read(self, slot: int) -> NDArray[np.uint8]:
        """Copy a frame out of the ring."""
        return self.worker.ring.read(slot)

    async def run(self) -> None:
        """Pass reports on until the worker is closed or lost."""
        async for report in self.worker.messages():
            self._pass_on(report)

    def _pass_on(self, report: Report) -> None:
        match report:
            case Ready():
                self._on_ready(self.worker)
            case SessionEnded():
                if report.session_id == self._session_id:
                    self._session_id = None
                    if self._sitter is not None:
                        self._sitter.fail(ErrorCode.WORKER_DIED)
                    self._on_free()
            case Failed(is_fatal=True):
                self._on_lost(report.detail)
                if self._sitter is not None:
                    self._sitter.on_report(report, self._release)
            case FrameReady() if self._sitter is None:
                self._release(report.slot)
            case _ if self._sitter is not None:
                self._sitter.on_report(report, self._release)

    def _release(self, slot: int) -> None:
        # A ring that was closed meanwhile has nothing to give back.
        with contextlib.suppress(StateError, ValueError):
            self.worker.ring.release(slot)

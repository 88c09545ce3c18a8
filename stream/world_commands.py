"""Commands of the player that change the world, from the message to the worker's answer.

Owns which are allowed when, and what the worker has not answered. Does not own the state, which a
pause changes through the registry, nor who hears of an answer (`room`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stream import client_messages as client
from stream import protocol as p
from stream.error_codes import ErrorCode, ProtocolError
from stream.protocol import SessionState
from stream.session_states import PLAYABLE, Event, Session
from stream.worker_messages import Applied, Reset, SetPrompt, StepOnce

if TYPE_CHECKING:
    from stream.seat import Seat
    from stream.session_meter import SessionMeter
    from stream.viewer import Surroundings

COMMANDS_UNANSWERED = 32
"""More are refused: what waits for a worker that is busy or restarts must have an end."""

WorldCommand = client.Prompt | client.Reset | client.Pause | client.Resume | client.Step


class WorldCommands:
    """Commands of one session.

    Args:
        session: whose they are.
        around: what sessions share.
        meter: hears that a reset lets presses go.
    """

    def __init__(self, session: Session, around: Surroundings, meter: SessionMeter) -> None:
        self._session = session
        self._around = around
        self._meter = meter
        self._unanswered: dict[int, str | None] = {}
        """Commands that the worker has not answered: id, and the prompt of one that changes it."""

    def take(self, message: WorldCommand, seat: Seat | None) -> None:
        """Act on a command.

        Args:
            message: of the player.
            seat: None while the session has no worker.

        Raises:
            ProtocolError: NOT_READY, RATE_LIMIT, or what is wrong with prompt or picture.
        """
        registry, session, now_s = self._around.registry, self._session, time.monotonic()
        session.last_input_s = now_s
        # While it warms up there is nothing to pause, but another world may be wished for.
        allowed: tuple[SessionState, ...] = PLAYABLE
        if isinstance(message, client.Prompt | client.Reset):
            allowed = (*PLAYABLE, SessionState.WARMING)
        if seat is None or session.state not in allowed:
            raise ProtocolError(ErrorCode.NOT_READY, str(session.state), retry_ms=1_000)
        if len(self._unanswered) >= COMMANDS_UNANSWERED:
            raise ProtocolError(ErrorCode.RATE_LIMIT, "unanswered commands", retry_ms=1_000)
        match message:
            case client.Prompt():
                prompt = p.clean_prompt(message.text)
                self._unanswered[message.id] = prompt
                seat.send(SetPrompt(id=message.id, prompt=prompt))
            case client.Reset():
                self._reset(message, seat)
            case client.Pause():
                if session.state is not SessionState.PAUSED:
                    registry.transition(session, Event.PAUSE, message.reason or "user", now_s)
            case client.Resume():
                if session.state is not SessionState.RUNNING:
                    registry.transition(session, Event.PLAY, message.reason or "user", now_s)
            case client.Step():
                if session.state is not SessionState.PAUSED:
                    registry.transition(session, Event.PAUSE, "step", now_s)
                self._unanswered[message.id] = None
                seat.send(StepOnce(id=message.id))

    def _reset(self, message: client.Reset, seat: Seat) -> None:
        start = None
        if message.scene is not None or message.image_id is not None:
            start = self._around.start_from(message.scene, message.image_id)
        prompt = None if message.prompt is None else p.clean_prompt(message.prompt)
        self._unanswered[message.id] = None
        seat.mailbox.clear()
        self._meter.forget_presses()
        seat.send(Reset(id=message.id, start=start, prompt=prompt, seed=message.seed))

    def applied(self, report: Applied) -> bool:
        """The worker did what a command asked for. Returns whether the world is another now."""
        prompt = self._unanswered.pop(report.id, None)
        if prompt is None:
            return False
        self._session.world = self._session.world.model_copy(update={"prompt": prompt})
        return True

    def refused(self, command_id: int) -> None:
        """The worker will not do what a command asked for."""
        self._unanswered.pop(command_id, None)

"""Sessions of the live service: admission, queue, leases, tickets.

Owns who may play, who watches, who waits. Pure: no network, no worker, the clock (seconds, any
origin) is an argument. Invariants: every change of state goes through `Registry.transition` and is
in `TRANSITIONS`; an illegal one is logged, counted and ignored; slots never hold more than one
session; tickets work once; a resume token works once and is replaced.
"""

from __future__ import annotations

import hmac
import secrets
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import structlog

from stream.error_codes import ErrorCode, ProtocolError
from stream.http_bodies import CreateSession
from stream.protocol import SessionState, WorldInfo, clean_prompt
from stream.session_states import EVENT_AT_END, LIVE, TRANSITIONS, Event, Session
from stream.settings import ServerSettings

log = structlog.get_logger(__name__)

TICKET_LIFE_S = 60.0
END_WARNING_S = 60.0
IDEMPOTENCY_LIFE_S = 60.0
DRAIN_S = 2.0
"""What is made already is shown before a session that drains closes."""
REMEMBERED_S = 600.0
"""How long files and status of a closed session can be fetched."""
_S = SessionState
Role = Literal["controller", "viewer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Right to open one socket."""

    session_id: str
    role: Role
    viewer_id: str
    expires_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Answer to a request for a session."""

    session: Session
    role: Role
    ticket: str
    expires_s: float
    resume_token: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of state that happened."""

    session: Session
    old: SessionState
    new: SessionState
    code: ErrorCode | None


class Registry:
    """All sessions.

    Args:
        settings: limits and times.
        on_change: called after each change of state, before `transition` returns.
    """

    def __init__(
        self, settings: ServerSettings, on_change: Callable[[Change], None] | None = None
    ) -> None:
        self._settings = settings
        self._on_change = on_change
        self._sessions: dict[str, Session] = {}
        self._tickets: dict[str, Ticket] = {}
        self._answers: dict[str, tuple[float, Admission]] = {}
        self._durations_s: deque[float] = deque(maxlen=20)
        self.illegal_count = 0
        """Changes of state that were asked for and that the table does not have: bugs."""
        self.is_draining = False
        """Whether nobody is admitted and nobody gets a slot."""

    # ---- looking up

    def get(self, session_id: str) -> Session:
        """Return a session that has not been forgotten.

        Raises:
            ProtocolError: NO_SESSION.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise ProtocolError(ErrorCode.NO_SESSION)
        return session

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def queue(self) -> list[Session]:
        """Sessions that wait, first come first."""
        return [each for each in self._sessions.values() if each.state is _S.QUEUED]

    def queue_position(self, session: Session) -> int | None:
        """Place in the queue from 1, or None."""
        waiting = self.queue()
        return waiting.index(session) + 1 if session in waiting else None

    def eta_s(self, position: int, now_s: float) -> float:
        """Guess when the visitor at `position` plays: from recent sessions, else the lease."""
        typical_s = self._settings.max_duration_s
        if self._durations_s:
            typical_s = min(typical_s, statistics.median(self._durations_s))
        ends = sorted(
            self._left_s(each, typical_s, now_s)
            for each in self._sessions.values()
            if each.holds_slot
        )
        if not ends:
            return 0.0
        rounds, slot = divmod(position - 1, len(ends))
        return ends[slot] + rounds * typical_s

    # ---- coming in

    def create(
        self, request: CreateSession, *, now_s: float, idempotency_key: str | None = None
    ) -> Admission:
        """Admit a player or a viewer, or let one come back.

        A browser that names itself as before goes on with its session: the newer window wins.

        Raises:
            ProtocolError: NOT_READY, QUEUE_FULL, NO_SESSION, UNAUTHORIZED.
        """
        if self.is_draining:
            raise ProtocolError(ErrorCode.NOT_READY, "draining")
        self._expire(now_s)
        if idempotency_key is not None and idempotency_key in self._answers:
            answer = self._answers[idempotency_key][1]
            if answer.session.state is not _S.CLOSED:
                return answer
        if request.resume is not None:
            admission = self._resume(request.resume, now_s)
        elif request.role == "viewer":
            admission = self._watch(request.join, now_s)
        else:
            session = self._of_client(request.client) or self._new(request, now_s)
            admission = self._admit(session, "controller", now_s)
        if idempotency_key is not None:
            self._answers[idempotency_key] = (now_s + IDEMPOTENCY_LIFE_S, admission)
        return admission

    def redeem(self, ticket: str, now_s: float) -> Ticket:
        """Use up a ticket.

        Raises:
            ProtocolError: UNAUTHORIZED for one that is unknown, used, expired, or of an ended
                session.
        """
        self._expire(now_s)
        found = self._tickets.pop(ticket, None)
        if found is None:
            raise ProtocolError(ErrorCode.UNAUTHORIZED, "ticket")
        session = self._sessions.get(found.session_id)
        if session is None or session.state is _S.CLOSED:
            raise ProtocolError(ErrorCode.UNAUTHORIZED, "session ended")
        return found

    def assign(self, free_slots: int, now_s: float) -> list[Session]:
        """Give free slots to those that wait longest; they go to WARMING."""
        chosen = self.queue()[: max(0, free_slots)] if not self.is_draining else []
        for session in chosen:
            session.started_s = session.last_input_s = now_s
            self.transition(session, Event.ASSIGN, "slot free", now_s)
        return chosen

    # ---- while it goes on

    def transition(
        self,
        session: Session,
        event: Event,
        reason: str,
        now_s: float,
        code: ErrorCode | None = None,
    ) -> bool:
        """Change the state; an illegal change is counted and ignored, and returns False."""
        old = session.state
        if old is _S.GRACE and event in (Event.FIRST_FRAME, Event.RESTART):
            # Nobody looks, but the world warmed up (or the worker died) behind the scenes.
            self._pass_in_grace(session, event)
            return True
        new = TRANSITIONS.get((old, event))
        if new is None:
            self.illegal_count += 1
            log.error("illegal_change", state=str(old), change=str(event), reason=reason)
            return False
        if event is Event.LOST:
            session.before_grace = old
        elif event is Event.RETURN and session.before_grace is not None:
            new, session.before_grace = session.before_grace, None
        elif event is Event.RESTART and old in (_S.RUNNING, _S.PAUSED):
            session.before_restart = old
        elif event is Event.FIRST_FRAME and session.before_restart is not None:
            new, session.before_restart = session.before_restart, None
        session.state, session.reason, session.since_s = new, reason, now_s
        if code is not None:
            session.last_error = code
        if new is _S.CLOSED:
            self._forget_rights(session)
            if session.started_s is not None:
                self._durations_s.append(now_s - session.started_s)
        if self._on_change is not None:
            self._on_change(Change(session=session, old=old, new=new, code=code))
        return True

    def is_player(self, session: Session, resume_token: str) -> bool:
        """Whether the token proves the player of this session."""
        return hmac.compare_digest(session.resume_token.encode(), resume_token.encode())

    def connected(self, session: Session, now_s: float) -> None:
        """The player's socket said hello."""
        session.gone_since_s = None
        session.said_bye = False
        session.last_input_s = now_s
        if session.state is _S.GRACE:
            self.transition(session, Event.RETURN, "reconnected", now_s)

    def lost(self, session: Session, now_s: float, *, said_bye: bool = False) -> None:
        """The player's socket closed; with a bye the place is kept for a reload only."""
        if session.state is _S.CLOSED:
            return
        session.gone_since_s = now_s
        session.said_bye = said_bye
        if session.state in LIVE:
            self.transition(session, Event.LOST, "connection lost", now_s)

    def input(self, session: Session, now_s: float) -> None:
        """The player did something: READY and PAUSED go on."""
        session.last_input_s = now_s
        if session.state in (_S.READY, _S.PAUSED):
            self.transition(session, Event.PLAY, "input", now_s)

    def tick(self, now_s: float, *, is_loaded: bool = True) -> None:
        """Apply every limit of time. Call it a few times a second.

        Args:
            now_s: the clock.
            is_loaded: False while the model loads, which may take longer than a warm-up.
        """
        self._expire(now_s)
        for session in self:
            ended = self._overdue(session, now_s, is_loaded=is_loaded)
            if ended is not None:
                code, reason = ended
                event = EVENT_AT_END.get(code, Event.CLOSE)
                if session.state in (_S.DRAINING, _S.FAILED):
                    event = Event.CLOSE
                self.transition(session, event, reason, now_s, code)
            elif (
                session.state is _S.RUNNING
                and now_s - session.last_input_s > self._settings.idle_pause_s
            ):
                self.transition(session, Event.PAUSE, "idle", now_s)

    def drain(self, code: ErrorCode, reason: str, now_s: float) -> None:
        """End every session that holds a slot, after what is made already was shown."""
        for session in self:
            if session.holds_slot and session.state not in (_S.DRAINING, _S.FAILED):
                self.transition(session, Event.DRAIN, reason, now_s, code)

    def warm_up_begins(self, session: Session, now_s: float) -> None:
        """The worker is loaded: only from now on counts the time of WARMING."""
        if session.state is _S.WARMING:
            session.since_s = now_s

    def end_warning(self, session: Session, now_s: float) -> bool:
        """Whether the player should be told, once, that the lease is about to end."""
        if session.started_s is None or session.is_end_warned or not session.holds_slot:
            return False
        left_s = session.started_s + self._settings.max_duration_s - now_s
        session.is_end_warned = left_s <= END_WARNING_S
        return session.is_end_warned

    # ---- inside

    @staticmethod
    def _pass_in_grace(session: Session, event: Event) -> None:
        if event is Event.FIRST_FRAME:
            session.before_grace = session.before_restart or _S.READY
            session.before_restart = None
            return
        if session.before_grace in (_S.RUNNING, _S.PAUSED):
            session.before_restart = session.before_grace
        session.before_grace = _S.WARMING

    def _patience_s(self, session: Session) -> float:
        """How long a player who is gone may be."""
        queued = session.state is _S.QUEUED
        patience_s = self._settings.queue_gone_s if queued else self._settings.grace_s
        return min(patience_s, self._settings.bye_grace_s) if session.said_bye else patience_s

    def _left_s(self, session: Session, typical_s: float, now_s: float) -> float:
        """Time until a session that holds a slot is likely to end."""
        left_s = (now_s if session.started_s is None else session.started_s) + typical_s - now_s
        if session.state is _S.GRACE and session.gone_since_s is not None:
            left_s = min(left_s, session.gone_since_s + self._patience_s(session) - now_s)
        return max(0.0, left_s)

    def _overdue(
        self, session: Session, now_s: float, *, is_loaded: bool
    ) -> tuple[ErrorCode, str] | None:
        settings, state = self._settings, session.state
        held_s = now_s - session.since_s
        gone_s = 0.0 if session.gone_since_s is None else now_s - session.gone_since_s
        if state is _S.QUEUED:
            if gone_s > self._patience_s(session):
                return ErrorCode.GONE, "left the queue"
            if held_s > settings.queue_s:
                return ErrorCode.QUEUE_FULL, "waited too long"
            return None
        if state is _S.CLOSED or not session.holds_slot:
            return None
        if state in (_S.DRAINING, _S.FAILED):
            code = session.last_error or ErrorCode.INTERNAL
            return (code, "drained") if held_s > DRAIN_S else None
        if gone_s > self._patience_s(session):
            return ErrorCode.GONE, "did not come back"
        if session.started_s is not None and now_s - session.started_s > settings.max_duration_s:
            return ErrorCode.MAX_DURATION, "longest duration"
        if state is _S.WARMING and is_loaded and held_s > settings.warm_up_s:
            return ErrorCode.WARMUP_TIMEOUT, "warm-up took too long"
        idle_s = now_s - max(session.since_s, session.last_input_s)
        if state is _S.READY and idle_s > settings.idle_ready_s:
            return ErrorCode.IDLE, "idle"
        if state is _S.PAUSED and idle_s > settings.idle_paused_s:
            return ErrorCode.IDLE, "idle"
        return None

    def _new(self, request: CreateSession, now_s: float) -> Session:
        if len(self.queue()) >= self._settings.max_queue + self._free_slot_count():
            raise ProtocolError(ErrorCode.QUEUE_FULL, retry_ms=10_000)
        has_start = request.scene is not None or request.image_id is not None
        session = Session(
            id=secrets.token_urlsafe(12),
            client=request.client,
            world=WorldInfo(
                scene=request.scene if has_start else self._settings.scene,
                image_id=request.image_id,
                prompt=clean_prompt(request.prompt or ""),
                seed=request.seed or 0,
                epoch=0,
            ),
            created_s=now_s,
            state=_S.QUEUED,
            since_s=now_s,
            resume_token=secrets.token_urlsafe(32),
            gone_since_s=now_s,
            last_input_s=now_s,
        )
        self._sessions[session.id] = session
        return session

    def _free_slot_count(self) -> int:
        held = sum(each.holds_slot for each in self._sessions.values())
        return max(0, self._settings.max_sessions - held)

    def _of_client(self, client: str | None) -> Session | None:
        if client is None:
            return None
        for session in self._sessions.values():
            is_open = session.state not in (_S.CLOSED, _S.FAILED, _S.DRAINING)
            if is_open and hmac.compare_digest((session.client or "").encode(), client.encode()):
                return session
        return None

    def _resume(self, token: str, now_s: float) -> Admission:
        for session in self._sessions.values():
            if session.state is not _S.CLOSED and hmac.compare_digest(
                session.resume_token.encode(), token.encode()
            ):
                return self._admit(session, "controller", now_s)
        raise ProtocolError(ErrorCode.NO_SESSION, "resume token")

    def _watch(self, join: str | None, now_s: float) -> Admission:
        if join is not None:
            session = self.get(join)
        else:
            playing = [each for each in self._sessions.values() if each.state in (*LIVE, _S.GRACE)]
            if not playing:
                raise ProtocolError(ErrorCode.NO_SESSION, "nobody plays")
            session = playing[0]
        if session.state is _S.CLOSED:
            raise ProtocolError(ErrorCode.NO_SESSION, "ended")
        pending = sum(
            ticket.role == "viewer" and ticket.session_id == session.id
            for ticket in self._tickets.values()
        )
        if len(session.viewer_ids) + pending >= self._settings.max_viewers:
            raise ProtocolError(ErrorCode.QUEUE_FULL, "viewers", retry_ms=10_000)
        return self._admit(session, "viewer", now_s)

    def _admit(self, session: Session, role: Role, now_s: float) -> Admission:
        ticket = secrets.token_urlsafe(32)
        expires_s = now_s + TICKET_LIFE_S
        self._tickets[ticket] = Ticket(
            session_id=session.id,
            role=role,
            viewer_id=secrets.token_urlsafe(9),
            expires_s=expires_s,
        )
        if role == "controller":
            session.resume_token = secrets.token_urlsafe(32)
        return Admission(
            session=session,
            role=role,
            ticket=ticket,
            expires_s=expires_s,
            resume_token=session.resume_token if role == "controller" else None,
        )

    def _forget_rights(self, session: Session) -> None:
        self._tickets = {
            key: ticket for key, ticket in self._tickets.items() if ticket.session_id != session.id
        }

    def _expire(self, now_s: float) -> None:
        self._tickets = {key: t for key, t in self._tickets.items() if t.expires_s > now_s}
        self._answers = {key: a for key, a in self._answers.items() if a[0] > now_s}
        self._sessions = {
            key: session
            for key, session in self._sessions.items()
            if session.state is not _S.CLOSED or now_s - session.since_s < REMEMBERED_S
        }

"""Actions of one socket as snapshots of its session, and their age until they show.

Owns clocks of browsers, and the joints between sockets: a page that was loaded anew counts mouse
motion and edges from zero again, while the session's mailbox goes on. Pure; times are milliseconds,
`ct` those of the browser.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from stream.actions import ActionSnapshot, Edge
from stream.client_messages import Act
from stream.protocol import KEY_CODES

FRAMES_REMEMBERED = 1_024
EDGES_PENDING = 256
MESSAGES_REMEMBERED = 50
LATENCY_LIMIT_MS = 60_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One `act` as its session sees it."""

    snapshot: ActionSnapshot
    new_edges: tuple[Edge, ...]
    is_press: bool
    """A key went down or a stick is out of its middle."""
    has_content: bool
    """Anything is held, pressed or moved."""


class SessionInput:
    """Sums that outlive a socket: mouse motion, edge numbers, the highest `seq`."""

    def __init__(self) -> None:
        self.last_seq = 0
        self._look = (0.0, 0.0)
        self._edge_count = 0
        self.begin_socket(0.0)

    def begin_socket(self, opened_ms: float) -> None:
        """A socket of the player said hello at `opened_ms` of the server's clock."""
        self._opened_ms = opened_ms
        self._page_look: tuple[float, float] | None = None
        self._page_edge_id = -1

    def take(self, act: Act, received_ms: float) -> Input | None:
        """Return the snapshot of a newer `act`, or None for an old one."""
        if act.seq <= self.last_seq:
            return None
        self.last_seq = act.seq
        before = act.look if self._page_look is None else self._page_look
        moved = (act.look[0] - before[0], act.look[1] - before[1])
        self._page_look = act.look
        self._look = (self._look[0] + moved[0], self._look[1] + moved[1])
        edges = tuple(self._new_edges(act, received_ms))
        held = frozenset(act.keys) & frozenset(KEY_CODES)
        is_press = any(edge.is_down for edge in edges) or any(act.pad)
        return Input(
            snapshot=ActionSnapshot(
                seq=act.seq,
                held=held,
                look=self._look,
                pad=act.pad,
                edges=edges,
                received_ms=received_ms,
            ),
            new_edges=edges,
            is_press=is_press,
            has_content=is_press or bool(held) or any(moved),
        )

    def _new_edges(self, act: Act, received_ms: float) -> Iterable[Edge]:
        open_for_ms = received_ms - self._opened_ms
        for number, code, is_down, ct_ms in sorted(act.edges):
            # What happened before this socket opened is over: no old action is applied.
            if number > self._page_edge_id and act.ct - ct_ms <= open_for_ms:
                self._edge_count += 1
                if code in KEY_CODES:
                    yield Edge(id=self._edge_count, code=code, is_down=bool(is_down), ct_ms=ct_ms)
            self._page_edge_id = max(self._page_edge_id, number)


class BrowserClock:
    """Clock of one browser against the server's, from its fastest message of late."""

    def __init__(self) -> None:
        self._behind_ms: deque[float] = deque(maxlen=MESSAGES_REMEMBERED)

    def heard(self, ct_ms: float, now_ms: float) -> None:
        """A message that was sent at `ct_ms` came at `now_ms` of the server's clock."""
        self._behind_ms.append(now_ms - ct_ms)

    def server_ms(self, ct_ms: float) -> float | None:
        """Server's time for a time of the browser, late by the fastest way of a message.

        None before the first message.
        """
        return ct_ms + min(self._behind_ms) if self._behind_ms else None


class LatchAge:
    """How old the newest action is when a chunk takes it; chunks without a new one say nothing."""

    def __init__(self) -> None:
        self.newest_ms: float | None = None
        """When an action was taken last; None before the first."""
        self._acted_ms: float | None = None
        self._latched_seq = 0

    def acted(self, now_ms: float) -> None:
        """The player did something."""
        self._acted_ms = now_ms

    def latched(self, act_seq: int, latch_ms: float) -> float | None:
        """Age of what a chunk takes that shows every action up to `act_seq`; None: nothing new."""
        if self._acted_ms is None or act_seq <= self._latched_seq:
            return None
        self._latched_seq = act_seq
        self.newest_ms = max(0.0, latch_ms - self._acted_ms)
        return self.newest_ms


class PhotonMeter:
    """Time from a key event to the first frame shown with it; both times are the browser's."""

    def __init__(self) -> None:
        self._act_seqs: OrderedDict[int, int] = OrderedDict()
        self._pending: deque[tuple[int, float]] = deque(maxlen=EDGES_PENDING)

    def pressed(self, seq: int, edges: Iterable[Edge]) -> None:
        """Edges that came first with `seq`."""
        self._pending.extend((seq, edge.ct_ms) for edge in edges)

    def made(self, frame_id: int, act_seq: int) -> None:
        """A frame shows every action up to `act_seq`."""
        self._act_seqs[frame_id] = act_seq
        if len(self._act_seqs) > FRAMES_REMEMBERED:
            self._act_seqs.popitem(last=False)

    def shown(self, frames: Iterable[tuple[int, float]]) -> list[float]:
        """Latencies in ms that a report of shown frames (frame id, ct) settles."""
        found: list[float] = []
        for frame_id, ct_ms in sorted(frames):
            act_seq = self._act_seqs.get(frame_id, -1)
            while self._pending and self._pending[0][0] <= act_seq:
                latency_ms = ct_ms - self._pending.popleft()[1]
                if 0.0 <= latency_ms <= LATENCY_LIMIT_MS:
                    found.append(latency_ms)
        return found

    def clear(self) -> None:
        """Forget pending edges: a reset, another page."""
        self._pending.clear()

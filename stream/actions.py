"""Mailbox of actions: what the browser holds, as the model takes it chunk by chunk.

Owns the keys and what they control, the tap latch, the rule that an old snapshot counts for
nothing, and the shared memory between the API process (writer) and the worker (reader).

Invariants: one writer, one reader, no queue: the newest snapshot replaces the one before it. Key
presses also go into a ring of `PRESS_CAPACITY`, so that a tap between two latches still moves the
camera; when it is full the oldest press is dropped and counted. Times are milliseconds of the
server's wall clock.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Self

from engine.config import FRAMES_PER_LATENT, CameraConfig
from engine.errors import StateError

if TYPE_CHECKING:
    from engine.types import Action

FRAMES_PER_CHUNK = sum(FRAMES_PER_LATENT)
STALE_MS = 500.0
"""A snapshot that was not refreshed for this long counts as empty hands."""
LOOK_DEG_PER_PX = 0.12
"""Turn of the camera for a mouse movement of one CSS pixel."""
PRESS_CAPACITY = 256

# Values are names of `engine.types.Control`, as text: the API process never imports torch.
KEYS: dict[str, str] = {
    "KeyW": "forward",
    "KeyS": "back",
    "KeyA": "left",
    "KeyD": "right",
    "ArrowLeft": "look_left",
    "ArrowRight": "look_right",
    "ArrowUp": "look_up",
    "ArrowDown": "look_down",
    "ShiftLeft": "boost",
}
"""`KeyboardEvent.code` to the control that it holds; the allow-list of the protocol."""
_CODES = tuple(KEYS)
_AXES: dict[str, tuple[int, float]] = {
    "forward": (0, 1.0),
    "back": (0, -1.0),
    "right": (1, 1.0),
    "left": (1, -1.0),
    "look_right": (2, 1.0),
    "look_left": (2, -1.0),
    "look_up": (3, 1.0),
    "look_down": (3, -1.0),
    "boost": (4, 1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """A key going down or up."""

    id: int
    """Rises with every edge of a session; repeated edges are known by it."""
    code: str
    is_down: bool
    ct_ms: float
    """When, by the browser's clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionSnapshot:
    """Everything that is held at one time. Codes without a control do nothing."""

    seq: int
    held: frozenset[str] = frozenset()
    """`KeyboardEvent.code` values."""
    look: tuple[float, float] = (0.0, 0.0)
    """Mouse motion to the right and downwards since the session began, CSS px."""
    pad: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Left stick right and down, right stick right and down, -1..1."""
    edges: tuple[Edge, ...] = ()
    received_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Latched:
    """The action of one chunk."""

    action: Action
    act_seq: int
    """Of the newest snapshot that it shows; 0 before the first."""
    latch_ms: float
    lost_press_count: int
    """Presses that were overwritten before it."""


def wall_ms() -> float:
    """Return the server's wall clock in milliseconds."""
    return time.time() * 1000.0


def held_axes(pressed: Mapping[str, int]) -> list[float]:
    """Axes of held keys; of two opposed ones the newest press wins.

    Args:
        pressed: code -> number of its last press, 0 where it is not known. Two opposed keys of
            unknown order cancel.

    Returns:
        forward, right, yaw, pitch, boost in -1..1.
    """
    axes = [0.0] * 5
    newest = [-1] * 5
    for code, number in pressed.items():
        axis, value = _AXES[KEYS[code]]
        if number > newest[axis]:
            axes[axis], newest[axis] = value, number
        elif number == newest[axis] and axes[axis] != value:
            axes[axis] = 0.0
    return axes


# Sequence of the lock, checksum of the body; then generation, seq, held keys as bits, presses ever,
# presses forgotten, times that motion was forgotten, time received, look, look when it was last so,
# pad, ring of presses (index into _CODES).
_LOCK = struct.Struct("<QI4x")
_BODY = struct.Struct(f"<QQQQQQd2d2d4d{PRESS_CAPACITY}s")
_SIZE = _LOCK.size + _BODY.size
_CENTRED = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _State:
    generation: int = 1
    seq: int = 0
    held_bits: int = 0
    press_count: int = 0
    forgotten_count: int = 0
    forget_count: int = 0
    received_ms: float = 0.0
    look: tuple[float, float] = (0.0, 0.0)
    forgotten_look: tuple[float, float] = (0.0, 0.0)
    pad: tuple[float, float, float, float] = _CENTRED
    presses: bytes = b""


class ActionMailbox:
    """Shared memory for the newest action.

    The API process calls `create`, `begin`, `post`, `clear`, `forget_motion`; the worker calls
    `attach` with the name and `latch`. Whoever created it unlinks it on `close`.
    """

    def __init__(
        self,
        memory: SharedMemory,
        *,
        is_owner: bool,
        camera: CameraConfig,
        stale_ms: float = STALE_MS,
    ) -> None:
        assert memory.buf is not None  # only after its close
        self._memory = memory
        self._buffer = memory.buf
        self._is_owner = is_owner
        self._camera = camera
        self._stale_ms = stale_ms
        self._lock_count = 0
        self._last_edge_id = -1
        self._ring = bytearray(PRESS_CAPACITY)
        self._state = _State()
        self._press_numbers: dict[str, int] = {}
        if is_owner:
            self._write(self._state)
        else:
            self._state = self._read()
        self._taken_count = self._state.press_count
        self._look = self._state.look

    @classmethod
    def create(cls) -> Self:
        """Make a mailbox; the writer's side."""
        memory = SharedMemory(create=True, size=_SIZE)
        return cls(memory, is_owner=True, camera=CameraConfig())

    @classmethod
    def attach(
        cls, name: str, camera: CameraConfig | None = None, *, stale_ms: float = STALE_MS
    ) -> Self:
        """Open the reader's side. What was posted before is held, but no earlier press counts."""
        memory = SharedMemory(name)
        return cls(memory, is_owner=False, camera=camera or CameraConfig(), stale_ms=stale_ms)

    @property
    def name(self) -> str:
        """Name for `attach`."""
        return self._memory.name

    def begin(self) -> None:
        """Forget everything, sequence numbers included: another session or a reloaded page."""
        last = self._state
        self._last_edge_id = -1
        self._write(
            _State(
                generation=last.generation + 1,
                press_count=last.press_count,
                forgotten_count=last.press_count,
                forget_count=last.forget_count,
            )
        )

    def post(self, snapshot: ActionSnapshot) -> bool:
        """Replace the newest snapshot.

        Returns:
            False for one that is not newer than the last; it is dropped.
        """
        last = self._state
        if snapshot.seq <= last.seq:
            return False
        press_count = last.press_count
        for edge in sorted(snapshot.edges, key=lambda edge: edge.id):
            if edge.id <= self._last_edge_id:
                continue
            self._last_edge_id = edge.id
            if edge.is_down and edge.code in KEYS:
                self._ring[press_count % PRESS_CAPACITY] = _CODES.index(edge.code)
                press_count += 1
        self._write(
            replace(
                last,
                seq=snapshot.seq,
                held_bits=_bits(snapshot.held),
                press_count=press_count,
                received_ms=snapshot.received_ms,
                look=snapshot.look,
                pad=snapshot.pad,
            )
        )
        return True

    def clear(self) -> None:
        """Release everything: lost connection, pause, reset. Sequence numbers go on."""
        last = self._state
        self._state = replace(
            last, held_bits=0, forgotten_count=last.press_count, received_ms=0.0, pad=_CENTRED
        )
        self.forget_motion()

    def forget_motion(self) -> None:
        """Let mouse motion so far turn nothing; what is held stays."""
        last = self._state
        self._write(replace(last, forget_count=last.forget_count + 1, forgotten_look=last.look))

    def latch(self, now_ms: float) -> Latched:
        """Take the action of the next chunk: held keys, taps, look and pad since the last latch."""
        import numpy as np

        from engine.types import Action

        state = self._read()
        if state.generation != self._state.generation:
            self._press_numbers.clear()
            self._look = (0.0, 0.0)
        if state.forget_count != self._state.forget_count:
            self._look = state.forgotten_look
        self._state = state
        # A clock that was set back must not make what is held last until it has caught up.
        is_fresh = abs(now_ms - state.received_ms) <= self._stale_ms
        held = set(_codes(state.held_bits)) if is_fresh else set()
        taken, lost_press_count = self._take_presses(state)
        held |= taken
        axes = held_axes({code: self._press_numbers.get(code, 0) for code in held})
        right_px, down_px = (now - then for now, then in zip(state.look, self._look, strict=True))
        self._look = state.look
        axes[2] += right_px * LOOK_DEG_PER_PX / FRAMES_PER_CHUNK / self._camera.yaw_deg_per_frame
        axes[3] -= down_px * LOOK_DEG_PER_PX / FRAMES_PER_CHUNK / self._camera.pitch_deg_per_frame
        if is_fresh:
            axes[0] -= state.pad[1]
            axes[1] += state.pad[0]
            axes[2] += state.pad[2]
            axes[3] -= state.pad[3]
        low_A = [-1.0, -1.0, -1.0, -1.0, 0.0]
        axes_FA = np.tile(np.clip(np.array(axes), low_A, 1.0), (FRAMES_PER_CHUNK, 1))
        return Latched(
            action=Action(axes_FA),
            act_seq=state.seq,
            latch_ms=now_ms,
            lost_press_count=lost_press_count,
        )

    def close(self) -> None:
        """Give the memory up; the owner removes it. Calling it again does nothing."""
        self._memory.close()
        if self._is_owner:
            self._is_owner = False
            self._memory.unlink()

    def _take_presses(self, state: _State) -> tuple[set[str], int]:
        """Return what was pressed since the last time, and how many presses were overwritten."""
        first = max(self._taken_count, state.forgotten_count)
        kept = max(first, state.press_count - PRESS_CAPACITY)
        self._taken_count = state.press_count
        taken = set()
        for number in range(kept, state.press_count):
            code = _CODES[state.presses[number % PRESS_CAPACITY]]
            self._press_numbers[code] = number + 1
            taken.add(code)
        return taken, kept - first

    def _write(self, state: _State) -> None:
        """Odd sequence while the body changes, even when it is whole."""
        body = _BODY.pack(
            state.generation,
            state.seq,
            state.held_bits,
            state.press_count,
            state.forgotten_count,
            state.forget_count,
            state.received_ms,
            *state.look,
            *state.forgotten_look,
            *state.pad,
            bytes(self._ring),
        )
        _LOCK.pack_into(self._buffer, 0, self._lock_count + 1, 0)
        self._buffer[_LOCK.size : _SIZE] = body
        self._lock_count += 2
        _LOCK.pack_into(self._buffer, 0, self._lock_count, zlib.crc32(body))
        self._state = state

    def _read(self) -> _State:
        """Read until nothing was written meanwhile; a write takes microseconds.

        The checksum stands in for memory barriers, which Python does not have.
        """
        deadline_s = time.monotonic() + 1.0
        while True:
            before, checksum = _LOCK.unpack_from(self._buffer, 0)
            body = bytes(self._buffer[_LOCK.size : _SIZE])
            after, _ = _LOCK.unpack_from(self._buffer, 0)
            if before == after and before % 2 == 0 and zlib.crc32(body) == checksum:
                break
            if time.monotonic() > deadline_s:
                raise StateError("action mailbox: no whole snapshot within 1 s; its writer is gone")
        generation, seq, bits, presses, forgotten, forgets, received_ms, *rest = _BODY.unpack(body)
        return _State(
            generation=generation,
            seq=seq,
            held_bits=bits,
            press_count=presses,
            forgotten_count=forgotten,
            forget_count=forgets,
            received_ms=received_ms,
            look=(rest[0], rest[1]),
            forgotten_look=(rest[2], rest[3]),
            pad=(rest[4], rest[5], rest[6], rest[7]),
            presses=rest[8],
        )


def _bits(held: Iterable[str]) -> int:
    return sum(1 << _CODES.index(code) for code in set(held) if code in KEYS)


def _codes(bits: int) -> list[str]:
    return [code for index, code in enumerate(_CODES) if bits >> index & 1]

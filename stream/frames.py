"""Ring of frames in shared memory, from the worker to the API process.

Owns the slots, their states and the bound. Invariants: a slot holds one uint8 RGB frame and goes
FREE, WRITING, READY, READING, FREE; the writer blocks while every slot is taken (no frame of the
model is dropped here) and is woken by a release, never by polling. Which frame a slot holds travels
as `FrameMeta` in a message. Taken slots are what is still to be shown: the worker starts chunks by
their number and the time of the last release, so a slot is released when its frame was sent, not
when it was read.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from engine.config import FRAMES_PER_LATENT
from engine.errors import StateError

if TYPE_CHECKING:
    from multiprocessing.synchronize import Semaphore

CAPACITY = 2 * sum(FRAMES_PER_LATENT)
"""Two chunks."""
NO_CHUNK = -1
"""Chunk of the first picture, which is shown before anything was made."""


_TIME = struct.Struct("<d")


class SlotState(IntEnum):
    """Who may touch a slot."""

    FREE = 0
    WRITING = 1
    READY = 2
    """Nobody but the writer knows of the frame yet."""
    READING = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameMeta:
    """What a frame is."""

    frame_id: int
    """From 1, rising by one with every frame of a session, over resets and restarts."""
    epoch: int
    chunk: int
    """Index of the chunk in its epoch, or `NO_CHUNK` for the first picture."""
    act_seq: int
    """Newest action that the frame shows."""
    latch_ms: float
    """When that action was taken, wall clock."""
    ready_ms: float
    """When the frame was in the ring, wall clock."""
    offset: int = 0
    """Index of the frame in its chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingHandle:
    """What another process needs to open the ring; passed as an argument of the process."""

    name: str
    width_px: int
    height_px: int
    capacity: int
    free: Semaphore


class RingCancelledError(StateError):
    """The wait for a free slot was given up by `cancel`."""


class FrameRing:
    """Shared memory of `capacity` frames: the API process creates it, the worker attaches.

    The worker calls `write` and `cancel`, the API process `claim`, `read` and `release`.
    """

    def __init__(self, handle: RingHandle, memory: SharedMemory, *, is_owner: bool) -> None:
        assert memory.buf is not None  # only after its close
        self.handle = handle
        self._memory = memory
        self._buffer = memory.buf
        self._is_owner = is_owner
        self._is_cancelled = False
        self._next = 0
        self._frame_bytes = handle.width_px * handle.height_px * 3
        self._time_at = _end_of_frames(handle.capacity, self._frame_bytes)

    @classmethod
    def create(cls, *, width_px: int, height_px: int, capacity: int = CAPACITY) -> Self:
        """Make a ring with every slot free: new shared memory is zero."""
        end = _end_of_frames(capacity, width_px * height_px * 3)
        memory = SharedMemory(create=True, size=end + _TIME.size)
        handle = RingHandle(
            name=memory.name,
            width_px=width_px,
            height_px=height_px,
            capacity=capacity,
            free=get_context("spawn").Semaphore(capacity),
        )
        return cls(handle, memory, is_owner=True)

    @classmethod
    def attach(cls, handle: RingHandle) -> Self:
        """Open the ring of another process."""
        return cls(handle, SharedMemory(handle.name), is_owner=False)

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.handle.capacity

    @property
    def taken_count(self) -> int:
        """Slots that are not free."""
        return sum(map(bool, self._buffer[: self.capacity]))

    @property
    def released_s(self) -> float:
        """When a slot was freed last, by the monotonic clock that processes share; 0 for never."""
        (released_s,) = _TIME.unpack_from(self._buffer, self._time_at)
        return float(released_s)

    def state(self, slot: int) -> SlotState:
        """Return the state of a slot."""
        return SlotState(self._buffer[slot])

    def write(self, frame_HWC: NDArray[np.uint8]) -> int:
        """Copy a frame into a free slot and return the slot; blocks while there is none.

        Raises:
            RingCancelledError: `cancel` was called.
            ValueError: the frame has another shape or type.
        """
        shape = (self.handle.height_px, self.handle.width_px, 3)
        if frame_HWC.shape != shape or frame_HWC.dtype != np.uint8:
            raise ValueError(
                f"frame is {frame_HWC.dtype} {frame_HWC.shape}; allowed: uint8 {shape}"
            )
        self.handle.free.acquire()
        if self._is_cancelled:
            self.handle.free.release()
            raise RingCancelledError("frame ring: the wait for a free slot was given up")
        slot = self._find_free()
        self._buffer[slot] = SlotState.WRITING
        self._slot(slot)[:] = np.ascontiguousarray(frame_HWC).data.cast("B")
        self._buffer[slot] = SlotState.READY
        self._next = (slot + 1) % self.capacity
        return slot

    def cancel(self) -> None:
        """Make `write` raise, now and until `resume`; from any thread of the writer's process."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self.handle.free.release()

    def resume(self) -> None:
        """Let `write` work again."""
        if self._is_cancelled:
            self.handle.free.acquire()
            self._is_cancelled = False

    def claim(self, slot: int) -> None:
        """The reader heard of the frame in a slot: from now on only `release` frees it.

        Raises:
            StateError: the slot holds no frame.
        """
        self._expect(slot, SlotState.READY, SlotState.READING)
        self._buffer[slot] = SlotState.READING

    def read(self, slot: int) -> NDArray[np.uint8]:
        """Return a copy of the frame in a slot, uint8 [H, W, 3]; the slot stays taken.

        Raises:
            StateError: the slot holds no frame.
        """
        self.claim(slot)
        flat = np.frombuffer(bytes(self._slot(slot)), dtype=np.uint8)
        return flat.reshape(self.handle.height_px, self.handle.width_px, 3)

    def release(self, slot: int) -> None:
        """Free a slot, whether its frame was read or not.

        Raises:
            StateError: the slot holds no frame.
        """
        self._expect(slot, SlotState.READY, SlotState.READING)
        _TIME.pack_into(self._buffer, self._time_at, time.monotonic())
        self._buffer[slot] = SlotState.FREE
        self.handle.free.release()

    def recover(self) -> None:
        """Give back what a dead writer held; only while there is no writer.

        Frames that the reader heard of stay. Of the others it never will hear, as the message died
        with the writer: a slot would be lost with each.
        """
        while self.handle.free.acquire(block=False):
            pass
        for slot in range(self.capacity):
            if self._buffer[slot] in (SlotState.WRITING, SlotState.READY):
                self._buffer[slot] = SlotState.FREE
        for _ in range(self.capacity - self.taken_count):
            self.handle.free.release()

    def close(self) -> None:
        """Give the memory up; the owner removes it. Calling it again does nothing."""
        self._memory.close()
        if self._is_owner:
            self._is_owner = False
            self._memory.unlink()

    def _find_free(self) -> int:
        for step in range(self.capacity):
            slot = (self._next + step) % self.capacity
            if self._buffer[slot] == SlotState.FREE:
                return slot
        raise StateError("frame ring: more slots counted free than there are")

    def _slot(self, slot: int) -> memoryview:
        begin = self.capacity + slot * self._frame_bytes
        return self._buffer[begin : begin + self._frame_bytes]

    def _expect(self, slot: int, *allowed: SlotState) -> None:
        found = self.state(slot)
        if found not in allowed:
            names = ", ".join(state.name for state in allowed)
            raise StateError(f"frame ring: slot {slot} is {found.name}; expected {names}")


def _end_of_frames(capacity: int, frame_bytes: int) -> int:
    """Offset behind states and frames, on a border of 8 bytes: such times are written at once."""
    return -(-capacity * (1 + frame_bytes) // _TIME.size) * _TIME.size

"""A follower: a process that shares the worlds of a worker, and holds an engine alone.

Owns its end of the pipe to the leader, its answers, and its end. Invariant: it ends when the leader
does, whatever ended that and wherever it is itself; a pipe that ends tells it, on Linux the kernel
as well.
"""

from __future__ import annotations

import ctypes
import logging
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from engine.calls import Call
from engine.device import held_bytes, resolve_device
from engine.engine import Engine
from engine.following import follow
from engine.loading import EngineSource
from engine.ranks import Meeting, Ranks, end_at_once, end_without_interpreter, join, part

HELD_S = 1.0
"""Between two reports of the memory that is held."""
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerConfig:
    """What a follower is told when it starts."""

    device: str
    port: int
    """Where the ranks meet."""
    rank: int
    count: int
    thread_count: int
    """Of torch; as many as the leader has, so that a trace names those of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The engine is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotLoaded:
    """It cannot be loaded here."""

    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A call was refused, as the leader has to refuse it."""

    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A call failed; the follower ends."""

    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Memory on its GPU."""

    device_bytes: int


Answer = Loaded | NotLoaded | Refused | Broken | Held


def run_follower(config: FollowerConfig, connection: Connection) -> None:
    """Load what the leader says and follow it. The target of the process."""
    _end_with_parent()
    # Signals reach the whole group: the leader decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = _Link(connection)
    try:
        _serve(config, link)
    # Whatever it was: the leader may be within an exchange that this rank left, and has to hear.
    except Exception as error:
        _log.exception("follower_failed rank=%d", config.rank)
        link.send(Broken(detail=_text(error)))
        end_at_once(1)
    end_without_interpreter()


def _serve(config: FollowerConfig, link: _Link) -> None:
    torch.set_num_threads(config.thread_count)
    device = resolve_device(config.device)
    group = join(device, Meeting.at(config.port, config.rank, config.count))
    source: EngineSource = link.receive()
    try:
        exchange = Ranks(group=group).exchange(source.model.num_attention_heads)
        engine = Engine(source.parts(world_size=config.count), exchange=exchange)
    # Libraries and drivers raise what they like; the leader tells of it, and ends this process.
    except Exception as error:
        link.send(NotLoaded(detail=_text(error)))
        link.receive()
        return
    link.send(Loaded())
    told_s = 0.0

    def receive() -> Call:
        nonlocal told_s
        if time.monotonic() - told_s > HELD_S:
            told_s = time.monotonic()
            link.send(Held(device_bytes=held_bytes(config.device)))
        call: Call = link.receive()
        return call

    follow(engine, receive, lambda error: link.send(Refused(detail=_text(error))))
    part(group)


class _Link:
    """The pipe to the leader, listened to by a thread of its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._received: SimpleQueue[bytes] = SimpleQueue()
        self._thread = threading.Thread(target=self._listen, name="leader", daemon=True)
        self._thread.start()

    def receive(self) -> Any:
        """Wait for what the leader says next.

        Raises: whatever reading it raises, such as MemoryError; here, where somebody notices.
        """
        return pickle.loads(self._received.get())

    def send(self, answer: Answer) -> None:
        """Answer; a leader that is gone hears nothing."""
        with suppress(OSError):
            self._connection.send_bytes(pickle.dumps(answer))

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv_bytes()
            # Mostly its end; a follower that went on without hearing would keep all others waiting.
            except Exception:
                end_at_once(1)
            self._received.put(message)


def _end_with_parent() -> None:
    """Let the kernel end this process with its parent, even one that is stopped or stuck."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

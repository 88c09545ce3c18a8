"""The processes that share the worlds of a worker, as the worker sees them; it is rank 0 itself.

Owns their start, what they are told and answer, the watch over them, their end. Invariants: one
that ends unasked, or fails, ends the worker at once, and with it all others: the service starts
another worker, which goes on from the trace, unless one failed while it loaded, as the next would;
none outlives the worker.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NoReturn

import torch

from engine.calls import Call, Close
from engine.device import resolve_device
from engine.errors import DeviceError, StateError
from engine.loading import EngineSource
from engine.ranks import Meeting, Ranks, end_at_once, join, part
from stream.follower import (
    Answer,
    Broken,
    FollowerConfig,
    Held,
    Loaded,
    NotLoaded,
    Refused,
    run_follower,
)

AGREE_S = 10.0
"""Within which all ranks refuse what one refuses: before anything is computed."""
END_S = 3.0
"""From the word to end to the kill."""
_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False, slots=True)
class _Follower:
    """What is known of one."""

    rank: int
    device: str
    process: BaseProcess
    connection: Connection
    is_loaded: bool = False
    failure: str | None = None
    """Why it cannot load."""
    refused_count: int = 0
    refused_s: float = 0.0
    """When it was the first to refuse."""
    refusal: str = ""
    """What it said the last time."""
    device_bytes: int = 0


class Followers:
    """Ranks 1 and up.

    Args:
        devices: of all ranks, that of this process first. On a CPU they share its threads.
        on_failure: hears of the error for which this process ends at once; from any thread. Not of
            a follower that is killed, because another one may live.

    Raises: DeviceError where one is not there; OSError where a process cannot be started.
    """

    def __init__(
        self, devices: Sequence[str], *, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._on_failure = on_failure
        count, own = len(devices), resolve_device(devices[0])
        if own.type == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // count))
        self._changed = threading.Condition()
        self._agreed_count = 0
        self._is_closing = self._is_ending = False
        self._followers: list[_Follower] = []
        meeting = Meeting.called(count)
        # To its parent this process is a daemon; the flag here would forbid it to have children.
        current_process().daemon = False
        try:
            for rank in range(1, count):
                self._followers.append(_start(rank, devices, meeting.port))
            self._thread = threading.Thread(target=self._watch, name="followers", daemon=True)
            self._thread.start()
            self.ranks = Ranks(own_device=str(own), group=join(own, meeting))
            """All of them."""
        except BaseException:
            self._is_ending = True
            for each in self._followers:
                each.process.kill()
            raise

    @property
    def _is_leaving(self) -> bool:
        return self._is_closing or self._is_ending

    @property
    def pids(self) -> tuple[int, ...]:
        """Of those that run."""
        pids = (each.process.pid for each in self._followers)
        return tuple(pid for pid in pids if pid is not None)

    @property
    def device_bytes(self) -> int:
        """Memory that they hold on GPUs, as they told last."""
        return sum(each.device_bytes for each in self._followers)

    def load(self, source: EngineSource) -> None:
        """Let them begin to load their engines; the leader's own has the same source."""
        # They encode no prompts, so what they would encode with stays where it lies.
        prompts = dataclasses.replace(source.config.prompts, residency="free")
        for each in self._followers:
            config = dataclasses.replace(source.config, device=each.device, prompts=prompts)
            self._send(each, pickle.dumps(dataclasses.replace(source, config=config)))

    def wait_loaded(self) -> None:
        """Wait until they have.

        Raises: DeviceError where one cannot.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: all(each.is_loaded or each.failure for each in self._followers)
            )
        for each in self._followers:
            if each.failure is not None:
                raise _failed(each, each.failure)

    def tell(self, call: Call) -> None:
        """Let all of them make a call."""
        self._is_closing = isinstance(call, Close)
        data = pickle.dumps(call)
        for each in self._followers:
            self._send(each, data)

    def agree(self) -> None:
        """Wait until all of them refused the call that this rank refused; end all where not."""
        self._agreed_count += 1
        with self._changed:
            is_alike = self._changed.wait_for(
                lambda: all(each.refused_count >= self._agreed_count for each in self._followers),
                AGREE_S,
            )
        if not is_alike:
            self.abandon(StateError("the first rank refused alone"))

    def abandon(self, error: BaseException) -> NoReturn:
        """End this process at once, and with it the others."""
        self._on_failure(error)
        _end(error)

    def close(self) -> None:
        """End them: in order where their engines are closing, else at once."""
        self._is_ending = True
        if not self._is_closing:
            for each in self._followers:
                each.process.kill()
        assert self.ranks.group is not None
        part(self.ranks.group)
        end_s = time.monotonic() + END_S
        for each in self._followers:
            each.process.join(max(0.0, end_s - time.monotonic()))
            each.process.kill()
            each.process.join()
        self._thread.join()
        for each in self._followers:
            each.connection.close()

    def _send(self, follower: _Follower, data: bytes) -> None:
        try:
            follower.connection.send_bytes(data)
        except OSError as error:
            _end(error)

    def _watch(self) -> None:
        of_connection = {each.connection: each for each in self._followers}
        while not self._is_ending:
            for connection in wait(list(of_connection), timeout=AGREE_S):
                assert isinstance(connection, Connection)
                follower = of_connection[connection]
                try:
                    answer: Answer = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    if not self._is_leaving:
                        _end(StateError(f"rank {follower.rank} ended"))
                    return
                self._note(follower, answer)
            self._check_refusals()

    def _check_refusals(self) -> None:
        """End all where one refused alone, however much it says meanwhile."""
        for each in self._followers:
            is_alone = each.refused_count > self._agreed_count
            if is_alone and time.monotonic() - each.refused_s >= AGREE_S:
                self.abandon(StateError(f"rank {each.rank} refused alone: {each.refusal}"))

    def _note(self, follower: _Follower, answer: Answer) -> None:
        with self._changed:
            match answer:
                case Loaded():
                    follower.is_loaded = True
                case NotLoaded():
                    follower.failure = answer.detail
                case Refused():
                    if follower.refused_count == self._agreed_count:
                        follower.refused_s = time.monotonic()
                    follower.refused_count += 1
                    follower.refusal = answer.detail
                case Held():
                    follower.device_bytes = answer.device_bytes
                case Broken() if not self._is_leaving:
                    self.abandon(_failed(follower, answer.detail))
            self._changed.notify_all()


def _end(error: BaseException) -> NoReturn:
    is_raised = error.__traceback__ is not None
    _log.error("ranks_abandoned reason=%s", error, exc_info=error if is_raised else None)
    end_at_once(1)


def _failed(follower: _Follower, detail: str) -> DeviceError:
    return DeviceError(f"rank {follower.rank} on {follower.device}: {detail}")


def _start(rank: int, devices: Sequence[str], port: int) -> _Follower:
    config = FollowerConfig(
        device=devices[rank], port=port, rank=rank, count=len(devices),
        thread_count=torch.get_num_threads(),
    )  # fmt: skip
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=run_follower, args=(config, theirs), name=f"worldstream-rank-{rank}", daemon=True
    )
    with theirs:
        process.start()
    return _Follower(rank=rank, device=devices[rank], process=process, connection=ours)

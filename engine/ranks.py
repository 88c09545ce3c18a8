"""Processes that share a rollout.

Owns how they find each other, how they agree, and how one of them leaves: at once, whereupon
whoever started the others ends them. Invariant: what one rank decides by itself, all ranks decide
alike, or they ask here; one that turns off alone leaves the others in an exchange that never comes.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # named in its documentation

from engine.device import resolve_device
from engine.errors import ConfigError
from engine.parallel import Alone, Exchange, Ulysses, forget

_TIMEOUT = timedelta(minutes=20)
"""Ranks compile each for themselves, and wait for the last one."""
_HOST = "127.0.0.1"
_LAST = -100
"""Of what multiprocessing does when a process ends: after everything else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The processes, seen from one of them; by itself without a group."""

    own_device: str | None = None
    """Of this rank; None leaves it to whoever asks."""
    group: dist.ProcessGroup | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.group is None else self.group.size()

    @property
    def is_first(self) -> bool:
        """Whether this rank tells and keeps what comes out."""
        return self.group is None or self.group.rank() == 0

    def device(self, asked: str) -> str:
        """Device of this rank where ``asked`` names that of all."""
        return asked if self.own_device is None else self.own_device

    def exchange(self, heads: int) -> Exchange:
        """How they share the rollouts of a model.

        Raises: ConfigError where its heads do not divide among them.
        """
        return Alone() if self.group is None or self.count == 1 else Ulysses(heads, self.group)

    def require_alike(self, dtype: str) -> None:
        """Raises: ConfigError for a dtype that each rank would measure for itself."""
        if self.count > 1 and dtype == "auto" and self.own_device == "cpu":
            raise ConfigError("dtype: auto; allowed for ranks on a CPU: float32, bfloat16")

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; waits for all of them."""
        if self.group is None or self.count == 1:
            return flag
        said = torch.tensor(int(flag), device=self.own_device)
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self.group)
        return bool(said.item())

    def least(self, value: float) -> float:
        """The least that a rank says; waits for all of them."""
        if self.group is None or self.count == 1:
            return value
        said = torch.tensor(value, dtype=torch.float64, device=self.own_device)
        dist.all_reduce(said, dist.ReduceOp.MIN, group=self.group)
        return float(said.item())


@contextmanager
def joined_ranks(device: str, on_failure: Callable[[Exception, int], int]) -> Iterator[Ranks]:
    """All ranks that torchrun started; else this process by itself.

    Among several, an error within ends this process: the others may wait for it, and an orderly end
    would wait for them.

    Args:
        device: "auto", "cpu", "cuda"; each rank gets one of its own.
        on_failure: tells of an error of a rank, and returns the exit code.

    Raises: DeviceError without a device.
    """
    if not dist.is_torchelastic_launched():
        yield Ranks()
        return
    found = resolve_device(device)
    if found.type == "cuda":
        found = resolve_device(f"cuda:{os.environ['LOCAL_RANK']}")
    group = join(found)
    try:
        yield Ranks(own_device=str(found), group=group)
    except Exception as error:
        end_at_once(on_failure(error, group.rank()))
    # The first one may still be writing; a rank that has gone would look like one that failed.
    dist.barrier(group)
    part(group)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the ranks of one machine find each other, seen from one of them."""

    store: TCPStore
    rank: int
    count: int

    @classmethod
    def called(cls, count: int) -> Meeting:
        """Open a place to meet, as the first rank."""
        # A socket of its own making: by itself the store listens to other machines as well.
        listener = socket.create_server((_HOST, 0))
        store = TCPStore(
            _HOST, listener.getsockname()[1], count, is_master=True, timeout=_TIMEOUT,
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip
        return cls(store=store, rank=0, count=count)

    @classmethod
    def at(cls, port: int, rank: int, count: int) -> Meeting:
        """Go where the first rank is."""
        store = TCPStore(_HOST, port, count, is_master=False, timeout=_TIMEOUT)
        return cls(store=store, rank=rank, count=count)

    @property
    def port(self) -> int:
        """Where the others come to."""
        return int(self.store.port)


def join(device: torch.device, meeting: Meeting | None = None) -> dist.ProcessGroup:
    """Wait for all ranks, and return their group.

    Args:
        device: of this rank.
        meeting: where; by default as torchrun says.
    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
        # Multicast through the switch is not there on every host that has NVLink, and hangs then.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        timeout=_TIMEOUT,
        store=None if meeting is None else meeting.store,
        rank=-1 if meeting is None else meeting.rank,
        world_size=-1 if meeting is None else meeting.count,
        device_id=device if is_cuda else None,
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def part(group: dist.ProcessGroup) -> None:
    """Give the group up; all ranks do so at about the same time."""
    forget(group)
    dist.destroy_process_group(group)


def end_process(code: int) -> NoReturn:
    """End a command; a rank does so at once.

    What still refers to an exchange when the interpreter ends takes its threads down while they
    run, and the rank that has done everything aborts.
    """
    if dist.is_torchelastic_launched():
        end_at_once(code)
    sys.exit(code)


def end_without_interpreter() -> None:
    """Let a process that multiprocessing started end in order, but for its interpreter.

    What still refers to an exchange would be taken down while its threads run.
    """
    Finalize(None, end_at_once, args=(0,), exitpriority=_LAST)


def end_at_once(code: int) -> NoReturn:
    """End this process without an orderly end, which would wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

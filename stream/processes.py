"""Processor time and memory of processes, as Linux tells them under /proc; needs no torch.

Owns the reading of /proc. Invariant: a process that ended is left out, as is one that nobody may
look at; where there is no /proc, nothing is found.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_ENDED = ("Z", "X")
_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What processes took together."""

    cpu_s: float = 0.0
    """Since each of them began."""
    resident_mib: float = 0.0
    peak_mib: float = 0.0
    """Sum of the most that each ever had."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            cpu_s=self.cpu_s + other.cpu_s,
            resident_mib=self.resident_mib + other.resident_mib,
            peak_mib=self.peak_mib + other.peak_mib,
        )


def has_processes() -> bool:
    """Whether this system tells of its processes."""
    return (PROC / "self" / "stat").exists()


def descendants(pid: int) -> dict[int, str]:
    """Ids and command lines of the processes that came from `pid`, itself left out."""
    children: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(*_GONE):
                children.setdefault(_parent(folder), []).append(int(folder.name))
    found: dict[int, str] = {}
    pending = [pid]
    while pending:
        for child in children.get(pending.pop(), ()):
            pending.append(child)
            with suppress(*_GONE):
                words = (PROC / str(child) / "cmdline").read_bytes().split(b"\0")
                found[child] = b" ".join(words).decode(errors="replace")
    return found


def usage(pids: Iterable[int]) -> Usage:
    """What these processes took; those that are gone are left out."""
    total = Usage()
    for pid in pids:
        with suppress(*_GONE):
            total = total + _usage(PROC / str(pid))
    return total


def runs(pid: int) -> bool:
    """Whether a process is there that has not ended; one that nobody has asked for yet has."""
    with suppress(*_GONE):
        return _fields(PROC / str(pid))[0] not in _ENDED
    return False


def wait_until_gone(pids: Collection[int], limit_s: float) -> None:
    """Wait until none of these processes runs, at most so long."""
    end_s = time.monotonic() + limit_s
    while any(runs(pid) for pid in pids) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)


def machine_cpu_s() -> float:
    """Processor time of everything on this machine, since it began; waiting left out."""
    user, nice, system, _, _, irq, soft_irq, steal, *_ = map(
        int, (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")


def _parent(folder: Path) -> int:
    return int(_fields(folder)[1])


def _fields(folder: Path) -> list[str]:
    """Fields of `stat` from the state on: the name before it may hold anything."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def _usage(folder: Path) -> Usage:
    fields = _fields(folder)
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
    )
    ticks_hz = os.sysconf("SC_CLK_TCK")

    def mib(name: str) -> float:
        # A process that has just ended has no memory left to tell of.
        return int(status.get(name, "0 kB").split()[0]) / 1024

    return Usage(
        cpu_s=(int(fields[11]) + int(fields[12])) / ticks_hz,
        resident_mib=mib("VmRSS"),
        peak_mib=mib("VmHWM"),
    )

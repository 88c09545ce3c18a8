"""Clocks that time the spans of a step without making it wait.

Owns the choice between host time and CUDA events.
"""

from __future__ import annotations

import time

import torch


class HostClock:
    """Marks on the host; right where every call ends when its work does, as on a CPU."""

    def __init__(self) -> None:
        self._marks_s: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Remember now."""
        self._marks_s[name] = time.perf_counter()

    def between_ms(self, first: str, second: str) -> float:
        """Milliseconds between two marks."""
        return (self._marks_s[second] - self._marks_s[first]) * 1e3


class CudaClock:
    """Marks in the stream; reading waits for the later of the two."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[str, torch.cuda.Event] = {}

    def mark(self, name: str) -> None:
        """Record an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks[name] = event

    def between_ms(self, first: str, second: str) -> float:
        """Milliseconds between two marks."""
        self._marks[second].synchronize()
        return self._marks[first].elapsed_time(self._marks[second])


def new_clock(device: torch.device) -> HostClock | CudaClock:
    """Clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()

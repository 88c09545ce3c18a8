"""What recorded calls of a decoder need: memory that never moves, and what records them.

Owns memory between two streams: what one leaves goes to the next, so that recordings, which know
addresses, serve again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from graphs.capture import CudaCapture
from graphs.runner import GraphRunner, RunnerLimits

T = TypeVar("T")


class Lender(Generic[T]):
    """Gives memory to streams, that of ended ones first.

    Args:
        make: memory for one stream; its content does not matter.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._free: list[T] = []

    def take(self) -> T:
        """Return memory whose content is undefined."""
        return self._free.pop() if self._free else self._make()

    def give(self, memory: T) -> None:
        """Take memory back whose stream has gone."""
        self._free.append(memory)

    def clear(self) -> None:
        """Free what lies ready."""
        self._free.clear()


def decode_runner(device: torch.device) -> GraphRunner | None:
    """Return what records the calls of one decoder, None where calls cannot be recorded."""
    if device.type != "cuda":
        return None
    # Before the kernels of a refresh beside it: somebody waits for the pictures.
    return GraphRunner(CudaCapture(device, priority=-1), RunnerLimits(captures_per_turn=1))

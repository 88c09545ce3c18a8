"""Work that a GPU does beside what follows it, and the wait for it.

Owns one side stream. The host never waits; on a CPU work is done at once. Invariant: whatever reads
or frees what the work touches comes after `join`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideWork:
    """A stream beside the current one.

    Args:
        device: where; anything but CUDA has no streams.
        priority: of what runs there; lower numbers come first, 0 is that of other streams.
    """

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=priority) if is_cuda else None
        self._is_pending = False

    @contextmanager
    def beside(self, *touched: Tensor) -> Iterator[None]:
        """Run what is launched within after what was launched before, beside what comes later.

        Args:
            touched: tensors that somebody else may free before the work on them is done.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_pending = True
        with torch.cuda.stream(self._stream):
            yield
        for tensor in touched:
            tensor.record_stream(self._stream)

    def join(self) -> None:
        """Let the current stream go on after the work only."""
        if self._stream is not None and self._is_pending:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._is_pending = False

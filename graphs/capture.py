"""Recording of graphs on a device.

Owns the protocol between `GraphRunner` and a device, and its CUDA form: one side stream on which
passes are warmed up and recorded, and one memory pool for all graphs.

One pool: replays never overlap (they are on one stream, or ordered by events), so the intermediates
of all graphs may lie in the same memory, and twelve graphs need that of the largest alone. What a
graph returns stays alive with its entry, so no later recording takes its place. The price is that
memory comes back only when the last graph has gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Pass = Callable[[], Tensor | None]
"""One pass over inputs at fixed addresses; nothing is done twice for one that is asked for once."""


class Captured(Protocol):
    """A recorded pass."""

    output: Tensor | None
    """At a fixed address; each replay overwrites it."""

    def replay(self) -> None:
        """Run the recorded kernels in the current stream."""
        ...

    def release(self) -> None:
        """Give the recording up. It must not be running."""
        ...


class CaptureBackend(Protocol):
    """What a device offers."""

    def warm_up(self, run: Pass) -> Tensor | None:
        """Run a pass where it would be recorded, so that plans and workspaces are made there."""
        ...

    def capture(self, run: Pass) -> Captured:
        """Record a pass without running it."""
        ...

    def used_bytes(self) -> int:
        """Memory in use on the device, by whatever."""
        ...

    def synchronize(self) -> None:
        """Wait until nothing runs."""
        ...

    def release_pool(self) -> None:
        """Give the memory of the recordings back, all of which are released."""
        ...


class CudaCaptured:
    """A `torch.cuda.CUDAGraph` and what it returns."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor | None) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        """Launch the graph in the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Destroy the graph."""
        self.output = None
        self._graph.reset()


class CudaCapture:
    """Recording on a CUDA device.

    Args:
        device: where.
        priority: of the recorded kernels, whatever stream they are replayed in; lower numbers come
            first, 0 is that of other streams.
    """

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Pass) -> Tensor | None:
        """Run in the side stream, between two waits."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = run()
        current.wait_stream(self._stream)
        if output is not None:
            output.record_stream(current)
        return output

    def capture(self, run: Pass) -> Captured:
        """Record in the side stream; other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = run()
        return CudaCaptured(graph, output)

    def used_bytes(self) -> int:
        """Total less free, which counts the driver's own share of a graph, too."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self._device)

    def release_pool(self) -> None:
        """Begin a new pool; the old one has no graph left and goes back to the device."""
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

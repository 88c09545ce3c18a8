"""Time of attention as a pass meets it: sustained, over many layers, backends in turn.

A GPU that waits between two calls runs the second at a clock that it cannot hold, and one that has
just read some keys finds a part of them near. In a pass neither happens. So calls are queued one
behind the other, a burst of each backend in turn, so that clock and heat are the same for all, and
each call reads the keys and values of another layer. The figure is a median over bursts; the first
third of them, while the clock settles, is left out. What does not give the output of torch's own
choice, up to rounding, has no time.
Owns `measure_on` and the schedule of bursts. Shape suffixes: B batch, R query rows, S key rows,
N heads, K head width.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.sdpa import SdpaBackend
from engine.config import BackendName
from engine.errors import UnsupportedError

Burst = Callable[[int], object]
"""Queues a number of calls."""
Timer = Callable[[Burst, int], Callable[[], float]]
"""Queues a burst; what it returns waits for the burst and gives its milliseconds."""

_BURST_MS, _ROUNDS, _BUDGET_MS = 5.0, (6, 24), 900.0
"""Length of a burst, least and most bursts of a backend, of all bursts together."""
_FAR = 1.5
"""Times the fastest: a backend that is so much slower is not measured further."""
_LARGEST_ERROR = 5e-3
"""Root of the squares of the difference from torch's output over those of the output. Two kernels
in bf16 are 3e-3 apart."""
_LAYERS, _ROTATED_BYTES = (2, 16), 2**28
"""Least and most layers of keys and values, and what they should amount to: several caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Of one call of each backend, in milliseconds, and why others have none."""

    times_ms: dict[BackendName, float] = field(default_factory=dict)
    refused: dict[BackendName, str] = field(default_factory=dict)


Measure = Callable[[Mapping[BackendName, AttentionBackend], AttentionShape], Times]


def sustained(bursts: Mapping[BackendName, Burst], timer: Timer) -> Times:
    """Time a call of each backend, bursts in turn; one that raises at its first call is refused."""
    refused: dict[BackendName, str] = {}
    first_ms: dict[BackendName, float] = {}
    for name, burst in bursts.items():
        try:
            timer(burst, 1)()  # what is compiled or planned at a first call
            first_ms[name] = timer(burst, 2)() / 2
        except (RuntimeError, ImportError, UnsupportedError) as error:
            # The kernel is there and cannot serve.
            refused[name] = str(error).partition("\n")[0]
    if not first_ms:
        return Times(refused=refused)
    limit_ms = _FAR * min(first_ms.values())
    counts = {
        name: max(1, round(_BURST_MS / ms)) for name, ms in first_ms.items() if ms <= limit_ms
    }
    least, most = _ROUNDS
    round_ms = sum(count * first_ms[name] for name, count in counts.items())
    rounds = min(most, max(least, int(_BUDGET_MS / round_ms)))
    queued = [
        {name: timer(bursts[name], count) for name, count in counts.items()} for _ in range(rounds)
    ]
    settled = queued[rounds // 3 :]
    medians_ms = {
        name: statistics.median(each[name]() for each in settled) / count
        for name, count in counts.items()
    }
    return Times(times_ms=first_ms | medians_ms, refused=refused)


def measure_on(device: torch.device) -> Measure:
    """Measure on a CUDA device, over random rows; keys have their heads outermost, as in the cache.

    Takes about a second a shape, and the memory of a few layers.
    """

    def timer(burst: Burst, count: int) -> Callable[[], float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        burst(count)
        end.record()

        def elapsed_ms() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return elapsed_ms

    def measure(candidates: Mapping[BackendName, AttentionBackend], shape: AttentionShape) -> Times:
        with torch.cuda.device(device):
            return sustained(bursts_over(candidates, shape, device), timer)

    return measure


def bursts_over(
    candidates: Mapping[BackendName, AttentionBackend], shape: AttentionShape, device: torch.device
) -> dict[BackendName, Burst]:
    """Calls of each candidate, each over the next layer.

    The first burst raises UnsupportedError for another output than that of torch's own choice.
    """

    def part(rows: int) -> torch.Tensor:
        size = (1, shape.heads, rows, shape.need.head_dim)
        return torch.randn(size, device=device, dtype=shape.need.dtype).transpose(1, 2)

    q_BRNK = part(shape.rows).contiguous()
    layer_bytes = 2 * shape.keys * shape.heads * shape.need.head_dim * shape.need.dtype.itemsize
    least, most = _LAYERS
    layer_count = min(most, max(least, -(-_ROTATED_BYTES // layer_bytes)))
    layers = [(part(shape.keys), part(shape.keys)) for _ in range(layer_count)]
    expected_BRNK = SdpaBackend()(q_BRNK, *layers[0])
    done = 0

    def require_agreement(backend: AttentionBackend) -> None:
        made_BRNK = backend(q_BRNK, *layers[0])
        error = ((made_BRNK - expected_BRNK).float().norm() / expected_BRNK.float().norm()).item()
        if not error <= _LARGEST_ERROR:
            raise UnsupportedError(
                f"its output differs from sdpa by {error:.4f}; allowed: {_LARGEST_ERROR}"
            )

    def burst_of(backend: AttentionBackend) -> Burst:
        is_known = False

        def burst(count: int) -> None:
            nonlocal done, is_known
            if not is_known:
                require_agreement(backend)
                is_known = True
            for _ in range(count):
                backend(q_BRNK, *layers[done % layer_count])
                done += 1

        return burst

    return {name: burst_of(backend) for name, backend in candidates.items()}

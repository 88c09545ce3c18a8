"""Which devices of this machine a world gets.

    seat i, a world of N ranks, G GPUs     N = 1: GPU i mod G      N > 1: GPUs i N ... i N + N - 1

Owns that order. Pure: how many GPUs there are is an argument, and no torch is loaded.
"""

from __future__ import annotations

from dataclasses import replace

from engine.errors import ConfigError, DeviceError
from stream.world_spec import WorldSpec


def place_world(spec: WorldSpec, gpu_count: int) -> tuple[str, ...]:
    """Devices of the ranks of a world, the leader's first. A GPU that is named stays what it is.

    Raises:
        ConfigError: a dtype that each rank on a CPU would measure for itself.
        DeviceError: there are fewer GPUs than all ranks of all worlds need.
    """
    asked, ranks = spec.engine.device, spec.rank_count
    if asked == "cpu" or (asked == "auto" and gpu_count == 0):
        if ranks > 1 and spec.engine.dtype == "auto":
            raise ConfigError(
                f"dtype: 'auto' with ranks {ranks} on a CPU; allowed: float32, bfloat16"
            )
        return ("cpu",) * ranks
    if asked not in ("auto", "cuda"):
        return (asked,)
    if ranks == 1:
        return (f"cuda:{spec.seat % gpu_count}" if gpu_count else "cuda",)
    needed = ranks * spec.world_count
    if needed > gpu_count:
        raise DeviceError(
            f"ranks: {ranks} with max_sessions {spec.world_count} take {needed} GPUs; this machine "
            f"has {gpu_count}"
        )
    first = spec.seat * ranks
    return tuple(f"cuda:{index}" for index in range(first, first + ranks))


def neighbour_count(spec: WorldSpec, device: str, gpu_count: int) -> int:
    """How many other worlds of the service have this GPU as well."""
    others = (replace(spec, seat=seat) for seat in range(spec.world_count) if seat != spec.seat)
    return sum(device in place_world(each, gpu_count) for each in others)

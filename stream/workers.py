"""All workers of the service, each with its seat.

Owns their start, their common readiness and progress, their end. Does not own sessions.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stream.memory import MemoryUse
from stream.metrics import WorkerFigures
from stream.processes import usage
from stream.seat import Seat
from stream.server_messages import Loading
from stream.settings import ServerSettings
from stream.supervisor import WatchdogLimits, WorkerHandle
from stream.worker_messages import WorkerConfig
from stream.world_source import OpenSource
from stream.world_spec import WorldSpec, prompt_options, world_spec

FPS = 24.0


class Workers:
    """The workers.

    Args:
        settings: what the operator chose.
        spec: the world that they serve.
        open_source: makes the worlds, in the worker.
        limits: of the watchdogs.
    """

    def __init__(
        self,
        settings: ServerSettings,
        spec: WorldSpec,
        *,
        open_source: OpenSource,
        limits: WatchdogLimits | None,
    ) -> None:
        self._settings = settings
        self._spec = spec
        self._open_source = open_source
        self._limits = limits
        self.seats: list[Seat] = []

    async def start(
        self,
        records: Path,
        *,
        on_ready: Callable[[WorkerHandle], None],
        on_free: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Start every process; returns before anything is loaded.

        Args:
            records: folder of the traces.
            on_ready: a worker is loaded.
            on_free: a seat may be given away.
            on_lost: a worker cannot run at all; with the reason, for the log.
        """
        for seat_index in range(self._settings.max_sessions):
            worker = WorkerHandle(
                self._config(records, seat_index),
                open_source=self._open_source,
                limits=self._limits,
            )
            seat = Seat(worker, on_ready=on_ready, on_free=on_free, on_lost=on_lost)
            self.seats.append(seat)
            await worker.start()

    async def close(self) -> None:
        """End every worker, at the same time."""
        await asyncio.gather(*(seat.worker.close() for seat in self.seats))

    @property
    def is_ready(self) -> bool:
        """Whether every worker is loaded, warmed up and alive."""
        return bool(self.seats) and all(seat.worker.is_ready for seat in self.seats)

    @property
    def is_loaded(self) -> bool:
        """Whether every worker is loaded, or was when it was heard of last."""
        return all(seat.worker.info is not None for seat in self.seats)

    @property
    def loading(self) -> Loading | None:
        """Progress of the worker that is furthest behind, or None."""
        found = [seat.loading for seat in self.seats]
        behind = [loading for loading in found if loading is not None]
        return min(behind, key=lambda loading: loading.percent, default=None)

    @property
    def plan_text(self) -> str:
        """Memory plan of a worker as a table; empty before there is one."""
        return next((seat.worker.plan_text for seat in self.seats if seat.worker.plan_text), "")

    @property
    def free_seats(self) -> list[Seat]:
        """Seats that a session may take, those with a worker that is loaded first."""
        free = [seat for seat in self.seats if seat.is_free]
        return sorted(free, key=lambda seat: seat.loading is not None)

    @property
    def frames_in_rings(self) -> int:
        """Frames that wait or are being shown."""
        return sum(seat.worker.ring.taken_count for seat in self.seats)

    @property
    def pids(self) -> list[int]:
        """Processes that run now, with those that share a world."""
        return [pid for seat in self.seats for pid in seat.worker.pids]

    @property
    def device_bytes(self) -> int:
        """Memory that is held on GPUs."""
        return sum(seat.worker.device_bytes for seat in self.seats)

    @property
    def figures(self) -> list[WorkerFigures]:
        """What each worker told of itself, seat by seat."""
        return [
            WorkerFigures(info=seat.worker.info, graphs=seat.worker.graphs) for seat in self.seats
        ]

    @property
    def memory(self) -> MemoryUse:
        """Memory of this process and of all workers."""
        return MemoryUse(
            resident_mib=usage((os.getpid(), *self.pids)).resident_mib,
            device_bytes=self.device_bytes,
        )

    def recycle_free(self, reason: str) -> None:
        """Start workers without a session anew, so that they give their memory back."""
        for seat in self.free_seats:
            seat.worker.recycle(reason)

    def _config(self, records: Path, seat_index: int) -> WorkerConfig:
        settings = self._settings
        return WorkerConfig(
            world=replace(self._spec, seat=seat_index),
            trace_folder=records,
            warm_up_scene=settings.scene,
            fps=FPS,
            jit_margin_ms=settings.jit_margin_ms,
            stale_ms=settings.key_stale_ms,
            thread_count=settings.threads,
        )


def spec_of(settings: ServerSettings) -> WorldSpec:
    """Return the world that the settings ask for.

    Raises:
        ConfigError: unknown preset, weights that are not there.
    """
    return world_spec(
        settings.preset,
        size=settings.size,
        weights=settings.weights,
        renderer=settings.renderer,
        device=settings.device,
        dtype=settings.dtype,
        decoder=settings.decoder,
        linear=settings.linear,
        attention=settings.attention,
        sparse_tau=settings.sparse_tau,
        sparse_block=settings.sparse_block,
        sparse_steps=settings.sparse_steps,
        kernels=settings.kernels,
        compiling=settings.compile,
        is_long_lived=True,
        world_count=settings.max_sessions,
        rank_count=settings.ranks,
        prompts=prompt_options(
            encoder=settings.prompt_encoder,
            residency=settings.prompt_residency,
            cache=settings.prompt_cache,
            cache_mib=settings.prompt_cache_mib,
            refinement=settings.refinement_prompt,
        ),
        lora=settings.lora,
        lora_mode=settings.lora_mode,
        qkv_layout=settings.qkv_layout,
    )

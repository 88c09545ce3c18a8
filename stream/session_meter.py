"""How long the things of one session take: its chunks, and its actions on their way to the eye.

Owns actions that no frame has shown yet, and the figures of the newest chunk; each figure goes to
the metrics of the service. Does not own clocks of browsers (`inputs`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stream.actions import wall_ms
from stream.chunk_watch import ChunkWatch
from stream.inputs import Input, LatchAge, PhotonMeter
from stream.worker_messages import ChunkDone, ChunkStarted

if TYPE_CHECKING:
    from stream.chunk_notice import DueTimes
    from stream.metrics import Metrics
    from stream.viewer import Viewer

ARRIVALS_PENDING = 256


class SessionMeter:
    """Figures of one session.

    Args:
        metrics: of the service.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.chunk_ms: float | None = None
        """Of the newest chunk, the wait for room in the ring left out; None before the first."""
        self._metrics = metrics
        self._photons = PhotonMeter()
        self._arrivals: deque[tuple[int, float]] = deque(maxlen=ARRIVALS_PENDING)
        self._latch_age = LatchAge()
        self._watch = ChunkWatch()

    @property
    def latch_age_ms(self) -> float | None:
        """Age of the newest action when a chunk took it; None before the first."""
        return self._latch_age.newest_ms

    def acted(self, seq: int, taken: Input, now_ms: float) -> None:
        """An action came, as `SessionInput` took it."""
        self._photons.pressed(seq, taken.new_edges)
        if taken.new_edges:
            self._arrivals.append((seq, now_ms))
        if taken.has_content:
            self._latch_age.acted(now_ms)

    def forget_presses(self) -> None:
        """What was pressed will not show: a reset, another page."""
        self._photons.clear()
        self._arrivals.clear()

    def chunk_started(self, report: ChunkStarted) -> None:
        """A chunk took the actions that there were."""
        self._metrics.drops.labels(where="press").inc(report.lost_press_count)
        age_ms = self._latch_age.latched(report.act_seq, report.latch_ms)
        if age_ms is not None:
            self._metrics.latch_age_s.observe(age_ms / 1e3)

    def chunk_done(self, report: ChunkDone) -> float:
        """A chunk is made. Returns its cost in ms, the wait for room in the ring left out."""
        metrics = self._metrics
        self.chunk_ms = made_ms = report.total_ms - report.ring_wait_ms
        self._watch.made(made_ms)
        metrics.chunk_s.observe(made_ms / 1e3)
        metrics.denoise_s.observe(sum(report.denoise_ms) / 1e3)
        metrics.refresh_s.observe(report.refresh_ms / 1e3)
        metrics.first_frame_s.observe(report.first_frame_ms / 1e3)
        metrics.first_decode_s.observe(report.first_decode_ms / 1e3)
        metrics.decode_s.observe(report.decode_ms / 1e3)
        metrics.ring_wait_s.observe(report.ring_wait_ms / 1e3)
        return made_ms

    def is_slow(self, busy_ms: float) -> bool:
        """Whether the chunk in hand is slow, which is said once; see `ChunkWatch.is_slow`."""
        return self._watch.is_slow(busy_ms)

    def frame_made(self, frame_id: int, act_seq: int) -> None:
        """A frame shows every action up to `act_seq`."""
        self._photons.made(frame_id, act_seq)

    def presented(self, act_seq: int) -> None:
        """Playback of a chunk begins that shows every action up to `act_seq`."""
        while self._arrivals and self._arrivals[0][0] <= act_seq:
            waited_ms = wall_ms() - self._arrivals.popleft()[1]
            self._metrics.present_s.observe(max(0.0, waited_ms) / 1e3)

    def shown(
        self, viewer: Viewer, frames: Sequence[tuple[int, float]], due_times: DueTimes
    ) -> None:
        """A page reports frames that it showed, by id and its own clock.

        Args:
            viewer: whose page it is.
            frames: ids and times in ms.
            due_times: when frames left.
        """
        metrics = self._metrics
        metrics.frames_shown.inc(len(frames))
        if viewer.is_player:
            for latency_ms in self._photons.shown(frames):
                metrics.photon_s.labels(transport=viewer.transport).observe(latency_ms / 1e3)
        for frame_id, ct_ms in frames:
            due_ms = due_times.due_ms(frame_id)
            shown_ms = viewer.clock.server_ms(ct_ms)
            if due_ms is not None and shown_ms is not None:
                age_s = max(0.0, shown_ms - due_ms) / 1e3
                metrics.frame_photon_s.labels(transport=viewer.transport).observe(age_s)

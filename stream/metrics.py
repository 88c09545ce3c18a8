"""Every Prometheus metric of the service, named once.

Owns names, labels, buckets. Invariants: no session ids, prompts, addresses or places on disk in
labels; each `Metrics` has a registry of its own, so that two services in one process do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from stream.worker_messages import GraphUse, Ready

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COST_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_SHORT_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0)
_LATENCY_S = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFigures:
    """What a worker told of itself."""

    info: Ready | None
    """None while it is not ready."""
    graphs: tuple[GraphUse, ...]


class ByWorker(Collector):
    """Metrics that workers count themselves; where one starts again, it counts from 0."""

    def __init__(self) -> None:
        self.workers: Sequence[WorkerFigures] = ()
        """By the number that is their label."""

    def collect(self) -> Iterator[Metric]:
        """Yield each with a sample a worker, and a part that records its passes."""
        info = InfoMetricFamily("worldstream_worker", "How a worker runs", labels=("worker",))
        labels = ("worker", "part")
        passes = CounterMetricFamily(
            "worldstream_graph_passes",
            "Passes by what recording made of them: replayed; recorded; plain, for now; unlisted, "
            "never to be recorded; refused, where recording failed",
            labels=(*labels, "outcome"),
        )
        evictions = CounterMetricFamily(
            "worldstream_graph_evictions", "Recordings that had to go", labels=labels
        )
        entries = GaugeMetricFamily(
            "worldstream_graph_recordings", "Recorded passes", labels=labels
        )
        held = GaugeMetricFamily(
            "worldstream_graph_bytes", "Memory of recorded passes", labels=labels
        )
        for number, worker in enumerate(self.workers):
            ready = worker.info
            if ready is not None:
                info.add_metric((f"{number}",), {
                    "device": ready.device, "ranks": f"{ready.rank_count}", "dtype": ready.dtype,
                    "linear": PurePath(ready.linear).name, "attention": ready.attention,
                })  # fmt: skip
            for use in worker.graphs:
                own = (f"{number}", use.part)
                for outcome, count in (
                    ("replayed", use.replayed_count), ("recorded", use.recorded_count),
                    ("plain", use.plain_count), ("unlisted", use.unlisted_count),
                    ("refused", use.refused_count),
                ):  # fmt: skip
                    passes.add_metric((*own, outcome), count)
                evictions.add_metric(own, use.evicted_count)
                entries.add_metric(own, use.entry_count)
                held.add_metric(own, use.held_bytes)
        yield from (info, passes, evictions, entries, held)


class Metrics:
    """The metrics of one service; times in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.by_worker = ByWorker()
        self.registry.register(self.by_worker)
        self.chunk_s = self._histogram(
            "chunk_seconds", "From latch to the end of the refresh", _COST_S
        )
        self.denoise_s = self._histogram("denoise_seconds", "All denoise steps", _COST_S)
        self.refresh_s = self._histogram("refresh_seconds", "Refresh of a chunk", _COST_S)
        self.first_frame_s = self._histogram(
            "first_frame_seconds", "From latch to the first frame of a chunk", _COST_S
        )
        self.first_decode_s = self._histogram(
            "first_decode_seconds", "Decoding of the first latent of a chunk", _SHORT_S
        )
        self.decode_s = self._histogram("decode_seconds", "Decoding of a chunk", _COST_S)
        self.encode_s = self._histogram(
            "encode_seconds", "Encoding of a frame", _SHORT_S, ("codec", "size")
        )
        self.send_s = self._histogram(
            "send_seconds", "From an encoded frame to its last RTP packet", _SHORT_S
        )
        self.ring_wait_s = self._histogram("ring_wait_seconds", "Wait for free slots", _COST_S)
        self.latch_age_s = self._histogram(
            "latch_age_seconds", "Age of the newest action when latched", _SHORT_S
        )
        self.loop_lag_s = self._histogram("loop_lag_seconds", "Delay of the event loop", _SHORT_S)
        self.queue_wait_s = self._histogram(
            "queue_wait_seconds", "From a session's creation to its slot", (1, 5, 15, 60, 300, 900)
        )
        self.warm_up_s = self._histogram(
            "warm_up_seconds", "From a slot to the first picture", _COST_S
        )
        self.photon_s = self._histogram(
            "action_to_photon_seconds",
            "From a key event to the first frame shown with it, browser's clock",
            _LATENCY_S,
            ("transport",),
        )
        self.frame_photon_s = self._histogram(
            "frame_to_photon_seconds",
            "From a frame's departure to its presentation",
            _SHORT_S,
            ("transport",),
        )
        self.present_s = self._histogram(
            "action_to_present_seconds",
            "From a key's arrival at the server to the playback of the chunk that shows it",
            _LATENCY_S,
        )
        self.frames_made = self._counter("frames_made", "Frames of the worker")
        self.frames_shown = self._counter("frames_shown", "Frames that players reported as shown")
        self.frames_encoded = self._counter("frames_encoded", "Frames encoded", ("codec",))
        self.frames_sent = self._counter(
            "frames_sent", "New frames that went to a viewer or the recording", ("transport",)
        )
        self.frames_dropped = self._counter(
            "frames_dropped", "Frames that a viewer or the recording did not get", ("transport",)
        )
        self.frames_stale = self._counter("frames_stale", "Frames of older epochs, never sent")
        self.drops = self._counter("drops", "Things given up at a bound", ("where",))
        self.messages_in = self._counter("messages_in", "Messages of browsers", ("type",))
        self.messages_out = self._counter("messages_out", "Messages to browsers", ("type",))
        self.messages_bad = self._counter("messages_bad", "Refused or unknown messages", ("why",))
        self.errors = self._counter(
            "errors", "Refused requests and messages, failed sessions", ("code",)
        )
        self.epochs = self._counter("epoch_changes", "Resets")
        self.sessions_ended = self._counter("sessions_ended", "Ended sessions", ("reason",))
        self.keyframes = self._counter("keyframes", "Keyframes made", ("cause",))
        self.fallbacks = self._counter("transports_chosen", "Transports chosen", ("transport",))
        self.reconnects = self._counter("reconnects", "Players that came back")
        self.worker_restarts = self._counter("worker_restarts", "Workers started again")
        self.loop_stuck = self._counter("loop_stuck", "Times that the event loop stood still")
        self.illegal_changes = self._gauge("illegal_changes", "Changes of state that no table has")
        self.uploads = self._counter("uploads", "Seed images", ("result",))
        self.sessions = self._gauge("sessions", "Sessions", ("state",))
        self.viewers = self._gauge("viewers", "Open sockets with a session")
        self.queue_length = self._gauge("queue_length", "Waiting visitors")
        self.playout_left_s = self._gauge(
            "playout_left_seconds", "Frames that wait for their time, least of all sessions"
        )
        self.bitrate_bps = self._gauge("bitrate_bps", "Aim of the encoders, least of all sessions")
        self.remb_bps = self._gauge("remb_bps", "Least estimate of a WebRTC receiver; 0: none")
        self.rtt_s = self._gauge("rtt_seconds", "Longest round trip to a WebRTC receiver; 0: none")
        self.resident_bytes = self._gauge(
            "resident_bytes", "Memory of the service's own process and of all workers", ("process",)
        )
        self.device_bytes = self._gauge("device_bytes", "Memory that workers hold on GPUs")
        self.ring_frames = self._gauge("ring_frames", "Taken slots of the frame ring")

    def text(self) -> bytes:
        """Return all metrics as Prometheus text."""
        return generate_latest(self.registry)

    def _histogram(
        self, name: str, help_text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(
            f"worldstream_{name}", help_text, labels, buckets=buckets, registry=self.registry
        )

    def _counter(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"worldstream_{name}", help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"worldstream_{name}", help_text, labels, registry=self.registry)

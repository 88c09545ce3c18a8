"""Gauges of /metrics: what is true at the moment of asking, as against what was counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection

from stream.metrics import Metrics
from stream.processes import usage
from stream.protocol import SessionState
from stream.room import Room
from stream.sessions import Registry
from stream.workers import Workers


def bring_up_to_date(
    metrics: Metrics, *, registry: Registry, rooms: Collection[Room], workers: Workers
) -> None:
    """Set every gauge."""
    states = Counter(session.state for session in registry)
    for state in SessionState:
        metrics.sessions.labels(state=str(state)).set(states[state])
    metrics.viewers.set(sum(len(room.viewers) for room in rooms))
    metrics.queue_length.set(len(registry.queue()))
    metrics.illegal_changes.set(registry.illegal_count)
    media = [room.transports.media.stats() for room in rooms if room.transports.media is not None]
    metrics.playout_left_s.set(min((each.playout_left_s for each in media), default=0.0))
    metrics.bitrate_bps.set(min((each.bitrate_bps for each in media), default=0))
    metrics.remb_bps.set(min((each.remb_bps for each in media if each.remb_bps), default=0))
    metrics.rtt_s.set(max((each.rtt_s for each in media if each.rtt_s), default=0.0))
    metrics.ring_frames.set(workers.frames_in_rings)
    for process, pids in (("service", [os.getpid()]), ("workers", workers.pids)):
        metrics.resident_bytes.labels(process=process).set(usage(pids).resident_mib * 2**20)
    metrics.device_bytes.set(workers.device_bytes)
    metrics.by_worker.workers = workers.figures

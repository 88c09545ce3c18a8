"""Presentation times: when each frame is due, and how late the next chunk may start.

Owns the arithmetic of even playback. Pure: clocks are arguments, states are values.
Invariants: due times and `pts90` rise strictly; after a stall of a period or more the clock starts
again at now; no two frames leave closer than `MIN_SPACING` periods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

PTS_HZ = 90_000
COST_SMOOTHING = 0.3
"""Weight of the newest chunk in the mean cost of a frame."""
SLOWEST_PERIODS = 2.0
"""Playback slows down to half the rate for a slow generator, and stalls beyond."""
MIN_SPACING = 0.8
COST_WINDOW = 20
START_MARGIN_S = 0.040


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What pacing remembers of one run; times are of one monotonic clock, in seconds."""

    nominal_period_s: float
    frame_cost_s: float | None = None
    """Smoothed generation time of a frame; None before the first chunk."""
    spare_s: float = 0.0
    """What each frame of the newest chunk may take less, as the chunk came earlier than needed."""
    origin_s: float | None = None
    """Due time of the first frame, where `pts90` is 0."""
    due_s: float = 0.0
    """Of the newest frame sent; without meaning while `origin_s` is None, like the next two."""
    sent_s: float = 0.0
    pts90: int = 0

    @property
    def period_s(self) -> float:
        """Time between frames: nominal, longer where generation does not keep up.

        What lies ahead of a chunk is waited for by every action in it, so that a slow generator
        is given the time that it needs and no more.
        """
        longest_s = self.nominal_period_s * SLOWEST_PERIODS
        needed_s = (self.frame_cost_s or 0.0) - self.spare_s
        return min(max(self.nominal_period_s, needed_s), longest_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class PacingDecision:
    """When the next frame leaves, and under which timestamp."""

    due_s: float
    """Its place in even playback, which `pts90` tells."""
    pts90: int
    wait_s: float
    """From now to when it leaves: at its due time, unless that is past or the last frame left
    too short a time ago. 0 for at once."""
    is_late: bool
    """Its due time was past."""


def new_timeline(fps: float) -> Timeline:
    """Timeline before its first frame.

    Raises:
        ValueError: if `fps` is not a finite number above 0.
    """
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps: {fps}; expected a number above 0")
    return Timeline(nominal_period_s=1.0 / fps)


def decide(timeline: Timeline, now_s: float) -> PacingDecision:
    """Due time of the next frame, which is there now."""
    if timeline.origin_s is None:
        return PacingDecision(due_s=now_s, pts90=0, wait_s=0.0, is_late=False)
    period_s = timeline.period_s
    regular_s = timeline.due_s + period_s
    # A sender that wakes late by less than a period makes up for it in the next frames; if each
    # time were the new beginning, playback would fall behind by all of them together.
    is_stall = now_s >= regular_s + period_s
    due_s = now_s if is_stall else regular_s
    return PacingDecision(
        due_s=due_s,
        pts90=max(round(PTS_HZ * (due_s - timeline.origin_s)), timeline.pts90 + 1),
        wait_s=max(due_s, timeline.sent_s + MIN_SPACING * period_s, now_s) - now_s,
        is_late=now_s > regular_s,
    )


def with_sent(timeline: Timeline, decision: PacingDecision, sent_s: float) -> Timeline:
    """Timeline after the frame of `decision` left at `sent_s`."""
    origin_s = decision.due_s if timeline.origin_s is None else timeline.origin_s
    return replace(
        timeline, origin_s=origin_s, due_s=decision.due_s, sent_s=sent_s, pts90=decision.pts90
    )


def with_chunk_cost(timeline: Timeline, generation_s: float, frame_count: int) -> Timeline:
    """Timeline that knows what one more chunk cost."""
    cost_s = generation_s / frame_count
    if timeline.frame_cost_s is not None:
        cost_s = COST_SMOOTHING * cost_s + (1 - COST_SMOOTHING) * timeline.frame_cost_s
    return replace(timeline, frame_cost_s=cost_s)


def with_chunk_begin(timeline: Timeline, lead_s: float, frame_count: int) -> Timeline:
    """Timeline that knows how long before its time a chunk's first frame was there."""
    return replace(timeline, spare_s=max(0.0, lead_s - START_MARGIN_S) / frame_count)


def forecast_pts90(timeline: Timeline, decision: PacingDecision, frame_count: int) -> list[int]:
    """Timestamps of the frame of `decision` and those after it, if each comes in time."""
    origin_s = decision.due_s if timeline.origin_s is None else timeline.origin_s
    offset_s = decision.due_s - origin_s
    period_s = timeline.period_s
    later = [round(PTS_HZ * (offset_s + i * period_s)) for i in range(1, frame_count)]
    return [decision.pts90, *later][:frame_count]


def start_wait_s(
    left_s: float,
    chunk_costs_s: Sequence[float],
    margin_s: float = START_MARGIN_S,
) -> float:
    """How long the next chunk may still wait for fresher actions; 0 means: start now.

    Args:
        left_s: until everything is shown that was made.
        chunk_costs_s: generation times so far, oldest first; the newest `COST_WINDOW` count.
        margin_s: reserve on top of the 95th percentile (nearest rank) of the costs.
    """
    if not chunk_costs_s:
        return 0.0
    return max(0.0, left_s - cost_p95(chunk_costs_s) - margin_s)


def cost_p95(chunk_costs: Sequence[float]) -> float:
    """95th percentile (nearest rank) of the newest `COST_WINDOW` costs, oldest first; 0 of none."""
    costs = sorted(chunk_costs[-COST_WINDOW:])
    return costs[math.ceil(0.95 * len(costs)) - 1] if costs else 0.0

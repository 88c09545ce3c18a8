"""Schedule and pacing together, on a clock of their own: how fresh pictures are, whether any stall.

A generator makes chunks at costs that are drawn; it starts when the schedule says, a pacer sends
what it made. Times are seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from engine.config import FRAMES_PER_LATENT
from stream import pacing
from stream.chunk_schedule import ChunkSchedule

pytestmark = pytest.mark.cpu

FPS = 24.0
PERIOD_S = 1 / FPS
FRAMES = sum(FRAMES_PER_LATENT)
DECODE_S = 0.015
REFRESH_S = 0.06
MARGIN_S = 0.04


@dataclass
class Loop:
    """What came of a run."""

    leads_s: list[float] = field(default_factory=list)
    """From a chunk's first frame being made to its departure."""
    latch_to_send_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Between departures."""

    @classmethod
    def run(cls, costs_s: list[float], *, lateness_s: Callable[[], float] = lambda: 0.0) -> Loop:
        """Make and play one chunk for each cost (latch to first latent).

        Args:
            costs_s: one for each chunk.
            lateness_s: how much too late the pacer wakes next.
        """
        loop, schedule = cls(), ChunkSchedule(FPS, MARGIN_S)
        timeline = pacing.new_timeline(FPS)
        made: list[float] = []
        sent: list[float] = []
        now_s = 0.0
        for index, cost_s in enumerate(costs_s):
            latch_s = now_s
            at_s, first, need_s = latch_s + cost_s, len(made), 0.0
            for latent_frames in FRAMES_PER_LATENT:
                at_s += DECODE_S
                need_s = max(need_s, at_s - latch_s - (len(made) - first) * PERIOD_S)
                made += [at_s] * latent_frames
            if index:
                schedule.chunk_made(need_s)
            for number in range(first, len(made)):
                arrival_s = max(made[number], sent[-1] if sent else 0.0)
                decision = pacing.decide(timeline, arrival_s)
                if number == first:
                    lead_s = decision.due_s - made[first]
                    timeline = pacing.with_chunk_begin(timeline, lead_s, FRAMES)
                    loop.leads_s.append(lead_s)
                    loop.latch_to_send_s.append(decision.due_s - latch_s)
                at_sent_s = arrival_s + decision.wait_s + lateness_s()
                timeline = pacing.with_sent(timeline, decision, at_sent_s)
                if sent:
                    loop.gaps_s.append(at_sent_s - sent[-1])
                sent.append(at_sent_s)
            end_s = at_s + REFRESH_S
            timeline = pacing.with_chunk_cost(timeline, end_s - latch_s, FRAMES)
            now_s = end_s
            left = sum(each > now_s for each in sent)
            released_s = max((each for each in sent if each <= now_s), default=0.0)
            now_s += schedule.wait_s(left, released_s, now_s)
        return loop


def test_a_steady_generator_is_fresh_and_never_stalls() -> None:
    loop = Loop.run([0.3] * 60)
    assert loop.leads_s[2:] == pytest.approx([MARGIN_S] * 58, abs=1e-6)
    assert loop.latch_to_send_s[-1] == pytest.approx(0.3 + DECODE_S + MARGIN_S)
    assert max(loop.gaps_s[FRAMES:]) == pytest.approx(PERIOD_S)


@pytest.mark.parametrize("seed", range(5))
def test_an_uneven_generator_waits_for_its_slow_chunks_only(seed: int) -> None:
    chance = random.Random(seed)
    costs_s = [chance.uniform(0.27, 0.33) for _ in range(200)]
    loop = Loop.run(costs_s)
    steady = slice(20, None)
    assert all(lead_s <= MARGIN_S + 0.06 + 1e-6 for lead_s in loop.leads_s[steady])
    assert max(loop.gaps_s[20 * FRAMES :]) == pytest.approx(PERIOD_S)
    mean_s = sum(loop.latch_to_send_s[steady]) / len(loop.latch_to_send_s[steady])
    assert mean_s < 0.33 + DECODE_S + MARGIN_S


@pytest.mark.parametrize("seed", range(3))
def test_a_pacer_that_wakes_late_keeps_rate_and_freshness(seed: int) -> None:
    """3 ms late on average, and 25 ms each fiftieth time, as on a machine that is busy."""
    chance = random.Random(seed)
    loop = Loop.run(
        [0.3] * 100,
        lateness_s=lambda: 0.025 if chance.random() < 0.02 else chance.expovariate(1 / 0.003),
    )
    steady_s = loop.gaps_s[5 * FRAMES :]
    assert len(steady_s) / sum(steady_s) == pytest.approx(FPS, rel=0.002)
    assert min(steady_s) >= pacing.MIN_SPACING * PERIOD_S
    assert max(loop.leads_s[5:]) <= MARGIN_S + 0.03


def test_a_generator_that_is_too_slow_is_stretched_and_nothing_piles_up() -> None:
    cost_s = 0.9 - len(FRAMES_PER_LATENT) * DECODE_S - REFRESH_S
    loop = Loop.run([cost_s] * 60)
    assert loop.leads_s[30:] == pytest.approx([MARGIN_S] * 30, abs=PERIOD_S)
    assert max(loop.gaps_s[30 * FRAMES :]) < 2 * PERIOD_S


def test_a_backlog_after_a_slow_time_is_played_off() -> None:
    slow_s = 1.2 - len(FRAMES_PER_LATENT) * DECODE_S - REFRESH_S
    loop = Loop.run([slow_s] * 20 + [0.3] * 40)
    assert max(loop.leads_s[45:]) <= MARGIN_S + 1e-6

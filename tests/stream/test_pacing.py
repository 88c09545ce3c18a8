"""Pacing with a clock of our own: even due times, stalls, slow generators, latest start."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream import pacing

pytestmark = pytest.mark.cpu

FPS = 24.0
PERIOD_S = 1 / FPS


def play(arrivals_s, fps=FPS, lateness_s=0.0):
    """(due_s, sent_s, pts90) of frames that arrive at these times and are sent a bit late."""
    timeline, now_s, sent = pacing.new_timeline(fps), 0.0, []
    for arrival_s in arrivals_s:
        now_s = max(now_s, arrival_s)
        decision = pacing.decide(timeline, now_s)
        now_s = now_s + decision.wait_s + lateness_s
        timeline = pacing.with_sent(timeline, decision, now_s)
        sent.append((decision.due_s, now_s, decision.pts90))
    return sent


def test_burst_leaves_evenly():
    dues = [due_s for due_s, _, _ in play([0.0] * 17)]
    assert dues == pytest.approx([i * PERIOD_S for i in range(17)])


def test_pts90_counts_from_first_frame():
    assert [pts for _, _, pts in play([5.0] * 4)] == [0, 3750, 7500, 11250]


def test_stall_moves_clock_and_nothing_catches_up():
    sent = play([0.0, 0.0, 1.0, 1.0, 1.0])
    dues = [due_s for due_s, _, _ in sent]
    assert dues == pytest.approx([0, PERIOD_S, 1.0, 1.0 + PERIOD_S, 1.0 + 2 * PERIOD_S])
    assert sent[2][2] == 90_000


def test_frame_after_its_due_time_is_late():
    timeline = pacing.with_sent(
        pacing.new_timeline(FPS), pacing.decide(pacing.new_timeline(FPS), 0.0), 0.0
    )
    assert not pacing.decide(timeline, 0.9 * PERIOD_S).is_late
    assert pacing.decide(timeline, 1.1 * PERIOD_S).is_late


def test_late_sender_keeps_spacing():
    timeline = pacing.new_timeline(FPS)
    timeline = pacing.with_sent(timeline, pacing.decide(timeline, 0.0), 0.9 * PERIOD_S)
    decision = pacing.decide(timeline, 0.9 * PERIOD_S)
    assert 0.9 * PERIOD_S + decision.wait_s == pytest.approx(1.7 * PERIOD_S)


def test_late_sender_makes_up_for_it_and_the_times_stay_even():
    timeline, now_s, sent_s, due_s = pacing.new_timeline(FPS), 0.0, [], []
    for index in range(12):
        decision = pacing.decide(timeline, now_s)
        now_s += decision.wait_s + (0.9 * PERIOD_S if index == 2 else 0.0)
        timeline = pacing.with_sent(timeline, decision, now_s)
        sent_s.append(now_s)
        due_s.append(decision.due_s)
    assert due_s == pytest.approx([i * PERIOD_S for i in range(12)])
    assert sent_s[8:] == pytest.approx(due_s[8:])


def test_a_whole_period_late_is_a_stall():
    timeline = pacing.with_sent(
        pacing.new_timeline(FPS), pacing.decide(pacing.new_timeline(FPS), 0.0), 0.0
    )
    assert pacing.decide(timeline, 1.9 * PERIOD_S).due_s == pytest.approx(PERIOD_S)
    assert pacing.decide(timeline, 2.1 * PERIOD_S).due_s == pytest.approx(2.1 * PERIOD_S)


def test_slow_generator_stretches_playback():
    timeline = pacing.with_chunk_cost(pacing.new_timeline(FPS), 17 * 0.05, 17)
    assert timeline.period_s == pytest.approx(0.05)


def test_generator_at_70_percent_neither_freezes_playback_nor_piles_up():
    """Chunks come in bursts, each 1 / 0.7 of its own duration after the one before."""
    timeline, now_s, cost_s = pacing.new_timeline(FPS), 0.0, 17 * PERIOD_S / 0.7
    arrivals_s = [(chunk + 1) * cost_s for chunk in range(12) for _ in range(17)]
    sent_s = []
    for index, arrival_s in enumerate(arrivals_s):
        now_s = max(now_s, arrival_s)
        if index % 17 == 0:
            timeline = pacing.with_chunk_cost(timeline, cost_s, 17)
        decision = pacing.decide(timeline, now_s)
        if index % 17 == 0:
            timeline = pacing.with_chunk_begin(timeline, decision.due_s - arrival_s, 17)
        now_s += decision.wait_s
        timeline = pacing.with_sent(timeline, decision, now_s)
        sent_s.append(now_s)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(sent_s)]
    backlogs = [
        sum(arrival_s <= at_s for arrival_s in arrivals_s) - index
        for index, at_s in enumerate(sent_s)
    ]
    assert max(gaps_s) <= 2.5 * PERIOD_S
    assert max(backlogs) <= 17


def test_newest_chunk_weighs_three_tenths():
    timeline = pacing.with_chunk_cost(pacing.new_timeline(FPS), 17 * 0.05, 17)
    timeline = pacing.with_chunk_cost(timeline, 17 * 0.06, 17)
    assert timeline.period_s == pytest.approx(0.7 * 0.05 + 0.3 * 0.06)


def test_backlog_of_a_slow_generator_is_played_off():
    """Chunks of 1 s, the first of them half a second early: the lead shrinks to the margin."""
    timeline, lead_s = pacing.with_chunk_cost(pacing.new_timeline(FPS), 1.0, 17), 0.5
    leads_s = []
    for _ in range(4):
        timeline = pacing.with_chunk_begin(timeline, lead_s, 17)
        lead_s += 17 * timeline.period_s - 1.0
        leads_s.append(lead_s)
    assert leads_s == pytest.approx(
        [0.5 + 17 * PERIOD_S - 1.0, *[pacing.START_MARGIN_S] * 3], abs=1e-9
    )


def test_a_chunk_in_time_is_not_hurried():
    timeline = pacing.with_chunk_cost(pacing.new_timeline(FPS), 17 * 0.05, 17)
    timeline = pacing.with_chunk_begin(timeline, pacing.START_MARGIN_S, 17)
    assert timeline.period_s == pytest.approx(0.05)


def test_stretch_ends_at_half_rate():
    timeline = pacing.with_chunk_cost(pacing.new_timeline(FPS), 17.0, 17)
    assert timeline.period_s == pytest.approx(2 * PERIOD_S)


def test_fast_generator_does_not_hurry_playback():
    timeline = pacing.with_chunk_cost(pacing.new_timeline(FPS), 0.1, 17)
    assert timeline.period_s == pytest.approx(PERIOD_S)


def test_forecast_is_what_happens():
    timeline = pacing.new_timeline(FPS)
    timeline = pacing.with_sent(timeline, pacing.decide(timeline, 3.0), 3.0)
    decision = pacing.decide(timeline, 3.001)
    expected = pacing.forecast_pts90(timeline, decision, 17)
    seen = []
    for _ in range(17):
        seen.append(decision.pts90)
        timeline = pacing.with_sent(timeline, decision, decision.due_s)
        decision = pacing.decide(timeline, decision.due_s)
    assert seen == pytest.approx(expected, abs=1)


@given(
    gaps_s=st.lists(st.floats(0, 2), min_size=2, max_size=60),
    lateness_s=st.floats(0, 0.05),
)
def test_times_rise_and_never_faster_than_spacing(gaps_s, lateness_s):
    arrivals_s, at_s = [], 0.0
    for gap_s in gaps_s:
        at_s += gap_s
        arrivals_s.append(at_s)
    sent = play(arrivals_s, lateness_s=lateness_s)
    for (_, before_s, pts_before), (due_s, after_s, pts) in itertools.pairwise(sent):
        assert pts > pts_before
        assert after_s >= due_s
        assert after_s - before_s >= pacing.MIN_SPACING * PERIOD_S - 1e-9


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf")])
def test_wrong_rate_is_refused(fps):
    with pytest.raises(ValueError, match="fps"):
        pacing.new_timeline(fps)


def test_first_chunk_starts_at_once():
    assert pacing.start_wait_s(34 * PERIOD_S, []) == 0.0


def test_chunk_starts_when_playout_left_is_its_cost():
    wait_s = pacing.start_wait_s(17 * PERIOD_S, [0.5] * 20, margin_s=0.04)
    assert wait_s == pytest.approx(17 * PERIOD_S - 0.54)


def test_one_outlier_in_twenty_is_passed_over_and_two_are_not():
    assert pacing.start_wait_s(34 * PERIOD_S, [0.1] * 19 + [1.0]) > 1.0
    assert pacing.start_wait_s(34 * PERIOD_S, [0.1] * 18 + [1.0] * 2) < 0.4


def test_old_costs_are_forgotten():
    assert pacing.start_wait_s(34 * PERIOD_S, [5.0] * 20 + [0.1] * 20) > 1.0


def test_slow_chunk_starts_at_once():
    assert pacing.start_wait_s(17 * PERIOD_S, [0.9]) == 0.0

"""Figures of a page from logs that are written by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stream import live_figures as figures
from stream.live_browser import HOLD_S, KEYS, TAP_S, Packet, PageLog, RtpFrame, strokes

pytestmark = pytest.mark.cpu

ORIGIN = 2**32 - 5_000
"""Random in a connection; timestamps wrap within the first chunks here."""
OFFSET_MS = 40.0
"""Server clock minus page clock."""
STEP = 3_750


def chunk(k: int, act: int, *, latch_ms: float, due_ms: float) -> dict[str, Any]:
    """Chunk `k`; times are of the page's clock."""
    times = {
        "latch": [[0, latch_ms + OFFSET_MS]],
        "gen0": latch_ms + OFFSET_MS,
        "gen1": latch_ms + 300.0 + OFFSET_MS,
        "enq": latch_ms + 301.0 + OFFSET_MS,
        "due": due_ms + OFFSET_MS,
    }
    more = {"pts0": 17 * k * STEP, "dpts": STEP, "act": [[0, act]], "times": times}
    return {"t": "chunk", "k": k, "first": 2 + 17 * k, "n": 17, **more}


def act(seq: int, *edges: tuple[int, float]) -> dict[str, Any]:
    return {"t": "act", "seq": seq, "edges": [[number, "KeyW", 1, ms] for number, ms in edges]}


def rtc_log() -> PageLog:
    """Two chunks of 17 frames, each shown 10 ms after it was due; a key between their latches."""
    log = PageLog()
    log.received = [
        (100.0, {"t": "pong", "ct": 96.0, "st": 98.0 + OFFSET_MS}),
        (900.0, {"t": "rtc.origin", "gen": 1, "origin": ORIGIN}),
        (990.0, chunk(0, 1, latch_ms=600.0, due_ms=1_000.0)),
        (1_690.0, chunk(1, 3, latch_ms=1_300.0, due_ms=1_000.0 + 17 * STEP / 90)),
    ]
    log.sent = [
        (501.0, act(1, (1, 500.0))),
        (1_102.0, act(2, (1, 500.0), (2, 1_100.0))),
        (1_150.0, act(3, (2, 1_100.0))),
        (1_400.0, act(4, (3, 1_399.0))),
    ]
    for index in range(34):
        due_ms = 1_000.0 + index * STEP / 90
        rtp = (ORIGIN + index * STEP + index % 3 * 20) % 2**32
        log.rtp.append(RtpFrame(due_ms + 10.0, rtp, due_ms + 5.0, 2.0))
    return log


def test_frames_are_named_by_their_timestamps() -> None:
    shown = figures.shown_frames(rtc_log())
    assert [each.frame for each in shown] == list(range(2, 36))
    assert shown[3].at_ms == pytest.approx(1_000 + 3 * STEP / 90 + 10)
    assert shown[3].decoded_ms == pytest.approx(1_000 + 3 * STEP / 90 + 7)


def test_frames_before_the_origin_is_told_have_no_name() -> None:
    log = rtc_log()
    log.received[1] = (1_500.0, log.received[1][1])
    assert min(each.at_ms for each in figures.shown_frames(log)) >= 1_500.0


def test_a_repeated_frame_counts_once() -> None:
    log = rtc_log()
    log.rtp.append(log.rtp[-1]._replace(at_ms=9_000.0))
    assert len(figures.shown_frames(log)) == 34


def test_each_key_waits_for_the_first_frame_that_shows_it() -> None:
    log = rtc_log()
    keys = figures.keys_to_screen(
        log, figures.shown_frames(log), encode_ms=1.5, decode_latent_ms=20.0
    )
    assert [each.total_ms for each in keys] == pytest.approx(
        [1_010.0 - 500.0, 1_010.0 + 17 * STEP / 90 - 1_100.0]
    )


def test_parts_add_up_and_the_clock_offset_cancels() -> None:
    log = rtc_log()
    first, _ = figures.keys_to_screen(
        log, figures.shown_frames(log), encode_ms=1.5, decode_latent_ms=20.0
    )
    assert tuple(first.parts) == figures.PARTS
    assert sum(first.parts.values()) == pytest.approx(first.total_ms)
    expected = {
        "input": 1.0,
        "uplink": 2.0,
        "wait_for_chunk": 600.0 - 503.0,
        "generate": 280.0,
        "decode_latent": 20.0,
        "queue_ahead": 100.0,
        "encode": 1.5,
        "transport": 3.5,
        "decode_video": 2.0,
        "display": 3.0,
    }
    assert first.parts == pytest.approx(expected)


def test_frames_of_a_socket_are_timed_by_the_page() -> None:
    log = rtc_log()
    log.rtp = []
    log.packets = [Packet(1_005.0, 2, 1, 0, 1_001.0), Packet(1_050.0, 2, 4, 9, 1_049.0)]
    log.sent += [
        (1_007.0, {"t": "ack", "frame": 2, "drawn_ct": 1_007.0}),
        (2_000.0, {"t": "shown", "frames": [[2, 1_012.0]]}),
    ]
    (shown,) = figures.shown_frames(log)
    assert (shown.at_ms, shown.came_ms, shown.decoded_ms) == (1_012.0, 1_005.0, 1_007.0)
    assert figures.first_shown_ms(log) == 1_007.0


def test_rates_are_those_of_full_windows() -> None:
    log = PageLog(rtp=[])
    shown = [
        figures.Shown(at_ms=50.0 * i, frame=i, pts90=4_500 * i, came_ms=None, decoded_ms=None)
        for i in range(500)
    ]
    assert figures.frame_rates(shown, 0.0, 25_000.0) == [20.0, 20.0]
    assert figures.frame_rates(shown, 0.0, 9_000.0) == []
    assert figures.shown_frames(log) == []


@pytest.mark.parametrize(("stretch", "growth_ms"), [(1.0, 0.0), (1.01, 4_500.0)])
def test_media_that_falls_behind_is_growing_lag(stretch: float, growth_ms: float) -> None:
    shown = [
        figures.Shown(
            at_ms=50.0 * stretch * i, frame=i, pts90=4_500 * i, came_ms=None, decoded_ms=None
        )
        for i in range(10_000)
    ]
    assert figures.media_lag_growth_ms(shown) == pytest.approx(growth_ms)


def test_the_clock_is_that_of_the_fastest_pings() -> None:
    log = PageLog()
    slow = [(10.0 * i, {"t": "pong", "ct": 10.0 * i - 9.0, "st": 0.0}) for i in range(4)]
    log.received = [*slow, (100.0, {"t": "pong", "ct": 98.0, "st": 99.0 + OFFSET_MS})]
    assert figures.clock_offset_ms(log) == OFFSET_MS
    assert figures.round_trip_ms(log) == 9.0


def test_nothing_measured_is_no_number() -> None:
    found = figures.percentiles([])
    assert found["n"] == 0
    assert math.isnan(found["p50"])


def test_strokes_repeat_and_hold_both_taps_and_holds() -> None:
    first = [stroke for stroke, _ in zip(strokes(3), range(200), strict=False)]
    again = [stroke for stroke, _ in zip(strokes(3), range(200), strict=False)]
    assert first == again
    assert {key for stroke in first for key in stroke.keys} == set(KEYS)
    taps = [stroke for stroke in first if stroke.held_s <= TAP_S[1]]
    assert 0 < len(taps) < len(first)
    assert max(stroke.held_s for stroke in first) <= HOLD_S[1]

"""Inputs of a session over several sockets, and the latency that they measure."""

import pytest

from stream.client_messages import Act
from stream.inputs import (
    MESSAGES_REMEMBERED,
    BrowserClock,
    LatchAge,
    PhotonMeter,
    SessionInput,
)

pytestmark = pytest.mark.cpu


def _act(seq: int, **more: object) -> Act:
    return Act.model_validate({"t": "act", "seq": seq, "ct": 10_000.0, **more}, strict=False)


def test_old_and_equal_sequence_numbers_are_dropped() -> None:
    inputs = SessionInput()
    assert inputs.take(_act(5), 0.0) is not None
    assert inputs.take(_act(5), 0.0) is None
    assert inputs.take(_act(4), 0.0) is None
    assert inputs.last_seq == 5


def test_edge_counts_once_though_it_is_repeated() -> None:
    inputs = SessionInput()
    edges = [(1, "KeyW", 1, 9_990.0)]
    first = inputs.take(_act(1, edges=edges), 5_000.0)
    second = inputs.take(_act(2, edges=[*edges, (2, "KeyW", 0, 9_999.0)]), 5_010.0)
    assert first is not None
    assert second is not None
    assert [edge.is_down for edge in first.new_edges] == [True]
    assert [edge.is_down for edge in second.new_edges] == [False]


def test_mouse_goes_on_where_it_was_when_a_page_is_loaded_anew() -> None:
    inputs = SessionInput()
    inputs.take(_act(1, look=(100.0, 0.0)), 0.0)
    inputs.take(_act(2, look=(130.0, 5.0)), 0.0)
    inputs.begin_socket(0.0)
    taken = inputs.take(_act(3, look=(7.0, 0.0)), 0.0)
    moved = inputs.take(_act(4, look=(8.0, 0.0)), 0.0)
    assert taken is not None
    assert moved is not None
    assert (taken.snapshot.look, moved.snapshot.look) == ((30.0, 5.0), (31.0, 5.0))


def test_edges_from_before_the_socket_opened_are_not_applied() -> None:
    inputs = SessionInput()
    inputs.begin_socket(opened_ms=1_000.0)
    old_and_new = [(1, "KeyW", 1, 9_700.0), (2, "KeyS", 1, 9_990.0)]
    taken = inputs.take(_act(1, edges=old_and_new), received_ms=1_100.0)
    assert taken is not None
    assert [edge.code for edge in taken.snapshot.edges] == ["KeyS"]


def test_unknown_keys_are_passed_over() -> None:
    taken = SessionInput().take(_act(1, keys=("KeyW", "F13"), edges=[(1, "F13", 1, 1.0)]), 9e9)
    assert taken is not None
    assert taken.snapshot.held == {"KeyW"}
    assert taken.new_edges == ()


def test_latency_is_from_the_edge_to_the_first_frame_that_shows_it() -> None:
    meter, inputs = PhotonMeter(), SessionInput()
    taken = inputs.take(_act(7, edges=[(1, "KeyW", 1, 9_900.0)]), 9e9)
    assert taken is not None
    meter.pressed(7, taken.new_edges)
    for frame_id, act_seq in ((1, 6), (2, 7), (3, 8)):
        meter.made(frame_id, act_seq)
    assert meter.shown([(1, 10_000.0)]) == []
    assert meter.shown([(3, 10_540.0), (2, 10_500.0)]) == [600.0]
    assert meter.shown([(3, 10_600.0)]) == []


def test_latency_that_cannot_be_is_left_out() -> None:
    meter, inputs = PhotonMeter(), SessionInput()
    taken = inputs.take(_act(1, edges=[(1, "KeyW", 1, 9_900.0)]), 9e9)
    assert taken is not None
    meter.pressed(1, taken.new_edges)
    meter.made(1, 1)
    assert meter.shown([(1, 5.0)]) == []


def test_clock_of_a_browser_is_that_of_its_fastest_message() -> None:
    clock = BrowserClock()
    assert clock.server_ms(100.0) is None
    for way_ms in (40.0, 5.0, 90.0):
        clock.heard(1_000.0, 8_000.0 + way_ms)
    assert clock.server_ms(1_100.0) == 8_105.0


def test_clock_of_a_browser_that_was_set_is_learnt_anew() -> None:
    clock = BrowserClock()
    clock.heard(1_000.0, 1_000.0)
    for _ in range(MESSAGES_REMEMBERED):
        clock.heard(1_000.0, 9_000.0)
    assert clock.server_ms(1_000.0) == 9_000.0


def test_age_is_that_of_actions_that_are_new_to_their_chunk() -> None:
    age = LatchAge()
    assert (age.latched(0, 1_000.0), age.newest_ms) == (None, None)
    age.acted(1_000.0)
    assert age.latched(3, 1_040.0) == 40.0
    assert age.latched(3, 61_000.0) is None  # nobody has touched anything for a minute
    assert age.newest_ms == 40.0
    age.acted(61_500.0)
    assert age.latched(4, 61_400.0) == 0.0  # it came while the chunk began

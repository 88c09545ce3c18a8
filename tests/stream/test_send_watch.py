"""Watch over connections that send nothing."""

import pytest

from stream.send_watch import SendWatch

pytestmark = pytest.mark.cpu


def remedies(watch, seconds, *, begin_s=0.0, sends_at_s=()):
    """(second, remedy) of a connection that is offered a frame every half second."""
    found = []
    for step in range(2 * seconds):
        now_s = begin_s + step / 2
        watch.offered(now_s)
        if now_s in sends_at_s:
            watch.sent()
        remedy = watch.remedy(now_s)
        if remedy:
            found.append((now_s, remedy))
    return found


def test_keyframe_after_three_seconds_and_a_new_connection_after_ten():
    assert remedies(SendWatch(), 12) == [(3.0, "keyframe"), (10.0, "renegotiate")]


def test_remedies_come_again_while_nothing_helps():
    found = remedies(SendWatch(), 22)
    assert found[2:] == [(13.0, "keyframe"), (20.0, "renegotiate")]


def test_connection_that_sends_is_left_alone():
    assert remedies(SendWatch(), 30, sends_at_s=range(0, 30, 2)) == []


def test_time_without_frames_does_not_count():
    watch = SendWatch()
    watch.offered(0.0)
    watch.sent()
    assert watch.remedy(100.0) is None
    assert remedies(watch, 4, begin_s=100.0) == [(103.0, "keyframe")]

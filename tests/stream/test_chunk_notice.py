"""Notices of chunks: what was told is what is sent, or a correction came first."""

import pytest

from stream import pacing
from stream.chunk_notice import CHUNKS_REMEMBERED, PTS_TOLERANCE, Announcer, DueTimes
from stream.frames import FrameMeta

pytestmark = pytest.mark.cpu

FRAMES = 17


def meta(index, *, epoch=0, chunk=None):
    return FrameMeta(
        frame_id=index + 1,
        epoch=epoch,
        chunk=index // FRAMES if chunk is None else chunk,
        act_seq=7,
        latch_ms=1000.0,
        ready_ms=1500.0,
        offset=index % FRAMES,
    )


class Run:
    """An announcer and the timeline that it is asked along."""

    def __init__(self):
        self.announcer = Announcer(FRAMES)
        self.timeline = pacing.new_timeline(24)
        self.now_s = 0.0

    def send(self, frame, *, arrives_s=0.0):
        self.now_s = max(self.now_s, arrives_s)
        decision = pacing.decide(self.timeline, self.now_s)
        told = self.announcer.announce(
            frame, self.timeline, decision, queued_ms=1600.0, now_ms=self.now_s * 1e3
        )
        self.now_s += decision.wait_s
        self.timeline = pacing.with_sent(self.timeline, decision, self.now_s)
        return told, decision.pts90


def test_even_chunk_is_told_once():
    run = Run()
    told = [run.send(meta(i))[0] for i in range(34)]
    assert [i for i, each in enumerate(told) if each] == [0, 17]
    first = told[0]
    assert (first.k, first.first, first.n, first.pts0, first.dpts) == (0, 1, 17, 0, 3750)
    assert (first.act, first.latch) == (((0, 7),), ((0, 1000.0),))
    assert not first.is_correction


def test_stall_inside_a_chunk_is_corrected_before_the_frame():
    run = Run()
    for i in range(5):
        run.send(meta(i))
    told, pts90 = run.send(meta(5), arrives_s=1.0)
    assert told.is_correction
    assert told.dpts is None
    assert told.pts[5] == pts90
    assert told.pts[:5] == (0, 3750, 7500, 11250, 15000)
    assert all(run.send(meta(i))[0] is None for i in range(6, 17))


def test_every_frame_leaves_as_told():
    run, told_pts = Run(), {}
    for i in range(51):
        frame = meta(i)
        told, pts90 = run.send(frame, arrives_s=0.07 * i if i % 9 == 0 else 0.0)
        if told is not None:
            times = told.pts or [told.pts0 + told.dpts * j for j in range(told.n)]
            told_pts = {told.first + j: pts for j, pts in enumerate(times)}
        assert abs(told_pts[frame.frame_id] - pts90) <= PTS_TOLERANCE


def test_due_time_is_that_of_the_first_frame():
    run = Run()
    told = [run.send(meta(i))[0] for i in range(18)]
    assert told[0].due_ms == 0.0
    assert told[17].due_ms == pytest.approx(17 / 24 * 1e3)
    corrected = run.send(meta(18), arrives_s=2.0)[0]
    step_ms = (corrected.pts[1] - corrected.pts0) / pacing.PTS_HZ * 1e3
    assert corrected.due_ms + step_ms == pytest.approx(2_000.0)


def test_first_picture_is_no_chunk():
    assert Run().send(meta(0, chunk=-1))[0] is None


def test_dropped_head_of_a_chunk_keeps_frame_ids():
    run = Run()
    run.send(meta(0))
    told, pts90 = run.send(meta(20))
    assert (told.first, told.pts[3]) == (18, pts90)
    assert len(told.pts) == FRAMES


def test_same_chunk_of_a_new_epoch_is_new():
    run = Run()
    run.send(meta(0))
    told, _ = run.send(meta(0, epoch=1))
    assert (told.epoch, told.is_correction) == (1, False)


def test_due_times_are_those_of_the_newest_notice_of_a_chunk():
    run, due_times, sent_ms = Run(), DueTimes(), {}
    for i in range(40):
        frame = meta(i)
        told, _ = run.send(frame, arrives_s=0.5 if i == 5 else 0.0)
        sent_ms[frame.frame_id] = run.now_s * 1e3
        if told is not None:
            due_times.told(told)
    for frame_id, at_ms in sent_ms.items():
        assert due_times.due_ms(frame_id) == pytest.approx(at_ms, abs=0.1)
    assert due_times.due_ms(0) is None
    assert due_times.due_ms(999) is None


def test_due_times_of_long_ago_are_forgotten():
    run, due_times = Run(), DueTimes()
    for i in range(FRAMES * (CHUNKS_REMEMBERED + 1)):
        told, _ = run.send(meta(i))
        if told is not None:
            due_times.told(told)
    assert due_times.due_ms(1) is None
    assert due_times.due_ms(FRAMES + 1) is not None

"""Bit rate by what links carry: steps down and up, and who gets the second encoder."""

from itertools import pairwise

import pytest

from stream.rate_control import CLEAN_S, Feed, Link, RateControl
from stream.video_encoder import Codec

pytestmark = pytest.mark.cpu

WANTED_BPS = 2_000_000
FPS = 24


class Room:
    """Rate control with a clock; `run` lets time pass with every link as it is told."""

    def __init__(self, *feeds):
        self.now_s = 100.0
        self.rates = RateControl(WANTED_BPS)
        self.feeds = [(feed, Codec.H264) for feed in feeds]
        self.remb_bps = dict.fromkeys(map(id, feeds))
        self.jammed = set()
        self.sent_bps = None
        """Bits a second that the encoder makes; None: all that it may."""

    def carries(self, feed, bps):
        self.remb_bps[id(feed)] = bps

    def run(self, seconds):
        """Every bit rate after every half second."""
        seen = []
        for step in range(round(seconds * FPS)):
            self.now_s += 1 / FPS
            for feed, _ in self.feeds:
                sent_bps = self.sent_bps or self.rates.bitrate_bps
                size = round(sent_bps / 8 / FPS * (0.5 if feed.is_half else 1.0))
                feed.link.note_frame(None if id(feed) in self.jammed else size, self.now_s)
                if step % FPS == 0 and (bps := self.remb_bps[id(feed)]) is not None:
                    feed.link.note_estimate(bps, self.now_s)
            if step % (FPS // 2) == 0:
                self.rates.update(self.feeds, self.now_s)
                seen.append(self.rates.bitrate_bps)
        return seen


def player():
    return Feed(role="player")


def spectator():
    return Feed(role="spectator")


def test_good_link_keeps_the_wanted_bit_rate():
    feed = player()
    room = Room(feed)
    room.carries(feed, 3_000_000)
    assert set(room.run(60)) == {WANTED_BPS}


def test_tight_link_steps_down_by_a_quarter_after_three_seconds():
    feed = player()
    room = Room(feed)
    room.carries(feed, 1_000_000)
    seen = room.run(5)
    assert seen[:6] == [WANTED_BPS] * 6  # 0 to 2.5 s
    assert seen[-1] == 1_500_000


def test_steps_are_five_seconds_apart_and_end_where_the_link_carries_it():
    feed = player()
    room = Room(feed)
    room.carries(feed, 1_000_000)
    seen = room.run(20)
    changes = [i for i, (a, b) in enumerate(pairwise(seen)) if a != b]
    assert len(changes) == 2
    assert changes[1] - changes[0] == 10  # half seconds
    assert seen[-1] == 1_125_000  # 0.8 of it is below 1 Mb/s


def test_clean_link_goes_up_by_a_tenth_every_fifteen_seconds_to_what_was_wanted():
    feed = player()
    room = Room(feed)
    room.carries(feed, 1_300_000)
    room.run(5.5)
    room.carries(feed, 5_000_000)
    seen = room.run(80)
    steps = sorted(set(seen))
    assert steps == [1_500_000, 1_650_000, 1_815_000, 1_996_500, WANTED_BPS]
    assert seen.count(1_650_000) == pytest.approx(CLEAN_S * 2, abs=1)


def test_bit_rate_has_a_floor():
    feed = player()
    room = Room(feed)
    room.carries(feed, 1_000)
    assert room.run(120)[-1] == WANTED_BPS / 5


@pytest.mark.parametrize(("remb_bps", "sent_bps"), [(100_000, 20_000), (240_000, 200_000)])
def test_low_estimate_of_a_stream_that_sends_less_means_nothing(remb_bps, sent_bps):
    feed = player()
    room = Room(feed)
    room.carries(feed, remb_bps)
    room.sent_bps = sent_bps
    assert set(room.run(30)) == {WANTED_BPS}


def test_old_estimate_means_nothing():
    feed = player()
    room = Room(feed)
    room.run(3)
    feed.link.note_estimate(1_000_000, room.now_s)
    assert set(room.run(30)) == {WANTED_BPS}


def test_socket_without_room_steps_down_as_well():
    feed = player()
    room = Room(feed)
    room.jammed.add(id(feed))
    assert room.run(5)[-1] == 1_500_000


def test_slow_spectator_is_halved_and_the_player_keeps_the_bit_rate():
    lead, slow = player(), spectator()
    room = Room(lead, slow)
    room.carries(lead, 5_000_000)
    room.carries(slow, 800_000)
    assert set(room.run(10)) == {WANTED_BPS}
    assert (lead.is_half, slow.is_half) == (False, True)
    assert room.rates.half_bps == WANTED_BPS / 2


def test_spectator_comes_back_when_its_link_is_clean_and_less_soon_the_next_time():
    lead, slow = player(), spectator()
    room = Room(lead, slow)
    room.carries(slow, 800_000)
    room.run(5)
    room.carries(slow, 1_500_000)  # receivers tell 1.5 times what they get, at most
    room.run(CLEAN_S + 1)
    assert not slow.is_half
    room.carries(slow, 800_000)
    room.run(5)
    room.carries(slow, 1_500_000)
    room.run(CLEAN_S + 1)
    assert slow.is_half
    room.run(CLEAN_S + 1)
    assert not slow.is_half


def test_third_encoder_is_never_made():
    lead, slow = player(), spectator()
    room = Room(lead, slow, Feed(role="recording"))
    room.feeds[0] = (lead, Codec.VP8)
    room.jammed.add(id(slow))
    room.run(10)
    assert not slow.is_half  # VP8 for the player, H.264 for the recording


def test_second_encoder_is_given_back_to_a_second_codec():
    lead, slow, late = player(), spectator(), spectator()
    room = Room(lead, slow)
    room.jammed.add(id(slow))
    room.run(10)
    assert slow.is_half
    room.feeds.append((late, Codec.VP8))
    room.remb_bps[id(late)] = None
    room.run(1)
    assert not slow.is_half


def test_bit_rate_recovers_when_nobody_plays_by_video():
    feed = player()
    room = Room(feed)
    room.carries(feed, 1_000_000)
    room.run(5)
    room.feeds.clear()
    assert room.run(80)[-1] == WANTED_BPS


def test_few_missed_frames_are_no_jam():
    link = Link()
    for index in range(72):
        link.note_frame(None if index % 6 == 0 else 10_000, index / FPS)
    assert not link.is_tight(WANTED_BPS, 3.0)

"""Shared encoders with a clock of our own: what is encoded, for whom, and when as a keyframe."""

import pytest

from stream.media_events import MediaSettings
from stream.rate_control import Feed
from stream.shared_encoders import SPECTATOR_GAP_S, SharedEncoders, Stream
from stream.video_encoder import Codec, KeyCause, KeyGate

pytestmark = pytest.mark.cpu


class Viewer:
    """What encoders look at in a viewer."""

    def __init__(self, codec=Codec.H264, *, has_room=True, role="player"):
        self.codec, self.has_room, self.gate = codec, has_room, KeyGate()
        self.feed, self.sent_count = Feed(role=role), 0


class Bench:
    """Encoders, viewers and a clock; one call of `frame` is one frame that all get."""

    def __init__(self, *viewers):
        self.now_s = 100.0
        self.viewers = list(viewers)
        settings = MediaSettings(keyframe_min_s=0.5, join_keyframe_min_s=0.2)
        self.encoders = SharedEncoders(64, 48, 24, settings, clock_s=lambda: self.now_s)

    def frame(self):
        """Codecs that were encoded, with whether as a keyframe."""
        wants = self.encoders.choose(self.viewers)
        for want in wants.values():
            for viewer in want.viewers:
                viewer.gate.is_waiting &= want.key_cause is None
                viewer.sent_count += not viewer.gate.is_waiting
        self.now_s += 1 / 24
        return {
            each.codec: want.key_cause is not None
            for each, want in wants.items()
            if not each.is_half
        }


def test_first_frame_is_a_keyframe_and_later_ones_are_not():
    bench = Bench(Viewer())
    assert [bench.frame()[Codec.H264] for _ in range(3)] == [True, False, False]


def test_each_codec_once():
    bench = Bench(Viewer(), Viewer(), Viewer(Codec.VP8), Viewer(Codec.JPEG))
    assert set(bench.frame()) == {Codec.H264, Codec.VP8, Codec.JPEG}


def test_viewers_without_room_are_not_encoded_for():
    bench = Bench(Viewer(has_room=False), Viewer(Codec.JPEG, has_room=False))
    assert bench.frame() == {}
    assert bench.encoders.skipped_count == 2


def test_wishes_for_keyframes_are_merged():
    bench = Bench(Viewer())
    keys = []
    for _ in range(60):
        bench.encoders.want_keyframe(Stream(Codec.H264), KeyCause.PLI)
        keys.append(bench.frame()[Codec.H264])
    at = [index for index, is_key in enumerate(keys) if is_key]
    assert at == [0, 12, 24, 36, 48]


def test_one_wish_is_one_keyframe():
    bench = Bench(Viewer())
    for _ in range(20):
        bench.frame()
    bench.encoders.want_keyframe(Stream(Codec.H264), KeyCause.PLI)
    assert [bench.frame()[Codec.H264] for _ in range(20)] == [True] + [False] * 19


def test_newcomer_waits_less_than_a_wish():
    bench = Bench(Viewer())
    bench.frame()
    bench.viewers.append(Viewer())
    keys = [bench.frame()[Codec.H264] for _ in range(8)]
    assert keys.index(True) == 4  # 5/24 s after the first


def test_nothing_is_encoded_that_nobody_could_decode():
    bench = Bench(Viewer())
    bench.frame()
    bench.viewers[0].gate.miss()
    assert bench.frame() == {}


def test_newcomer_is_seen_when_a_keyframe_may_come():
    bench = Bench(Viewer())
    assert bench.encoders.key_wait_s(bench.viewers) < 0
    bench.frame()
    assert bench.encoders.key_wait_s(bench.viewers) is None
    bench.viewers.append(Viewer())
    assert bench.encoders.key_wait_s(bench.viewers) == pytest.approx(0.2 - 1 / 24)


def test_wish_for_a_keyframe_is_seen_while_no_frames_come():
    bench = Bench(Viewer())
    bench.frame()
    bench.encoders.want_keyframe(Stream(Codec.H264), KeyCause.PLI)
    assert bench.encoders.key_wait_s(bench.viewers) == pytest.approx(0.5 - 1 / 24)


def frames_to_the_next_key(bench):
    return next(count for count in range(100) if bench.frame()[Codec.H264])


@pytest.mark.parametrize(("role", "least_s"), [("player", 0.5), ("spectator", SPECTATOR_GAP_S)])
def test_viewer_with_a_gap_waits_longer_than_a_newcomer(role, least_s):
    bench = Bench(Viewer(), Viewer(role=role))
    bench.frame()
    bench.viewers[1].gate.miss()
    assert frames_to_the_next_key(bench) == pytest.approx(least_s * 24 - 1, abs=1)


def test_short_jam_of_all_who_watch_costs_the_recording_a_frame_and_no_keyframe():
    bench = Bench(Viewer(), Viewer(role="recording"))
    bench.frame()
    bench.viewers[0].has_room = False
    assert [bench.frame() for _ in range(3)] == [{}] * 3
    bench.viewers[0].has_room = True
    assert bench.frame() == {Codec.H264: False}


def test_long_jam_leaves_the_recording_alone():
    bench = Bench(Viewer(), Viewer(role="recording"))
    bench.frame()
    bench.viewers[0].has_room = False
    frames = [bench.frame() for _ in range(24)]
    assert frames == [{}] * 12 + [{Codec.H264: False}] * 12  # 0.5 s of 24 frames a second


def test_half_rate_viewers_have_an_encoder_of_their_own():
    bench = Bench(Viewer(), Viewer(role="spectator"))
    bench.viewers[1].feed.is_half = True
    wants = bench.encoders.choose(bench.viewers)
    rates = {stream.is_half: want.bitrate_bps for stream, want in wants.items()}
    assert rates == {False: 2_000_000, True: 1_000_000}


def test_jpeg_is_never_halved():
    bench = Bench(Viewer(Codec.JPEG, role="spectator"))
    bench.viewers[0].feed.is_half = True
    assert list(bench.encoders.choose(bench.viewers)) == [Stream(Codec.JPEG)]

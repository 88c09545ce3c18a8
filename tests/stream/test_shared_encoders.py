"""Shared encoders with a clock of our own: what is encoded, for whom, and when as a keyframe."""

import pytest

from stream.media_events import MediaSettings
from stream.shared_encoders import SharedEncoders
from stream.video_encoder import Codec, KeyGate

pytestmark = pytest.mark.cpu


class Viewer:
    """What encoders look at in a viewer."""

    def __init__(self, codec=Codec.H264, *, has_room=True):
        self.codec, self.has_room, self.gate = codec, has_room, KeyGate()


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
                viewer.gate.is_waiting &= not want.is_key
        self.now_s += 1 / 24
        return {codec: want.is_key for codec, want in wants.items()}


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
        bench.encoders.want_keyframe(Codec.H264)
        keys.append(bench.frame()[Codec.H264])
    at = [index for index, is_key in enumerate(keys) if is_key]
    assert at == [0, 12, 24, 36, 48]


def test_one_wish_is_one_keyframe():
    bench = Bench(Viewer())
    for _ in range(20):
        bench.frame()
    bench.encoders.want_keyframe(Codec.H264)
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
    assert bench.encoders.has_newcomer(bench.viewers)
    bench.frame()
    assert not bench.encoders.has_newcomer(bench.viewers)
    bench.viewers.append(Viewer())
    assert not bench.encoders.has_newcomer(bench.viewers)
    bench.now_s += 0.2
    assert bench.encoders.has_newcomer(bench.viewers)

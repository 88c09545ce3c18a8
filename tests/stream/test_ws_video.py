"""WebSocket video: the header byte by byte, and the window of unacknowledged frames."""

import struct

import pytest

from stream.rate_control import Feed
from stream.video_encoder import Codec, EncodedFrame
from stream.ws_video import WsVideo, pack_frame

pytestmark = pytest.mark.cpu

PERIOD_S = 1 / 24


def frame(frame_id, *, is_key=False, **changes):
    values = {
        "codec": Codec.H264,
        "data": b"picture",
        "is_key": is_key,
        "frame_id": frame_id,
        "act_seq": 412,
        "pts90": 3750,
        "epoch": 0,
        "created_ms": 1795997299702.5,
        "width_px": 256,
        "height_px": 160,
    }
    return EncodedFrame(**(values | changes))


class Client:
    """A viewer with a clock of its own, and what it got."""

    def __init__(self, codec=Codec.H264):
        self.now_s = 0.0
        self.got = []
        self.takes = True
        self.video = WsVideo(
            codec,
            Feed(role="player"),
            self._take,
            self._take_back,
            period_s=PERIOD_S,
            clock_s=lambda: self.now_s,
        )

    def _take_back(self):
        """Of what it was sent, the newest has not left."""
        self.got.pop()
        return 1

    def _take(self, data):
        if self.takes:
            self.got.append(data)
        return self.takes

    @property
    def ids(self):
        return [struct.unpack_from("<I", each, 4)[0] for each in self.got]


def test_header_fields_lie_where_the_protocol_says():
    data = pack_frame(frame(7, is_key=True, is_repeated=True, is_discontinuity=True))
    assert data[:4] == bytes([1, 1, 7, 0])
    assert struct.unpack_from("<III", data, 4) == (7, 412, 3750)
    assert struct.unpack_from("<d", data, 16) == (1795997299702.5,)
    assert struct.unpack_from("<HHI", data, 24) == (256, 160, 7)
    assert data[32:] == b"picture"


@pytest.mark.parametrize(
    ("codec", "number"), [(Codec.H264, 1), (Codec.VP8, 2), (Codec.JPEG, 3)], ids=str
)
def test_codec_numbers(codec, number):
    assert pack_frame(frame(1, codec=codec))[1] == number


@pytest.mark.parametrize(
    ("flag", "bit"), [("is_key", 1), ("is_discontinuity", 2), ("is_repeated", 4)]
)
def test_flags(flag, bit):
    assert pack_frame(frame(1, **{flag: True}))[2] == bit


def test_large_counters_wrap():
    data = pack_frame(frame(2**32 + 5, pts90=2**32 + 6, act_seq=2**32 + 7))
    assert struct.unpack_from("<III", data, 4) == (5, 7, 6)


def test_nothing_before_a_keyframe():
    client = Client()
    assert not client.video.deliver(frame(1))
    assert client.video.deliver(frame(2, is_key=True))
    assert client.ids == [2]


def test_window_of_two_closes_and_opens():
    client = Client()
    client.video.deliver(frame(1, is_key=True))
    assert client.video.has_room
    client.video.deliver(frame(2))
    assert not client.video.has_room
    client.video.acknowledge(1)
    assert client.video.has_room


def test_acknowledgement_covers_what_was_sent_before():
    client = Client()
    client.video.deliver(frame(1, is_key=True))
    client.video.deliver(frame(2))
    client.video.acknowledge(2)
    client.video.deliver(frame(3))
    assert client.video.has_room


def test_what_is_taken_back_needs_no_acknowledgement_and_leaves_a_gap():
    client = Client()
    client.video.deliver(frame(1, is_key=True))
    client.video.deliver(frame(2))
    client.video.discard()
    assert client.ids == [1]
    assert client.video.has_room
    assert not client.video.deliver(frame(3))
    assert client.video.deliver(frame(4, is_key=True))
    assert not client.video.has_room


def test_unknown_acknowledgement_changes_nothing():
    client = Client()
    client.video.deliver(frame(1, is_key=True))
    client.video.deliver(frame(2))
    client.video.acknowledge(99)
    assert not client.video.has_room


def test_window_grows_with_the_shortest_round_trip_up_to_eight():
    client = Client()
    client.video.deliver(frame(1, is_key=True))
    client.now_s = 2.5 * PERIOD_S
    client.video.acknowledge(1)
    assert client.video.window_frames == 1 + 3
    client.video.deliver(frame(2))
    client.now_s += 100.0
    client.video.acknowledge(2)
    assert client.video.window_frames == 1 + 3
    slow = Client()
    slow.video.deliver(frame(1, is_key=True))
    slow.now_s = 100.0
    slow.video.acknowledge(1)
    assert slow.video.window_frames == 8


def test_short_round_trip_leaves_the_window_at_two():
    client = Client()
    client.video.deliver(frame(1, is_key=True))
    client.now_s = PERIOD_S / 10
    client.video.acknowledge(1)
    assert client.video.window_frames == 2


def test_frame_that_the_socket_does_not_take_is_a_gap():
    client = Client()
    client.video.deliver(frame(1, is_key=True))
    client.takes = False
    assert not client.video.deliver(frame(2))
    client.takes = True
    assert not client.video.deliver(frame(3))
    assert client.video.deliver(frame(4, is_key=True))
    assert client.ids == [1, 4]


def test_repeated_frame_counts_once():
    client = Client()
    client.video.deliver(frame(1, is_key=True))
    client.video.deliver(frame(1, is_repeated=True))
    assert client.video.has_room

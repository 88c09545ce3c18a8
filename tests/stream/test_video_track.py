"""Track of encoded pictures: order, bound, keyframes first, end."""

import asyncio

import pytest
from aiortc.mediastreams import MediaStreamError

from stream.rate_control import Feed
from stream.video_encoder import Codec, EncodedFrame
from stream.video_track import QUEUE_FRAMES, VideoTrack

pytestmark = pytest.mark.cpu


def frame(frame_id, *, is_key=False, epoch=0):
    return EncodedFrame(
        codec=Codec.H264,
        data=bytes([frame_id]),
        is_key=is_key,
        frame_id=frame_id,
        act_seq=0,
        pts90=frame_id * 3750,
        epoch=epoch,
        created_ms=0.0,
        width_px=64,
        height_px=48,
    )


async def started_track(sent=None):
    """A track whose sender already waits for the first picture."""
    told = sent if sent is not None else []
    track = VideoTrack(
        Codec.H264,
        Feed(role="player"),
        on_started=lambda: None,
        on_sent=lambda pts90, send_ms: told.append(pts90),
    )
    first = asyncio.ensure_future(track.recv())
    await asyncio.sleep(0)
    return track, first


def test_nothing_is_taken_before_the_connection_asks():
    async def check():
        started = []
        track = VideoTrack(
            Codec.H264,
            Feed(role="player"),
            on_started=lambda: started.append(1),
            on_sent=lambda pts90, send_ms: None,
        )
        assert not track.has_room
        assert not track.deliver(frame(1, is_key=True))
        waiting = asyncio.ensure_future(track.recv())
        await asyncio.sleep(0)
        assert started == [1]
        assert track.has_room
        track.deliver(frame(2, is_key=True))
        assert bytes(await waiting) == b"\x02"

    asyncio.run(check())


def test_pictures_keep_order_and_time():
    async def check():
        track, first = await started_track()
        track.deliver(frame(1, is_key=True))
        track.deliver(frame(2))
        packets = [await first, await track.recv()]
        assert [(bytes(p), p.pts, p.time_base.denominator) for p in packets] == [
            (b"\x01", 3750, 90_000),
            (b"\x02", 7500, 90_000),
        ]

    asyncio.run(check())


def test_full_queue_has_no_room():
    async def check():
        track, first = await started_track()
        track.deliver(frame(1, is_key=True))
        await first
        for index in range(QUEUE_FRAMES):
            assert track.has_room
            track.deliver(frame(2 + index))
        assert not track.has_room

    asyncio.run(check())


def test_after_a_gap_a_keyframe_comes_first():
    async def check():
        track, first = await started_track()
        track.deliver(frame(1, is_key=True))
        await first
        track.gate.miss()
        assert not track.deliver(frame(3))
        assert track.deliver(frame(4, is_key=True))
        assert bytes(await track.recv()) == b"\x04"

    asyncio.run(check())


def test_older_epoch_leaves_the_queue():
    async def check():
        track, first = await started_track()
        track.deliver(frame(1, is_key=True))
        await first
        track.deliver(frame(2))
        track.discard_before(1)
        assert track.gate.is_waiting
        track.deliver(frame(3, is_key=True, epoch=1))
        assert bytes(await track.recv()) == b"\x03"

    asyncio.run(check())


def test_sent_is_told_when_the_next_is_asked_for():
    async def check():
        sent = []
        track, first = await started_track(sent)
        track.deliver(frame(1, is_key=True))
        await first
        assert sent == []
        track.deliver(frame(2))
        await track.recv()
        assert sent == [3750]

    asyncio.run(check())


def test_stop_ends_a_waiting_sender():
    async def check():
        track, first = await started_track()
        track.stop()
        with pytest.raises(MediaStreamError):
            await first
        assert not track.has_room

    asyncio.run(check())

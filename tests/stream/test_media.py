"""Media of a session: epochs, bounds, sharing, slow and late viewers, offers that overlap."""

import asyncio
import gc
import threading
from pathlib import Path

import av
import numpy as np
import pytest
from aiortc import RTCPeerConnection, RTCSessionDescription

from stream.peer import OfferError
from stream.recording import export_mp4
from stream.video_encoder import Codec
from tests.stream.media_bench import Reader, new_offer, run, wait_for

pytestmark = pytest.mark.cpu

CYCLES = 50


def test_every_frame_reaches_a_viewer_in_order():
    async def check(bench):
        reader = Reader(bench, "a")
        bench.publish(34)
        await bench.drain()
        assert reader.ids == list(range(1, 35))
        assert reader.keys == [1]

    run(check)


def test_stream_can_be_decoded():
    async def check(bench):
        reader = Reader(bench, "a")
        bench.publish(20)
        await bench.drain()
        decoder = av.CodecContext.create("h264", "r")
        greys = [
            frame.to_ndarray(format="gray").mean()
            for each in reader.got
            for frame in decoder.decode(av.Packet(each[32:]))
        ]
        assert len(greys) == 20
        assert np.all(np.diff(greys) > 0)

    run(check)


def test_chunk_is_told_before_its_frames_and_once():
    async def check(bench):
        order = []
        bench.log.on_chunk = lambda notice: order.append(("chunk", notice.first))
        bench.media.audience.add_ws(
            "a", Codec.JPEG, lambda data: order.append(("frame", data[4])) or True, lambda: 0
        )
        bench.publish(1)
        await bench.drain()
        assert order == [("chunk", 1), ("frame", 1)]

    run(check)


def test_one_encode_serves_all_viewers_of_a_codec():
    async def check(bench):
        readers = [Reader(bench, str(i)) for i in range(4)]
        bench.publish(10)
        await bench.drain()
        assert [reader.ids for reader in readers] == [list(range(1, 11))] * 4
        assert bench.log.encoded == [Codec.H264] * 10

    run(check)


def test_nobody_watches_nothing_is_encoded():
    async def check(bench):
        bench.publish(10)
        await bench.drain()
        assert bench.log.encoded == []
        assert bench.media.stats().shown_count == 10

    run(check)


def test_full_queue_drops_its_oldest():
    async def check(bench):
        reader = Reader(bench, "a", Codec.JPEG)
        bench.publish(50)
        assert bench.released == list(range(1, 17))
        await bench.drain()
        assert reader.ids == list(range(17, 51))
        assert bench.media.stats().overflow_count == 16

    run(check)


def test_no_frame_of_an_older_epoch_leaves():
    async def check(bench):
        reader = Reader(bench, "a")
        bench.publish(20)
        await wait_for(lambda: len(reader.got) >= 3)
        bench.media.set_epoch(1)
        seen = len(reader.got)
        bench.publish(3)
        bench.publish(5, epoch=1)
        await bench.drain()
        assert reader.ids[seen:] == [24, 25, 26, 27, 28]
        assert reader.got[seen][2] & 2  # discontinuity

    run(check, join_keyframe_min_s=0.0)


def test_what_lies_in_a_socket_is_taken_back_with_its_epoch():
    async def check(bench):
        lying = []
        bench.media.audience.add_ws(
            "a",
            Codec.H264,
            lambda data: lying.append(data[4]) or True,
            lambda: [len(lying), lying.clear()][0],
        )
        bench.publish(2)
        await bench.drain()
        assert lying == [1, 2]
        bench.media.set_epoch(1)
        bench.publish(2, epoch=1)  # the window of two is open again
        await bench.drain()
        assert lying == [3, 4]

    run(check, join_keyframe_min_s=0.0)


def test_ten_resets_at_once_equal_one():
    async def check(bench):
        reader = Reader(bench, "a")
        bench.publish(3)
        await bench.drain()
        for epoch in range(1, 11):
            bench.publish(1, epoch=epoch)
            bench.media.set_epoch(epoch)
        await bench.drain()
        assert reader.ids == [1, 2, 3, 13]

    run(check, join_keyframe_min_s=0.0)


def test_late_viewer_gets_a_keyframe_of_the_last_picture_at_once():
    async def check(bench):
        Reader(bench, "a")
        bench.publish(3)
        await bench.drain()
        await asyncio.sleep(0.2)
        late = Reader(bench, "b")
        await wait_for(lambda: late.got)
        assert (late.ids, late.keys, late.got[0][2] & 4) == ([3], [3], 4)

    run(check)


def test_slow_viewer_gets_few_frames_and_others_all():
    async def check(bench):
        slow = Reader(bench, "slow", acknowledges=False)
        fast = Reader(bench, "fast")
        bench.publish(30)
        await bench.drain()
        assert slow.ids == [1, 2]
        assert fast.ids == list(range(1, 31))
        assert bench.media.audience.dropped_count("slow") == 28
        assert bench.media.audience.dropped_count("fast") == 0

    run(check)


def test_viewer_that_stalled_goes_on_with_the_newest_keyframe():
    async def check(bench):
        slow = Reader(bench, "slow", acknowledges=False)
        Reader(bench, "fast")
        bench.publish(30)
        await bench.drain()
        slow.acknowledges = True
        bench.media.audience.acknowledge("slow", 2)
        bench.publish(5)
        await bench.drain()
        assert slow.ids[2:] == [31, 32, 33, 34, 35]
        assert slow.keys == [1, 31]

    run(check, keyframe_min_s=0.0)


def test_lone_viewer_that_stalled_needs_no_keyframe():
    async def check(bench):
        slow = Reader(bench, "slow", acknowledges=False)
        bench.publish(10)
        await bench.drain()
        assert len(bench.log.encoded) == 2
        slow.acknowledges = True
        bench.media.audience.acknowledge("slow", 2)
        bench.publish(2)
        await bench.drain()
        assert (slow.ids, slow.keys) == ([1, 2, 11, 12], [1])

    run(check)


def test_last_picture_is_repeated_while_nothing_comes():
    async def check(bench):
        reader = Reader(bench, "a")
        bench.publish(1)
        await wait_for(lambda: len(reader.got) >= 3)
        assert set(reader.ids) == {1}
        assert [each[2] & 4 for each in reader.got[:3]] == [0, 4, 4]

    run(check, repeat_s=0.05)


def test_slow_generator_slows_playback():
    async def check(bench):
        bench.media.note_chunk(17 * 12.0, 17)
        assert bench.media.stats().period_s == pytest.approx(0.012)

    run(check)


def test_recording_holds_what_was_shown(tmp_path):
    async def check(bench):
        bench.media.record(tmp_path / "live.ts")
        bench.publish(20)
        await wait_for(lambda: bench.log.delivered.count(("recording", True)) == 20)
        await bench.media.close()
        assert export_mp4(tmp_path / "live.ts", tmp_path / "live.mp4") == 20

    run(check)


def test_two_offers_at_once_leave_the_newer():
    async def check(bench):
        first, second = await new_offer(), await new_offer()
        results = await asyncio.gather(
            bench.media.audience.add_webrtc("a", 1, first.localDescription.sdp),
            bench.media.audience.add_webrtc("a", 2, second.localDescription.sdp),
            return_exceptions=True,
        )
        assert isinstance(results[0], OfferError)
        await second.setRemoteDescription(RTCSessionDescription(results[1].sdp, "answer"))
        await wait_for(lambda: ("a", 2, "connected") in bench.log.states)
        await first.close()
        await second.close()

    run(check)


def test_bad_second_offer_leaves_the_viewer_alone():
    async def check(bench):
        browser = await new_offer()
        answer = await bench.media.audience.add_webrtc("a", 1, browser.localDescription.sdp)
        await browser.setRemoteDescription(RTCSessionDescription(answer.sdp, "answer"))
        await wait_for(lambda: bench.media.stats().webrtc_viewers == 1)
        for gen in (1, 2, 3):
            with pytest.raises(OfferError):
                await bench.media.audience.add_webrtc("a", gen, "v=0\r\nnonsense")
        bench.publish(10)
        await bench.drain()
        stats = bench.media.stats()
        assert (stats.webrtc_viewers, stats.missed_count) == (1, 0)
        assert len(bench.log.encoded) == 10
        await browser.close()

    run(check)


def test_new_connection_replaces_the_old_when_it_stands():
    async def check(bench):
        browsers = [await new_offer(), await new_offer()]
        for gen, browser in enumerate(browsers, 1):
            answer = await bench.media.audience.add_webrtc("a", gen, browser.localDescription.sdp)
            assert ("a", 1, "closed") not in bench.log.states
            await browser.setRemoteDescription(RTCSessionDescription(answer.sdp, "answer"))
            await wait_for(lambda gen=gen: ("a", gen, "connected") in bench.log.states)
        await wait_for(lambda: ("a", 1, "closed") in bench.log.states)
        for browser in browsers:
            await browser.close()

    run(check)


def test_viewer_who_left_before_the_answer_leaves_nothing():
    async def check(bench):
        browser = await new_offer()
        answering = asyncio.ensure_future(
            bench.media.audience.add_webrtc("a", 1, browser.localDescription.sdp)
        )
        await asyncio.sleep(0)
        bench.media.audience.remove("a")
        with pytest.raises(OfferError):
            await answering
        await browser.close()

    run(check)


def test_cancelled_offer_leaves_nothing():
    async def check(bench):
        browser = await new_offer()
        answering = asyncio.ensure_future(
            bench.media.audience.add_webrtc("a", 1, browser.localDescription.sdp)
        )
        await asyncio.sleep(0)
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        await browser.close()

    run(check)


def test_websocket_takes_over_from_webrtc():
    async def check(bench):
        browser = await new_offer()
        answer = await bench.media.audience.add_webrtc("a", 1, browser.localDescription.sdp)
        await browser.setRemoteDescription(RTCSessionDescription(answer.sdp, "answer"))
        await wait_for(lambda: bench.media.stats().webrtc_viewers == 1)
        reader = Reader(bench, "a")
        bench.publish(3)
        await bench.drain()
        assert reader.ids == [1, 2, 3]
        assert bench.media.stats().webrtc_viewers == 0
        await browser.close()

    run(check)


def test_close_twice_releases_what_waits():
    async def check(bench):
        Reader(bench, "a")
        bench.publish(20)
        await bench.media.close()
        await bench.media.close()
        bench.publish(1)

    run(check)


def test_keyframes_are_told_with_their_cause():
    async def check(bench):
        Reader(bench, "a")
        bench.publish(1)
        await wait_for(lambda: bench.log.encoded)
        bench.media.audience.request_keyframe("a")
        await wait_for(lambda: len(bench.log.keys) == 2)
        bench.media.set_epoch(1)
        bench.publish(1, epoch=1)
        await wait_for(lambda: len(bench.log.keys) == 3)
        assert bench.log.keys == ["join", "client", "reset"]

    run(check, keyframe_min_s=0.0)


def test_pacing_that_breaks_is_told_and_closes_cleanly():
    async def check(bench):
        failures = []
        bench.log.on_failed = lambda: failures.append(1)
        bench.log.on_chunk = lambda notice: 1 / 0
        bench.publish(1)
        await wait_for(lambda: failures)

    run(check)


def test_coming_and_going_leaves_no_sockets_threads_or_connections():
    async def check(bench):
        counts = []
        for gen in range(CYCLES):
            browser = await new_offer()
            answer = await bench.media.audience.add_webrtc("a", gen, browser.localDescription.sdp)
            await browser.setRemoteDescription(RTCSessionDescription(answer.sdp, "answer"))
            await wait_for(lambda gen=gen: ("a", gen, "connected") in bench.log.states)
            bench.publish(1)
            await bench.drain()
            bench.media.audience.remove("a")
            await browser.close()
            await wait_for(lambda gen=gen: ("a", gen, "closed") in bench.log.states)
            await asyncio.sleep(0.05)
            files = len(list(Path("/proc/self/fd").iterdir()))
            counts.append((files, threading.active_count(), len(asyncio.all_tasks())))
        assert counts[-1] == counts[1]
        del browser
        gc.collect()
        alive = [each for each in gc.get_objects() if type(each) is RTCPeerConnection]
        assert len(alive) <= 1  # the last one's task may not be forgotten yet

    run(check)

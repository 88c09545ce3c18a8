"""Media over bad links: loss, long gaps, slow spectators, connections that send nothing."""

import asyncio
import time

import pytest

from stream import aiortc_access
from stream.aiortc_access import PLAYOUT_DELAY_URI
from stream.video_encoder import Codec
from tests import tolerances
from tests.stream.media_bench import Reader, run, wait_for
from tests.stream.rtc_browser import Dropper, RtcBrowser

pytestmark = pytest.mark.cpu

FPS = 60.0


async def watch(bench, name, **options):
    """A WebRTC viewer that is connected, and the sender of its video."""
    browser = RtcBrowser()
    answer = await bench.media.audience.add_webrtc(name, 1, await browser.offer(), **options)
    await browser.accept(answer)
    await wait_for(lambda: (name, 1, "connected") in bench.log.states)
    return browser, bench.media.audience._peers[name, 1]._sender


async def feed(bench, seconds):
    """Publish as a generator does that keeps up."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if bench.media.stats().queue_frames < 17:
            bench.publish(17)
        await asyncio.sleep(0.02)
    await bench.drain()


@pytest.mark.parametrize("share", sorted(tolerances.LOSSY_LINK_SHARE))
def test_frames_shown_over_a_lossy_link(share):
    async def check(bench):
        browser, sender = await watch(bench, "a")
        drops = Dropper(sender, share=share)
        await feed(bench, 5.0)
        await asyncio.sleep(0.5)
        assert drops.lost_count
        assert len(browser.frames) >= tolerances.LOSSY_LINK_SHARE[share] * bench.count
        await browser.close()

    run(check, fps=FPS)


def test_late_viewer_sees_the_picture_soon():
    async def check(bench):
        Reader(bench, "a")
        feeding = asyncio.ensure_future(feed(bench, 3.0))
        await asyncio.sleep(0.5)
        browser = RtcBrowser()
        offer = await browser.offer()
        begin_s = time.monotonic()
        await browser.accept(await bench.media.audience.add_webrtc("b", 1, offer))
        await wait_for(lambda: browser.frames)
        assert browser.shown_s[0] - begin_s <= tolerances.LATE_VIEWER_S
        await feeding
        await browser.close()

    run(check, fps=FPS)


def test_slow_spectator_costs_the_player_nothing():
    async def check(bench):
        player = Reader(bench, "player")
        slow = Reader(bench, "slow", acknowledges=False, role="spectator")
        await feed(bench, 4.5)
        assert bench.media.audience._ws["slow"].feed.is_half
        assert bench.media.stats().bitrate_bps == 2_000_000
        assert player.ids == list(range(1, bench.count + 1))
        assert player.keys == [1]
        slow.acknowledges = True
        bench.media.audience.acknowledge("slow", slow.ids[-1])
        seen = len(slow.got)
        await feed(bench, 0.7)
        assert slow.keys[1] == slow.ids[seen]
        assert player.keys == [1]

    run(check, fps=FPS)


def test_connection_that_sends_nothing_gets_a_keyframe_then_a_request_for_a_new_one():
    async def check(bench):
        told = []
        bench.log.on_stalled = lambda viewer_id, gen: told.append((viewer_id, gen))
        browser, _ = await watch(bench, "a")
        audience = bench.media.audience
        for second in range(11):
            audience.note_frame(1_000.0 + second)
        assert told == [("a", 1)]
        bench.publish(1)
        await wait_for(lambda: bench.log.keys)
        assert bench.log.keys == ["watchdog"]
        await browser.close()

    run(check)


@pytest.mark.parametrize(("role", "value"), [("player", 0), ("spectator", 50)])
def test_spectators_may_hold_a_picture_and_players_may_not(role, value):
    async def check(bench):
        browser = RtcBrowser()
        lines = (await browser.offer()).replace("\r\n", "\n").split("\n")
        at = next(i for i, line in enumerate(lines) if line.startswith("a=extmap:"))
        lines.insert(at, f"a=extmap:9 {PLAYOUT_DELAY_URI}")
        answer = await bench.media.audience.add_webrtc("a", 1, "\r\n".join(lines), role=role)
        assert PLAYOUT_DELAY_URI in answer.sdp
        sender = bench.media.audience._peers["a", 1]._sender
        header_map = sender.__dict__[aiortc_access._EXTENSION_MAP]
        assert header_map._value == value.to_bytes(3)
        await browser.close()

    run(check)


def test_codec_of_the_offer_can_be_restricted():
    async def check(bench):
        browser = RtcBrowser()
        offer = await browser.offer()
        answer = await bench.media.audience.add_webrtc("a", 1, offer, codecs=(Codec.VP8,))
        assert answer.codec is Codec.VP8
        await browser.close()

    run(check)

"""WebRTC peers on 127.0.0.1: answers, codecs, origin of times, bad offers, clean ends."""

import asyncio
import re
import socket

import numpy as np
import pytest
from aiortc.rtp import (
    RTCP_PSFB_APP,
    RtcpPsfbPacket,
    RtpPacket,
    pack_remb_fci,
    unpack_header_extensions,
)
from aiortc.sdp import SessionDescription

from stream import aiortc_access
from stream.peer import IceSettings, OfferError, Peer, PeerEvents
from stream.protocol import CANDIDATE_LIMIT, SDP_LIMIT
from stream.rate_control import Feed
from stream.video_encoder import Codec, EncodedFrame, VideoEncoder
from tests.stream.rtc_browser import HOSTS, Dropper, RtcBrowser

pytestmark = pytest.mark.cpu


class Server(PeerEvents):
    """A peer of ours, what it told, and an encoder to feed it."""

    def __init__(self, playout_ms=(0, 0), hosts=HOSTS, **settings):
        self.states, self.origins, self.acts = [], [], []
        self.keyframe, self.started = asyncio.Event(), asyncio.Event()
        self.peer = Peer(
            IceSettings(hosts=hosts, **settings),
            Feed(role="player"),
            self,
            playout_ms=playout_ms,
        )
        self._encoder = None

    def on_started(self):
        self.started.set()

    def on_keyframe(self, peer):
        self.keyframe.set()

    def on_origin(self, origin):
        self.origins.append(origin)

    def on_state(self, state):
        self.states.append(state)

    def on_act(self, text):
        self.acts.append(text)

    def send(self, index):
        codec = self.peer.track.codec
        if self._encoder is None:
            self._encoder = VideoEncoder(
                codec, width_px=64, height_px=48, fps=24, bitrate_bps=1_000_000
            )
        pixels = np.full((48, 64, 3), 90, np.uint8)
        made = self._encoder.encode(pixels, pts90=index * 3750, is_key=False)
        return self.peer.track.deliver(
            EncodedFrame(
                codec=codec,
                data=made.data,
                is_key=made.is_key,
                frame_id=index + 1,
                act_seq=0,
                pts90=index * 3750,
                epoch=0,
                created_ms=0.0,
                width_px=64,
                height_px=48,
            )
        )


async def connected(codecs=(Codec.H264, Codec.VP8), *, hosts=HOSTS):
    browser, server = RtcBrowser(hosts), Server(hosts=hosts)
    answer = await server.peer.answer(await browser.offer(), codecs)
    await browser.accept(answer)
    async with asyncio.timeout(10):
        await server.started.wait()
    return browser, server, answer


def run(check):
    """Run a coroutine function and see that no task outlives it."""

    async def guarded():
        await check()
        await asyncio.sleep(0.05)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left

    asyncio.run(guarded())


@pytest.mark.parametrize("codec", [Codec.H264, Codec.VP8], ids=str)
def test_pictures_arrive_with_the_wanted_codec(codec):
    async def check():
        browser, server, answer = await connected((codec,))
        assert answer.codec is codec
        for index in range(8):
            server.send(index)
            await asyncio.sleep(0.02)
        async with asyncio.timeout(10):
            await browser.has_frame.wait()
        frame = browser.frames[0]
        assert (frame.width, frame.height) == (64, 48)
        assert server.states == ["connected"]
        await server.peer.close()
        await browser.close()

    run(check)


def test_origin_joins_rtp_times_to_ours():
    async def check():
        browser, server, _ = await connected()
        seen = []
        receiver = browser.pc.getReceivers()[0]
        handle = receiver._handle_rtp_packet

        async def spy(packet, *args, **kwargs):
            seen.append(packet.timestamp)
            await handle(packet, *args, **kwargs)

        receiver._handle_rtp_packet = spy
        for index in range(3):
            server.send(index)
            await asyncio.sleep(0.05)
        assert len(server.origins) == 1
        times = dict.fromkeys(seen)
        assert list(times) == [(server.origins[0] + i * 3750) % 2**32 for i in range(3)]
        await server.peer.close()
        await browser.close()

    run(check)


def test_lost_picture_asks_for_a_keyframe():
    async def check():
        browser, server, _ = await connected()
        server.send(0)
        async with asyncio.timeout(10):
            await browser.ask_for_keyframe()
            await server.keyframe.wait()
        await server.peer.close()
        await browser.close()

    run(check)


def test_h264_is_preferred_and_constrained_baseline_first():
    async def check():
        browser, server, answer = await connected()
        assert answer.codec is Codec.H264
        codecs = SessionDescription.parse(answer.sdp).media[0].rtp.codecs
        assert codecs[0].parameters["profile-level-id"] == "42e01f"
        await server.peer.close()
        await browser.close()

    run(check)


def test_playout_delay_is_negotiated_and_sent():
    async def check():
        browser, server = RtcBrowser(), Server(playout_ms=(0, 500))
        lines = (await browser.offer()).replace("\r\n", "\n").split("\n")
        at = next(i for i, line in enumerate(lines) if line.startswith("a=extmap:"))
        lines.insert(at, f"a=extmap:9 {aiortc_access.PLAYOUT_DELAY_URI}")
        answer = await server.peer.answer("\r\n".join(lines), (Codec.H264,))
        assert f"a=extmap:9 {aiortc_access.PLAYOUT_DELAY_URI}" in answer.sdp
        sent = []
        await browser.accept(answer)
        async with asyncio.timeout(10):
            await server.started.wait()
        transport = server.peer._sender.transport
        send = transport._send_rtp

        async def spy(data):
            sent.append(data)
            await send(data)

        transport._send_rtp = spy
        server.send(0)
        await asyncio.sleep(0.1)
        packet = next(each for each in sent if each[1] & 0x7F >= 96)
        assert RtpPacket.parse(packet).ssrc == server.peer._sender._ssrc
        profile, length = int.from_bytes(packet[12:14]), int.from_bytes(packet[14:16]) * 4
        extensions = dict(unpack_header_extensions(profile, packet[16 : 16 + length]))
        assert extensions[9] == (50).to_bytes(3)
        await server.peer.close()
        await browser.close()

    run(check)


def test_candidates_keep_to_hosts_and_ports():
    async def check():
        browser, server = RtcBrowser(), Server(udp_ports=(47_310, 47_319))
        answer = await server.peer.answer(await browser.offer(), (Codec.H264,))
        found = SessionDescription.parse(answer.sdp).media[0].ice_candidates
        assert [each.ip for each in found] == ["127.0.0.1"]
        assert 47_310 <= found[0].port <= 47_319
        await server.peer.close()
        await browser.close()

    run(check)


def has_ipv6_loopback():
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no ::1")
def test_connection_over_ipv6():
    async def check():
        browser, server, answer = await connected(hosts=("::1",))
        found = SessionDescription.parse(answer.sdp).media[0].ice_candidates
        assert [each.ip for each in found] == ["::1"]
        await server.peer.close()
        await browser.close()

    run(check)


def test_no_free_port_is_said_at_once():
    async def check():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            browser, server = RtcBrowser(), Server(udp_ports=(port, port))
            with pytest.raises(OfferError) as caught:
                await server.peer.answer(await browser.offer(), (Codec.H264,))
        assert caught.value.code == "RTC_FAILED"
        await server.peer.close()
        await browser.close()

    run(check)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_actions_come_by_the_data_channel():
    async def check():
        browser, server = RtcBrowser(), Server()
        channel = browser.pc.createDataChannel("act", ordered=False, maxRetransmits=0)
        channel.on("open", lambda: channel.send('{"t":"act"}'))
        await browser.accept(await server.peer.answer(await browser.offer(), (Codec.H264,)))
        await until(lambda: server.acts)
        assert server.acts == ['{"t":"act"}']
        await server.peer.close()
        await browser.close()

    run(check)


@pytest.mark.parametrize("label", ["act", "chat"])
def test_other_data_channels_are_closed(label):
    async def check():
        browser, server = RtcBrowser(), Server()
        first = browser.pc.createDataChannel("act", ordered=False, maxRetransmits=0)
        await browser.accept(await server.peer.answer(await browser.offer(), (Codec.H264,)))
        await until(lambda: first.readyState == "open")
        other = browser.pc.createDataChannel(label)
        await until(lambda: other.readyState == "closed")
        assert first.readyState == "open"
        await server.peer.close()
        await browser.close()

    run(check)


def test_receiver_tells_round_trip_and_what_its_link_carries():
    async def check():
        browser, server, _ = await connected()
        link = server.peer.track.feed.link
        ssrc = SessionDescription.parse(browser.pc.remoteDescription.sdp).media[0].ssrc[0].ssrc
        report = RtcpPsfbPacket(
            fmt=RTCP_PSFB_APP, ssrc=1, media_ssrc=0, fci=pack_remb_fci(1_500_000, [ssrc])
        )
        await browser.pc.getReceivers()[0]._send_rtcp(report)
        index = 0
        while link.rtt_s is None or link.remb_bps is None:
            assert index < 500
            server.send(index)
            index += 1
            await asyncio.sleep(0.02)
        assert link.remb_bps > 0
        assert 0 <= link.rtt_s < 1
        await server.peer.close()
        await browser.close()

    run(check)


@pytest.mark.parametrize(("lost", "is_told"), [(3, False), (200, True)])
def test_loss_beyond_repair_asks_for_a_keyframe(lost, is_told):
    async def check():
        browser, server, _ = await connected()
        drops = Dropper(server.peer._sender)
        server.send(0)
        await asyncio.sleep(0.05)
        drops.count_left = lost
        for index in range(1, lost + 2):
            server.send(index)
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.3)
        assert server.keyframe.is_set() == is_told
        await server.peer.close()
        await browser.close()

    run(check)


def test_connection_that_the_browser_ends_is_closed():
    async def check():
        browser, server, _ = await connected()
        server.send(0)
        await browser.close()
        index = 1
        while server.states == ["connected"]:
            assert index < 500
            server.send(index)
            index += 1
            await asyncio.sleep(0.02)
        assert server.states == ["connected", "closed"]
        await server.peer.close()

    run(check)


BAD_OFFERS = {
    "empty": lambda sdp: "",
    "words": lambda sdp: "nonsense\r\nv=x\r\n",
    "half": lambda sdp: sdp[: len(sdp) // 2],
    "no ice": lambda sdp: sdp.replace("a=ice-ufrag", "a=x-ufrag"),
    "no fingerprint": lambda sdp: sdp.replace("a=fingerprint", "a=x-fingerprint"),
    "two videos": lambda sdp: sdp + sdp[sdp.index("m=video") :],
    "audio": lambda sdp: sdp.replace("m=video", "m=audio"),
    "too long": lambda sdp: sdp + "a=x\r\n" * SDP_LIMIT,
    "candidates": lambda sdp: (
        sdp + "a=candidate:1 1 udp 1 127.0.0.1 9 typ host\r\n" * (CANDIDATE_LIMIT + 1)
    ),
    "sections run together": lambda sdp: re.sub("m=application.*\r\n", "", sdp),
    "no codec": lambda sdp: sdp.replace("VP8/90000", "XX/90000").replace("H264/90000", "YY/90000"),
}


@pytest.mark.parametrize("name", BAD_OFFERS)
def test_bad_offer_is_refused_and_freed(name):
    async def check():
        browser, server = RtcBrowser(), Server()
        browser.pc.createDataChannel("act")
        offer = BAD_OFFERS[name](await browser.offer())
        with pytest.raises(OfferError) as caught:
            await server.peer.answer(offer, (Codec.H264, Codec.VP8))
        wanted = {"too long": "TOO_LARGE", "no codec": "RTC_CODEC"}.get(name, "BAD_MESSAGE")
        assert caught.value.code == wanted
        await server.peer.close()
        assert server.states == ["closed"]
        await browser.close()

    run(check)


def test_names_of_the_local_network_do_not_delay_the_answer():
    async def check():
        browser, server = RtcBrowser(), Server()
        offer = await browser.offer()
        offer = offer.replace(" 127.0.0.1 ", " 3b0c7a52-7a0b-4d2c-9d0f-0d1b7f2f1a11.local ")
        answer = await server.peer.answer(offer, (Codec.H264,))
        await browser.accept(answer)
        async with asyncio.timeout(5):
            await server.started.wait()
        await server.peer.close()
        await browser.close()

    run(check)


def test_bad_candidate_is_refused():
    async def check():
        browser, server, _ = await connected()
        with pytest.raises(OfferError) as caught:
            await server.peer.add_candidate("nonsense", "0", 0)
        assert caught.value.code == "BAD_MESSAGE"
        await server.peer.close()
        await browser.close()

    run(check)


def test_close_twice_and_before_anything():
    async def check():
        server = Server()
        await server.peer.close()
        await server.peer.close()
        assert server.states == ["closed"]

    run(check)

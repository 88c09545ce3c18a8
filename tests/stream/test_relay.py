"""Video through a TURN server over TCP, the one way that a strict firewall leaves."""

import socket
import time

import pytest
from aiortc import RTCConfiguration, RTCIceServer
from aiortc.rtcconfiguration import RTCIceTransportPolicy

from stream.peer import IceServerSettings, IceSettings
from tests import tolerances
from tests.stream.media_bench import run, wait_for
from tests.stream.rtc_browser import RtcBrowser
from tests.stream.turn_relay import needs_coturn, turn_relay

pytestmark = [pytest.mark.cpu, needs_coturn]


@pytest.fixture
def relay(tmp_path):
    """A relay on this machine."""
    with turn_relay(tmp_path) as relay:
        yield relay


def relayed_browser(relay):
    user = relay.user()
    server = RTCIceServer(urls=list(user.urls), username=user.username, credential=user.credential)
    policy = RTCIceTransportPolicy.RELAY
    return RtcBrowser(
        hosts=None,
        configuration=RTCConfiguration(iceServers=[server], iceTransportPolicy=policy),
    )


def test_first_frame_through_the_relay(relay):
    async def check(bench):
        bench.publish(1)
        begin_s = time.monotonic()
        browser = relayed_browser(relay)
        offer = await browser.offer()
        assert " typ relay" in offer
        assert " typ host" not in offer
        await browser.accept(await bench.media.audience.add_webrtc("a", 1, offer))
        await wait_for(lambda: browser.frames)
        assert browser.shown_s[0] - begin_s <= tolerances.RELAY_FIRST_FRAME_S
        await browser.close()

    run(check, repeat_s=0.1)


def test_server_offers_its_own_relay_beside_its_address(relay):
    async def check(bench):
        browser = RtcBrowser()
        answer = await bench.media.audience.add_webrtc("a", 1, await browser.offer())
        assert " typ relay" in answer.sdp
        assert " typ host" in answer.sdp
        await browser.accept(answer)
        await wait_for(lambda: ("a", 1, "connected") in bench.log.states)
        await browser.close()

    user = relay.user()
    server = IceServerSettings(urls=user.urls, username=user.username, credential=user.credential)
    run(check, ice=IceSettings(hosts=("127.0.0.1",), servers=(server,)))


def test_relay_that_does_not_answer_keeps_nobody_waiting():
    async def check(bench):
        browser = RtcBrowser()
        answer = await bench.media.audience.add_webrtc("a", 1, await browser.offer())
        await browser.accept(answer)
        await wait_for(lambda: ("a", 1, "connected") in bench.log.states)
        await browser.close()

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"turn:127.0.0.1:{deaf.getsockname()[1]}?transport=tcp"
        server = IceServerSettings(urls=(url,), username="visitor", credential="secret")
        run(check, ice=IceSettings(hosts=("127.0.0.1",), servers=(server,)))

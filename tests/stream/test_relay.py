"""Video through a TURN server over TCP, the one way that a strict firewall leaves."""

import shutil
import socket
import subprocess
import time

import pytest
from aiortc import RTCConfiguration, RTCIceServer
from aiortc.rtcconfiguration import RTCIceTransportPolicy

from stream.ice_servers import parse_ice_server, with_user
from stream.peer import IceServerSettings, IceSettings
from tests import tolerances
from tests.stream.media_bench import run, wait_for
from tests.stream.rtc_browser import RtcBrowser

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(shutil.which("turnserver") is None, reason="coturn is not installed"),
]

SECRET = "north"


@pytest.fixture
def turn_url(tmp_path):
    """URL of a relay on this machine that takes TCP only."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["turnserver", "-n", "--no-udp", "--no-tls", "--no-dtls", "--no-cli"]
    command += ["--listening-ip=127.0.0.1", f"--listening-port={port}", "--relay-ip=127.0.0.1"]
    command += ["--use-auth-secret", f"--static-auth-secret={SECRET}", "--realm=test"]
    command += ["--allow-loopback-peers", f"--pidfile={tmp_path / 'turn.pid'}"]
    command += ["--log-file=stdout", "--no-stdout-log", f"--userdb={tmp_path / 'turn.db'}"]
    relay = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    try:
        end_s = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 0.2).close()
                break
            except OSError:
                assert time.monotonic() < end_s
                time.sleep(0.05)
        yield f"turn:127.0.0.1:{port}?transport=tcp"
    finally:
        relay.terminate()
        relay.wait(10)


def relayed_browser(turn_url):
    found = with_user(parse_ice_server(turn_url), SECRET, time.time() + 60)
    server = RTCIceServer(
        urls=list(found.urls), username=found.username, credential=found.credential
    )
    policy = RTCIceTransportPolicy.RELAY
    return RtcBrowser(
        hosts=None,
        configuration=RTCConfiguration(iceServers=[server], iceTransportPolicy=policy),
    )


def test_first_frame_through_the_relay(turn_url):
    async def check(bench):
        bench.publish(1)
        begin_s = time.monotonic()
        browser = relayed_browser(turn_url)
        offer = await browser.offer()
        assert " typ relay" in offer
        assert " typ host" not in offer
        await browser.accept(await bench.media.audience.add_webrtc("a", 1, offer))
        await wait_for(lambda: browser.frames)
        assert browser.shown_s[0] - begin_s <= tolerances.RELAY_FIRST_FRAME_S
        await browser.close()

    run(check, repeat_s=0.1)


def test_server_offers_its_own_relay_beside_its_address(turn_url):
    async def check(bench):
        browser = RtcBrowser()
        answer = await bench.media.audience.add_webrtc("a", 1, await browser.offer())
        assert " typ relay" in answer.sdp
        assert " typ host" in answer.sdp
        await browser.accept(answer)
        await wait_for(lambda: ("a", 1, "connected") in bench.log.states)
        await browser.close()

    user = with_user(parse_ice_server(turn_url), SECRET, time.time() + 60)
    server = IceServerSettings(urls=(turn_url,), username=user.username, credential=user.credential)
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

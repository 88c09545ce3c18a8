"""Video and actions of the live service over both transports; the world is painted."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from stream.ws_video import HEADER
from tests import tolerances
from tests.stream.live_service import Client, Service, running
from tests.stream.media_bench import wait_for
from tests.stream.rtc_browser import RtcBrowser

pytestmark = pytest.mark.cpu

STALL_S = 6.0


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service whose world ends soon after its player left."""
    with running(grace_s=0.5) as service:
        yield service


@pytest.fixture
def join(service: Service) -> Iterator[Callable[..., Client]]:
    """Opens clients that are gone after the test, and their sessions with them."""
    clients: list[Client] = []

    def hello(**body: str) -> Client:
        clients.append(Client.hello(service, **body))
        return clients[-1]

    yield hello
    for client in clients:
        client.close()
    service.wait(
        lambda: all(seat.is_free for seat in service.live.workers.seats), "the seat is free"
    )


def play(join: Callable[..., Client]) -> Client:
    """A player whose world is there."""
    client = join()
    client.until("state", state="READY")
    return client


def metric(service: Service, name: str) -> float:
    """Value of one line of the metrics, 0 where there is none."""
    text = service.live.metrics_text().decode()
    found = re.search(rf"^worldstream_{re.escape(name)} (.+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def connect(client: Client, browser: RtcBrowser) -> None:
    """Let a browser have its video by WebRTC."""
    client.send(t="media", transport="webrtc")
    client.send(t="rtc.offer", gen=1, sdp=await browser.offer())
    answer = await asyncio.to_thread(client.until, "rtc.answer")

    class Answer:
        sdp = answer["sdp"]

    await browser.accept(Answer)


def test_actions_by_data_channel_are_those_of_the_socket(
    service: Service, join: Callable[..., Client]
) -> None:
    async def check(client: Client) -> None:
        browser = RtcBrowser()
        channel = browser.pc.createDataChannel("act", ordered=False, maxRetransmits=0)
        await connect(client, browser)
        await wait_for(lambda: channel.readyState == "open")
        room = service.live.room(client.made["session_id"])

        act = {"t": "act", "seq": 7, "ct": time.time() * 1e3, "keys": ["KeyW"]}
        channel.send(json.dumps(act))
        await asyncio.to_thread(client.until, "state", state="RUNNING")
        assert room._input.last_seq == 7

        client.seq = 6
        old = metric(service, 'drops_total{where="old_act"}')
        client.act("KeyW")
        await wait_for(lambda: metric(service, 'drops_total{where="old_act"}') == old + 1)

        channel.send("x" * 5_000)
        await asyncio.to_thread(client.until, "err", code="TOO_LARGE")
        channel.send('{"t":"ping","id":1,"ct":0}')
        await asyncio.to_thread(client.until, "err", code="BAD_MESSAGE")
        channel.send(b"\x00")
        await asyncio.to_thread(client.until, "err", code="BAD_MESSAGE")
        await browser.close()

    asyncio.run(check(play(join)))


def test_costs_and_counts_of_video_are_metrics(
    service: Service, join: Callable[..., Client]
) -> None:
    async def check(client: Client) -> None:
        browser = RtcBrowser()
        await connect(client, browser)
        client.act("KeyW")
        await wait_for(lambda: len(browser.frames) > 20)
        counts = {name: metric(service, name) for name in POSITIVE}
        assert min(counts.values()) > 0, counts
        assert metric(service, "bitrate_bps") == 2_000_000
        await wait_for(lambda: metric(service, "rtt_seconds") > 0)
        await browser.close()

    asyncio.run(check(play(join)))


POSITIVE = (
    'frames_encoded_total{codec="h264"}',
    'frames_sent_total{transport="webrtc"}',
    'frames_sent_total{transport="recording"}',
    'encode_seconds_count{codec="h264",size="256x160"}',
    'keyframes_total{cause="join"}',
    "send_seconds_count",
)


def test_spectator_by_data_channel_cannot_steer(
    service: Service, join: Callable[..., Client]
) -> None:
    async def check(client: Client) -> None:
        browser = RtcBrowser()
        channel = browser.pc.createDataChannel("act", ordered=False, maxRetransmits=0)
        await connect(client, browser)
        await wait_for(lambda: channel.readyState == "open")
        channel.send(json.dumps({"t": "act", "seq": 1_000, "ct": 0.0, "keys": ["KeyW"]}))
        await asyncio.to_thread(client.until, "err", code="NOT_CONTROLLER")
        await browser.close()

    session_id = play(join).made["session_id"]
    asyncio.run(check(join(role="viewer", join=session_id)))
    assert service.live.room(session_id)._input.last_seq < 1_000


def test_offer_that_cannot_be_used_is_refused_and_counted(
    service: Service, join: Callable[..., Client]
) -> None:
    client = play(join)
    name = 'errors_total{code="BAD_MESSAGE"}'
    before = metric(service, name)
    client.send(t="rtc.offer", gen=1, sdp="v=0")
    client.until("err", code="BAD_MESSAGE")
    assert metric(service, name) == before + 1


def test_socket_chosen_while_an_offer_is_in_hand_wins(
    service: Service, join: Callable[..., Client]
) -> None:
    async def check(client: Client) -> None:
        browser = RtcBrowser()
        client.send(t="rtc.offer", gen=1, sdp=await browser.offer())
        client.send(t="media", transport="ws", codec="jpeg")
        await asyncio.to_thread(client.until_frames, 2)
        media = service.live.room(client.made["session_id"]).transports.media
        assert media is not None
        await wait_for(lambda: not media.audience._peers)
        await browser.close()

    asyncio.run(check(play(join)))


def test_reader_that_stalled_gets_two_old_frames_and_then_new_ones(
    service: Service, join: Callable[..., Client]
) -> None:
    def third_age_ms(client: Client) -> float:
        """Age of the third frame that is read from now on."""
        count = 0
        while True:
            raw = client.socket.recv(timeout=30)
            if isinstance(raw, str):
                continue
            count += 1
            fields = HEADER.unpack(raw[: HEADER.size])
            if count == 3:
                return time.time() * 1e3 - float(fields[7])
            client.send(t="ack", frame=fields[4])

    player = play(join)
    session_id = player.made["session_id"]
    viewers = [player, *(join(role="viewer", join=session_id) for _ in range(2))]
    for viewer, codec in zip(viewers, ("h264", "vp8", "jpeg"), strict=True):
        viewer.send(t="media", transport="ws", codec=codec)
    player.act("KeyW")
    for viewer in viewers:
        viewer.until_frames(10)
    time.sleep(STALL_S)
    with ThreadPoolExecutor(len(viewers)) as pool:
        ages_ms = list(pool.map(third_age_ms, viewers))
    assert max(ages_ms) <= tolerances.STALLED_READER_AGE_MS, ages_ms

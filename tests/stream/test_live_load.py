"""The service under many messages and many visitors; the world is painted."""

import asyncio
import json
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from stream.processes import usage
from tests.stream.live_service import Client, Service, running
from tests.stream.test_protocol import MESSAGES
from tests.tolerances import CYCLES_GROWTH_MIB

pytestmark = pytest.mark.cpu

FUZZ_MESSAGES = 10_000
CYCLES = 200
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 2**40, 1e300, "", "x" * 3_000, "KeyW", [], {}),
    *([[1]], {"t": "act"}, "\u0000", "\ud83d\ude00"),
)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service with room for many."""
    with running(grace_s=300.0, max_viewers=64, messages_per_s=10_000) as service:
        yield service


@pytest.fixture(scope="module")
def player(service: Service) -> Iterator[Client]:
    """Somebody who plays all the time."""
    client = Client.hello(service)
    client.play()
    yield client
    client.close()


def _messages() -> Iterator[str | bytes]:
    """Messages that are mended, broken, or never were any; the same each time."""
    rng = random.Random(3)
    for _ in range(FUZZ_MESSAGES):
        message = dict(rng.choice(MESSAGES))
        for key in tuple(message):
            if rng.random() < 0.3:
                message[key] = rng.choice(JUNK)
        if message.get("t") in ("bye", "media"):
            message["t"] = "dance"  # the first leaves; the second would need acknowledgements
        text = json.dumps(message)
        kind = rng.random()
        if kind < 0.05:
            yield text.encode()
        elif kind < 0.1:
            yield text[: rng.randrange(len(text))]
        else:
            yield text


def test_ten_thousand_wild_messages_disturb_nobody(service: Service, player: Client) -> None:
    sent, socket_count = 0, 0
    messages = _messages()
    message = next(messages, None)
    while message is not None:
        wild = Client.hello(service, role="viewer")
        socket_count += 1
        try:
            while message is not None:
                wild.socket.send(message)
                message, sent = next(messages, None), sent + 1
        except ConnectionClosed:
            pass  # too many bad ones: the next socket goes on
        wild.close()
        if socket_count % 20 == 0:
            player.act("KeyW")
            player.until_frames(1)
    assert sent == FUZZ_MESSAGES
    player.act("KeyW")
    player.until_frames(5)
    assert service.request("GET", "/healthz")[0] == 200
    assert service.live.registry.illegal_count == 0
    assert 'worldstream_errors_total{code="INTERNAL"}' not in service.live.metrics_text().decode()


def test_visitors_who_come_and_go_leave_nothing(service: Service, player: Client) -> None:
    loop = next(iter(service.live._tasks)).get_loop()

    def alive() -> tuple[int, int, int, float]:
        """Tasks, threads, open files (sockets are files), memory in MiB."""
        return (
            len(asyncio.all_tasks(loop)),
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            usage([os.getpid()]).resident_mib,
        )

    counts: list[tuple[int, int, int, float]] = []
    for cycle in range(CYCLES):
        viewer = Client.hello(service, role="viewer")
        viewer.send(t="media", transport="ws", codec="jpeg")
        viewer.until_frames(1)
        if cycle % 2:
            viewer.send(t="bye")
        viewer.close()
        if cycle % 10 == 9:
            player.act("KeyW")
            player.until_frames(1)
            viewers = service.live.room(player.made["session_id"]).viewers
            service.wait(lambda viewers=viewers: len(viewers) == 1, "the viewer is gone")  # type: ignore[misc]
            counts.append(alive())
    # A request that is being answered may be alive beside what stays.
    assert counts[-1][0] <= counts[0][0] + 2, counts
    assert counts[-1][1] <= counts[0][1], counts
    # The same for its connection, on both sides of it.
    assert counts[-1][2] <= counts[0][2] + 4, counts
    assert counts[-1][3] - counts[len(counts) // 2][3] < CYCLES_GROWTH_MIB, counts

"""The send queue of one browser; the network is a list."""

import asyncio
from typing import Any, cast

import pytest
from starlette.websockets import WebSocket

from stream.server_messages import Warn
from stream.sockets import Socket

pytestmark = pytest.mark.cpu


class Network:
    """A WebSocket that sends when it may."""

    def __init__(self) -> None:
        self.may_send = asyncio.Event()
        self.sent: list[str | bytes] = []

    async def send_text(self, text: str) -> None:
        await self.may_send.wait()
        self.sent.append(text)

    async def send_bytes(self, data: bytes) -> None:
        await self.may_send.wait()
        self.sent.append(data)

    application_state = None


def test_video_that_was_taken_back_never_leaves() -> None:
    async def scenario() -> None:
        network = Network()
        socket = Socket(
            cast(WebSocket, cast(Any, network)), messages_per_s=200, on_sent=lambda kind: None
        )
        assert socket.send_video(b"1")
        await asyncio.sleep(0)  # the first one is with the network
        assert all(socket.send_video(each) for each in (b"2", b"3"))
        assert socket.take_back_video() == 2
        socket.send(Warn(code="x", msg="x"))
        network.may_send.set()
        await socket.finish()
        assert network.sent[0] == b"1"
        assert [type(each) for each in network.sent[1:]] == [str]

    asyncio.run(scenario())

"""A live service on a free port of this machine, and a client of it: for the tests of the app.

The service is the real one with its worker process; the world is painted (`painted_worlds`), blown
up to the size of the preset.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Self

import uvicorn
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from engine.config import preset
from engine.types import Action
from stream.app import create_app
from stream.live import Live
from stream.load_news import LoadNews
from stream.serve import LiveServer, uvicorn_config
from stream.settings import load_settings
from stream.supervisor import WatchdogLimits
from stream.world_source import FollowerUse, OpenSource
from stream.world_spec import Start, WorldSpec
from stream.ws_video import HEADER
from tests.stream.painted_worlds import PaintedWorld
from vae_stream.decoder import FrameChunk

GEOMETRY = preset("mini").model.geometry
DEADLINE_S = 30.0
START_LIMIT_S = 150.0
"""Worker processes import torch; on a busy machine that takes its time."""


class WidePaintedWorld(PaintedWorld):
    """Painted frames, each pixel as large as it takes."""

    geometry = GEOMETRY

    def step(self, action: Action) -> Iterator[FrameChunk]:
        for chunk in super().step(action):
            frames_THWC = chunk.frames_THWC
            _, height_px, width_px, _ = frames_THWC.shape
            wide_THWC = frames_THWC.repeat_interleave(GEOMETRY.height_px // height_px, 1)
            yield FrameChunk(
                frames_THWC=wide_THWC.repeat_interleave(GEOMETRY.width_px // width_px, 2),
                first_frame=chunk.first_frame,
                latent_index=chunk.latent_index,
            )


class WidePaintedWorlds:
    """Source of the one world."""

    def __init__(self, spec: WorldSpec, news: LoadNews) -> None:
        self._world = WidePaintedWorld()

    def open(self, start: Start) -> WidePaintedWorld:
        return self._world

    @property
    def followers(self) -> FollowerUse:
        return FollowerUse()

    def close(self) -> None:
        pass


class Service:
    """A service in a thread."""

    def __init__(
        self, live: Live, server: uvicorn.Server, thread: threading.Thread, port: int
    ) -> None:
        self.live = live
        self.port = port
        self._server, self._thread = server, thread
        self.base = f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        """Ask the server to end, as a signal does."""
        self._server.should_exit = True

    def join(self) -> None:
        """Wait until it ended."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def request(
        self, method: str, path: str, body: bytes | dict[str, Any] | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Status and body, as JSON where it is; header names are written with underscores."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        request = urllib.request.Request(self.base + path, data=data, method=method)
        if isinstance(body, dict):
            request.add_header("Content-Type", "application/json")
        for name, value in headers.items():
            request.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                status, raw = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw

    def create(self, **body: Any) -> dict[str, Any]:
        """Open a session."""
        status, made = self.request("POST", "/v1/sessions", body)
        assert status == 201, made
        return dict(made)

    def state(self, session_id: str) -> str:
        """State of a session."""
        return str(self.request("GET", f"/v1/sessions/{session_id}")[1]["state"])

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = DEADLINE_S) -> None:
        """Wait until something holds."""
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, what
            time.sleep(0.02)


class Client:
    """A browser, as far as the server sees."""

    def __init__(self, service: Service, made: dict[str, Any], *, origin: str | None = "") -> None:
        self.service = service
        self.made = made
        self.messages: list[dict[str, Any]] = []
        self.frames: list[tuple[int, int, int]] = []
        """(frame id, act_seq, flags)."""
        self.seq = 0
        self._stack = ExitStack()
        self.socket: ClientConnection = self._stack.enter_context(
            connect(
                f"ws://127.0.0.1:{service.port}{made['ws_url']}",
                subprotocols=["wm.v1", f"ticket.{made['ticket']}"],  # type: ignore[list-item]
                origin=(service.base if origin == "" else origin),  # type: ignore[arg-type]
                compression=None,
                # A browser reads whatever comes; a bounded queue would stop pongs as well.
                max_queue=None,
                ping_interval=None,
            )
        )

    @classmethod
    def hello(cls, service: Service, made: dict[str, Any] | None = None, **body: Any) -> Self:
        """Open a session unless there is one, and its socket, and be welcomed."""
        client = cls(service, made or service.create(**body))
        client.send(t="hello", ver=1, viewport=[800, 600])
        client.until("welcome")
        return client

    def send(self, **message: Any) -> None:
        """Send a message."""
        self.socket.send(json.dumps(message))

    def act(self, *keys: str, **more: Any) -> int:
        """Hold keys; returns the sequence number."""
        self.seq += 1
        self.send(t="act", seq=self.seq, ct=time.time() * 1e3, keys=list(keys), **more)
        return self.seq

    def step(self, timeout_s: float = DEADLINE_S) -> dict[str, Any] | None:
        """Take one message; a frame is acknowledged and gives None."""
        raw = self.socket.recv(timeout=timeout_s)
        if isinstance(raw, bytes):
            fields = HEADER.unpack(raw[: HEADER.size])
            self.frames.append((fields[4], fields[5], fields[2]))
            with suppress(ConnectionClosed):
                self.send(t="ack", frame=fields[4])
            return None
        message = dict(json.loads(raw))
        self.messages.append(message)
        return message

    def until(self, t: str, **wanted: Any) -> dict[str, Any]:
        """Take messages until one of this type with these values came."""
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            message = self.step()
            if message and message["t"] == t and wanted.items() <= message.items():
                return message
        raise AssertionError(f"no {t} {wanted}; had {[each['t'] for each in self.messages]}")

    def until_frames(self, count: int) -> None:
        """Take messages until so many more frames came."""
        end_s, wanted = time.monotonic() + DEADLINE_S, len(self.frames) + count
        while len(self.frames) < wanted:
            assert time.monotonic() < end_s
            self.step()

    def play(self) -> None:
        """Choose pictures over the socket and begin."""
        self.until("state", state="READY")
        self.send(t="media", transport="ws", codec="jpeg")
        self.act("KeyW")
        self.until("state", state="RUNNING")

    def close_code(self) -> int:
        """Take messages until the server closed the socket; with which code."""
        try:
            while True:
                self.step()
        except ConnectionClosed as closed:
            return -1 if closed.rcvd is None else closed.rcvd.code

    def close(self) -> None:
        """Close the socket."""
        self._stack.close()


@contextmanager
def running(
    *,
    open_source: OpenSource = WidePaintedWorlds,
    watchdog: WatchdogLimits | None = None,
    is_waited_for: bool = True,
    **settings: Any,
) -> Iterator[Service]:
    """A service until the end of the block."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(16)
    port = listener.getsockname()[1]
    chosen = {
        "sessions_per_min": 10_000,
        "sockets_per_address": 100,
        "renderer": True,
        "port": port,
        **settings,
    }
    live = Live(load_settings(**chosen), open_source=open_source, watchdog=watchdog)
    server = LiveServer(uvicorn_config(create_app(live), live.settings), live)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), name="service"
    )
    thread.start()
    service = Service(live, server, thread, port)
    try:
        service.wait(lambda: server.started, "the server starts")
        if is_waited_for:
            service.wait(
                lambda: service.request("GET", "/readyz")[0] == 200,
                "the worker is ready",
                START_LIMIT_S,
            )
        yield service
    finally:
        service.stop()
        service.join()
        listener.close()

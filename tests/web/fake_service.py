"""Scripted service for tests of the page: real protocol models, JPEG pictures, no model, no media.

Owns nothing that the service itself decides: a test says which states and messages come when.
"""

from __future__ import annotations

import asyncio
import io
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, WebSocket
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from PIL import Image
from starlette.websockets import WebSocketDisconnect

from stream import client_messages as client
from stream import http_bodies as bodies
from stream import protocol as p
from stream import server_messages as server
from stream.error_codes import ERROR_TEXT, HTTP_STATUS, ErrorCode

WEB_CLIENT = Path(__file__).parents[2] / "web_client"
LIMITS = p.Limits(image_bytes=8 << 20, key_refresh_ms=50, key_stale_ms=500, ladder_s=(0.6, 0.6))
HEADER = struct.Struct("<BBBBIIIdHHI")


def picture(colour: str, kind: str = "JPEG") -> bytes:
    """Return one plain picture of the size of a frame."""
    file = io.BytesIO()
    Image.new("RGB", (256, 160), colour).save(file, kind)
    return file.getvalue()


class FakeService:
    """What the page sees, set by the test; what the page sent, kept in `received`."""

    def __init__(self) -> None:
        self.loading: server.Loading | None = None
        self.refusal: ErrorCode | None = None
        self.first_state = p.SessionState.READY
        self.received: list[Any] = []
        self.created: list[dict[str, Any]] = []
        self.socket: WebSocket | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.url = ""
        self.video_on = True
        self.closes_at_once: int | None = None
        self._sends_video = False
        self._seq = 0
        self._frame = 0
        self._session_count = 0

    def messages(self, kind: str) -> list[Any]:
        """Return what came of one type."""
        return [message for message in list(self.received) if message.t == kind]

    def send(self, message: Any) -> None:
        """Send a message from the test's thread."""
        assert self.loop is not None
        assert self.socket is not None
        text = p.encode(message)
        asyncio.run_coroutine_threadsafe(self.socket.send_text(text), self.loop).result(5)

    def close_socket(self, code: int) -> None:
        """Close the page's socket."""
        assert self.loop is not None
        assert self.socket is not None
        asyncio.run_coroutine_threadsafe(self.socket.close(code), self.loop).result(5)

    def set_state(self, state: p.SessionState, reason: str = "") -> None:
        """Tell the page of a new state."""
        self.send(server.State(state=state, reason=reason, since=time.time() * 1000))

    def info(self) -> bodies.ServiceInfo:
        """Return the body of `/v1/info`."""
        return bodies.ServiceInfo(
            version="0", preset="tiny", source="renderer",
            video=p.VideoInfo(w=256, h=160, fps=24), chunk=p.ChunkInfo(first=17, next=17),
            latch_ms=708, codecs=("jpeg",), ice=(), limits=LIMITS,
            scenes=tuple(
                bodies.SceneInfo(
                    name=name, prompt=f"words of {name}", thumbnail=f"/v1/scenes/{name}.png"
                )
                for name in ("meadow-forest", "snow-ruins")
            ),
            needs_token=False, is_ready=self.loading is None, loading=self.loading,
        )  # fmt: skip

    def app(self) -> FastAPI:
        """Return the application with the page in it."""
        app = FastAPI()
        app.get("/v1/info")(lambda: JSONResponse(self.info().model_dump(mode="json")))
        app.get("/v1/scenes/{name}.png")(
            lambda: Response(picture("green", "PNG"), 200, None, "image/png")
        )
        app.get("/readyz")(self._ready)
        app.post("/v1/sessions", status_code=201)(self._create)
        app.websocket("/v1/ws")(self._talk)
        app.mount("/", StaticFiles(directory=WEB_CLIENT, html=True))
        return app

    def _ready(self) -> JSONResponse:
        body = {"ready": self.loading is None}
        if self.loading is None:
            return JSONResponse(body)
        return JSONResponse({**body, "loading": self.loading.model_dump()}, 503)

    def _create(self, body: dict[str, Any]) -> JSONResponse:
        bodies.CreateSession.model_validate(body)
        self.created.append(body)
        if self.refusal is not None:
            error = bodies.ErrorBody(
                code=self.refusal, msg=ERROR_TEXT[self.refusal], retry_ms=60_000
            )
            return JSONResponse(error.model_dump(mode="json"), HTTP_STATUS[self.refusal])
        self._session_count += 1
        made = bodies.SessionCreated(
            session_id="s1", role="controller", ticket="a" * 43, ws_url="/v1/ws", queue_pos=None,
            resume_token=f"resume-{self._session_count}", state=self.first_state, expires_at=0,
        )  # fmt: skip
        return JSONResponse(made.model_dump(mode="json"), 201)

    async def _talk(self, socket: WebSocket) -> None:
        await socket.accept(p.PROTOCOL)
        if self.closes_at_once is not None:
            await socket.close(self.closes_at_once)
            return
        self.loop, self.socket, self._sends_video = asyncio.get_running_loop(), socket, False
        video = asyncio.create_task(self._video(socket))
        try:
            while True:
                message = client.parse_client(await socket.receive_text())
                self.received.append(message)
                await self._answer(socket, message)
        except WebSocketDisconnect:
            pass
        finally:
            video.cancel()

    async def _answer(self, socket: WebSocket, message: Any) -> None:
        if isinstance(message, client.Hello):
            world = p.WorldInfo(
                scene="meadow-forest", image_id=None, prompt="words", seed=0, epoch=0
            )
            welcome = server.Welcome(
                session="s1", role="controller", resume_token=f"resume-{self._session_count}",
                video=p.VideoInfo(w=256, h=160, fps=24), chunk=p.ChunkInfo(first=17, next=17),
                latch_ms=708, ice=(), limits=LIMITS, world=world, last_seq=100, hb_ms=2000,
                st=time.time() * 1000,
            )  # fmt: skip
            await socket.send_text(p.encode(welcome))
            state = server.State(state=self.first_state, reason="", since=time.time() * 1000)
            await socket.send_text(p.encode(state))
        elif isinstance(message, client.Ping):
            pong = server.Pong(id=message.id, ct=message.ct, st=time.time() * 1000)
            await socket.send_text(p.encode(pong))
        elif isinstance(message, client.Media):
            self._sends_video = message.codec == "jpeg"
        elif isinstance(message, client.Act):
            self._seq = message.seq

    async def _video(self, socket: WebSocket) -> None:
        data = picture("steelblue")
        while True:
            await asyncio.sleep(1 / 24)
            if not (self._sends_video and self.video_on):
                continue
            self._frame += 1
            now_ms = time.time() * 1000
            head = HEADER.pack(1, 3, 1, 0, self._frame, self._seq, 0, now_ms, 256, 160, len(data))
            await socket.send_bytes(head + data)


@contextmanager
def serve(service: FakeService) -> Iterator[FakeService]:
    """Run the service on a free port of the loopback in a thread."""
    config = uvicorn.Config(
        service.app(),
        host="127.0.0.1",
        port=0,
        log_level="warning",
        lifespan="off",
        ws="websockets-sansio",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline_s = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline_s, "the fake service did not start"
        time.sleep(0.02)
    service.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield service
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)

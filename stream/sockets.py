"""One browser's WebSocket: bounded sending with control before video, limits on what comes in.

Owns the send queue and the strikes. Invariants: video never delays a control message by more than
one frame; a client that does not read is closed, not buffered for; a refused message gets a typed
error, and after too many of them the socket closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from stream.client_messages import ClientMessage, parse_client
from stream.error_codes import CLOSE_CODE, ErrorCode, ProtocolError
from stream.limits import TokenBucket
from stream.protocol import MESSAGE_LIMIT_BYTES, encode
from stream.server_messages import ServerMessage, bye, err

CONTROL_LIMIT = 256
VIDEO_LIMIT = 8
BYTES_PER_S = 256 * 1024
STRIKES_PER_MIN = 20
FLOOD_STRIKES = 3
CLOSE_LIMIT_S = 2.0


class Socket:
    """A socket after its handshake was accepted.

    Args:
        websocket: accepted.
        messages_per_s: more than this are refused with RATE_LIMIT.
        on_sent: called with the type of each message that is queued.
    """

    def __init__(
        self, websocket: WebSocket, *, messages_per_s: int, on_sent: Callable[[str], None]
    ) -> None:
        self._websocket = websocket
        self._on_sent = on_sent
        self._control: deque[str] = deque()
        self._video: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._writer = asyncio.create_task(self._write(), name="socket writer")
        self._messages = TokenBucket(per_s=messages_per_s, burst=messages_per_s)
        self._bytes = TokenBucket(per_s=BYTES_PER_S, burst=2 * BYTES_PER_S)
        self._strikes = TokenBucket(per_s=STRIKES_PER_MIN / 60, burst=STRIKES_PER_MIN)
        self._floods = TokenBucket(per_s=FLOOD_STRIKES / 60, burst=FLOOD_STRIKES)
        self._flood_told_s = 0.0
        self._closing: tuple[int, str] | None = None

    @property
    def is_open(self) -> bool:
        """Whether messages still go out."""
        return self._closing is None and not self._writer.done()

    def send(self, message: ServerMessage) -> None:
        """Queue a control message; a client that reads none of 256 is closed."""
        if not self.is_open:
            return
        if len(self._control) >= CONTROL_LIMIT:
            self._control.clear()
            self.close(ErrorCode.RATE_LIMIT)
            return
        self._queue(message)
        self._wake.set()

    def send_video(self, frame: bytes) -> bool:
        """Queue a video frame; False where the queue is full."""
        if not self.is_open or len(self._video) >= VIDEO_LIMIT:
            return False
        self._video.append(frame)
        self._wake.set()
        return True

    def take_back_video(self) -> int:
        """Drop the video frames that have not left yet; how many."""
        count = len(self._video)
        self._video.clear()
        return count

    def close(self, code: ErrorCode, *, resume: bool = False) -> None:
        """Say bye, send what is queued for control, close."""
        if not self.is_open:
            return
        self._queue(bye(code, resume=resume))
        self._closing = (CLOSE_CODE.get(code, 1000), str(code))
        self._video.clear()
        self._wake.set()

    def _queue(self, message: ServerMessage) -> None:
        self._control.append(encode(message))
        self._on_sent(message.t)

    async def receive(self) -> ClientMessage | None:
        """Return the next message, None for one of unknown type.

        Raises:
            WebSocketDisconnect: the client left.
            ProtocolError: the message was refused; the client was told already.
        """
        event = await self._websocket.receive()
        if event["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(event.get("code", 1006))
        return self.judge(event.get("text") or event.get("bytes") or "")

    def judge(
        self, message: str | bytes, *, limit: int = MESSAGE_LIMIT_BYTES
    ) -> ClientMessage | None:
        """Read a message of this client, whichever way it came; None for one of unknown type.

        Args:
            message: as it came.
            limit: characters or bytes that it may have.

        Raises:
            ProtocolError: the message was refused; the client was told already.
        """
        now_s = time.monotonic()
        if not (self._messages.take(now_s) and self._bytes.take(now_s, len(message))):
            self._flooded(now_s)
            raise ProtocolError(ErrorCode.RATE_LIMIT)
        try:
            if len(message) > limit:
                raise ProtocolError(ErrorCode.TOO_LARGE, f"{len(message)} of {limit}")
            if isinstance(message, bytes):
                raise ProtocolError(ErrorCode.BAD_MESSAGE, "binary")
            return parse_client(message)
        except ProtocolError as error:
            self.refuse(error)
            raise

    def refuse(self, error: ProtocolError) -> None:
        """Tell the client; too many refusals a minute close the socket."""
        self.send(err(error.code, retry_ms=error.retry_ms))
        if error.code in (ErrorCode.BAD_MESSAGE, ErrorCode.TOO_LARGE) and not self._strikes.take(
            time.monotonic()
        ):
            self.close(ErrorCode.BAD_MESSAGE)

    async def finish(self) -> None:
        """Wait for the writer to end, shortly; then end it."""
        if self._closing is None:
            self._closing = (1000, "")
            self._wake.set()
        await asyncio.wait((self._writer,), timeout=CLOSE_LIMIT_S)
        self._writer.cancel()
        await asyncio.wait((self._writer,), timeout=CLOSE_LIMIT_S)

    def _flooded(self, now_s: float) -> None:
        """One strike a second at most: a burst is one offence, however many messages it has."""
        if now_s - self._flood_told_s < 1.0:
            return
        self._flood_told_s = now_s
        self.send(err(ErrorCode.RATE_LIMIT, retry_ms=1_000))
        if not self._floods.take(now_s):
            self.close(ErrorCode.RATE_LIMIT)

    async def _write(self) -> None:
        # A socket that breaks while we write is seen by the reader as well.
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            while True:
                if self._control:
                    await self._websocket.send_text(self._control.popleft())
                elif self._closing is not None:
                    code, reason = self._closing
                    if self._websocket.application_state is WebSocketState.CONNECTED:
                        await self._websocket.close(code, reason)
                    return
                elif self._video:
                    await self._websocket.send_bytes(self._video.popleft())
                else:
                    self._wake.clear()
                    await self._wake.wait()

"""Door of the WebSocket: who may come in, and the conversation until the socket ends.

Owns the handshake, the count of sockets of an address, the loop that reads. Invariants: nobody
without a ticket gets a socket; a message that is refused never ends the conversation of others.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import structlog
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from stream import client_messages as client
from stream import http_bodies as bodies
from stream import protocol as p
from stream.error_codes import ERROR_TEXT, HTTP_STATUS, ErrorCode, ProtocolError
from stream.gate import SECURITY_HEADERS
from stream.live import Live
from stream.room import Room
from stream.sessions import Ticket
from stream.sockets import Socket
from stream.viewer import Viewer

HELLO_LIMIT_S = 5.0

log = structlog.get_logger(__name__)


class Door:
    """Door of a service."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._open_count: Counter[str] = Counter()

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one WebSocket from its handshake to its end."""
        address = websocket.client.host if websocket.client else "unknown"
        try:
            ticket = self._ticket(websocket, address)
            room = self._live.room(ticket.session_id)
        except ProtocolError as error:
            await self._refuse(websocket, error)
            return
        # Counted before anything is awaited, so that no other handshake slips in between.
        self._open_count[address] += 1
        try:
            await websocket.accept(subprotocol=p.PROTOCOL)
            await self._serve_accepted(websocket, ticket, room)
        except WebSocketDisconnect:
            pass
        finally:
            self._open_count[address] -= 1
            if not self._open_count[address]:
                del self._open_count[address]

    async def _serve_accepted(self, websocket: WebSocket, ticket: Ticket, room: Room) -> None:
        sent = self._live.metrics.messages_out
        socket = Socket(
            websocket,
            messages_per_s=self._live.settings.messages_per_s,
            on_sent=lambda kind: sent.labels(type=kind).inc(),
        )
        viewer = Viewer(id=ticket.viewer_id, role=ticket.role, socket=socket)
        try:
            if await _is_greeted(socket):
                room.join(viewer)
                await self._converse(room, viewer)
        finally:
            room.leave(viewer)
            await socket.finish()

    def _ticket(self, websocket: WebSocket, address: str) -> Ticket:
        offered = websocket.scope.get("subprotocols", [])
        tickets = [each for each in offered if each.startswith(p.TICKET_PREFIX)]
        if p.PROTOCOL not in offered or len(tickets) != 1:
            raise ProtocolError(ErrorCode.UNAUTHORIZED, "subprotocols")
        if self._open_count[address] >= self._live.settings.sockets_per_address:
            raise ProtocolError(ErrorCode.RATE_LIMIT, "sockets of this address")
        ticket = tickets[0].removeprefix(p.TICKET_PREFIX)
        return self._live.registry.redeem(ticket, time.monotonic())

    async def _refuse(self, websocket: WebSocket, error: ProtocolError) -> None:
        log.info("socket_refused", code=str(error.code), detail=error.detail)
        self._live.metrics.errors.labels(code=str(error.code)).inc()
        body = bodies.ErrorBody(code=error.code, msg=ERROR_TEXT[error.code])
        await websocket.send_denial_response(
            JSONResponse(
                body.model_dump(mode="json"),
                HTTP_STATUS[error.code],
                SECURITY_HEADERS,
            )
        )

    async def _converse(self, room: Room, viewer: Viewer) -> None:
        metrics = self._live.metrics
        while viewer.socket.is_open and not viewer.has_left:
            try:
                message = await viewer.socket.receive()
            except ProtocolError as error:
                metrics.messages_bad.labels(why=str(error.code)).inc()
                metrics.errors.labels(code=str(error.code)).inc()
                continue
            if message is None:
                metrics.messages_bad.labels(why="unknown").inc()
                continue
            metrics.messages_in.labels(type=message.t).inc()
            try:
                room.handle(viewer, message)
            except ProtocolError as error:
                log.info("message_refused", code=str(error.code), detail=error.detail)
                metrics.errors.labels(code=str(error.code)).inc()
                viewer.socket.refuse(error)


async def _is_greeted(socket: Socket) -> bool:
    """Whether the first message is a hello of our version; otherwise the socket closes."""
    try:
        message = await asyncio.wait_for(socket.receive(), HELLO_LIMIT_S)
    except (TimeoutError, ProtocolError):
        message = None
    if isinstance(message, client.Hello) and message.ver == p.VERSION:
        return True
    socket.close(ErrorCode.BAD_MESSAGE)
    return False

"""Gate in front of every request and socket: host, origin, size, headers.

Owns what is checked before a route sees anything. Invariants: an unknown Host never gets an answer
other than FORBIDDEN_ORIGIN (against DNS rebinding; addresses themselves cannot be rebound); a page
of another origin can neither write nor open a socket; no body grows beyond its limit.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stream.error_codes import ERROR_TEXT, HTTP_STATUS, ErrorCode
from stream.http_bodies import ErrorBody
from stream.settings import ServerSettings

BODY_LIMIT_BYTES = 64 * 1024
IMAGE_PATH = "/v1/images"
LENGTH_DIGITS = 15
"""More in a Content-Length are not worth reading."""
BODY_LIMIT_S = 30.0
"""A body is there within this time of its headers."""
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; connect-src 'self' ws: wss:; img-src 'self' blob: data:; "
        "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class BodyRefusedError(HTTPException):
    """A body turned out too large or too slow.

    The framework takes any other error of reading a body for one of the body's form.
    """

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(HTTP_STATUS[code], str(code))
        self.code = code


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._hosts = {
            name.lower()
            for name in ("localhost", settings.host, socket.gethostname(), *settings.allowed_hosts)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and pass on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope, Headers(scope=scope))
        if refusal is not None:
            await deny(scope, receive, send, refusal)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        await self._app(scope, self._limited(scope, receive), _with_headers(send))

    def _refusal(self, scope: Scope, headers: Headers) -> ErrorCode | None:
        host = headers.get("host", "")
        if not self._is_known(host):
            return ErrorCode.FORBIDDEN_ORIGIN
        is_write = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")
        if is_write and not self._is_own_page(scope, headers, host):
            return ErrorCode.FORBIDDEN_ORIGIN
        if scope["type"] == "http":
            length = headers.get("content-length", "0")
            if not length.isdecimal():
                return ErrorCode.BAD_MESSAGE
            if len(length) > LENGTH_DIGITS or int(length) > self._limit_bytes(scope):
                return ErrorCode.TOO_LARGE
        return None

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        if name is None:
            return False
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_own_page(self, scope: Scope, headers: Headers, host: str) -> bool:
        origin = headers.get("origin")
        if origin is None:
            if scope["type"] == "websocket":
                # A browser always sends it; other clients prove themselves by the token.
                return self.has_token(headers)
            return headers.get("sec-fetch-site", "none") in ("same-origin", "none")
        if origin in self._settings.allowed_origins or origin == f"https://{host}":
            return True
        # Whoever can forge plain HTTP must not reach what is encrypted.
        return origin == f"http://{host}" and scope.get("scheme") not in ("https", "wss")

    def has_token(self, headers: Headers) -> bool:
        """Whether the request carries the access token."""
        return has_token(self._settings, headers)

    def _limit_bytes(self, scope: Scope) -> int:
        is_image = scope["path"] == IMAGE_PATH
        return self._settings.image_limit_bytes if is_image else BODY_LIMIT_BYTES

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        limit_bytes, seen_bytes, is_whole = self._limit_bytes(scope), 0, False
        end_s = asyncio.get_running_loop().time() + BODY_LIMIT_S

        async def limited() -> Message:
            nonlocal seen_bytes, is_whole
            if is_whole:  # what follows is the end of the connection, whenever that comes
                return await receive()
            try:
                async with asyncio.timeout_at(end_s):
                    message = await receive()
            except TimeoutError:
                raise BodyRefusedError(ErrorCode.BAD_MESSAGE) from None
            seen_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if seen_bytes > limit_bytes:
                raise BodyRefusedError(ErrorCode.TOO_LARGE)
            return message

        return limited


def has_token(settings: ServerSettings, headers: Headers) -> bool:
    """Whether `Authorization: Bearer` carries the access token; False where there is none."""
    if settings.token is None:
        return False
    kind, _, given = headers.get("authorization", "").partition(" ")
    wanted = settings.token.get_secret_value()
    return kind.lower() == "bearer" and hmac.compare_digest(given.encode(), wanted.encode())


async def deny(scope: Scope, receive: Receive, send: Send, code: ErrorCode) -> None:
    """Answer with the error; a socket is refused before it opens."""
    body = ErrorBody(code=code, msg=ERROR_TEXT[code])
    response = JSONResponse(body.model_dump(mode="json"), HTTP_STATUS[code], SECURITY_HEADERS)
    await response(scope, receive, send)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending

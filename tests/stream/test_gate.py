"""The gate: bodies that lie about their size, in front of the routes that read them."""

import asyncio
import json
from collections.abc import Iterable

import pytest
from starlette.types import Message, Scope

from stream import gate
from stream.app import create_app
from stream.error_codes import ErrorCode
from stream.gate import BODY_LIMIT_BYTES
from stream.live import Live
from stream.settings import load_settings

pytestmark = pytest.mark.cpu

SESSIONS, IMAGES = "/v1/sessions", "/v1/images"
NOT_STARTED = ErrorCode.NOT_READY
"""What a request is answered that was read to its end."""


def _code(
    bodies: Iterable[bytes] = (b"{}",),
    *,
    path: str = SESSIONS,
    scheme: str = "http",
    is_endless: bool = False,
    **headers: str,
) -> ErrorCode:
    """Code that a service which is not started answers to a body in parts."""
    parts: list[Message] = [
        {"type": "http.request", "body": body, "more_body": True} for body in bodies
    ]
    if not is_endless:
        parts.append({"type": "http.request", "body": b"", "more_body": False})
    content_type = "application/json" if path == SESSIONS else "image/png"
    given = {"host": "localhost", "content-type": content_type}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "scheme": scheme,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    sent: list[Message] = []

    async def receive() -> Message:
        if not parts:
            await asyncio.sleep(3600.0)
        return parts.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(create_app(Live(load_settings(renderer=True)))(scope, receive, send))
    return ErrorCode(json.loads(sent[1]["body"])["code"])


@pytest.mark.parametrize(
    ("path", "limit"), [(SESSIONS, BODY_LIMIT_BYTES), (IMAGES, load_settings().image_limit_bytes)]
)
def test_body_without_a_length_ends_at_the_limit(path: str, limit: int) -> None:
    halves = [b"{" + b" " * (limit // 2 - 1), b" " * (limit // 2 - 1) + b"}"]
    assert _code(halves, path=path) is NOT_STARTED
    assert _code([*halves, b"x"], path=path) is ErrorCode.TOO_LARGE


def test_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_LIMIT_S", 0.05)
    assert _code([b"{"], is_endless=True) is ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize(
    ("length", "code"),
    [
        ("2", NOT_STARTED),
        ("-1", ErrorCode.BAD_MESSAGE),
        ("x", ErrorCode.BAD_MESSAGE),
        ("9" * 5_000, ErrorCode.TOO_LARGE),
    ],
)
def test_length_is_read_with_care(length: str, code: ErrorCode) -> None:
    assert _code(content_length=length) is code


@pytest.mark.parametrize(
    ("origin", "scheme", "code"),
    [
        ("http://localhost", "http", NOT_STARTED),
        ("https://localhost", "http", NOT_STARTED),  # a proxy has the encryption
        ("https://localhost", "https", NOT_STARTED),
        ("http://localhost", "https", ErrorCode.FORBIDDEN_ORIGIN),
        ("http://localhost:81", "http", ErrorCode.FORBIDDEN_ORIGIN),
        ("null", "http", ErrorCode.FORBIDDEN_ORIGIN),
    ],
)
def test_only_pages_of_the_service_may_write(origin: str, scheme: str, code: ErrorCode) -> None:
    assert _code(origin=origin, scheme=scheme) is code

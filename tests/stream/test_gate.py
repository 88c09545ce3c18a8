"""The gate: bodies that lie about their size, hosts, in front of an application that reads."""

import asyncio
from collections.abc import Iterable

import pytest
from starlette.types import Message, Receive, Scope, Send

from stream import gate
from stream.gate import BODY_LIMIT_BYTES, Gate
from stream.settings import load_settings

pytestmark = pytest.mark.cpu


async def _reader(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body, then answers 200."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def _status(bodies: Iterable[bytes] = (b"",), *, is_endless: bool = False, **headers: str) -> int:
    """Status of a request that sends its body in parts."""
    parts: list[Message] = [
        {"type": "http.request", "body": body, "more_body": True} for body in bodies
    ]
    if not is_endless:
        parts.append({"type": "http.request", "body": b"", "more_body": False})
    given = {"host": "localhost", **{k.replace("_", "-"): v for k, v in headers.items()}}
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/sessions",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    sent: list[Message] = []

    async def receive() -> Message:
        if not parts:
            await asyncio.sleep(3600.0)
        return parts.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(Gate(_reader, load_settings())(scope, receive, send))
    return int(sent[0]["status"])


def test_body_without_a_length_ends_at_the_limit() -> None:
    half = b"x" * (BODY_LIMIT_BYTES // 2)
    assert _status([half, half]) == 200
    assert _status([half, half, b"x"]) == 413


def test_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_LIMIT_S", 0.05)
    assert _status([b"{"], is_endless=True) == 400


@pytest.mark.parametrize(
    ("length", "status"), [("5", 200), ("-1", 400), ("x", 400), ("9" * 5_000, 413)]
)
def test_length_is_read_with_care(length: str, status: int) -> None:
    assert _status(content_length=length) == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("LOCALHOST", 200),
        ("evil.example", 403),
        ("", 403),
        ("[", 403),
    ],
)
def test_unknown_hosts_get_nothing(host: str, status: int) -> None:
    assert _status(host=host) == status

"""Steps that tests of the page against the real service share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stream.protocol import SessionState
from stream.session_states import Session
from tests.stream.live_service import Service

if TYPE_CHECKING:
    from playwright.sync_api import Page

PICTURE_LIMIT_MS = 20_000


def until(condition: Callable[[], Any], limit_s: float = 30.0) -> Any:
    """Wait for a true value; fails with the last one."""
    deadline_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"still {value!r} after {limit_s} s"
        time.sleep(0.05)
    return value


def open_sessions(service: Service) -> list[Session]:
    return [each for each in service.live.registry if each.state is not SessionState.CLOSED]


def see(page: Page, service: Service, query: str = "") -> None:
    """Open the page and wait for the first picture."""
    page.goto(f"{service.base}/{query}")
    page.wait_for_selector("#overlay[data-picture=yes]", state="attached", timeout=PICTURE_LIMIT_MS)
    page.wait_for_selector("body[data-state=READY]")


def play(page: Page, service: Service, query: str = "") -> None:
    """Open the page and begin to walk."""
    see(page, service, query)
    page.keyboard.press("KeyW")
    page.wait_for_selector("body[data-state=RUNNING]")


def wait_for_words(page: Page, words: str) -> None:
    page.locator("#headline", has_text=words).wait_for(timeout=PICTURE_LIMIT_MS)


def wait_for_notice(page: Page, words: str) -> None:
    page.locator("#notice", has_text=words).wait_for(timeout=PICTURE_LIMIT_MS)


def play_painted(page: Page, service: Service) -> None:
    """Begin to walk, and wait until the first picture, which is a real one, has given way."""
    play(page, service, "?transport=jpeg")
    until(lambda: painted(page)[0] < 60)


def painted(page: Page) -> tuple[int, int]:
    """What the canvas shows: (chunk, walk so far), as red and blue."""
    red, _, blue, _ = page.evaluate(
        "() => { const context = document.getElementById('canvas').getContext('2d');"
        " return [...context.getImageData(9, 9, 1, 1).data]; }"
    )
    return red, blue

"""Attention comes and goes: pages behind others, closed pages, killed browsers, late viewers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api")
pytest.importorskip("fastapi")

from stream.processes import descendants
from stream.protocol import SessionState
from tests.web.conftest import ARGUMENTS, CHROMIUM
from tests.web.live_page import (
    PICTURE_LIMIT_MS,
    open_sessions,
    painted,
    play,
    play_painted,
    until,
    wait_for_words,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page, Playwright

    from tests.stream.live_service import Service

pytestmark = [
    pytest.mark.cpu,
    # Sockets of the threads that a failed test leaves behind.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

FOUND_LIMIT_S = 10.0
LATE_VIEWER_MS = 500 * 3
"""The specified limit, three times: other tests share the machine."""
TIMES = """
new MutationObserver(() => {
  const { rung } = document.body.dataset;
  if (rung) window.offeredMs ??= performance.now();
  if (document.getElementById('overlay').dataset.picture) window.pictureMs ??= performance.now();
}).observe(document, {subtree: true, attributes: true});
"""


CHUNKS = "worldstream_chunk_seconds_count"


def chunk_count(service: Service) -> float:
    """Chunks that the worker has made."""
    text = service.request("GET", "/metrics")[1].decode()
    (line,) = [each for each in text.splitlines() if each.startswith(CHUNKS)]
    return float(line.split()[1])


def test_world_stops_walking_when_another_page_comes_to_the_front(
    page: Page, service: Service
) -> None:
    play_painted(page, service)
    debugger = page.context.new_cdp_session(page)
    debugger.send("Emulation.setFocusEmulationEnabled", {"enabled": False})
    page.keyboard.down("KeyW")
    begin = painted(page)[1]
    until(lambda: painted(page)[1] > begin + 20)
    other = page.context.new_page()
    other.bring_to_front()
    until(lambda: not page.evaluate("document.hasFocus()"))
    assert page.query_selector("kbd.held") is None
    # Two chunks may already be latched when the keys are released.
    before = chunk_count(service)
    until(lambda: chunk_count(service) >= before + 3)
    chunk, walked = painted(page)
    until(lambda: painted(page)[0] >= chunk + 4)
    assert abs(painted(page)[1] - walked) <= 4  # JPEG; a walked chunk is 17 more


def test_killed_browser_is_found_and_the_worker_goes_idle(
    playwright: Playwright, service: Service, tmp_path: Path
) -> None:
    context = playwright.chromium.launch_persistent_context(
        tmp_path, executable_path=CHROMIUM, args=ARGUMENTS
    )
    folder = f"--user-data-dir={tmp_path}"
    commands = descendants(os.getpid()).items()
    (browser,) = (pid for pid, said in commands if folder in said and "--type=" not in said)
    try:
        play(context.new_page(), service, "?transport=webrtc")
        (session,) = open_sessions(service)
    finally:
        os.kill(browser, signal.SIGKILL)
    until(lambda: session.state is not SessionState.RUNNING, FOUND_LIMIT_S)
    time.sleep(1.5)  # longer than a chunk that was under way
    made = chunk_count(service)
    time.sleep(1.5)
    assert chunk_count(service) == made


def test_place_of_a_closed_page_goes_to_the_next_visitor(
    page: Page, other: Page, service: Service
) -> None:
    play(page, service, "?transport=jpeg")
    (session,) = open_sessions(service)
    other.goto(f"{service.base}/?transport=jpeg")
    wait_for_words(other, "You are number 1 of 1 in the queue")
    page.goto("about:blank")
    until(lambda: session.state is SessionState.CLOSED, 3 * service.live.settings.bye_grace_s)
    other.wait_for_selector("body[data-state=READY]", timeout=PICTURE_LIMIT_MS)


@pytest.mark.parametrize("transport", ["webrtc", "webcodecs"])
def test_late_viewer_sees_a_picture_at_once(
    page: Page, other: Page, service: Service, transport: str
) -> None:
    play(page, service, "?transport=webrtc")
    (session,) = open_sessions(service)
    other.add_init_script(TIMES)
    other.goto(f"{service.base}/?watch={session.id}&transport={transport}")
    until(lambda: other.evaluate("window.pictureMs"))
    assert other.evaluate("window.pictureMs - window.offeredMs") < LATE_VIEWER_MS

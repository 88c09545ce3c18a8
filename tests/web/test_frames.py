"""Which frames are on the screen, and when: read from their pixels, over the real media."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api")
pytest.importorskip("fastapi")

from stream.actions import FRAMES_PER_CHUNK
from tests.web.burned import Published, Seen, applied, begin_reading, burn_all, seen
from tests.web.live_page import open_sessions, play, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.stream.live_service import Service

pytestmark = [
    pytest.mark.cpu,
    # Sockets of the threads that a failed test leaves behind.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CHUNKS_BEHIND = 2
"""Frames that are older than this many chunks are dropped before they leave."""
SLOWDOWN = 6
RECOVERY_S = 2.0


@pytest.mark.parametrize("transport", ["webrtc", "webcodecs", "jpeg"])
def test_page_knows_which_frame_and_which_action_it_shows(
    page: Page, service: Service, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    burn_all(monkeypatch)
    play(page, service, f"?transport={transport}")
    begin_reading(page)
    for key in ("KeyW", "KeyA", "ArrowLeft", "KeyW"):
        page.keyboard.press(key, delay=300)
        page.wait_for_timeout(300)
    frames = until(lambda: (found := seen(page)) and len(found) >= 40 and found)
    # The picture may have moved on by one between its callback and the reading of its pixels.
    assert all(0 <= each.burned_id - each.frame_id <= 1 for each in frames), frames
    exact = [each for each in frames if each.burned_id == each.frame_id]
    assert len(exact) >= 0.8 * len(frames)
    assert [each.act_seq for each in exact] == [each.burned_seq for each in exact]
    assert len({each.act_seq for each in exact}) > 1


def age_frames(published: dict[int, Published], frame: Seen) -> int:
    """How many newer frames were there already when a frame was shown."""
    return sum(each.at_ms < frame.at_ms for each in published.values()) - frame.burned_id


@pytest.mark.parametrize("transport", ["webrtc", "jpeg"])
def test_slow_viewer_sees_nothing_old_and_recovers(
    page: Page, service: Service, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    published = burn_all(monkeypatch)
    play(page, service, f"?transport={transport}")
    begin_reading(page)
    page.keyboard.down("KeyW")
    debugger = page.context.new_cdp_session(page)
    debugger.send("Emulation.setCPUThrottlingRate", {"rate": SLOWDOWN})
    page.wait_for_timeout(4_000)
    slow = seen(page)
    debugger.send("Emulation.setCPUThrottlingRate", {"rate": 1})
    page.wait_for_timeout(1_000 * RECOVERY_S)
    recovered_ms = time.time() * 1e3
    page.wait_for_timeout(1_000)
    recovered = [each for each in seen(page) if each.at_ms > recovered_ms]
    limit_frames = CHUNKS_BEHIND * FRAMES_PER_CHUNK
    assert len(slow) > 10
    assert max(age_frames(published, each) for each in slow) <= limit_frames
    assert len(recovered) >= 10
    assert max(age_frames(published, each) for each in recovered) <= limit_frames


def first_digests(service: Service, count: int) -> list[str]:
    """Digests of the first chunks of the newest epoch, as soon as they are made."""
    (session,) = open_sessions(service)
    path = f"/v1/sessions/{session.id}/trace.jsonl"

    def lines() -> list[str]:
        _, raw = service.request("GET", path, Authorization=f"Bearer {session.resume_token}")
        return [] if isinstance(raw, dict) else raw.decode().splitlines()[1:]

    until(lambda: len(lines()) >= count)
    return [json.loads(line)["digest"] for line in lines()[:count]]


def test_ten_resets_in_a_second_end_as_one_and_no_frame_of_before_follows(
    page: Page, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = burn_all(monkeypatch)
    play(page, service, "?transport=webrtc")
    begin_reading(page)
    for _ in range(10):
        page.keyboard.press("KeyW", delay=20)
        page.click("#reset")
    done = until(lambda: (found := applied(page)) and len(found) == 10 and found)
    until(lambda: len(seen(page)) > done[-1][2] + 30)
    frames = seen(page)
    for _, epoch, shown_before in done:
        late = [each for each in frames[shown_before:] if published[each.burned_id].epoch < epoch]
        assert late == []
    after_ten = first_digests(service, 2)
    page.click("#reset")
    until(lambda: len(applied(page)) == 11)
    assert first_digests(service, 2) == after_ten

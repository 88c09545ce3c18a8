"""The page against the real service with its worker process; the world is painted."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

pytest.importorskip("playwright.sync_api")
pytest.importorskip("fastapi")

from tests.stream.live_service import Service, running
from tests.web.live_page import (
    PICTURE_LIMIT_MS,
    open_sessions,
    painted,
    play,
    play_painted,
    see,
    until,
    wait_for_notice,
    wait_for_words,
)

if TYPE_CHECKING:
    from playwright.sync_api import Download, Page

pytestmark = [
    pytest.mark.cpu,
    # Sockets of the threads that a failed test leaves behind.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

BLOCKED_UDP = "RTCPeerConnection.prototype.setRemoteDescription = () => new Promise(() => {});"
"""Nothing that the server offers is ever connected to."""


@pytest.mark.parametrize("transport", ["webrtc", "webcodecs", "jpeg"])
def test_visitor_sees_the_world_walks_and_reads_the_latency(
    page: Page, service: Service, transport: str
) -> None:
    play(page, service, f"?transport={transport}")
    assert page.get_attribute("body", "data-rung") == transport
    until(lambda: len(page.inner_text("#hud-fps")) == 2)  # ten and more
    page.keyboard.press("KeyW")
    until(lambda: "p95" in page.inner_text("#hud-latency"))
    assert page.is_hidden("#overlay")


def test_actions_come_by_the_data_channel_and_by_the_socket(page: Page, service: Service) -> None:
    def counts() -> list[float]:
        text = service.request("GET", "/metrics")[1].decode()
        found = dict(
            re.findall(r'worldstream_messages_in_total{type="(act|act.channel)"} (.+)', text)
        )
        return [float(found.get(way, 0)) for way in ("act", "act.channel")]

    play(page, service, "?transport=webrtc")
    before = counts()
    for key in ("KeyW", "KeyD", "KeyA"):
        page.keyboard.press(key, delay=60)
    until(lambda: all(now > old for now, old in zip(counts(), before, strict=True)))


def test_world_walks_while_a_key_is_held_and_stops_on_blur(page: Page, service: Service) -> None:
    play_painted(page, service)
    page.keyboard.down("KeyW")
    begin = painted(page)[1]
    until(lambda: painted(page)[1] > begin + 20)
    page.evaluate("() => dispatchEvent(new Event('blur'))")
    # JPEG moves a colour by up to 2. Two chunks may already be latched when the keys are released.
    chunk = painted(page)[0]
    until(lambda: painted(page)[0] >= chunk + 5)
    chunk, walked = painted(page)
    until(lambda: painted(page)[0] >= chunk + 4)
    assert abs(painted(page)[1] - walked) <= 4  # a walked chunk is 17 more


def test_blocked_udp_is_said_and_the_picture_comes_by_websocket(
    page: Page, service: Service
) -> None:
    page.add_init_script(BLOCKED_UDP)
    begin_s = time.monotonic()
    see(page, service)
    assert time.monotonic() - begin_s < 10
    assert page.get_attribute("body", "data-rung") in ("webcodecs", "jpeg")
    assert "WebRTC: no frames in time" in page.inner_text("#notice")


def test_second_visitor_waits_and_is_promoted(page: Page, other: Page, service: Service) -> None:
    see(page, service, "?transport=jpeg")
    other.goto(f"{service.base}/?transport=jpeg")
    wait_for_words(other, "You are number 1 of 1 in the queue")
    page.close()
    other.wait_for_selector("body[data-state=READY]", timeout=PICTURE_LIMIT_MS)


def test_second_window_of_a_browser_takes_over(page: Page, service: Service) -> None:
    see(page, service, "?transport=jpeg")
    second = page.context.new_page()
    see(second, service, "?transport=jpeg")
    wait_for_words(page, "You play in another window")
    assert second.get_attribute("body", "data-state") == "READY"


def test_spectator_sees_and_cannot_steer(page: Page, other: Page, service: Service) -> None:
    play(page, service, "?transport=jpeg")
    (session,) = open_sessions(service)
    other.goto(f"{service.base}/?watch={session.id}&transport=jpeg")
    other.wait_for_selector("#overlay[data-picture=yes]", state="attached")
    assert other.is_disabled("#reset")
    assert other.is_disabled("#prompt")
    taken = service.live.room(session.id)._input
    before = taken.last_seq
    other.keyboard.press("KeyS")
    time.sleep(0.3)
    assert taken.last_seq == before


def test_output_that_is_no_picture_stops_with_words_and_a_button(
    page: Page, service: Service
) -> None:
    play(page, service, "?transport=jpeg")
    page.fill("#prompt", "nan 9")
    page.keyboard.press("Enter")
    wait_for_words(page, "The world stopped")
    # The state is told before the reason.
    page.locator("#detail", has_text="The model made no valid picture.").wait_for()
    page.fill("#prompt", "")
    page.keyboard.press("Enter")
    page.click("#overlay-button")
    page.wait_for_selector("body[data-state=READY]", timeout=PICTURE_LIMIT_MS)


def test_wishes_are_applied_and_files_are_saved(
    page: Page, service: Service, tmp_path: Path
) -> None:
    play(page, service, "?transport=jpeg")
    page.fill("#prompt", "a lake")
    page.keyboard.press("Enter")
    wait_for_notice(page, "New prompt: done")
    page.click("button[data-scene=snow-ruins]")
    wait_for_notice(page, "Scene snow-ruins: done")
    assert page.get_attribute("button[data-scene=snow-ruins]", "aria-pressed") == "true"
    page.click("#reseed")
    wait_for_notice(page, "New seed: done")
    page.keyboard.press("KeyP")
    page.wait_for_selector("body[data-state=PAUSED]")
    page.click("#step")
    wait_for_notice(page, "One chunk: done")
    for button, ending in (("#save-trace", ".trace.jsonl"), ("#save-video", ".mp4")):
        with page.expect_download() as download:
            page.click(button)
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        assert path.name.endswith(ending)
        assert path.stat().st_size > 0
    (trace,) = tmp_path.glob("*.trace.jsonl")
    header = json.loads(trace.read_text(encoding="utf-8").splitlines()[0])
    assert header["scene"] == "snow-ruins"


def test_own_picture_starts_a_world_and_comes_with_its_trace(
    page: Page, service: Service, tmp_path: Path
) -> None:
    play(page, service, "?transport=jpeg")
    picture = tmp_path / "own.png"
    Image.new("RGB", (300, 200), "orange").save(picture)
    page.set_input_files("#upload", picture)
    wait_for_notice(page, "Own picture: done")
    downloads: list[Download] = []
    page.on("download", lambda download: downloads.append(download))
    page.click("#save-trace")
    until(lambda: page.wait_for_timeout(50) or len(downloads) == 2)
    for download in downloads:
        download.save_as(tmp_path / download.suggested_filename)
    (trace,) = tmp_path.glob("*.trace.jsonl")
    header = json.loads(trace.read_text(encoding="utf-8").splitlines()[0])
    assert (tmp_path / header["image"]).is_file()


def test_text_that_is_no_picture_is_refused_with_words(
    page: Page, service: Service, tmp_path: Path
) -> None:
    play(page, service, "?transport=jpeg")
    text = tmp_path / "text.png"
    text.write_text("no picture")
    page.set_input_files("#upload", text)
    wait_for_notice(page, "Own picture: The picture cannot be used.")
    assert page.get_attribute("body", "data-state") == "RUNNING"


def test_reloaded_page_goes_on_in_the_same_world(page: Page, service: Service) -> None:
    play(page, service, "?transport=jpeg")
    (session,) = open_sessions(service)
    page.reload()
    page.wait_for_selector("body[data-state=RUNNING]", timeout=PICTURE_LIMIT_MS)
    assert [each.id for each in open_sessions(service)] == [session.id]


def test_prompt_seed_and_pause_survive_a_reload(page: Page, service: Service) -> None:
    play(page, service, "?transport=jpeg")
    page.click("#reseed")
    wait_for_notice(page, "New seed: done")
    page.fill("#prompt", "a lake")
    page.keyboard.press("Enter")
    wait_for_notice(page, "New prompt: done")
    (session,) = open_sessions(service)
    world = session.world
    page.keyboard.press("KeyP")
    page.wait_for_selector("body[data-state=PAUSED]")
    page.reload()
    page.wait_for_selector("body[data-state=PAUSED]", timeout=PICTURE_LIMIT_MS)
    assert page.input_value("#prompt") == "a lake"
    time.sleep(0.5)  # nothing ends a pause that the player asked for
    assert page.get_attribute("body", "data-state") == "PAUSED"
    assert session.world == world
    assert world.seed != 0


def test_closing_server_is_said(page: Page) -> None:
    with running() as service:
        see(page, service, "?transport=jpeg")
        service.stop()
        wait_for_words(page, "The server is closing")
        service.join()
    wait_for_words(page, "The server does not answer")

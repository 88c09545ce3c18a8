"""The page against a scripted service: words, keys, release rules, ladder, reconnecting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright.sync_api")
pytest.importorskip("fastapi")

from stream import server_messages as server
from stream.error_codes import CLOSE_CODE, ERROR_TEXT, ErrorCode
from stream.protocol import SessionState, WorldInfo
from stream.transports import RENEGOTIATE
from tests.web.fake_service import FakeService, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.cpu


@pytest.fixture
def service() -> Iterator[FakeService]:
    with serve(FakeService()) as running:
        yield running


def until(condition: Callable[[], Any], limit_s: float = 15.0) -> Any:
    """Wait for what a test expects of the other side; fails with the last value."""
    deadline_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"still {value!r} after {limit_s} s"
        time.sleep(0.02)
    return value


def play(page: Page, service: FakeService, query: str = "?transport=jpeg") -> None:
    """Open the page and go on until the world runs."""
    page.goto(service.url + "/" + query)
    page.wait_for_selector("#overlay[data-picture=yes]", state="attached")
    service.set_state(SessionState.RUNNING)
    page.wait_for_selector("body[data-state=RUNNING]")


def wait_for_headline(page: Page, words: str) -> None:
    page.wait_for_function(
        "words => document.getElementById('headline').textContent.includes(words)"
        " && !document.getElementById('overlay').hidden",
        arg=words,
    )


def last_keys(service: FakeService) -> tuple[str, ...]:
    return service.messages("act")[-1].keys


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        (SessionState.WARMING, "", "Starting the world"),
        (SessionState.READY, "", "Click, or press W"),
        (SessionState.PAUSED, "user", "Paused"),
        (SessionState.DRAINING, "", "closing"),
        (SessionState.FAILED, "", "The world stopped"),
    ],
)
def test_every_state_has_words(
    page: Page, service: FakeService, state: SessionState, reason: str, words: str
) -> None:
    play(page, service)
    assert page.is_hidden("#overlay")
    service.set_state(state, reason)
    wait_for_headline(page, words)


def test_loading_shows_stage_and_percent_until_the_model_is_there(
    page: Page, service: FakeService
) -> None:
    service.loading = server.Loading(stage="weights", percent=40, seconds=12)
    page.goto(service.url + "/?transport=jpeg")
    wait_for_headline(page, "The model is loading")
    assert page.inner_text("#detail") == "weights: 40 %, 12 s so far"
    assert service.created == []
    service.loading = None
    wait_for_headline(page, "Click, or press W")


def test_queue_shows_position_and_estimate(page: Page, service: FakeService) -> None:
    service.first_state = SessionState.QUEUED
    page.goto(service.url)
    until(lambda: service.messages("hello"))
    service.send(server.Queue(pos=2, len=3, eta_s=40))
    wait_for_headline(page, "You are number 2 of 3 in the queue, about 40 s")
    assert service.messages("media") == []


def test_full_queue_is_said(page: Page, service: FakeService) -> None:
    service.refusal = ErrorCode.QUEUE_FULL
    page.goto(service.url)
    wait_for_headline(page, "Busy")


def test_invalid_picture_is_said_and_the_button_starts_a_new_world(
    page: Page, service: FakeService
) -> None:
    play(page, service)
    service.set_state(SessionState.FAILED)
    service.send(server.err(ErrorCode.GEN_INVALID, fatal=True))
    service.send(server.bye(ErrorCode.GEN_INVALID))
    service.close_socket(CLOSE_CODE[ErrorCode.GEN_INVALID])
    wait_for_headline(page, "The world stopped")
    assert page.inner_text("#detail") == ERROR_TEXT[ErrorCode.GEN_INVALID]
    time.sleep(0.6)  # twice the first back-off
    assert len(service.created) == 1
    page.click("#overlay-button")
    until(lambda: len(service.created) == 2)
    assert "resume" not in service.created[-1]


def test_lost_socket_is_said_and_the_page_returns_to_the_same_world(
    page: Page, service: FakeService
) -> None:
    play(page, service)
    page.evaluate(
        "new MutationObserver(() => { window.heard = (window.heard ?? '') +"
        " document.getElementById('headline').textContent; }).observe("
        "document.getElementById('headline'), {childList: true})"
    )
    service.close_socket(1012)
    until(lambda: len(service.created) == 2)
    assert service.created[-1]["resume"].startswith("resume-")
    assert "Connection lost" in page.evaluate("window.heard")
    page.wait_for_selector("body[data-state=READY]")
    service.set_state(SessionState.RUNNING)
    page.wait_for_selector("#overlay", state="hidden")


def test_page_returns_to_its_world_while_another_place_is_made_ready(
    page: Page, service: FakeService
) -> None:
    play(page, service)
    service.loading = server.Loading(stage="weights", percent=40, seconds=12)
    service.close_socket(1012)
    until(lambda: len(service.created) == 2)
    assert service.created[-1]["resume"].startswith("resume-")
    page.wait_for_selector("body[data-state=READY]")


def test_wish_without_a_connection_is_asked_for_after_it(page: Page, service: FakeService) -> None:
    play(page, service)
    service.refusal = ErrorCode.NOT_READY
    service.close_socket(1012)
    wait_for_headline(page, "The server is not ready")
    page.click("button[data-scene=snow-ruins]")
    assert service.messages("reset") == []
    service.refusal = None
    page.click("#overlay-button")
    wish = until(lambda: service.messages("reset"))[0]
    assert (wish.scene, wish.prompt) == ("snow-ruins", "words of snow-ruins")
    time.sleep(0.2)
    assert len(service.messages("reset")) == 1


def test_prompt_of_the_world_is_in_its_field_unless_somebody_types(
    page: Page, service: FakeService
) -> None:
    play(page, service)
    assert page.input_value("#prompt") == "words"
    world = WorldInfo(scene="snow-ruins", image_id=None, prompt="snow", seed=0, epoch=1)
    service.send(server.World(world=world))
    page.wait_for_function("document.getElementById('prompt').value === 'snow'")
    assert page.get_attribute("button[data-scene=snow-ruins]", "aria-pressed") == "true"
    page.fill("#prompt", "ice")
    service.send(server.World(world=world))
    service.send(server.Warn(code="TEST", msg="all heard"))
    page.locator("#notice", has_text="all heard").wait_for()
    assert page.input_value("#prompt") == "ice"


def test_picture_that_is_too_large_is_not_sent(page: Page, service: FakeService) -> None:
    play(page, service)
    page.evaluate(
        """() => {
          const chosen = new DataTransfer();
          chosen.items.add(new File([new Uint8Array(9 << 20)], 'own.png', {type: 'image/png'}));
          const field = document.getElementById('upload');
          field.files = chosen.files;
          field.dispatchEvent(new Event('change'));
        }"""
    )
    page.locator("#notice", has_text="Own picture: larger than 8 MiB").wait_for()


def test_slow_chunk_is_said_until_the_next_one(page: Page, service: FakeService) -> None:
    play(page, service)
    service.send(server.Warn(code="SLOW", msg="slow"))
    wait_for_headline(page, "The server is slow")
    service.send(
        server.Chunk(
            k=1, epoch=0, first=18, n=17, pts0=0, dpts=3750, pts=None, act=None,
            times=server.ChunkTimes(latch=(), gen0=0.0, gen1=0.0, enq=0.0, due=0.0),
        )
    )  # fmt: skip
    page.wait_for_selector("#overlay", state="hidden")


def test_reloaded_page_returns_to_the_same_world(page: Page, service: FakeService) -> None:
    play(page, service)
    page.reload()
    until(lambda: len(service.created) == 2)
    until(lambda: service.messages("bye"))  # frees the place of a page that is closed
    assert service.created[-1]["resume"].startswith("resume-")


@pytest.mark.parametrize("code", [1011, 1013, 4429, 4500])
def test_page_comes_back_after_what_passes(page: Page, service: FakeService, code: int) -> None:
    play(page, service)
    service.close_socket(code)
    until(lambda: len(service.created) == 2)
    page.wait_for_selector("body[data-state=READY]")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (4400, "did not understand this page"),
        (4404, "This world has ended"),
        (4408, "The world was put away"),
        (4409, "You play in another window"),
        (4410, "The world was put away"),
        (4411, "Time is up"),
    ],
)
def test_page_stops_and_says_so(page: Page, service: FakeService, code: int, words: str) -> None:
    play(page, service)
    service.close_socket(code)
    wait_for_headline(page, words)
    time.sleep(0.6)  # twice the first back-off
    assert len(service.created) == 1
    assert page.is_visible("#overlay-button")


def test_refused_ticket_is_replaced_once(page: Page, service: FakeService) -> None:
    service.closes_at_once = CLOSE_CODE[ErrorCode.UNAUTHORIZED]
    page.goto(service.url)
    wait_for_headline(page, "This server wants a token")
    assert len(service.created) == 2


def test_held_key_is_an_edge_then_fresh_snapshots_then_a_release(
    page: Page, service: FakeService
) -> None:
    play(page, service)
    page.keyboard.down("w")
    page.keyboard.down("w")  # the browser's auto-repeat
    until(lambda: len(service.messages("act")) >= 4)
    page.keyboard.up("w")
    until(lambda: last_keys(service) == ())
    acts = service.messages("act")
    assert {act.keys for act in acts[:-1]} == {("KeyW",)}
    edges = {edge[0]: edge[1:3] for act in acts for edge in act.edges}
    assert list(edges.values()) == [("KeyW", 1), ("KeyW", 0)]
    seqs = [act.seq for act in acts]
    assert seqs == sorted(set(seqs))
    assert seqs[0] > 100  # what the server had seen before
    time.sleep(0.2)
    assert len(service.messages("act")) == len(acts)  # nothing while idle


def test_tap_shorter_than_a_refresh_is_sent_as_two_edges(page: Page, service: FakeService) -> None:
    play(page, service)
    page.keyboard.press("d")
    until(lambda: service.messages("act") and last_keys(service) == ())
    edges = service.messages("act")[-1].edges
    assert [edge[1:3] for edge in edges] == [("KeyD", 1), ("KeyD", 0)]


RELEASES = {
    "blur": "dispatchEvent(new Event('blur'))",
    "hidden": "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
    "document.dispatchEvent(new Event('visibilitychange'))",
    "pagehide": "dispatchEvent(new Event('pagehide'))",
    "pointer lock lost": "document.dispatchEvent(new Event('pointerlockchange'))",
    "text field": "document.getElementById('prompt').focus()",
}


@pytest.mark.parametrize("how", RELEASES)
def test_lost_attention_releases_all_keys(page: Page, service: FakeService, how: str) -> None:
    play(page, service)
    page.keyboard.down("w")
    page.keyboard.down("ArrowLeft")
    until(lambda: service.messages("act") and last_keys(service) == ("KeyW", "ArrowLeft"))
    page.evaluate(RELEASES[how])
    until(lambda: last_keys(service) == ())
    assert page.query_selector("kbd.held") is None
    time.sleep(0.2)
    assert last_keys(service) == ()


def test_hidden_page_pauses_and_goes_on(page: Page, service: FakeService) -> None:
    play(page, service)
    page.evaluate(RELEASES["hidden"])
    assert until(lambda: service.messages("pause"))[0].reason == "hidden"
    service.set_state(SessionState.PAUSED, "hidden")
    time.sleep(0.1)
    assert service.messages("resume") == []
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    until(lambda: service.messages("resume"))


def test_world_that_goes_on_out_of_sight_is_paused(page: Page, service: FakeService) -> None:
    play(page, service)
    page.evaluate(RELEASES["hidden"])
    until(lambda: len(service.messages("pause")) == 1)
    service.set_state(SessionState.PAUSED, "hidden")
    service.set_state(SessionState.RUNNING, "reconnected")
    until(lambda: len(service.messages("pause")) == 2)


def test_shortcuts_of_the_browser_and_typed_text_move_nothing(
    page: Page, service: FakeService
) -> None:
    play(page, service)
    page.keyboard.press("Control+a")
    page.click("#prompt")
    page.keyboard.type("wasd")
    assert page.input_value("#prompt").endswith("wasd")
    assert service.messages("act") == []


def test_gamepad_moves_outside_its_dead_zone_only(page: Page, service: FakeService) -> None:
    page.add_init_script(
        "window.axes = [0.1, -1, 0.5, 0];"
        "navigator.getGamepads = () => [{connected: true, axes: window.axes}]"
    )
    play(page, service)
    act = until(lambda: service.messages("act"))[-1]
    assert act.pad == (0, -1, 0.412, 0)  # (0.5 - 0.15) / 0.85
    page.evaluate("window.axes = [0, 0, 0, 0]")
    until(lambda: service.messages("act")[-1].pad == (0, 0, 0, 0))


def test_mouse_looks_only_while_the_picture_has_it(page: Page, service: FakeService) -> None:
    play(page, service)
    page.mouse.move(300, 300)
    page.mouse.move(340, 300)
    assert service.messages("act") == []
    page.click("#stage", position={"x": 300, "y": 300})
    page.wait_for_function("document.pointerLockElement !== null")
    page.mouse.move(360, 310)
    act = until(lambda: service.messages("act") and service.messages("act")[-1])
    assert act.look[0] > 0
    assert page.is_visible("#mouse-hint")
    page.evaluate("document.exitPointerLock()")
    page.wait_for_selector("#mouse-hint", state="hidden")


def test_prompt_scene_seed_pause_and_step_are_sent(page: Page, service: FakeService) -> None:
    play(page, service)
    page.fill("#prompt", "snow at night")
    page.keyboard.press("Enter")
    wish = until(lambda: service.messages("prompt"))[0]
    assert wish.text == "snow at night"
    service.send(server.Applied(id=wish.id, chunk=6, epoch=0))
    page.wait_for_function("document.getElementById('notice').textContent === 'New prompt: done'")
    page.click("button[data-scene=snow-ruins]")
    reset = until(lambda: service.messages("reset"))[0]
    assert (reset.scene, reset.prompt) == ("snow-ruins", "words of snow-ruins")
    page.click("#reseed")
    assert until(lambda: len(service.messages("reset")) == 2)
    assert service.messages("reset")[1].seed is not None
    page.keyboard.press("p")
    until(lambda: service.messages("pause"))
    service.set_state(SessionState.PAUSED, "user")
    page.click("#step")
    until(lambda: service.messages("step"))
    page.click("#overlay-button")
    until(lambda: service.messages("resume"))


def test_action_to_photon_is_measured_and_reported(page: Page, service: FakeService) -> None:
    play(page, service)
    page.keyboard.press("w")
    page.wait_for_function("/^[0-9]+ ms/.test(document.getElementById('hud-latency').textContent)")
    report = until(lambda: service.messages("shown"))[0]
    frames = [frame for frame, _ in report.frames]
    assert frames == sorted(frames)
    page.wait_for_function("Number(document.getElementById('hud-fps').textContent) > 5")


def test_ladder_goes_down_by_itself_and_says_so(page: Page, service: FakeService) -> None:
    """No answer to the offer, no H.264: JPEG is what is left."""
    page.goto(service.url)
    page.wait_for_selector("#overlay[data-picture=yes]", state="attached", timeout=15_000)
    assert page.get_attribute("body", "data-rung") == "jpeg"
    chosen = [(media.transport, media.codec) for media in service.messages("media")]
    assert chosen == [("webrtc", None), ("ws", "h264"), ("ws", "jpeg")]
    assert "Now: WebSocket JPEG" in page.inner_text("#notice")
    page.reload()
    until(lambda: len(service.messages("hello")) == 2)
    until(lambda: len(service.messages("media")) == 4)
    assert service.messages("media")[-1].codec == "jpeg"  # remembered


def test_forced_rung_is_never_left(page: Page, service: FakeService) -> None:
    page.goto(service.url + "/?transport=webrtc")
    until(lambda: service.messages("rtc.offer"))
    time.sleep(1.2)  # twice the time that the ladder gives
    assert {media.transport for media in service.messages("media")} == {"webrtc"}
    assert "Trying again" in page.inner_text("#notice")
    page.select_option("#transport", "jpeg")
    page.wait_for_selector("#overlay[data-picture=yes]", state="attached")


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_narrow_page_needs_no_sideways_scrolling(
    page: Page, service: FakeService, scheme: Any
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 740})
    play(page, service)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_page_works_without_a_mouse(page: Page, service: FakeService) -> None:
    play(page, service)
    reached = set()
    for _ in range(16):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.dataset.scene")
        )
    assert {"stage", "pause", "reset", "transport", "prompt", "meadow-forest"} <= reached


def test_freed_mouse_releases_all_keys(page: Page, service: FakeService) -> None:
    play(page, service)
    page.click("#stage", position={"x": 300, "y": 300})
    page.wait_for_function("document.pointerLockElement !== null")
    page.keyboard.down("w")
    until(lambda: service.messages("act") and last_keys(service) == ("KeyW",))
    page.evaluate("document.exitPointerLock()")
    until(lambda: last_keys(service) == ())


def test_fast_toggles_arrive_whole_and_in_order(page: Page, service: FakeService) -> None:
    play(page, service)
    for _ in range(10):
        page.keyboard.press("a")
        page.keyboard.press("d")

    def edges() -> dict[int, tuple[str, int]]:
        acts = service.messages("act")
        return {number: (code, down) for act in acts for number, code, down, _ in act.edges}

    until(lambda: len(edges()) == 40)
    assert list(edges()) == sorted(edges())
    assert list(edges().values()) == [("KeyA", 1), ("KeyA", 0), ("KeyD", 1), ("KeyD", 0)] * 10


def test_touch_sticks_walk_and_look_at_once(browser: Browser, service: FakeService) -> None:
    context = browser.new_context(
        viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True
    )
    page = context.new_page()
    play(page, service)
    debugger = context.new_cdp_session(page)
    boxes = [page.locator(stick).bounding_box() for stick in ("#stick-walk", "#stick-look")]
    centres = [(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2) for box in boxes if box]
    (walk_x, walk_y), (look_x, look_y) = centres

    def touch(kind: str, *points: tuple[float, float]) -> None:
        debugger.send(
            "Input.dispatchTouchEvent",
            {
                "type": kind,
                "touchPoints": [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)],
            },
        )

    touch("touchStart", (walk_x, walk_y), (look_x, look_y))
    touch("touchMove", (walk_x, walk_y - 200), (look_x + 200, look_y))
    until(lambda: service.messages("act") and service.messages("act")[-1].pad == (0, -1, 1, 0))
    touch("touchEnd")
    until(lambda: service.messages("act")[-1].pad == (0, 0, 0, 0))
    context.close()


def test_connection_that_sends_nothing_is_made_anew(page: Page, service: FakeService) -> None:
    page.goto(service.url + "/?transport=webrtc")
    until(lambda: service.messages("rtc.offer"))
    service.send(server.Warn(code=RENEGOTIATE, msg="anew"))
    until(lambda: len(service.messages("rtc.offer")) == 2)
    assert [offer.gen for offer in service.messages("rtc.offer")] == [1, 2]


def test_stalled_video_asks_for_a_keyframe_then_begins_anew(
    page: Page, service: FakeService
) -> None:
    play(page, service)
    service.video_on = False
    stats = server.Stats(
        gen_ms=None, queue_frames=0, fps_out=24.0, encode_ms=None, kbps=0.0, act_lag_ms=None,
        dropped=0, viewers=1,
    )  # fmt: skip

    def came(kind: str, count: int) -> bool:
        service.send(stats)
        return len(service.messages(kind)) == count

    until(lambda: came("kf", 1))
    assert len(service.messages("media")) == 1
    until(lambda: came("media", 2))
    assert len(service.messages("kf")) == 1


def test_pictures_are_held_on_rough_links_only(page: Page, service: FakeService) -> None:
    page.goto(service.url)
    held = page.evaluate(
        """async () => {
          const { RtcVideo } = await import('/webrtc.js');
          const nothing = () => {};
          const rtc = new RtcVideo({gen: 1, video: document.createElement('video'), iceServers: [],
            isRelay: false, send: nothing, onFrame: nothing, onFailed: nothing});
          rtc.receiver = {jitterBufferTarget: null};
          const held = [];
          for (const jitter of [0.001, 0.02, 0.04, 0.2, 0.02, 0.01]) {
            rtc.peer.getStats = async () => new Map([['in', {type: 'inbound-rtp', jitter}]]);
            await rtc.poll();
            held.push(rtc.receiver.jitterBufferTarget);
          }
          rtc.close();
          return held;
        }"""
    )
    assert held == [0, 0, 80, 100, 100, 0]

"""The service over HTTP and WebSocket, with its worker process; the world is painted."""

import json
import os
import signal
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from tests.stream.live_service import Client, Service, running

pytestmark = [
    pytest.mark.cpu,
    # Sockets of the threads that a failed test leaves behind.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Service]:
    """A service for tests that leave it as they found it."""
    with running(max_sessions=2, grace_s=0.5, image_limit_bytes=100_000) as service:
        yield service


@pytest.fixture
def service(shared: Service) -> Iterator[Service]:
    """The shared service, empty before and after."""
    yield shared
    for session in shared.live.registry:
        token = {"Authorization": f"Bearer {session.resume_token}"}
        shared.request("DELETE", f"/v1/sessions/{session.id}", **token)
    shared.wait(
        lambda: all(seat.is_free for seat in shared.live.workers.seats), "all seats are free"
    )


def _png(width_px: int = 64, height_px: int = 48) -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (width_px, height_px), (200, 40, 40)).save(buffer, format="PNG")
    return buffer.getvalue()


def test_health_and_info(service: Service) -> None:
    assert service.request("GET", "/healthz") == (200, {"status": "ok"})
    status, info = service.request("GET", "/v1/info")
    assert status == 200
    assert (info["protocols"], info["is_ready"]) == (["wm.v1"], True)
    assert len(info["scenes"]) >= 8
    status, png = service.request("GET", info["scenes"][0]["thumbnail"])
    assert (status, png[:4]) == (200, b"\x89PNG")


def test_page_and_security_headers(service: Service) -> None:
    import urllib.request

    with urllib.request.urlopen(service.base + "/") as answer:
        assert answer.status == 200
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_play_shows_actions_in_frames(service: Service) -> None:
    client = Client.hello(service)
    client.play()
    seq = client.act("KeyW")
    while not any(act_seq >= seq for _, act_seq, _ in client.frames):
        client.step()
        if len(client.frames) % 5 == 0:
            client.act("KeyW")
    ids = [frame_id for frame_id, _, flags in client.frames if not flags & 4]
    assert ids == sorted(set(ids))
    client.close()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "BAD_MESSAGE"),
        ('{"t":"act","seq":"x"}', "BAD_MESSAGE"),
        (b"\x00\x01", "BAD_MESSAGE"),
        ('{"t":"hello","ver":1,"viewport":[1,1]}', "BAD_MESSAGE"),
        ('{"t":"rtc.offer","gen":1,"sdp":"v=0"}', "BAD_MESSAGE"),
    ],
)
def test_bad_message_gets_a_typed_error_and_the_socket_lives(
    service: Service, text: str | bytes, code: str
) -> None:
    client = Client.hello(service)
    client.until("state", state="READY")
    client.socket.send(text)
    assert client.until("err")["code"] == code
    client.send(t="dance")
    client.send(t="ping", id=3, ct=1.0)
    client.until("pong", id=3)
    client.close()


def test_oversized_message_closes_the_socket(service: Service) -> None:
    client = Client.hello(service)
    client.socket.send('"' + "x" * 70_000 + '"')
    assert client.close_code() == 1009


def test_flood_is_limited_and_others_play_on(service: Service) -> None:
    healthy, flooder = Client.hello(service), Client.hello(service)
    healthy.play()
    for number in range(1_000):
        flooder.send(t="ping", id=number, ct=1.0)
    assert flooder.until("err")["code"] == "RATE_LIMIT"
    healthy.until_frames(10)
    time.sleep(1.1)
    flooder.send(t="ping", id=5_000, ct=1.0)
    flooder.until("pong", id=5_000)
    healthy.close()
    flooder.close()


def test_socket_needs_ticket_and_origin(service: Service) -> None:
    made = service.create()
    for origin, ticket in (
        ("http://evil.example", made["ticket"]),
        (None, made["ticket"]),
        ("", "guess"),
    ):
        with pytest.raises(InvalidStatus) as caught:
            Client(service, made | {"ticket": ticket}, origin=origin)
        assert caught.value.response.status_code == (401 if ticket == "guess" else 403)
    Client.hello(service, made).close()
    with pytest.raises(InvalidStatus) as caught:
        Client(service, made)
    assert caught.value.response.status_code == 401


def test_socket_without_a_hello_does_not_disturb_the_player(service: Service) -> None:
    player = Client.hello(service, client="browser-2")
    player.play()
    silent = Client(service, service.create(client="browser-2"))
    silent.send(t="ping", id=1, ct=1.0)
    assert silent.close_code() == 4400
    assert service.state(player.made["session_id"]) == "RUNNING"
    player.until_frames(3)
    player.close()


def test_page_of_another_origin_cannot_write(service: Service) -> None:
    for headers in (
        {"Origin": "http://evil.example"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Host": "evil.example"},
    ):
        status, body = service.request("POST", "/v1/sessions", {}, **headers)
        assert (status, body["code"]) == (403, "FORBIDDEN_ORIGIN")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "BAD_MESSAGE"),
        ({"role": "king"}, 400, "BAD_MESSAGE"),
        ({"scene": "nowhere"}, 400, "BAD_MESSAGE"),
        ({"prompt": "x" * 1_001}, 400, "BAD_MESSAGE"),
        ({"seed": -1}, 400, "BAD_MESSAGE"),
        ({"resume": "guess"}, 404, "NO_SESSION"),
        ({"role": "viewer", "join": "guess"}, 404, "NO_SESSION"),
        (b"x" * 70_000, 413, "TOO_LARGE"),
    ],
)
def test_session_request_is_refused(
    service: Service, body: bytes | dict[str, Any], status: int, code: str
) -> None:
    got, answer = service.request(
        "POST", "/v1/sessions", body, **{"Content-Type": "application/json"}
    )
    assert (got, answer["code"]) == (status, code)


def test_unknown_paths_and_sessions_are_typed_errors(service: Service) -> None:
    for path in ("/v1/sessions/guess", "/v1/nothing", "/v1/scenes/nowhere.png", "/../etc/passwd"):
        status, answer = service.request("GET", path)
        assert (status, answer["code"]) == (404, "NO_SESSION")


def test_trace_and_recording_are_for_the_player(service: Service) -> None:
    client = Client.hello(service)
    client.play()
    client.until_frames(20)
    path = f"/v1/sessions/{client.made['session_id']}"
    assert service.request("GET", f"{path}/trace.jsonl")[0] == 403
    token = {"Authorization": f"Bearer {client.made['resume_token']}"}
    status, trace = service.request("GET", f"{path}/trace.jsonl", **token)
    assert status == 200
    lines = [json.loads(line) for line in trace.splitlines()]
    assert [line["type"] for line in lines[:2]] == ["header", "chunk"]
    status, video = service.request("GET", f"{path}/recording.mp4", **token)
    assert (status, video[4:8]) == (200, b"ftyp")
    client.close()


def test_prompt_pause_step_and_resume(service: Service) -> None:
    client = Client.hello(service)
    client.play()
    client.send(t="prompt", id=1, text="slow\u0007 0.01")
    client.until("applied", id=1)
    client.send(t="pause")
    client.until("state", state="PAUSED")
    client.act("KeyW")  # still held: that alone does not play on
    client.send(t="step", id=2)
    client.until("applied", id=2)
    assert service.state(client.made["session_id"]) == "PAUSED"
    client.send(t="resume")
    client.until("state", state="RUNNING")
    world = service.request("GET", f"/v1/sessions/{client.made['session_id']}")[1]["world"]
    assert world["prompt"] == "slow 0.01"
    client.close()


def test_a_prompt_that_cannot_be_encoded_is_told_and_the_world_goes_on(service: Service) -> None:
    client = Client.hello(service)
    client.play()
    before = service.request("GET", f"/v1/sessions/{client.made['session_id']}")[1]["world"]
    client.send(t="prompt", id=1, text="refused")
    assert client.until("warn")["code"] == "REFUSED"
    assert client.until("world")["world"]["prompt"] == before["prompt"]
    client.send(t="prompt", id=2, text="a lake")
    client.until("applied", id=2)
    client.close()


def test_viewers_are_told_of_the_world_and_of_each_change(service: Service) -> None:
    client = Client.hello(service, scene="snow-ruins")
    client.play()
    told = [each["world"] for each in client.messages if "world" in each]  # or in the welcome
    assert (told[-1]["scene"], bool(told[-1]["prompt"])) == ("snow-ruins", True)
    client.send(t="prompt", id=1, text="a lake")
    assert client.until("world")["world"]["prompt"] == "a lake"
    client.close()


def test_commands_and_actions_have_their_own_rates(service: Service) -> None:
    client = Client.hello(service)
    client.play()
    for number in range(30):
        client.send(t="prompt", id=number, text="a lake")
    assert client.until("err")["code"] == "RATE_LIMIT"
    for _ in range(140):
        client.act("KeyW")
    client.send(t="ping", id=9, ct=1.0)
    client.until("pong", id=9)
    text = service.live.metrics_text().decode()
    assert 'worldstream_drops_total{where="act_rate"}' in text
    client.close()


def test_ten_resets_act_as_one_and_no_older_frame_follows(service: Service) -> None:
    client = Client.hello(service)
    client.play()
    client.until_frames(20)
    for number in range(10):
        client.send(t="reset", id=number, seed=number)
    applied = client.until("applied", id=9)
    assert 1 <= applied["epoch"] <= 10
    newest = max(frame_id for frame_id, _, _ in client.frames)
    count = len(client.frames)
    client.until_frames(10)
    first_of_epoch = next(frame for frame in client.frames[count:] if frame[0] > newest)
    assert all(frame_id >= first_of_epoch[0] for frame_id, _, _ in client.frames[count:])
    assert service.request("GET", f"/v1/sessions/{client.made['session_id']}")[1]["world"] == {
        "scene": "meadow-forest",
        "image_id": None,
        "prompt": client.service.live.registry.get(client.made["session_id"]).world.prompt,
        "seed": 9,
        "epoch": applied["epoch"],
    }
    client.close()


def test_viewer_watches_but_does_not_play(service: Service) -> None:
    player = Client.hello(service)
    player.play()
    viewer = Client.hello(service, role="viewer")
    viewer.send(t="media", transport="ws", codec="jpeg")
    viewer.until_frames(3)
    viewer.act("KeyS")
    assert viewer.until("err")["code"] == "NOT_CONTROLLER"
    viewer.send(t="reset", id=1)
    assert viewer.until("err")["code"] == "NOT_CONTROLLER"
    viewer.close()
    player.until_frames(3)
    player.close()


def test_newer_window_of_the_player_takes_over(service: Service) -> None:
    old = Client.hello(service, client="browser-1")
    old.play()
    new = Client.hello(service, client="browser-1")
    assert new.made["session_id"] == old.made["session_id"]
    assert old.until("bye")["code"] == "CONFLICT"
    new.until("state", state="RUNNING")
    new.close()


def test_lost_socket_holds_the_world_and_then_gives_it_up(service: Service) -> None:
    client = Client.hello(service)
    client.play()
    client.socket.socket.close()
    session_id = client.made["session_id"]
    service.wait(lambda: service.state(session_id) == "GRACE", "the loss is noticed")
    again = Client.hello(service, service.create(resume=client.made["resume_token"]))
    again.until("state", state="RUNNING")
    assert again.made["session_id"] == session_id
    again.close()
    service.wait(lambda: service.state(session_id) == "CLOSED", "the grace ends")


def test_page_that_says_bye_may_be_loaded_anew_and_else_gives_up_its_place(
    service: Service,
) -> None:
    client = Client.hello(service)
    client.play()
    client.send(t="bye")
    assert client.close_code() == 1000
    session_id = client.made["session_id"]
    assert service.state(session_id) == "GRACE"
    again = Client.hello(service, service.create(resume=client.made["resume_token"]))
    again.until("state", state="RUNNING")
    again.send(t="bye")
    again.close()
    service.wait(lambda: service.state(session_id) == "CLOSED", "the place is given up")
    assert service.live.registry.illegal_count == 0


def test_hello_after_the_end_of_the_session_is_told_so(service: Service) -> None:
    made = service.create()
    client = Client(service, made)
    token = {"Authorization": f"Bearer {made['resume_token']}"}
    path = f"/v1/sessions/{made['session_id']}"
    assert service.request("DELETE", path, **token)[0] == 204
    client.send(t="hello", ver=1, viewport=[1, 1])
    assert client.close_code() == 4410
    assert service.request("DELETE", path, **token)[0] == 404


def test_third_visitor_waits_until_one_of_two_leaves(service: Service) -> None:
    first, second = Client.hello(service), Client.hello(service)
    first.play()
    second.play()
    third = Client.hello(service)
    assert third.made["queue_pos"] == 1
    third.until("queue", pos=1)
    token = {"Authorization": f"Bearer {first.made['resume_token']}"}
    path = f"/v1/sessions/{first.made['session_id']}"
    assert service.request("DELETE", path, **token)[0] == 204
    third.play()
    third.until_frames(3)
    second.until_frames(3)
    assert first.until("bye")["code"] == "GONE"
    second.close()
    third.close()


@pytest.mark.parametrize("fault", ["nan 2", "black 2", "frozen 2"])
def test_output_that_is_no_picture_ends_the_session_with_a_message(
    service: Service, fault: str
) -> None:
    client = Client.hello(service, prompt=fault)
    client.play()
    assert client.until("err", fatal=True)["code"] == "GEN_INVALID"
    assert client.until("bye")["resume"] is False
    Client.hello(service).close()


def test_worker_that_dies_comes_back_with_the_world(service: Service) -> None:
    client = Client.hello(service)
    client.play()
    client.until_frames(20)
    session = service.live.registry.get(client.made["session_id"])
    seat = service.live._rooms[session.id].seat
    assert seat is not None
    assert seat.worker.pid is not None
    os.kill(seat.worker.pid, signal.SIGKILL)
    client.until("warn", code="WORKER_DIED")
    client.until("state", state="RUNNING", reason="worker is back")
    client.act("KeyW")
    client.until_frames(5)
    client.close()


def test_upload_is_decoded_and_limited(service: Service) -> None:
    png = {"Content-Type": "image/png"}
    status, made = service.request("POST", "/v1/images", _png(), **png)
    assert status == 201
    assert service.live.images is not None
    assert service.live.images.path(made["image_id"]).is_file()
    for body, headers, wanted in (
        (b"<html>", png, (422, "BAD_IMAGE")),
        (_png(16, 16), png, (422, "BAD_IMAGE")),
        (_png()[:60], png, (422, "BAD_IMAGE")),
        (_png(), {"Content-Type": "text/plain"}, (422, "BAD_IMAGE")),
        (b"x" * 200_000, png, (413, "TOO_LARGE")),
    ):
        status, answer = service.request("POST", "/v1/images", body, **headers)
        assert (status, answer["code"]) == wanted


def test_world_starts_from_an_upload_and_its_files_are_kept(tmp_path: Path) -> None:
    # The renderer takes no pictures: this service says that it runs the model, and paints.
    with running(renderer=False, record=str(tmp_path)) as service:
        _, made = service.request("POST", "/v1/images", _png(), **{"Content-Type": "image/png"})
        client = Client.hello(service, image_id=made["image_id"])
        client.play()
        client.until_frames(20)
        token = {"Authorization": f"Bearer {client.made['resume_token']}"}
        path = f"/v1/sessions/{client.made['session_id']}"
        status, picture = service.request("GET", f"{path}/picture.png", **token)
        assert (status, picture[:4]) == (200, b"\x89PNG")
        client.close()
    name = client.made["session_id"]
    trace = (tmp_path / f"{name}-e0.trace.jsonl").read_text().splitlines()
    assert json.loads(trace[-1])["type"] == "end"
    assert json.loads(trace[0])["image"] == f"{made['image_id']}.png"
    assert (tmp_path / f"{made['image_id']}.png").read_bytes() == picture
    assert (tmp_path / f"{name}.mp4").read_bytes()[4:8] == b"ftyp"
    assert not list(tmp_path.glob("*.ts"))


def test_access_token_is_needed_where_there_is_one() -> None:
    with running(token="hunter2", is_waited_for=False) as service:
        assert service.request("POST", "/v1/sessions", {})[1]["code"] == "UNAUTHORIZED"
        assert service.request("GET", "/metrics")[0] == 401
        right = {"Authorization": "Bearer hunter2"}
        assert service.request("POST", "/v1/sessions", {}, **right)[0] == 201
        assert service.request("GET", "/readyz")[0] == 503


def test_shutdown_tells_viewers_and_ends_in_time() -> None:
    with running() as service:
        client = Client.hello(service)
        client.play()
        pid = service.live.workers.seats[0].worker.pid
        begin_s = time.monotonic()
        service.request("GET", "/healthz")
        service.stop()
        assert client.until("bye") == {
            "t": "bye",
            "code": "SERVER_SHUTDOWN",
            "reason": "The server is closing.",
            "resume": False,
        }
        service.join()
    assert time.monotonic() - begin_s < 12.0
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(urllib.error.URLError):
        service.request("GET", "/healthz")

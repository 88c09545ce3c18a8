"""A session as the API process sees it: what it tells its worker; the worker is a list."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stream import client_messages as client
from stream.actions import ActionMailbox, wall_ms
from stream.error_codes import ErrorCode, ProtocolError
from stream.http_bodies import CreateSession
from stream.live import Live
from stream.protocol import SessionState
from stream.room import Room
from stream.seat import Seat
from stream.session_files import SessionFiles
from stream.session_states import Event
from stream.settings import load_settings
from stream.supervisor import WorkerHandle
from stream.viewer import Viewer
from stream.worker_messages import (
    Applied,
    ChunkDone,
    ChunkStarted,
    Command,
    Failed,
    FailureCode,
    Loading,
    Pause,
    Refused,
    Report,
    Resume,
)
from stream.world_commands import COMMANDS_UNANSWERED

pytestmark = pytest.mark.cpu


class Desk:
    """A room with its session on a seat whose worker only listens."""

    def __init__(self, files: SessionFiles) -> None:
        self.live = Live(load_settings(renderer=True))
        self.session = self.live.registry.create(CreateSession(), now_s=0.0).session
        self.room = Room(self.session, self.live._surroundings(files))
        self.live._rooms[self.session.id] = self.room
        self.commands: list[Command] = []
        self.mailbox = ActionMailbox.create()
        self.worker = SimpleNamespace(
            info=None, loading=None, mailbox=self.mailbox, send=self.commands.append
        )
        self.room.seat = Seat(
            cast(WorkerHandle, self.worker),
            on_ready=lambda worker: None,
            on_free=lambda: None,
            on_lost=lambda reason: None,
        )

    def report(self, *reports: Report) -> None:
        """Let the worker say something."""
        for each in reports:
            self.room.on_report(each, lambda slot: None)

    def go(self, *events: Event) -> SessionState:
        """Change the state step by step."""
        for event in events:
            self.live.registry.transition(self.session, event, "test", 0.0)
        return self.session.state


@pytest.fixture
def desk() -> Iterator[Desk]:
    files = SessionFiles(None)
    made = Desk(files)
    yield made
    made.mailbox.close()
    asyncio.run(files.close())


class Listener:
    """A socket that keeps what it is sent."""

    is_open = True

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self, code: ErrorCode) -> None:
        self.is_open = False


def _viewer(name: str = "a") -> tuple[Viewer, Listener]:
    listener = Listener()
    return Viewer(id=name, role="controller", socket=cast(Any, listener)), listener


def _press(seq: int, ct: float) -> client.Act:
    edges = ((seq, "KeyW", 1, ct),)
    return client.Act(t="act", seq=seq, ct=ct, keys=("KeyW",), edges=edges)


PLAYING = (Event.ASSIGN, Event.FIRST_FRAME, Event.PLAY)


def test_a_world_that_comes_back_waits_for_a_player_who_left_meanwhile(desk: Desk) -> None:
    assert desk.go(*PLAYING, Event.RESTART, Event.LOST) is SessionState.GRACE
    assert [type(each) for each in desk.commands] == [Resume, Pause]
    desk.go(Event.FIRST_FRAME, Event.RETURN)
    assert desk.session.state is SessionState.RUNNING
    assert isinstance(desk.commands[-1], Resume)


def test_motion_while_the_world_pauses_turns_nothing(desk: Desk) -> None:
    worker = ActionMailbox.attach(desk.mailbox.name)
    desk.go(*PLAYING, Event.PAUSE)
    player, _ = _viewer()
    desk.room.join(player)
    now_ms = wall_ms()
    for seq, motion in ((1, 0.0), (2, 900.0)):
        act = client.Act(t="act", seq=seq, ct=now_ms, look=(motion, 0.0))
        desk.room.handle(player, act)
    assert desk.session.state is SessionState.PAUSED
    press = client.Act(
        t="act",
        seq=3,
        ct=now_ms,
        keys=("KeyW",),
        look=(900.0, 0.0),
        edges=((1, "KeyW", 1, now_ms),),
    )
    desk.room.handle(player, press)
    assert desk.session.state is SessionState.RUNNING
    axes_A = worker.latch(wall_ms()).action.axes_FA[0]
    assert axes_A.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    worker.close()


def test_what_the_mailbox_gives_up_is_counted(desk: Desk) -> None:
    desk.go(*PLAYING)
    player, _ = _viewer()
    desk.room.join(player)
    for seq in (5, 5, 4):
        desk.room.handle(player, client.Act(t="act", seq=seq, ct=wall_ms()))
    report = ChunkStarted(epoch=0, chunk=0, latch_ms=wall_ms(), act_seq=5, lost_press_count=3)
    desk.room.on_report(report, lambda slot: None)
    text = desk.live.metrics.text().decode()
    assert 'worldstream_drops_total{where="old_act"} 2.0' in text
    assert 'worldstream_drops_total{where="press"} 3.0' in text


def test_viewers_hear_what_a_chunk_cost_and_how_old_its_action_was(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.go(*PLAYING)
    player, listener = _viewer()
    desk.room.join(player)
    stats = SimpleNamespace(
        queue_frames=3, fps_out=24.0, encode_ms=4.0, kbps=900.0, overflow_count=0
    )
    monkeypatch.setattr(desk.room.transports, "stats", lambda: stats)
    desk.room.tell_stats()
    assert (listener.sent[-1].gen_ms, listener.sent[-1].act_lag_ms) == (None, None)
    monkeypatch.setattr("stream.room.wall_ms", lambda: 5_000.0)
    desk.room.handle(player, _press(1, 900.0))
    desk.report(
        ChunkStarted(epoch=0, chunk=0, latch_ms=5_030.0, act_seq=1, lost_press_count=0),
        ChunkDone(
            epoch=0, chunk=0, denoise_ms=(), refresh_ms=0.0, first_frame_ms=120.0,
            first_decode_ms=10.0, decode_ms=60.0, ring_wait_ms=300.0, total_ms=500.0,
        ),
    )  # fmt: skip
    desk.room.tell_stats()
    assert (listener.sent[-1].gen_ms, listener.sent[-1].act_lag_ms) == (200.0, 30.0)


def test_what_was_pressed_on_a_page_that_is_gone_has_no_latency(desk: Desk) -> None:
    desk.go(*PLAYING)
    for name, seq in (("a", 1), ("b", 2)):
        player, _ = _viewer(name)
        desk.room.join(player)
        desk.room.handle(player, _press(seq, wall_ms()))
    desk.room._meter.frame_made(7, 2)
    desk.room.handle(player, client.Shown(t="shown", frames=((7, wall_ms()),)))
    text = desk.live.metrics.text().decode()
    assert 'worldstream_action_to_photon_seconds_count{transport="none"} 1.0' in text


def test_what_the_worker_answers_makes_room_for_further_commands(desk: Desk) -> None:
    desk.go(*PLAYING)
    player, listener = _viewer()
    desk.room.join(player)

    def take(number: int) -> None:
        prompt = client.Prompt(t="prompt", id=number, text="snow")
        desk.room._commands.take(prompt, desk.room.seat)

    for number in range(COMMANDS_UNANSWERED):
        take(number)
    with pytest.raises(ProtocolError, match="RATE_LIMIT"):
        take(99)
    desk.report(Refused(id=1, detail="no"), Applied(id=2, epoch=0, chunk=3))
    assert [each.t for each in listener.sent[-4:]] == ["warn", "world", "world", "applied"]
    assert [each.world.prompt == "snow" for each in listener.sent[-3:-1]] == [False, True]
    take(99)
    take(100)


def test_a_worker_that_dies_while_the_session_drains_changes_nothing(desk: Desk) -> None:
    desk.go(*PLAYING, Event.DRAIN)
    report = Failed(
        session_id=desk.session.id, code=FailureCode.WORKER_DIED, is_fatal=False, detail=""
    )
    desk.room.on_report(report, lambda slot: None)
    assert desk.session.state is SessionState.DRAINING
    assert desk.live.registry.illegal_count == 0


def test_who_joins_hears_how_the_own_worker_loads(desk: Desk) -> None:
    desk.worker.loading = Loading(stage="weights", percent=40.0, seconds=3.0)
    viewer, listener = _viewer()
    desk.room.join(viewer)
    assert [each.t for each in listener.sent] == ["welcome", "state", "loading"]
    desk.worker.info = object()
    viewer, listener = _viewer("b")
    desk.room.leave(next(iter(desk.room.viewers.values())))
    desk.room.join(viewer)
    assert [each.t for each in listener.sent] == ["welcome", "state"]


def test_play_begins_although_nothing_can_be_recorded(desk: Desk, tmp_path: Path) -> None:
    async def scenario() -> None:
        desk.room.transports.start(tmp_path / "gone" / "a.ts")
        assert desk.room.transports.media is not None
        await desk.room.transports.close()
        assert desk.room.transports.media is None

    asyncio.run(scenario())


def test_transports_are_chosen_a_few_times_only(desk: Desk) -> None:
    viewer, _ = _viewer()
    desk.room.join(viewer)
    choice = client.Media(t="media", transport="ws", codec="jpeg")

    def codes() -> Iterator[ErrorCode | None]:
        for _ in range(10):
            try:
                desk.room.handle(viewer, choice)
            except ProtocolError as error:
                yield error.code
            else:
                yield None

    told = list(codes())
    assert told[:3] == [None] * 3
    assert told[-1] is ErrorCode.RATE_LIMIT


def _loads(loading: Loading | None) -> Seat:
    info = object() if loading is None else None
    worker = SimpleNamespace(info=info, loading=loading)
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    return Seat(cast(WorkerHandle, worker), on_ready=nothing, on_free=nothing, on_lost=nothing)


def test_a_visitor_gets_the_worker_that_is_loaded(desk: Desk) -> None:
    loading = Loading(stage="weights", percent=40.0, seconds=3.0)
    seats = [_loads(loading), _loads(None), _loads(loading)]
    desk.live.workers.seats = seats
    assert desk.live.workers.free_seats == [seats[1], seats[0], seats[2]]

"""Commands of a player: which are taken when, what goes to the worker, what its answers change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stream import client_messages as client
from stream.error_codes import ErrorCode, ProtocolError
from stream.http_bodies import CreateSession
from stream.live import Live
from stream.protocol import SessionState
from stream.session_files import SessionFiles
from stream.session_meter import SessionMeter
from stream.session_states import Event
from stream.settings import load_settings
from stream.worker_messages import Applied, Reset, SetPrompt, StepOnce
from stream.world_commands import COMMANDS_UNANSWERED, WorldCommand, WorldCommands

pytestmark = pytest.mark.cpu


class Player:
    """A session, its commands, and a seat that keeps what it is told."""

    def __init__(self, files: SessionFiles) -> None:
        self.live = Live(load_settings(renderer=True))
        self.session = self.live.registry.create(CreateSession(), now_s=0.0).session
        around = self.live._surroundings(files)
        self.meter = SessionMeter(around.metrics)
        self.commands = WorldCommands(self.session, around, self.meter)
        self.told: list[Any] = []
        mailbox = SimpleNamespace(clear=lambda: self.told.append("mailbox cleared"))
        self.seat = cast(Any, SimpleNamespace(send=self.told.append, mailbox=mailbox))

    def go(self, *events: Event) -> None:
        for event in events:
            self.live.registry.transition(self.session, event, "test", 0.0)

    def refusal(self, message: WorldCommand, *, has_seat: bool = True) -> ProtocolError:
        with pytest.raises(ProtocolError) as refused:
            self.commands.take(message, self.seat if has_seat else None)
        return refused.value


@pytest.fixture
def player() -> Iterator[Player]:
    files = SessionFiles(None)
    made = Player(files)
    yield made
    asyncio.run(files.close())


PAUSE = client.Pause(t="pause", id=1)
RESUME = client.Resume(t="resume", id=5)
STEP = client.Step(t="step", id=2)


def _prompt(number: int = 3, text: str = "snow") -> client.Prompt:
    return client.Prompt(t="prompt", id=number, text=text)


def test_without_a_worker_nothing_is_taken(player: Player) -> None:
    player.go(Event.ASSIGN, Event.FIRST_FRAME)
    assert player.refusal(_prompt(), has_seat=False).code is ErrorCode.NOT_READY


def test_while_it_warms_up_another_world_may_be_wished_for_and_no_pause(player: Player) -> None:
    player.go(Event.ASSIGN)
    player.commands.take(_prompt(), player.seat)
    assert player.told == [SetPrompt(id=3, prompt="snow")]
    assert player.refusal(PAUSE).code is ErrorCode.NOT_READY
    assert player.session.state is SessionState.WARMING


def test_a_step_pauses_and_is_told_to_the_worker(player: Player) -> None:
    player.go(Event.ASSIGN, Event.FIRST_FRAME, Event.PLAY)
    player.commands.take(STEP, player.seat)
    assert player.session.state is SessionState.PAUSED
    assert player.told == [StepOnce(id=2)]


def test_a_reset_lets_held_keys_go_before_the_worker_hears_of_it(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    player.go(Event.ASSIGN, Event.FIRST_FRAME)
    monkeypatch.setattr(player.meter, "forget_presses", lambda: player.told.append("forgotten"))
    player.commands.take(client.Reset(t="reset", id=4, seed=7, prompt="sand"), player.seat)
    reset = Reset(id=4, start=None, prompt="sand", seed=7)
    assert player.told == ["mailbox cleared", "forgotten", reset]


def test_what_is_so_already_needs_no_change(player: Player) -> None:
    player.go(Event.ASSIGN, Event.FIRST_FRAME, Event.PLAY)
    for message, state in ((PAUSE, SessionState.PAUSED), (RESUME, SessionState.RUNNING)):
        for _ in range(2):
            player.commands.take(message, player.seat)
            assert player.session.state is state
    assert player.live.registry.illegal_count == 0
    assert player.told == []


def test_a_reset_to_an_unknown_scene_changes_nothing(player: Player) -> None:
    player.go(Event.ASSIGN, Event.FIRST_FRAME)
    player.refusal(client.Reset(t="reset", id=4, scene="nowhere"))
    assert player.told == []


@pytest.mark.parametrize(
    "waiting",
    [
        _prompt,
        lambda number: client.Reset(t="reset", id=number),
        lambda number: client.Step(t="step", id=number),
    ],
    ids=["prompt", "reset", "step"],
)
def test_what_waits_for_the_worker_has_an_end(
    player: Player, waiting: Callable[[int], WorldCommand]
) -> None:
    player.go(Event.ASSIGN, Event.FIRST_FRAME, Event.PLAY)
    for number in range(COMMANDS_UNANSWERED):
        player.commands.take(waiting(number), player.seat)
    assert player.refusal(_prompt(99)).code is ErrorCode.RATE_LIMIT
    player.commands.refused(5)
    player.commands.take(_prompt(99), player.seat)


def test_the_prompt_is_that_of_the_world_once_the_worker_has_it(player: Player) -> None:
    player.go(Event.ASSIGN, Event.FIRST_FRAME)
    player.commands.take(_prompt(), player.seat)
    player.commands.take(STEP, player.seat)
    before = player.session.world.prompt
    assert not player.commands.applied(Applied(id=2, epoch=0, chunk=1))
    assert player.session.world.prompt == before != "snow"
    assert player.commands.applied(Applied(id=3, epoch=0, chunk=1))
    assert player.session.world.prompt == "snow"


def test_a_command_counts_as_use_although_it_is_refused(player: Player) -> None:
    player.session.last_input_s = -1.0
    player.refusal(PAUSE)
    assert player.session.last_input_s > 0.0

"""The state table, admission, the queue and every limit of time, with a clock in hand."""

from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream.error_codes import ErrorCode, ProtocolError
from stream.http_bodies import CreateSession
from stream.protocol import SessionState
from stream.session_states import TRANSITIONS, Event, Session
from stream.sessions import Admission, Change, Registry
from stream.settings import ServerSettings, load_settings

pytestmark = pytest.mark.cpu

S = SessionState
NOTED_FOR_THE_RETURN = {(S.GRACE, Event.FIRST_FRAME), (S.GRACE, Event.RESTART)}


def _settings(**more: object) -> ServerSettings:
    return load_settings(max_queue=3, max_viewers=2, **more)


def _create(registry: Registry, now_s: float = 0.0, **more: object) -> Admission:
    return registry.create(CreateSession.model_validate(more), now_s=now_s)


def _playing(registry: Registry, now_s: float = 0.0, **more: object) -> Session:
    session = _create(registry, now_s, **more).session
    registry.connected(session, now_s)
    registry.assign(1, now_s)
    registry.transition(session, Event.FIRST_FRAME, "", now_s)
    registry.input(session, now_s)
    assert session.state is S.RUNNING
    return session


def _refusal(registry: Registry, now_s: float = 0.0, **more: object) -> ErrorCode:
    with pytest.raises(ProtocolError) as caught:
        _create(registry, now_s, **more)
    return caught.value.code


def test_nothing_leaves_closed_and_everything_else_can_close() -> None:
    assert not [state for state, _ in TRANSITIONS if state is S.CLOSED]
    assert {state for state, event in TRANSITIONS if event is Event.CLOSE} == set(S) - {S.CLOSED}


@pytest.mark.parametrize(
    ("state", "event"),
    [pair for pair in product(S, Event) if pair not in {*TRANSITIONS, *NOTED_FOR_THE_RETURN}],
)
def test_illegal_change_is_counted_and_ignored(state: SessionState, event: Event) -> None:
    registry = Registry(_settings())
    session = _create(registry).session
    session.state = state
    assert not registry.transition(session, event, "", 0.0)
    assert (session.state, registry.illegal_count) == (state, 1)


def test_first_visitor_plays_and_the_next_ones_wait_in_order() -> None:
    registry = Registry(_settings())
    first, second, third = (_create(registry).session for _ in range(3))
    assert registry.assign(1, 1.0) == [first]
    assert [registry.queue_position(each) for each in (first, second, third)] == [None, 1, 2]
    registry.transition(first, Event.CLOSE, "", 2.0)
    assert registry.assign(1, 2.0) == [second]
    assert registry.queue_position(third) == 1


def test_queue_has_an_end() -> None:
    registry = Registry(_settings())
    for _ in range(4):  # one for the seat, three that wait
        _create(registry)
    assert _refusal(registry) is ErrorCode.QUEUE_FULL


def test_ticket_works_once_and_not_for_long() -> None:
    registry = Registry(_settings())
    made = _create(registry)
    assert registry.redeem(made.ticket, 1.0).session_id == made.session.id
    late = _create(registry, 1.0)
    for ticket, now_s in ((made.ticket, 2.0), (late.ticket, 62.0), ("guess", 2.0)):
        with pytest.raises(ProtocolError) as caught:
            registry.redeem(ticket, now_s)
        assert caught.value.code is ErrorCode.UNAUTHORIZED


def test_resume_token_is_replaced_at_each_use() -> None:
    registry = Registry(_settings())
    made = _create(registry)
    again = _create(registry, resume=made.resume_token)
    assert again.session is made.session
    assert again.resume_token != made.resume_token
    assert _refusal(registry, resume=made.resume_token) is ErrorCode.NO_SESSION


def test_same_browser_goes_on_with_its_session() -> None:
    registry = Registry(_settings())
    made = _create(registry, client="abcdefgh")
    assert _create(registry, client="abcdefgh").session is made.session
    assert _create(registry, client="abcdefgX").session is not made.session


def test_same_request_twice_makes_one_session() -> None:
    registry = Registry(_settings())
    request = CreateSession()
    first = registry.create(request, now_s=0.0, idempotency_key="k")
    assert registry.create(request, now_s=1.0, idempotency_key="k") is first
    assert registry.create(request, now_s=99.0, idempotency_key="k") is not first


def test_viewers_watch_within_their_limit_and_never_play() -> None:
    registry = Registry(_settings())
    assert _refusal(registry, role="viewer") is ErrorCode.NO_SESSION
    session = _playing(registry)
    watching = [_create(registry, role="viewer") for _ in range(2)]
    assert [each.session for each in watching] == [session, session]
    assert [each.resume_token for each in watching] == [None, None]
    assert registry.redeem(watching[0].ticket, 0.0).role == "viewer"
    session.viewer_ids.add("one")
    assert _refusal(registry, role="viewer") is ErrorCode.QUEUE_FULL


@pytest.mark.parametrize("state", [S.WARMING, S.READY, S.RUNNING, S.PAUSED])
def test_player_who_comes_back_finds_the_state_of_before(state: SessionState) -> None:
    registry = Registry(_settings())
    session = _playing(registry)
    session.state = state
    registry.lost(session, 10.0)
    assert session.state is S.GRACE
    registry.connected(session, 20.0)
    assert session.state is state


def test_world_that_warmed_up_while_nobody_looked_is_ready_on_return() -> None:
    registry = Registry(_settings())
    session = _create(registry).session
    registry.connected(session, 0.0)
    registry.assign(1, 0.0)
    registry.lost(session, 1.0)
    registry.transition(session, Event.FIRST_FRAME, "", 2.0)
    assert session.state is S.GRACE
    registry.connected(session, 3.0)
    assert session.state is S.READY


@pytest.mark.parametrize("state", [S.RUNNING, S.PAUSED])
@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "in-grace"])
def test_session_goes_on_as_before_when_its_worker_is_back(
    state: SessionState, is_seen: bool
) -> None:
    registry = Registry(_settings())
    session = _playing(registry)
    session.state = state
    if not is_seen:
        registry.lost(session, 1.0)
    registry.transition(session, Event.RESTART, "", 2.0)
    registry.transition(session, Event.RESTART, "it died while it loaded", 3.0)
    registry.transition(session, Event.FIRST_FRAME, "", 4.0)
    if not is_seen:
        assert session.state is S.GRACE
        registry.connected(session, 5.0)
    assert session.state is state


def test_player_who_says_bye_has_time_to_load_the_page_anew_and_no_more() -> None:
    registry = Registry(_settings(bye_grace_s=4.0))
    player, waiting = _playing(registry), _create(registry).session
    registry.connected(waiting, 0.0)
    for session in (player, waiting):
        registry.lost(session, 10.0, said_bye=True)
        registry.tick(13.0)
        registry.connected(session, 13.5)
        registry.lost(session, 20.0)
        registry.tick(25.0)
        assert session.state in (S.GRACE, S.QUEUED)
        registry.lost(session, 30.0, said_bye=True)
        registry.tick(35.0)
        assert (session.state, session.last_error) == (S.CLOSED, ErrorCode.GONE)


def test_drained_sessions_close_soon_and_those_who_wait_stay() -> None:
    registry = Registry(_settings())
    player, waiting = _playing(registry), _create(registry).session
    registry.drain(ErrorCode.NOT_READY, "memory", 1.0)
    registry.drain(ErrorCode.NOT_READY, "memory", 1.5)
    assert (player.state, waiting.state) == (S.DRAINING, S.QUEUED)
    registry.tick(4.0)
    assert (player.state, player.last_error) == (S.CLOSED, ErrorCode.NOT_READY)
    assert registry.illegal_count == 0


@pytest.mark.parametrize(
    ("state", "after_s", "code"),
    [
        (S.GRACE, 30.0, ErrorCode.GONE),
        (S.READY, 120.0, ErrorCode.IDLE),
        (S.PAUSED, 300.0, ErrorCode.IDLE),
        (S.WARMING, 120.0, ErrorCode.WARMUP_TIMEOUT),
        (S.RUNNING, 1_800.0, ErrorCode.MAX_DURATION),
    ],
)
def test_limits_of_time(state: SessionState, after_s: float, code: ErrorCode) -> None:
    changes: list[Change] = []
    registry = Registry(_settings(), changes.append)
    session = _playing(registry, 100.0)
    if state is S.GRACE:
        registry.lost(session, 100.0)
    session.state = state
    session.last_input_s = 100.0 if state is not S.RUNNING else 1e9
    registry.tick(100.0 + after_s - 0.5)
    assert session.state is state
    registry.tick(100.0 + after_s + 0.5)
    ended = {ErrorCode.MAX_DURATION: S.DRAINING, ErrorCode.WARMUP_TIMEOUT: S.FAILED}
    assert session.state is ended.get(code, S.CLOSED)
    registry.tick(100.0 + after_s + 5.5)
    assert session.state is S.CLOSED
    assert changes[-1].code is code
    assert registry.illegal_count == 0


def test_player_without_input_is_paused_and_plays_on_with_the_next() -> None:
    registry = Registry(_settings())
    session = _playing(registry, 0.0)
    registry.tick(61.0)
    assert session.state is S.PAUSED
    registry.input(session, 62.0)
    assert session.state is S.RUNNING


def test_place_in_the_queue_is_lost_with_the_connection_and_with_patience() -> None:
    registry = Registry(_settings())
    _playing(registry)
    gone, patient = (_create(registry, 0.0).session for _ in range(2))
    registry.connected(patient, 0.0)
    registry.tick(16.0)
    assert (gone.state, patient.state) == (S.CLOSED, S.QUEUED)
    registry.tick(601.0)
    assert patient.state is S.CLOSED


def test_loading_does_not_count_as_warm_up() -> None:
    registry = Registry(_settings())
    session = _create(registry).session
    registry.connected(session, 0.0)
    registry.assign(1, 0.0)
    registry.tick(500.0, is_loaded=False)
    assert session.state is S.WARMING
    registry.warm_up_begins(session, 500.0)
    registry.tick(600.0)
    assert session.state is S.WARMING


def test_end_of_the_lease_is_announced_once() -> None:
    registry = Registry(_settings(max_duration_s=100))
    session = _playing(registry, 0.0)
    assert [registry.end_warning(session, now_s) for now_s in (30.0, 41.0, 42.0)] == [
        False,
        True,
        False,
    ]


def test_nobody_is_admitted_while_draining() -> None:
    registry = Registry(_settings())
    registry.is_draining = True
    assert _refusal(registry) is ErrorCode.NOT_READY


def test_estimate_counts_what_is_left_and_those_ahead() -> None:
    registry = Registry(_settings(max_duration_s=100))
    _playing(registry, 0.0)
    assert registry.eta_s(1, 30.0) == 70.0
    assert registry.eta_s(2, 30.0) == 170.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["new", "lose", "back", "act", "tick", "end"]),
            st.integers(0, 4),
            st.floats(0.0, 50.0),
        ),
        max_size=60,
    )
)
def test_slots_are_never_overbooked(steps: list[tuple[str, int, float]]) -> None:
    registry, now_s = Registry(_settings(max_sessions=2)), 0.0
    for name, which, wait_s in steps:
        now_s += wait_s
        sessions = list(registry)
        session = sessions[which % len(sessions)] if sessions else None
        if name == "new":
            with suppress(ProtocolError):  # the queue is full
                _create(registry, now_s)
        elif name == "tick":
            registry.tick(now_s)
        elif session is not None and name == "lose":
            registry.lost(session, now_s)
        elif session is not None and name == "back" and session.state is not S.CLOSED:
            registry.connected(session, now_s)
        elif session is not None and name == "act":
            registry.transition(session, Event.FIRST_FRAME, "", now_s)
            registry.input(session, now_s)
        elif session is not None:
            registry.transition(session, Event.CLOSE, "", now_s)
        held = sum(each.holds_slot for each in registry)
        registry.assign(2 - held, now_s)
        assert sum(each.holds_slot for each in registry) <= 2
        assert len(registry.queue()) <= 3 + 2

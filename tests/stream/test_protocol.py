"""Messages: round trips, refusals, the generated types."""

import json
from contextlib import suppress
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream import actions, protocol, typescript
from stream import client_messages as client
from stream import server_messages as server
from stream.client_messages import parse_client
from stream.error_codes import ERROR_TEXT, ErrorCode, ProtocolError
from stream.schema import json_schema

pytestmark = pytest.mark.cpu

ACT = {
    "t": "act",
    "seq": 412,
    "ct": 1795997299204.2,
    "keys": ["KeyW", "ShiftLeft"],
    "look": [3.5, -1.0],
    "pad": [0, 0, 0, 0],
    "edges": [[87, "KeyW", 1, 1795997299201.0], [88, "Space", 0, 1795997299202.1]],
}
MESSAGES: list[dict[str, Any]] = [
    {"t": "hello", "ver": 1, "viewport": [800, 600], "caps": {"webrtc": True, "rvfc": True}},
    {"t": "rtc.offer", "gen": 1, "sdp": "v=0"},
    {"t": "rtc.candidate", "gen": 1, "candidate": "", "mid": "0", "mline": 0},
    {"t": "rtc.state", "gen": 1, "state": "failed"},
    ACT,
    {"t": "ping", "id": 1, "ct": 5.0},
    {"t": "ack", "frame": 3, "drawn_ct": 5.0},
    {"t": "kf", "reason": "lost"},
    {"t": "media", "transport": "ws", "codec": "h264"},
    {"t": "prompt", "text": "snow", "id": 2},
    {"t": "reset", "id": 3, "seed": 7},
    {"t": "pause", "reason": "hidden"},
    {"t": "resume"},
    {"t": "step", "id": 4},
    {"t": "shown", "frames": [[1, 5.0], [2, 6.0]]},
    {"t": "bye"},
]


def _refusal(text: str) -> ErrorCode:
    with pytest.raises(ProtocolError) as caught:
        parse_client(text)
    return caught.value.code


def test_there_is_an_example_of_every_client_message() -> None:
    models = get_args(get_args(client.ClientMessage)[0])
    known = {get_args(model.model_fields["t"].annotation)[0] for model in models}
    assert {each["t"] for each in MESSAGES} == known


@pytest.mark.parametrize("data", MESSAGES, ids=lambda data: data["t"])
def test_client_message_survives_a_round_trip(data: dict[str, Any]) -> None:
    message = parse_client(json.dumps(data))
    assert message is not None
    assert parse_client(protocol.encode(message)) == message


def test_unknown_type_is_no_error_and_unknown_fields_are_passed_over() -> None:
    assert parse_client('{"t":"dance"}') is None
    assert parse_client('{"t":"bye","mood":"sad"}') == client.ClientBye(t="bye")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        '{"t":1}',
        '{"t":"act","seq":"1","ct":1}',
        '{"t":"act","seq":1.5,"ct":1}',
        '{"t":"act","seq":-1,"ct":1}',
        '{"t":"act","seq":4294967296,"ct":1}',
        '{"t":"act","seq":1,"ct":NaN}',
        '{"t":"act","seq":1,"ct":1,"pad":[2,0,0,0]}',
        '{"t":"act","seq":1,"ct":1,"look":[1]}',
        '{"t":"prompt","id":1,"text":"\\ud800"}',
        '{"t":"reset","id":1,"image_id":"../../etc/passwd"}',
        '{"t":"reset","id":1,"seed":true}',
        '{"t":"media","transport":"pigeon"}',
        "[" * 30_000,
    ],
)
def test_wrong_form_is_a_bad_message(text: str) -> None:
    assert _refusal(text) is ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keys", ["KeyW"] * (protocol.HELD_LIMIT + 1)),
        ("edges", [[i, "KeyW", 1, 1.0] for i in range(protocol.EDGE_LIMIT + 1)]),
    ],
)
def test_lists_are_bounded(field: str, value: list[Any]) -> None:
    assert _refusal(json.dumps(ACT | {field: value})) is ErrorCode.BAD_MESSAGE


def test_oversized_text_is_too_large() -> None:
    assert _refusal(" " * (protocol.MESSAGE_LIMIT_BYTES + 1)) is ErrorCode.TOO_LARGE


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["t", *ACT]) | st.text(max_size=4), inner, max_size=5)
        ),
        max_leaves=12,
    ),
    st.sampled_from([each["t"] for each in MESSAGES]),
)
def test_any_json_is_read_or_refused(value: Any, kind: str) -> None:
    for data in (value, {**(value if isinstance(value, dict) else {"x": value}), "t": kind}):
        with suppress(ProtocolError):
            parse_client(json.dumps(data))


def test_server_message_survives_a_round_trip() -> None:
    for message in (server.bye(ErrorCode.IDLE), server.err(ErrorCode.RATE_LIMIT, retry_ms=5)):
        assert server.SERVER.validate_json(protocol.encode(message)) == message


def test_every_code_has_a_text() -> None:
    assert set(ERROR_TEXT) == set(ErrorCode)


def test_keys_of_the_protocol_are_those_of_the_mailbox() -> None:
    assert set(protocol.KEY_CODES) == set(actions.KEYS)


def test_typescript_types_are_fresh() -> None:
    assert typescript.PATH.read_text(encoding="utf-8") == typescript.typescript(), (
        "run python -m stream.typescript"
    )


def test_schema_names_every_message() -> None:
    schema = json_schema()
    names = {each["$ref"].rsplit("/", 1)[-1] for each in schema["client"]["oneOf"]}
    assert len(names) == len(MESSAGES)
    assert names <= set(schema["$defs"])

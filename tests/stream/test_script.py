import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.types import AXES, Control
from stream.script import (
    FRAME_COUNT_LIMIT,
    FRAMES_PER_CHUNK,
    KEYS,
    load_script,
    parse_script,
    parse_timed_keys,
)

pytestmark = pytest.mark.cpu


def _held(text: str, frame_count: int) -> list[frozenset[str]]:
    keys = parse_script(text).keys()
    return [next(keys) for _ in range(frame_count)]


def test_key_names_are_controls() -> None:
    assert {name for name in KEYS.values() if name is not None} == set(Control)


def test_short_form_holds_keys_for_their_frames() -> None:
    held = _held("w*2 wd*1 left*1 w+boost*1 -*1", 7)
    assert held == [
        {"forward"},
        {"forward"},
        {"forward", "right"},
        {"look_left"},
        {"forward", "boost"},
        set(),
        set(),
    ]


@pytest.mark.parametrize(
    ("item", "controls"),
    [
        ("WASD*1", {"forward", "left", "back", "right"}),
        ("shift+w*1", {"boost", "forward"}),
        ("up+right*1", {"look_up", "look_right"}),
        ("wd+down*1", {"forward", "right", "look_down"}),
        ("none*1", set()),
    ],
)
def test_joined_keys(item: str, controls: set[str]) -> None:
    assert parse_script(item).spans[0].keys == controls


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["empty"]),
        ("w", ["item 1", "'w'", "number of frames"]),
        ("w*17 q*3", ["item 2", "'q'", "shift"]),
        ("w*17 wq*3", ["item 2", "'wq'"]),
        ("w*0", ["0 frames", "1 to"]),
        ("w*-3", ["'-3'"]),
        ("w*1.5", ["'1.5'"]),
        ("w*\u0663", ["frames"]),
        (f"w*{FRAME_COUNT_LIMIT + 1}", [str(FRAME_COUNT_LIMIT)]),
        (f"w*{FRAME_COUNT_LIMIT} d*1", [str(FRAME_COUNT_LIMIT)]),
        ("w**3", ["'w*'"]),
        ("+w*3", ["''"]),
        ("leftw*4", ["'leftw'"]),
    ],
)
def test_short_form_refuses_with_place_and_rule(text: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_script(text)
    for name in names:
        assert name in str(refused.value)


def test_actions_cut_at_chunks_and_release_after_the_end() -> None:
    actions = list(parse_script("w*20").actions(3))
    forward = [action.axes_FA[:, AXES.index("forward")].sum() for action in actions]
    assert forward == [17.0, 3.0, 0.0]


def test_actions_of_a_long_script_are_cut() -> None:
    assert len(list(parse_script("w*1000").actions(2))) == 2


@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_chunk_count_holds_the_whole_script(counts: list[int]) -> None:
    script = parse_script(" ".join(f"w*{count}" for count in counts))
    assert script.frame_count == sum(counts)
    assert 0 <= script.chunk_count * FRAMES_PER_CHUNK - sum(counts) < FRAMES_PER_CHUNK


def test_timed_keys_hold_until_changed_and_to_the_end() -> None:
    lines = [
        {"frame": 2, "keys": ["w"]},
        {"time_s": 0.125, "keys": ["w", "left"]},
        {"frame": 5, "prompt": "snow"},
    ]
    script = parse_timed_keys("\n".join(map(json.dumps, lines)))
    keys = script.keys()
    held = [next(keys) for _ in range(8)]
    assert held[:4] == [set(), set(), {"forward"}, {"forward", "look_left"}]
    assert held[4:] == [{"forward", "look_left"}] * 4


@pytest.mark.parametrize(("frame", "chunk_index"), [(0, 0), (1, 1), (17, 1), (18, 2)])
def test_prompt_takes_over_at_the_first_chunk_from_its_frame(frame: int, chunk_index: int) -> None:
    script = parse_timed_keys(json.dumps({"frame": frame, "prompt": "snow"}))
    expected = [None, None, None]
    expected[chunk_index] = "snow"
    assert [script.prompt_for(index) for index in range(3)] == expected


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('{"frame": 0', "JSON"),
        ('{"keys": ["w"]}', "point of time"),
        ('{"frame": 0, "time_s": 0, "keys": []}', "point of time"),
        ('{"frame": 0}', "nothing to do"),
        ('{"frame": 0, "key": ["w"], "keys": []}', "'key'"),
        ('{"frame": -1, "keys": []}', "-1"),
        ('{"frame": 1.5, "keys": []}', "1.5"),
        ('{"frame": true, "keys": []}', "True"),
        ('{"time_s": NaN, "keys": []}', "nan"),
        ('{"frame": 0, "keys": "w"}', "list"),
        ('{"frame": 0, "keys": ["x"]}', "'x'"),
        ('{"frame": 0, "prompt": 3}', "text"),
    ],
)
def test_timed_keys_refuse_with_line_and_rule(line: str, name: str) -> None:
    with pytest.raises(ConfigError, match="line 1") as refused:
        parse_timed_keys(line)
    assert name in str(refused.value)


def test_timed_keys_refuse_to_go_back() -> None:
    with pytest.raises(ConfigError, match=r"line 2.*frame 3 comes after frame 4"):
        parse_timed_keys('{"frame": 4, "keys": []}\n{"frame": 3, "keys": []}')


def test_file_of_either_form(tmp_path: Path) -> None:
    short, timed = tmp_path / "a.txt", tmp_path / "b.jsonl"
    short.write_text("# walk\nw*3  # then turn\nleft*2\n")
    timed.write_text('{"frame": 0, "keys": ["w"]}\n{"frame": 3, "keys": []}\n')
    assert load_script(str(short)).frame_count == 5
    assert load_script(str(timed)).frame_count == 3


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.txt.*No such file"):
        load_script(str(tmp_path / "gone.txt"))


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe\x00w")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_script(str(path))
